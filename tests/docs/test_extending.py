"""What docs/extending.md promises to those who bring their own: it works, and a mistake is named with its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core.errors import ConfigError, EnergyError, InputError, UnsupportedError
from metastable.core.types import energy_and_grad
from metastable.energies import check_energy
from metastable.evaluation.diagnosis import RULES, Finding, diagnose
from metastable.kernels import ChainState, Info, StepKernel
from metastable.methods import ChainMethod, Method, Negatives
from metastable.report.read import Run as Page
from metastable.report.sections.registered import registered
from metastable.summary import SECTIONS, Measured, register

X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
SMALL = {"name": "mlp", "hidden": [4]}


def fit(method: Any, **options: Any) -> ms.Run:
    return ms.fit(SMALL, X, method, steps=2, learning_rate=1e-3, evaluate=False, **options)


# ---- an energy


class Bowl(nn.Module):
    event_shape = (2,)

    def __init__(self, gradient=lambda x, values: (values, 2 * x)):
        super().__init__()
        self.a, self.gradient = nn.Parameter(torch.ones(())), gradient

    def forward(self, x):
        return self.a * x.square().sum(1)

    def value_and_grad(self, x):
        return self.gradient(x, self(x))


WRONG_GRADIENTS = {
    "no pair": (
        lambda x, values: values,
        r"must return a pair, energies \(B,\) and gradients \(B, \*event\)",
    ),
    "a number a row": (
        lambda x, values: (values, values),
        r"gradients must have shape \(3, 2\).*got.*\(3,\)",
    ),
    "the other sign": (lambda x, values: (values, -2 * x), "gradients must be those of the energy"),
    "other energies": (lambda x, values: (values + 1, 2 * x), "energies must be those of the energy"),
}


@pytest.mark.parametrize(("gradient", "words"), WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
def test_a_gradient_that_is_not_the_energys_is_refused(gradient, words):
    with pytest.raises(EnergyError, match=f"energy.value_and_grad: {words}"):
        check_energy(Bowl(gradient), X)


def test_a_right_gradient_is_taken_and_a_wrong_one_is_named_in_other_units_too():
    check_energy(Bowl(), X)
    with pytest.raises(EnergyError, match=r"energy.value_and_grad: .*gradients \(B, \*event\)"):
        ms.fit(Bowl(lambda x, values: (values, values)), X, "cd", steps=1, evaluate=False)


# ---- a kernel


@dataclass(frozen=True)
class Drift(StepKernel):
    name: ClassVar[str] = "drift"
    invariant: ClassVar[bool] = False

    def init(self, energy, x):
        return ChainState(x, *energy_and_grad(energy, x))

    def step(self, energy, state, noise, step_size):
        x = state.x - step_size * state.grad
        moved = (x - state.x).square().sum(1)
        return self.init(energy, x), Info(torch.ones_like(moved), moved)


@dataclass(frozen=True)
class Unfinished(StepKernel):
    name: ClassVar[str] = "unfinished"


def test_a_kernel_that_never_rejects_is_not_warmed_up():
    with pytest.raises(UnsupportedError, match=r"warmup: 'drift' never rejects .* give its step_size"):
        ms.sample(Bowl(), 4, kernel=Drift(0.1), warmup=5)
    with pytest.raises(UnsupportedError, match="'drift' does not leave its target invariant"):
        ms.log_partition(Bowl(), kernel=Drift(0.1), walkers=8)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("drift", "kernel: must be a kernel.*got 'drift'"),
        (Drift, r"kernel: got the class Drift; .*Drift\(…\)"),
    ],
)
def test_what_is_no_kernel_is_named(kernel, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        ms.sample(Bowl(), 4, kernel=kernel)
    with pytest.raises(ConfigError, match=rf"^pcd\.{words}"):
        ms.methods.PersistentCD(kernel=kernel)


def test_a_kernel_without_its_pieces_names_them():
    with pytest.raises(NotImplementedError, match=r"Unfinished.init\(energy, x\)"):
        ms.sample(Bowl(), 4, kernel=Unfinished(0.1))


def test_a_run_with_a_kernel_of_ones_own_says_how_it_is_read_back(tmp_path):
    method = ms.methods.PersistentCD(walkers=8, kernel=Drift(0.01))
    fit(method, out=tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"method.kernel: the run in .*load_run\(folder, method=...\).*'drift'"
    ):
        ms.load_run(tmp_path / "run")
    assert ms.load_run(tmp_path / "run", method=method).trained_with == method


# ---- a method


class Count(NamedTuple):
    made: torch.Tensor


@dataclass(frozen=True)
class Counting(Method):
    name: ClassVar[str] = "counting"

    def start(self, context):
        return Count(torch.zeros(()))

    def loss(self, context, state, player, batch, negatives):
        return context.energy(batch).mean(), {"made": state.made}

    def advance(self, context, state):
        return Count(state.made + 1), {}

    def load(self, tree):
        return Count(**tree)


def variant(**pieces: Any) -> Method:
    return dataclass(frozen=True)(type("Variant", (Counting,), {"__annotations__": {}, **pieces}))()


WRONG_PIECES = {
    "loss alone": ({"loss": lambda s, c, *_: c.energy(X).mean()}, r"loss: must return \(loss, metrics\)"),
    "loss of rows": ({"loss": lambda s, c, *_: (c.energy(X), {})}, r"loss: must be one number, .*\(60,\)"),
    "detached": (
        {"loss": lambda s, c, *_: (c.energy(X).mean().detach(), {})},
        "loss: must depend on the player",
    ),
    "metric": ({"advance": lambda s, c, state: (state, {"a": 0.5})}, "advance: metrics must be .* a = 0.5"),
    "metric of rows": (
        {"advance": lambda s, c, state: (state, {"a": torch.ones(3)})},
        r"advance: metrics .* a = a tensor of shape \(3,\)",
    ),
    "state alone": (
        {"advance": lambda s, c, state: state},
        r"advance: must return \(state, metrics\), got Count of Tensor",
    ),
    "nothing": (
        {"negatives": lambda *_: None},
        r"negatives: must return \(negatives, state, metrics\), got None",
    ),
    "turns": ({"turns": lambda s, c: ("enrgy",)}, r"turns: 'enrgy' is no player of this run \(energy\)"),
}


@pytest.mark.parametrize(("pieces", "words"), WRONG_PIECES.values(), ids=WRONG_PIECES)
def test_a_piece_that_returns_something_else_is_named(pieces, words):
    with pytest.raises(ConfigError, match=rf"^counting\.{words}"):
        fit(variant(**pieces))


def test_right_pieces_train_and_are_logged():
    assert fit(Counting()).history[-1]["made"] == 0.5  # the mean of 0 and 1


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (variant(needs="label"), "method.needs: unknown value 'label' .*'labels'"),
        (object(), "method: must be a Method, its name or a table with a name, got object"),
    ],
)
def test_what_is_no_method_is_named(method, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        fit(method)


def test_a_method_that_carries_nothing_needs_no_load_and_another_is_told():
    assert Method().load({}) == ()
    with pytest.raises(NotImplementedError, match=r"Method.load\(tree\): .*State\(\*\*tree\)"):
        Method().load({"made": torch.ones(())})


@dataclass(frozen=True)
class Fixed(ChainMethod):
    """Chains of its own that read `step_size`; it has no field for how many there are."""

    name: ClassVar[str] = "fixed"

    def start(self, context):
        return Count(torch.zeros(()))

    def negatives(self, context, state, batch):
        x = context.data[:8] + self.step_size
        return Negatives(x), state, {}

    def load(self, tree):
        return Count(**tree)


def test_negatives_of_a_method_of_ones_own_are_looked_at_with_longer_steps():
    from metastable.methods import Context
    from metastable.runs.chains import Chains
    from metastable.summary import step_check

    context = Context(Bowl(), {}, X, ms.proposals.fit_gaussian(X), torch.Generator().manual_seed(0))
    check = step_check(Chains(Fixed(step_size=0.5), context, Count(torch.zeros(()))))
    assert check is not None
    assert check.larger is not None
    expected = (X[:8] + 2.0).square().sum(1).double()  # four times the step
    assert torch.allclose(check.larger.sort().values, expected.sort().values, rtol=1e-5)


# ---- a rule and a section


@pytest.mark.parametrize("answer", ["bad", True])
def test_a_rule_that_gives_no_finding_is_refused(answer, monkeypatch):
    monkeypatch.setattr("metastable.evaluation.diagnosis.RULES", [*RULES, lambda log, facts: answer])
    with pytest.raises(
        ConfigError, match=f"RULES: must be rules that return a Finding or None, got {answer!r}"
    ):
        diagnose([])


def test_findings_and_facts_that_nobody_knows_are_named():
    with pytest.raises(ConfigError, match=r"finding 'mine'.severity: unknown value 'bad'"):
        Finding("mine", "bad", "Words.")
    with pytest.raises(ConfigError, match=r"section.facts: unknown value 'seperated' .*'separated'"):
        Measured(facts={"seperated": True})
    with pytest.raises(ConfigError, match=r"section.findings: must be Findings, got 'mine'"):
        Measured(findings=["mine"])  # pyright: ignore


class Plain:
    name = "plain"

    def applies(self, judged):
        return True

    def measure(self, judged):
        return {"a": 1.0}


def test_a_section_without_its_members_or_with_another_answer_is_named(monkeypatch):
    with pytest.raises(InputError, match="section: must be an object with name, applies and measure"):
        register(Plain)  # pyright: ignore
    with pytest.raises(InputError, match="section: must be an object with name, applies and measure"):
        register(type("Half", (), {"name": "half"})())  # pyright: ignore
    from metastable.summary import Judged, judge

    judged = Judged(fit("cd"), X, 0)
    with pytest.raises(ConfigError, match=r"section 'plain'.measure: must be Measured\(…\), got {'a': 1.0}"):
        judge(judged, [Plain()])  # pyright: ignore
    assert not any(isinstance(section, Plain) for section in SECTIONS)


def test_the_page_draws_arrays_of_a_registered_section_by_their_shape(tmp_path):
    arrays = {"data": X.numpy(), "tails/data": np.arange(30.0), "tails/curve": np.ones((2, 9))}
    run = Page(tmp_path, summary={"scores": {"tails/ratio": 2.0, "mmd": 0.0}}, arrays=arrays)
    (page,) = registered(run)
    assert "<h2>Tails</h2>" in page
    assert page.count("<figure>") == 2
    assert "<td>Ratio</td>" in page
    assert "<h3>Histogram</h3>" in page
    assert "<h3>Lines</h3>" in page
    (bare,) = registered(
        Page(tmp_path, arrays={"tails/data": np.ones((3, 4, 5))}, summary={"scores": {"tails/a": 1}})
    )
    assert "<figure>" not in bare
    assert registered(Page(tmp_path, summary={"scores": {"mmd": 0.0}})) == []
