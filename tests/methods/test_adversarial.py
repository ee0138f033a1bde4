"""Noise that learns: the energy plays NCE, the noise climbs the same objective, and both end near the data."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import each, mean_and_error, quadrature, z_limit
from torch import Tensor

import metastable as ms
from metastable.benchmarks.step_cost import trainer
from metastable.core.errors import ConfigError
from metastable.energies import MLP, GaussianMixture, Tilted
from metastable.methods import NCE, AdversarialContrastive, Context, FlowContrastive
from metastable.proposals import Flow, Gaussian, Generator, Mixture, fit_gaussian
from metastable.training import Adam, Schedule

F64 = torch.float64
over = pytest.mark.parametrize
DATA = 1.0 + torch.randn((60, 2), generator=torch.Generator().manual_seed(0), dtype=F64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bent_flow() -> Flow:
    flow = Flow(2, data=DATA, layers=2, hidden=(8,), seed=1)
    with torch.no_grad():
        for p in flow.parameters():
            p += 0.2 * torch.randn(p.shape, generator=rng(2), dtype=F64)
    return flow


def energy() -> Tilted:
    return Tilted(fit_gaussian(DATA), MLP(2, hidden=(8,), seed=3), zero_start=False).double()


def context_of(method: NCE, seed: int = 0) -> Context:
    E, noise = energy(), fit_gaussian(DATA)
    players = {"energy": E, **method.companions(E, DATA, noise, 0)}
    for module in players.values():
        module.double()
    players["log_partition"].value.data.fill_(0.3)
    return Context(E, players, DATA, noise, rng(seed))


MEMBERS = {
    "fce": FlowContrastive(noise=bent_flow(), noise_ratio=2.0),
    "ace, flow": AdversarialContrastive(noise=bent_flow(), base_share=0.3),
    "ace, generator": AdversarialContrastive(noise=Generator(2, data=DATA, hidden=(8,), draws=16, seed=4)),
}
over_members = over("method", MEMBERS.values(), ids=MEMBERS)


def energy_step(method: NCE, context: Context) -> tuple[Tensor, list[Tensor]]:
    negatives, state, _ = method.negatives(context, method.load({}), DATA)
    loss, _ = method.loss(context, state, "energy", DATA, negatives)
    players = (context.players["energy"], context.players["log_partition"])
    return loss, list(torch.autograd.grad(loss, [p for m in players for p in m.parameters()]))


def test_the_energy_plays_nce_against_the_flow_as_it_is():
    game, plain = FlowContrastive(noise=bent_flow()), NCE(noise=bent_flow())
    (loss, gradient), (same, too) = (energy_step(m, context_of(m)) for m in (game, plain))
    assert torch.equal(loss, same)
    assert all(torch.equal(a, b) for a, b in zip(gradient, too, strict=True))


def objective(method: FlowContrastive, context: Context) -> Tensor:
    """J/ρ₁ of (3.4) and (3.3) with densities written out, on draws that always use the same random numbers."""
    noise, E, c = context.players["noise"], context.energy, context.players["log_partition"].value
    k = method.noise_ratio
    x = noise.rsample(round(k * len(DATA)), rng(5))
    data_ratio = (-E(DATA) - c - noise.log_prob(DATA)).exp() / k
    noise_ratio = (-E(x) - c - noise.log_prob(x)).exp() / k
    return -(data_ratio / (1 + data_ratio)).log().mean() - k * (1 / (1 + noise_ratio)).log().mean()


@over_members
def test_the_noise_climbs_the_objective(method):
    """Its loss is −J, and its gradient the finite difference of −J with common random numbers."""
    context = context_of(method)
    noise = context.players["noise"]
    parameters = [p for p in noise.parameters() if p.requires_grad]
    direction = [torch.randn(p.shape, generator=rng(6), dtype=F64) for p in parameters]

    def loss() -> Tensor:
        return method.loss(replace(context, rng=rng(5)), method.load({}), "noise", DATA, None)[0]

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += by * d
            value = float(objective(method, context))
            for p, d in zip(parameters, direction, strict=True):
                p -= by * d
        return value

    assert float(loss().detach()) == pytest.approx(-float(objective(method, context).detach()), abs=1e-10)
    gradient = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None)
    difference = (moved(1e-6) - moved(-1e-6)) / 2e-6
    assert abs(slope) > 1e-3
    assert slope == pytest.approx(-difference, rel=1e-4)


def test_a_gradient_without_the_draws_would_be_another():
    """The mutant: draws without gradients leave out the path through f_φ."""
    method = MEMBERS["fce"]
    context = context_of(method)
    noise = context.players["noise"]
    whole = method.loss(replace(context, rng=rng(5)), method.load({}), "noise", DATA, None)[0]
    with_path = noise.rsample
    noise.rsample = lambda n, source: with_path(n, source).detach()
    part = method.loss(replace(context, rng=rng(5)), method.load({}), "noise", DATA, None)[0]
    a, b = (torch.autograd.grad(loss, list(noise.parameters()))[0] for loss in (whole, part))
    assert torch.equal(whole, part)
    assert (a - b).abs().max() > 1e-3


def test_likelihood_is_added_to_the_noise_alone():
    plain, pulled = (FlowContrastive(noise=bent_flow(), likelihood=w) for w in (0.0, 2.0))
    losses = [m.loss(context_of(m, 5), m.load({}), "noise", DATA, None)[0].detach() for m in (plain, pulled)]
    nll = -context_of(plain).players["noise"].log_prob(DATA).mean().detach()
    assert float(losses[1] - losses[0]) == pytest.approx(2 * float(nll), abs=1e-10)
    assert torch.equal(*(energy_step(m, context_of(m))[0] for m in (plain, pulled)))


def test_the_base_is_a_share_of_the_noise_and_does_not_learn():
    method = AdversarialContrastive(base_share=0.25, base=Gaussian(torch.zeros(2, dtype=F64), 3.0))
    noise = method.noise_model(DATA, 0)
    assert isinstance(noise, Mixture)
    assert noise.weights.tolist() == pytest.approx([0.25, 0.75])
    assert isinstance(noise.components[1], Generator)
    learned = {name for name, p in noise.named_parameters() if p.requires_grad}
    assert learned
    assert all(name.startswith("components.1.") for name in learned)


def test_an_estimated_density_is_drawn_anew_and_its_bias_is_logged():
    method = MEMBERS["ace, generator"]
    context = context_of(method)
    before = context.players["noise"].components[1].latents.clone()
    _, state, metrics = method.negatives(context, method.load({}), DATA)
    assert not torch.equal(before, context.players["noise"].components[1].latents)
    assert metrics["density_bias"] < 0
    assert metrics["density_draws"] == 16
    assert method.current_walkers(context, state) is None
    assert method.log_partition(context, state) is None
    exact = MEMBERS["ace, flow"]
    assert exact.negatives(context_of(exact), state, DATA)[2] == {}


# ---- training


TWO_MODES = ms.energies.two_modes(5.0, (0.3, 0.7), 2)
MODES = TWO_MODES.sample(3000, rng(7))


def kl_to_truth(run, truth: GaussianMixture) -> float:
    """KL(p_data ‖ p_θ), log Z by quadrature, over fresh rows, with the largest error that chance allows added."""
    with torch.no_grad():
        z = quadrature(lambda x: run.energy(x.float()).double(), [(-9.0, 9.0, 301)] * 2).log_partition
        x = truth.sample(4000, rng(9))
        gap = (run.energy(x) - truth(x)).double() + z - truth.log_partition().double()
    mean, error = mean_and_error(gap)
    return float(mean + z_limit() * error)


@over(
    "method",
    [
        FlowContrastive(noise=Flow(2, data=MODES, kind="affine", layers=2, hidden=(16,))),
        AdversarialContrastive(noise=Generator(2, data=MODES, hidden=(16,), draws=64)),
    ],
    ids=["fce", "ace"],
)
def test_two_modes_are_learned(method):
    """From a Gaussian start that is 0.3 nats from the truth to within 0.08, error of the measurement included."""
    truth, x = TWO_MODES, MODES
    settings = {"batch_size": 256, "learning_rate": 1e-2, "schedule": Schedule("cosine"), "evaluate": False}
    start = ms.fit(None, x, method, steps=1, **settings)
    run = ms.fit(None, x, method, steps=100, **settings)
    assert kl_to_truth(start, truth) > 0.3
    assert kl_to_truth(run, truth) < 0.08
    assert abs(run.history[-1]["objective"]) < math.log(2) + 0.01
    noise, before = run.players["noise"], method.noise_model(x, 0)
    assert bool(noise.log_prob(x).mean() > before.float().log_prob(x).mean())


def test_a_run_with_a_generator_says_that_its_density_is_estimated():
    x = DATA.float()
    run = ms.fit(None, x, AdversarialContrastive(), steps=40, log_every=2, evaluate=False)
    findings = ms.evaluation.diagnosis.diagnose(run.history, ms.evaluation.diagnosis.Facts(method=run.method))
    found = {f.name: f for f in findings}
    assert "estimated-density" in found
    assert "256 draws" in found["estimated-density"].text
    assert found["estimated-density"].evidence["density_bias"] < 0


@over(
    "method",
    [
        NCE(noise=Flow(2, layers=1, hidden=(4,))),
        FlowContrastive(noise=Flow(2, layers=1, hidden=(4,)), noise_steps=2),
        AdversarialContrastive(noise=Generator(2, hidden=(4,), draws=8)),
    ],
    ids=lambda m: m.name,
)
def test_resuming_is_bit_exact(method, tmp_path):
    settings = {"evaluate": False, "checkpoint_every": 4, "log_every": 3, "batch_size": 20}
    settings |= {"schedule": Schedule("cosine")}
    whole = ms.fit(None, DATA.float(), method, steps=8, out=tmp_path / "whole", **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000008")
    resumed = ms.fit(None, DATA.float(), method, steps=8, out=tmp_path / "parts", resume=True, **settings)
    for name, module in whole.players.items():
        for a, b in zip(
            module.state_dict().values(), resumed.players[name].state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), name
    assert "learning_rate" in whole.history[-1]


def test_an_update_is_one_step_of_every_schedule():
    """However many turns a player has in it."""
    x = DATA.float()
    method = FlowContrastive(noise=Flow(2, layers=1, hidden=(4,)), noise_steps=3)
    E = Tilted(fit_gaussian(x), MLP(2, hidden=(4,)))
    training = trainer(E, x, method, Adam(1e-3), 0)
    for _ in range(2):
        training._update()
    assert {name: s.last_epoch for name, s in training.schedules.items()} == {
        "energy": 2,
        "noise": 2,
        "log_partition": 2,
    }
    steps = {name: max(int(s["step"]) for s in o.state.values()) for name, o in training.optimisers.items()}
    assert steps == {"energy": 2, "noise": 6, "log_partition": 2}


# ---- refused


@each(
    "make, path",
    [
        (lambda: FlowContrastive(noise="gaussian"), "flow-contrastive.noise"),
        (lambda: FlowContrastive(noise_steps=0), "flow-contrastive.noise_steps"),
        (lambda: FlowContrastive(noise_rate=0.0), "flow-contrastive.noise_rate"),
        (lambda: FlowContrastive(likelihood=-1.0), "flow-contrastive.likelihood"),
        (lambda: FlowContrastive(noise_ratio=0), "flow-contrastive.noise_ratio"),
        (lambda: AdversarialContrastive(base_share=1.0), "adversarial-contrastive.base_share"),
        (lambda: AdversarialContrastive(base_share=0.0), "adversarial-contrastive.base_share"),
        (lambda: AdversarialContrastive(base="flat"), "adversarial-contrastive.base"),
        (
            lambda: FlowContrastive(noise=Gaussian(torch.zeros(2))).noise_model(DATA, 0),
            "flow-contrastive.noise",
        ),
    ],
)
def test_bad_settings_name_field_and_value(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == path
