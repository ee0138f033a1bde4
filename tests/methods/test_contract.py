"""Every method goes through the same door: start, loss, advance, save and load."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import each
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, UnsupportedError
from metastable.energies import MLP, AsEnergy, JointEnergy, Tilted
from metastable.kernels import HMC, MALA, ULA, Kernel
from metastable.kernels.base import ChainState, Info
from metastable.methods import (
    JEM,
    METHODS,
    NCE,
    AdaptiveNCE,
    AdversarialContrastive,
    Context,
    ContrastiveDivergence,
    Density,
    ExactDraws,
    FDivergence,
    FlowContrastive,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ShortRun,
)
from metastable.methods.base import ChainMethod, Negatives, Objective, contrast
from metastable.methods.conditional import ConditionalNCE
from metastable.methods.interpolating import InterpolatingNCE
from metastable.methods.ranking import ImplicitBC, RankingNCE
from metastable.methods.score import DenoisingScoreMatching, ScoreMatching, SlicedScoreMatching
from metastable.proposals import Diffusion, fit_gaussian
from metastable.training.checkpoints import pack, unpack

SMALL_FLOW = {"name": "flow", "layers": 2, "hidden": (8,), "bins": 4}
FEW_STEPS = {"name": "interpolant", "width": 8, "steps": 4, "scored": 3}
MEMBERS = {
    "cd": ContrastiveDivergence(steps=2),
    "cd, hmc": ContrastiveDivergence(kernel=HMC(0.2, leapfrog=2), steps=1),
    "pcd": PersistentCD(walkers=40, batch=16, rejuvenation=0.2),
    "pcd, from noise": PersistentCD(walkers=40, start_at="noise", kernel=MALA(0.1)),
    "pcd, from the model": PersistentCD(walkers=40, start_at="model"),
    "short-run": ShortRun(walkers=20, steps=3),
    "jarzynski": Jarzynski(walkers=64, populations=4),
    "jarzynski, mini-batch": Jarzynski(walkers=64, populations=4, batch=8, steps=2, gradient="batch"),
    "jarzynski, moved": Jarzynski(walkers=64, populations=4, batch=8, gradient="moved", threshold=0.99),
    "jarzynski, moved, ula": Jarzynski(walkers=64, populations=4, batch=8, gradient="moved", step_size=0.05),
    "jarzynski, mala": Jarzynski(walkers=64, populations=4, kernel=MALA(0.1), batch=8),
    "jarzynski, all steer": Jarzynski(walkers=64, held_out=0.0, resample="lag", lag=2),
    "jarzynski, entropy": Jarzynski(
        walkers=64, populations=4, resample="entropy", threshold=1.0, order="energy"
    ),
    "exact": ExactDraws(walkers=30),
    "f-ebm": FDivergence(source=PersistentCD(walkers=40, batch=16)),
    "f-ebm, js on jarzynski": FDivergence(f="js", source=Jarzynski(walkers=64, populations=4), ratio_steps=2),
    "f-ebm, theorem 1": FDivergence(
        f="alpha", alpha=0.5, source=ExactDraws(), estimator="theorem1", clip_exponent=5.0
    ),
    "f-ebm, normalised": FDivergence(
        f="hellinger", source=Jarzynski(walkers=64, populations=4), normalise=True, exponent_l2=0.1
    ),
    "f-ebm, a user's": FDivergence(f=lambda u: (u - 1) * u.log(), source=ShortRun(walkers=20, steps=3)),
    "nce": NCE(),
    "nce, uniform": NCE(noise="uniform", noise_ratio=0.3, learn_log_z=False),
    "flow-contrastive": FlowContrastive(pretrain=1, noise_steps=2, likelihood=0.1),
    "adversarial-contrastive": AdversarialContrastive(noise_ratio=2.0),
    "adversarial-contrastive, flow": AdversarialContrastive(noise="flow", pretrain=0, base="uniform"),
    "ranking-nce": RankingNCE(negatives_per_datum=3),
    "ranking-nce, shared": RankingNCE(negatives_per_datum=20, shared=True, proposal="uniform"),
    "ibc": ImplicitBC(negatives_per_datum=5),
    "ranking-nce, interpolant": RankingNCE(negatives_per_datum=2, proposal=FEW_STEPS, walkers=64),
    "ranking-nce, given": RankingNCE(negatives_per_datum=3),
    "ranking-nce, given, adversarial": RankingNCE(
        negatives_per_datum=3, proposal=SMALL_FLOW, adversarial=True
    ),
    "ibc, given": ImplicitBC(negatives_per_datum=2, proposal=SMALL_FLOW),
    "interpolating-nce": InterpolatingNCE(negatives_per_datum=2, times=2, proposal=FEW_STEPS),
    "interpolating-nce, given": InterpolatingNCE(negatives_per_datum=2, times=3, proposal=FEW_STEPS),
    "conditional-nce": ConditionalNCE(negatives_per_datum=2),
    "adance": AdaptiveNCE(interval=2, source=PersistentCD(walkers=40, batch=16, rejuvenation=0.2, steps=2)),
    "adance, squared": AdaptiveNCE(ShortRun(walkers=20, steps=3, kernel=MALA(0.1)), "squared", interval=3),
    "adance, jarzynski": AdaptiveNCE(Jarzynski(walkers=64, populations=4), "kl", interval=2),
    "adance, jarzynski mini-batch": AdaptiveNCE(Jarzynski(walkers=64, populations=4, batch=8), interval=1),
    "mixed": Mixed(sources=(PersistentCD(walkers=40, batch=16), ShortRun(walkers=8, steps=3))),
    "mixed, weighted": Mixed(
        sources=(Jarzynski(walkers=64, populations=4), PersistentCD(walkers=20, start_at="noise")),
        shares=(3, 1),
    ),
    "robust": Robust(source=ShortRun(walkers=20, steps=3)),
    "robust, cd": Robust(source=ContrastiveDivergence(steps=2, kernel=MALA(0.1)), beta=-0.3),
    "robust, exact": Robust(source=ExactDraws(), sampling=1.0, weighting=0.2),
    "robust, batch-corrected": Robust(
        source=PersistentCD(walkers=40, batch=16), beta=0.5, variant="batch-corrected"
    ),
    "robust, several β": Robust(
        source=PersistentCD(walkers=40, batch=16, energy_l2=0.1),
        beta=(0.0, 0.3, -0.2),
        beta_start=0.8,
        anneal=3,
    ),
    "robust, jarzynski": Robust(
        source=Jarzynski(walkers=64, populations=4),
        beta=0.2,
        beta_start=0.0,
        anneal=3,
        variant="true-objective",
    ),
    "robust, jarzynski mini-batch": Robust(
        source=Jarzynski(walkers=64, populations=4, batch=8, steps=2), sampling=1.0, weighting=0.5
    ),
    "robust, mixed": Robust(
        source=Mixed(sources=(PersistentCD(walkers=40), ShortRun(walkers=8, steps=3))), variant="no-positive"
    ),
    "jem": JEM(
        source=Robust(
            source=PersistentCD(
                walkers=40,
                batch=16,
                steps=3,
                step_size=1e-3,
                start_at="noise",
                noise="uniform",
                rejuvenation=0.2,
            )
        )
    ),
    "jem, plain": JEM(source=PersistentCD(walkers=40, kernel=MALA(0.01)), generative=0.5),
    "jem, classifier": JEM(source=PersistentCD(walkers=40), generative=0.0),
    "jem, several β": JEM(
        source=Robust(source=ShortRun(walkers=20, steps=3, step_size=1e-3), beta=(0.0, 0.2))
    ),
    "jem, mixed": JEM(
        source=Mixed(sources=(PersistentCD(walkers=40, step_size=1e-3), ShortRun(walkers=8, step_size=1e-3)))
    ),
    "jem, adance": JEM(
        source=AdaptiveNCE(interval=2, source=PersistentCD(walkers=40, batch=16, step_size=1e-3))
    ),
    "score-matching": ScoreMatching(),
    "score-matching, in parts": ScoreMatching(chunk=20),
    "score-matching, hutchinson": ScoreMatching(trace="hutchinson", projections=2, probes="gaussian"),
    "denoising-score-matching": DenoisingScoreMatching(sigma=0.3, sigma_start=1.0, anneal=3),
    "sliced-score-matching": SlicedScoreMatching(projections=3, chunk=20),
    "sliced-score-matching, variance reduced": SlicedScoreMatching(variance_reduced=True),
    "density": Density(),
}


def test_every_registered_method_is_tested():
    assert set(METHODS) == {m.name for m in MEMBERS.values()}


@pytest.fixture(params=[(3,), (2, 2, 2)], ids=["vector", "image"])
def context(request) -> Context:
    rng = torch.Generator().manual_seed(0)
    data = torch.randn((50, *request.param), generator=rng) + 1.0
    energy = Tilted(fit_gaussian(data), MLP(request.param, hidden=(8,)), zero_start=True)
    noise = fit_gaussian(data)
    energy.sample = noise.sample  # for exact draws; right at the start, and good enough for a contract
    return Context(energy, {"energy": energy}, data, noise, rng)


def with_companions(method, context: Context) -> Context:
    """The context as a run of this method has it."""
    if method.needs == "labels":
        shape = tuple(context.data.shape[1:])
        energy = JointEnergy(MLP(shape, hidden=(8,), outputs=3), output_scale=20.0)
        labels = torch.randint(3, (len(context.data),), generator=context.rng)
        context = replace(context, energy=energy, given=labels)
    given = any(method is member for name, member in MEMBERS.items() if ", given" in name)
    if given or method.timed:
        contexts = torch.randn((len(context.data), 2), generator=context.rng) if given else None
        energy = Joined(tuple(context.data.shape[1:]), 2 if given else 0, method.timed)
        context = replace(context, energy=energy, given=contexts)
    if method.name == "density":
        context = replace(context, energy=a_density(tuple(context.data.shape[1:])))
    made = method.companions(context.energy, batch_of(method, context), context.noise, 0)
    return replace(context, players={"energy": context.energy, **made})


class Joined(nn.Module):
    """E(x | given, t) by one network on rows that join all three, which the tests can watch."""

    def __init__(self, shape: tuple[int, ...], contexts: int, timed: bool):
        super().__init__()
        self.shape = shape
        self.network = MLP(math.prod(shape) + contexts + timed, hidden=(8,))

    def forward(self, x: Tensor, given: Tensor | None = None, t: Tensor | None = None) -> Tensor:
        lead = x.shape[: x.dim() - len(self.shape)]
        parts = [x.reshape(*lead, -1)]
        if given is not None:
            parts.append(given.view(len(given), *[1] * (len(lead) - 1), -1).expand(*lead, -1))
        if t is not None:
            parts.append(t[..., None])
        return self.network(torch.cat(parts, -1).flatten(0, -2)).view(lead)


def a_density(shape: tuple[int, ...]) -> AsEnergy:
    """A diffusion whose network the tests can watch."""
    d = math.prod(shape)
    network = MLP(d, hidden=(8,), outputs=d)
    energy = AsEnergy(
        Diffusion(shape, network=lambda z, given, noise: network(z.flatten(0, -2)).view(z.shape))
    )
    energy.network = network
    return energy


def batch_of(method, context: Context) -> Any:
    """All data as the method's batches are."""
    return method.takes(Batch(context.data, context.given))


def tells_its_samples(method, context, negatives):
    """Those who look at samples only find them, whatever the method keeps beside them."""
    sets = method.drawn(negatives)
    assert (len(sets) > 0) == (negatives is not None)
    for drawn in sets:
        assert isinstance(drawn, Negatives)
        assert drawn.x.shape[1:] == context.data.shape[1:]


def update(method, context, state, rate=0.05):
    batch = batch_of(method, context)
    negatives, state, metrics = method.negatives(context, state, batch)
    if isinstance(method, (ChainMethod, Objective)):
        tells_its_samples(method, context, negatives)
    for turn in method.turns(context):
        together = (turn,) if isinstance(turn, str) else turn
        loss, more = method.loss(context, state, together[0], batch, negatives)
        metrics |= more
        parameters = [p for name in together for p in context.players[name].parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= rate * g
    state, more = method.advance(context, state)
    context.step += 1
    return state, {**metrics, **more}


def check_metrics(metrics):
    for name in ("energy_data", "energy_negatives", "energy_gap", "displacement", "score_loss", "score_norm"):
        assert name not in metrics or torch.isfinite(metrics[name]), name
    if "energy_negatives" in metrics:
        data, negatives = metrics["energy_data"], metrics["energy_negatives"]
        assert torch.isclose(metrics["energy_gap"], data - negatives, atol=1e-6 * float(data.abs()))
    else:  # a method without negatives says what it learns from instead
        learned = metrics.keys() & {"score_loss", "density_loss", "label_cross_entropy"}
        assert learned
        assert all(torch.isfinite(metrics[name]) for name in learned)


@pytest.mark.parametrize("method", MEMBERS.values(), ids=MEMBERS)
def test_saved_state_goes_on_bit_for_bit_and_updates_cost_what_they_say(method, context):
    """`evaluations` are the rows that really went through the energy, or a copy of it, in the second update."""
    context = with_companions(method, context)
    state = method.start(context)
    assert 0 < method.power(0) < math.inf
    state, _ = update(method, context, state)
    kept = unpack(*pack(method.save(state)))
    weights = copy.deepcopy({name: m.state_dict() for name, m in context.players.items()})
    rng, rows = context.rng.get_state(), []
    for module in (context.energy, *(m for name, m in context.players.items() if name == "frozen")):
        module.network.register_forward_hook(lambda module, given, made: rows.append(len(made)))

    def go_on(state):
        for name, module in context.players.items():
            module.load_state_dict(weights[name])
        context.rng.set_state(rng)
        context.step = 1
        for _ in range(3):
            state, metrics = update(method, context, state)
            if context.step == 2:
                assert method.evaluations(context, len(context.data)) == sum(rows)
        rows.clear()
        return metrics, context.energy.state_dict()["network.head.weight"].clone()

    first, second = go_on(state), go_on(method.load(kept))
    check_metrics(first[0])
    assert torch.equal(first[1], second[1])
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name]), name


def test_surrogate_gradient_is_data_minus_weighted_negatives():
    energy = MLP(2, hidden=(8,)).double()
    rng = torch.Generator().manual_seed(0)
    data, x = (torch.randn((n, 2), generator=rng, dtype=torch.float64) for n in (7, 5))
    log_weight = torch.randn(5, generator=rng, dtype=torch.float64)
    loss, _ = contrast(energy, data, Negatives(x, log_weight))
    got = torch.autograd.grad(loss, list(energy.parameters()))
    p = torch.softmax(log_weight, 0)
    rows = [
        torch.autograd.grad(energy(r[None])[0], list(energy.parameters()), allow_unused=True) for r in data
    ]
    negatives = [
        torch.autograd.grad(energy(r[None])[0], list(energy.parameters()), allow_unused=True) for r in x
    ]
    for i, g in enumerate(got):
        mean = sum(r[i] for r in rows) / 7
        model = sum(w * r[i] for w, r in zip(p, negatives, strict=True))
        torch.testing.assert_close(g, mean - model, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Identity(Kernel):
    name = "identity"

    def init(self, energy, x: Tensor) -> ChainState:
        return ChainState(x, x.new_empty(0), x.new_empty(0))

    def step(self, energy, state, noise, step_size):
        zero = state.x.new_zeros(len(state.x))
        return state, Info(zero + 1, zero)


def test_an_identity_kernel_keeps_every_persistent_chain(context):
    method = PersistentCD(walkers=40, batch=7, kernel=Identity())
    state = method.start(context)
    before = state.buffer.clone()
    for _ in range(30):
        state, _ = update(method, context, state)
    assert torch.equal(state.buffer, before)


@dataclass(frozen=True)
class Shift(Identity):
    name = "shift"

    def step(self, energy, state, noise, step_size):
        zero = state.x.new_zeros(len(state.x))
        return ChainState(state.x + 1, state.energy, state.grad), Info(zero + 1, zero)


def test_chains_return_to_the_rows_they_were_read_from(context):
    """After every update exactly the rows that were read have moved, each by one."""
    method = PersistentCD(walkers=40, batch=7, kernel=Shift())
    state = method.start(context)
    before = state.buffer.clone()
    state, _ = update(method, context, state)
    assert int((state.buffer == before + 1).flatten(1).all(1).sum()) == 7
    assert int((state.buffer == before).flatten(1).all(1).sum()) == 33


@dataclass(frozen=True)
class Unknown(Identity):
    name = "unknown"
    invariant = False


def test_a_kernel_without_a_known_density_is_refused_by_jarzynski(context):
    method = Jarzynski(walkers=64, populations=4, kernel=Unknown())
    state = method.start(context)
    _, state, _ = method.negatives(context, state, context.data)
    with pytest.raises(UnsupportedError, match="transition density"):
        method.advance(context, state)


@each(
    "make, field",
    [
        (lambda: Jarzynski(step_size=-0.1), "ula.step_size"),
        (lambda: Jarzynski(step_size=0.1, kernel=ULA(0.1)), "jarzynski.step_size"),
        (lambda: Jarzynski(walkers=1), "jarzynski.walkers"),
        (lambda: Jarzynski(held_out=1.0), "jarzynski.held_out"),
        (lambda: Jarzynski(scheme="systemic"), "jarzynski.scheme"),
        (lambda: Jarzynski(resample="often"), "jarzynski.resample"),
        (lambda: Jarzynski(walkers=100, batch=90), "jarzynski.batch"),
        (lambda: Jarzynski(threshold=1.5), "jarzynski.threshold"),
        (lambda: ContrastiveDivergence(steps=0), "cd.steps"),
        (lambda: PersistentCD(rejuvenation=1.2), "pcd.rejuvenation"),
        (lambda: PersistentCD(start_at="date"), "pcd.start_at"),
        (lambda: ShortRun(walkers=0), "short-run.walkers"),
    ],
)
def test_bad_settings_name_field_and_value(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == field


def test_threshold_schedule():
    method = Jarzynski(schedule=((240, 0.5), (300, 0.8)))
    assert [method.threshold_at(k) for k in (0, 239, 240, 299, 300)] == [0.0, 0.0, 0.5, 0.5, 0.8]


def test_an_energy_without_an_exact_start_gets_walkers_and_log_z_from_smc(context):
    """The spread between populations then holds the error of the start."""
    shape = tuple(context.data.shape[1:])
    energy = Tilted(fit_gaussian(context.data), MLP(shape, hidden=(8,), seed=3), zero_start=False)
    context.energy, context.players = energy, {"energy": energy}
    method = Jarzynski(walkers=2048, populations=8)
    state = method.start(context)
    z = method.log_partition(context, state)
    reference = fit_gaussian(context.data)
    x = reference.sample(200_000, context.rng)
    with torch.no_grad():
        ratio = (-energy(x) - reference.log_prob(x)).double()
    exact = float(torch.logsumexp(ratio, 0)) - torch.log(torch.tensor(2e5)).item()
    assert z.std_error > 0
    assert abs(z.value - exact) < 6 * z.std_error + 0.01
