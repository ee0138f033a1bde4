"""AdaptiveNCE: when the copy is renewed, what chains see, what is logged, and what a run keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import assert_within, each
from torch import nn

import metastable as ms
from metastable.core.errors import ConfigError, DivergenceError
from metastable.core.types import energy_and_grad
from metastable.energies import MLP, GaussianMixture, Tilted
from metastable.kernels import ULA
from metastable.methods import AdaptiveNCE, Bregman, Context, Jarzynski, PersistentCD
from metastable.methods.base import Negatives
from metastable.proposals import fit_gaussian
from metastable.training import SGD

SETTINGS = dict(seed=1, batch_size=None, evaluate=False, device="cpu", log_every=1, units="none")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(n: int = 60) -> torch.Tensor:
    return torch.randn((n, 2), generator=rng(4)) + 1


def chains(**settings) -> PersistentCD:
    step = {} if "kernel" in settings else {"step_size": 0.05}
    return PersistentCD(**{"walkers": 32, "steps": 2, "rejuvenation": 0.2, **step, **settings})


class WithBuffer(nn.Module):
    """A network whose output depends on a buffer that moves after each step."""

    def __init__(self):
        super().__init__()
        self.network = MLP(2, (8,), seed=1)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x):
        return self.network(x) + self.shift * x[:, 0] + self.hidden

    def after_step(self):
        self.shift += 0.1
        self.hidden += 1.0


# ---- Algorithm 3.1


@pytest.mark.parametrize("interval", [1, 3])
def test_the_copy_is_renewed_every_interval_parameters_and_buffers(interval):
    """Against the sequence of weights that training went through."""
    energy, seen = WithBuffer(), []

    def watch(row):
        weights = [p.detach().clone() for p in (*energy.parameters(), *energy.buffers())]
        seen.append((weights, row["var_log_g"]))

    run = ms.fit(energy, data(), AdaptiveNCE(chains(), interval=interval), 7, progress=watch, **SETTINGS)
    frozen = run.players["frozen"]
    renewed = 7 - 7 % interval
    for kept, then in zip((*frozen.parameters(), *frozen.buffers()), seen[renewed - 1][0], strict=True):
        assert torch.equal(kept, then)
    assert not any(p.requires_grad for p in frozen.parameters())
    fresh = [step % interval == 0 for step in range(7)]
    assert [v == 0 for _, v in seen] == fresh  # g = 1 exactly in the update after a renewal, and only there


def test_chains_run_on_the_copy():
    """One ULA step without noise to speak of: the move is the copy's gradient, not the model's."""
    energy, x = MLP(2, (8,), seed=1), data()
    method = AdaptiveNCE(
        chains(walkers=60, steps=1, rejuvenation=0.0, kernel=ULA(0.1, noise=1e-9)), interval=9
    )
    frozen = method.companions(energy, x, fit_gaussian(x), 0)["frozen"]
    with torch.no_grad():
        for p in energy.parameters():
            p.mul_(3)
    context = Context(energy, {"energy": energy, "frozen": frozen}, x, fit_gaussian(x), rng())
    negatives, _, metrics = method.negatives(context, method.start(context), x)
    slope = energy_and_grad(frozen, x).grad
    torch.testing.assert_close(negatives.x, x - 0.1 * slope, rtol=0, atol=1e-6)
    torch.testing.assert_close(metrics["gradient_magnitude"], slope.norm(dim=1).mean())


def test_at_interval_one_training_is_persistent_cd_at_half_the_rate():
    """S₀′(1) = ½ for nce: the same parameters, update for update, as PCD with half the learning rate."""
    ends = []
    for method, rate in ((AdaptiveNCE(chains(), interval=1), 0.2), (chains(), 0.1)):
        energy = MLP(2, (8,), seed=1)
        ms.fit(energy, data(), method, 20, optimiser=SGD(rate), precision="64-true", **SETTINGS)
        ends.append(torch.cat([p.flatten() for p in energy.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-10)
    energy = MLP(2, (8,), seed=1)
    ms.fit(energy, data(), chains(), 20, optimiser=SGD(0.2), precision="64-true", **SETTINGS)
    other = torch.cat([p.flatten() for p in energy.parameters()])
    assert (other - ends[0]).abs().max() > 1e-3  # the factor matters


@pytest.mark.parametrize(
    "psi", ["nce", "kl", "squared", lambda u: u**2 - u.log()], ids=["nce", "kl", "squared", "own"]
)
def test_every_psi_learns_a_mean(psi):
    """A Gaussian with a free mean: the data's mean is the answer, to within what the chains wander."""
    x = data(1000)
    energy = GaussianMixture(torch.zeros(1, 2), trainable=True)
    method = AdaptiveNCE(
        PersistentCD(step_size=0.2, walkers=1000, rejuvenation=0.1, steps=2), psi, interval=5
    )
    tail = []

    def watch(row):
        if row["step"] > 80:
            tail.append(energy.means.detach().clone()[0])

    ms.fit(energy, x, method, 150, optimiser=SGD(0.1), progress=watch, **SETTINGS)
    mean = torch.stack(tail).mean(0)
    # ULA's own bias keeps the mean; 1000 walkers wander by 1/√1000, and the average over updates less
    assert_within(mean, x.mean(0), 1 / 1000**0.5)


# ---- weighted negatives


def test_weighted_negatives_are_averaged_with_their_weights():
    x = data()
    energy = Tilted(fit_gaussian(x), MLP(2, (8,), seed=1), zero_start=False)
    frozen = AdaptiveNCE().companions(energy, x, fit_gaussian(x), 0)["frozen"]
    with torch.no_grad():
        energy.network.head.weight.mul_(2)
    context = Context(energy, {"energy": energy, "frozen": frozen}, x, fit_gaussian(x), rng())
    points = torch.randn((3, 2), generator=rng(1))
    counts = torch.tensor([1, 2, 3])
    method = AdaptiveNCE(psi="kl")
    weighted = Negatives(points, counts.float().log())
    repeated = Negatives(points.repeat_interleave(counts, 0))
    one, other = (method.loss(context, None, "energy", x, n) for n in (weighted, repeated))
    torch.testing.assert_close(one[0], other[0])
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name])
    unweighted = method.loss(context, None, "energy", x, Negatives(points))[0]
    assert (unweighted - one[0]).abs() > 1e-4


def test_walkers_of_a_jarzynski_source_are_those_of_the_copy():
    """Their log Z must be that of the frozen energy, known exactly, also across renewals."""
    x = data(500)
    energy = GaussianMixture(torch.tensor([[-0.5, 0.0], [0.5, 0.0]]), trainable=True)
    method = AdaptiveNCE(Jarzynski(walkers=4000, step_size=0.1, populations=8), interval=4)
    kept = {}

    class Spy(AdaptiveNCE):
        def advance(self, context, state):
            state, metrics = super().advance(context, state)
            kept["state"], kept["context"] = state, context
            return state, metrics

    spy = Spy(method.source, interval=4)
    run = ms.fit(energy, x, spy, 30, optimiser=SGD(0.2), **SETTINGS)
    assert run.log_partition is None
    z = spy.source.log_partition(spy.sampled(kept["context"]), kept["state"])
    frozen = run.players["frozen"]
    assert_within(z.value, frozen.log_partition().item(), z.std_error)
    assert abs(frozen.log_partition().item() - energy.log_partition().item()) > 1e-4


# ---- the chains' temperature, and whose walkers they are

T = 0.25


def cold(**settings) -> PersistentCD:
    """Chains whose noise makes them sample exp(−E/T)."""
    return chains(kernel=ULA(0.08, noise=(2 * 0.08 * T) ** 0.5), **settings)


def moved_apart() -> tuple[Context, GaussianMixture, GaussianMixture]:
    """A Gaussian, E = ‖x − m‖²/2, and a frozen copy with another mean."""
    energy, frozen = (GaussianMixture(torch.tensor([m]), trainable=True) for m in ([0.5, 0.0], [0.0, 0.0]))
    x = data()
    return (
        Context(energy, {"energy": energy, "frozen": frozen}, x, fit_gaussian(x), rng()),
        energy,
        frozen,
    )


def test_g_is_the_ratio_of_densities_at_the_chains_temperature():
    """Where E is the data's law and E_frozen the negatives', both at T, (4.10) is at rest; not with P = 1."""
    context, energy, frozen = moved_apart()
    n = 200_000
    x, negatives = (
        m.means.detach() + T**0.5 * torch.randn((n, 2), generator=rng(s))
        for s, m in ((5, energy), (6, frozen))
    )
    sizes = {}
    for tempered in (True, False):
        method = AdaptiveNCE(cold(), psi="nce", tempered=tempered)
        assert method.power(0) == pytest.approx(1 / T)
        loss, metrics = method.loss(context, None, "energy", x, Negatives(negatives))  # type: ignore
        sizes[tempered] = torch.autograd.grad(loss, energy.means)[0].norm()
        P = 1 / T if tempered else 1.0
        with torch.no_grad():
            log_g = P * (frozen(negatives) - energy(negatives))
        torch.testing.assert_close(metrics["var_log_g"], log_g.var(correction=0))
    error = T**0.5 / n**0.5  # of a mean of ∂E/∂m = m − x, with weights below 1, of data and of negatives
    assert sizes[True] < 5 * error
    assert sizes[False] > 20 * error


def test_at_interval_one_the_temperature_makes_no_difference():
    """g = 1: the update of maximum likelihood on E, times S₀′(1), whatever P."""
    context, energy, _ = moved_apart()
    context.players["frozen"].load_state_dict(energy.state_dict())
    negatives = Negatives(torch.randn((30, 2), generator=rng(3)))
    losses = [
        AdaptiveNCE(cold(), tempered=tempered).loss(context, None, "energy", context.data, negatives)[0]  # type: ignore
        for tempered in (True, False)
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, energy.means)[0] for loss in losses))


@pytest.mark.parametrize("tempered", [True, False])
def test_walkers_are_those_of_the_model(tempered):
    """Exact draws of the copy at T, weighted, have the model's mean, and unweighted the copy's."""
    context, energy, frozen = moved_apart()
    n = 20_000
    x = T**0.5 * torch.randn((n, 2), generator=rng(8)) + frozen.means.detach()
    method = AdaptiveNCE(cold(walkers=n), tempered=tempered)
    state = method.start(context)._replace(buffer=x)
    walkers = method.current_walkers(context, state)
    p = torch.softmax(walkers.log_weight, 0)
    mean = p.to(x) @ walkers.x
    assert_within(mean, energy.means.detach()[0], 1.5 * T**0.5 / walkers.ess**0.5)
    assert walkers.ess < 0.5 * n  # e^{−‖m − m_f‖²/T} of them


def test_differences_of_energies_are_taken_in_float32():
    """Energies in bf16, whose small differences are exponentiated."""

    class Narrow(nn.Module):
        def __init__(self, slope: float):
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(slope))

        def forward(self, x):
            return (x[:, 0] * self.slope).to(torch.bfloat16)

    energy, frozen = Narrow(1.0), Narrow(1.125)
    x = data()
    context = Context(energy, {"energy": energy, "frozen": frozen}, x, fit_gaussian(x), rng())
    loss, metrics = AdaptiveNCE(cold()).loss(context, None, "energy", x, Negatives(x))  # type: ignore
    assert loss.dtype == torch.float32
    difference = frozen(x).float() - energy(x).float()
    torch.testing.assert_close(metrics["log_g_max"], difference.abs().max() / T)
    assert {value.dtype for value in metrics.values()} == {torch.float32}


# ---- what is logged


def test_metrics_are_what_their_names_say():
    x = data()
    energy = MLP(2, (8,), seed=1)
    method = AdaptiveNCE(chains())
    frozen = method.companions(energy, x, fit_gaussian(x), 0)["frozen"]
    with torch.no_grad():
        energy.head.weight.mul_(3)
    context = Context(energy, {"energy": energy, "frozen": frozen}, x, fit_gaussian(x), rng())
    negatives = Negatives(torch.randn((20, 2), generator=rng(3)))
    _, metrics = method.loss(context, None, "energy", x, negatives)
    with torch.no_grad():
        on_model, on_data = (frozen(y) - energy(y) for y in (negatives.x, x))
    torch.testing.assert_close(metrics["var_log_g"], on_model.var(correction=0))
    torch.testing.assert_close(metrics["var_log_g_data"], on_data.var(correction=0))
    torch.testing.assert_close(metrics["log_g_max"], torch.cat([on_model, on_data]).abs().max())
    torch.testing.assert_close(metrics["weight_negatives"], torch.sigmoid(on_model).mean())
    torch.testing.assert_close(metrics["weight_data"], torch.sigmoid(-on_data).mean())
    assert not any(value.requires_grad for value in metrics.values())


# ---- runs, settings, errors


def test_resume_is_bit_exact_between_renewals(tmp_path):
    def energy():
        return MLP(2, (8,), seed=1)

    method = AdaptiveNCE(chains(), interval=4)
    settings = SETTINGS | {"checkpoint_every": 3, "learning_rate": 1e-3}
    whole = ms.fit(energy(), data(), method, 10, **settings)
    ms.fit(energy(), data(), method, 6, out=tmp_path / "run", **settings)  # ends between two renewals
    rest = ms.fit(energy(), data(), method, 10, out=tmp_path / "run", resume=True, **settings)
    for name in ("energy", "frozen"):
        for a, b in zip(whole.players[name].parameters(), rest.players[name].parameters(), strict=True):
            assert torch.equal(a, b), name
    assert [r["var_log_g"] for r in whole.history] == [r["var_log_g"] for r in rest.history]
    again = ms.load_run(tmp_path / "run", energy=energy())
    assert torch.equal(again.players["frozen"].head.weight, rest.players["frozen"].head.weight)


def test_a_run_with_a_psi_of_ones_own_is_read_back(tmp_path):
    method = AdaptiveNCE(chains(), Bregman.from_function(lambda u: u**2 - u.log()))
    ms.fit(None, data(), method, 3, out=tmp_path / "run", **SETTINGS)
    assert ms.load_run(tmp_path / "run").method == "adance"


def test_by_name_with_nested_settings():
    method = ms.api.resolve_method(
        {
            "name": "adance",
            "psi": "kl",
            "interval": 3,
            "source": {
                "name": "pcd",
                "rejuvenation": 0.25,
                "kernel": {"name": "ula", "step_size": 1.0, "noise": 0.005},
            },
        }
    )
    assert isinstance(method, AdaptiveNCE)
    assert method.source == PersistentCD(rejuvenation=0.25, kernel=ULA(1.0, noise=0.005))
    assert method.bregman.name == "kl"
    assert replace(method, psi="squared").bregman.name == "squared"
    assert 0.1 <= AdaptiveNCE().source.rejuvenation <= 0.25


@each(
    "settings, field, words",
    [
        ({"interval": 0}, "adance.interval", "at least 1, got 0"),
        ({"interval": 2.5}, "adance.interval", "integer"),
        ({"psi": "kll"}, "adance.psi", "did you mean 'kl'"),
        ({"psi": lambda u: -u}, "adance.psi", "strictly convex"),
        ({"source": AdaptiveNCE()}, "adance.source", "a method with chains"),
        ({"source": PersistentCD(energy_l2=0.1)}, "adance.source.energy_l2", "must be 0"),
    ],
)
def test_bad_settings_are_named(settings, field, words):
    with pytest.raises(ConfigError, match=words) as caught:
        AdaptiveNCE(**settings)
    assert caught.value.path == field


def test_a_network_that_stays_flat_is_called_constant_at_the_temperature_of_its_chains(monkeypatch):
    """The same flat energy is flat for chains at temperature 1, and steep for chains at 10⁻⁵."""
    monkeypatch.setattr("metastable.summary.likelihood.affordable", lambda *_: False)  # it has no log Z
    found = []
    for kernel in (ULA(0.1), ULA(1.0, noise=0.005)):
        run = ms.fit(
            MLP(2, (8,), seed=1),
            data(),
            AdaptiveNCE(chains(kernel=kernel)),
            1,
            learning_rate=1e-9,
            device="cpu",
        )
        found.append("constant-energy" in [f.name for f in run.diagnosis])
    assert found == [True, False]


def test_an_overflow_is_reported_with_the_exponent():
    method = AdaptiveNCE(chains(), "squared", interval=200)
    with pytest.raises(DivergenceError, match=r"\|log g\|, which is exponentiated, went up to"):
        ms.fit(MLP(2, (32, 32)), data(), method, 60, learning_rate=0.5, **SETTINGS)


def test_log_z_of_the_frozen_copy_is_not_logged_as_the_models():
    x = torch.randn((200, 2), generator=torch.Generator().manual_seed(0))
    source = ms.methods.Jarzynski(walkers=64, populations=4)
    run = ms.fit(None, x, AdaptiveNCE(source, interval=5), steps=10, evaluate=False)
    assert run.log_partition is None
    assert "ess" in run.history[-1]
    assert not [name for name in run.history[-1] if name.startswith("log_z")]
