"""Steps that tune themselves, the pace of learning, the meters of the weights, and whom to trust."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from metastable.api import fit
from metastable.core.errors import ConfigError
from metastable.energies import MLP, Tilted
from metastable.evaluation.quadrature import grid_density
from metastable.kernels import MALA, ULA
from metastable.methods import (
    Context,
    ContrastiveDivergence,
    FDivergence,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ShortRun,
)
from metastable.methods.jarzynski import JarzynskiState
from metastable.proposals import Gaussian, fit_gaussian
from metastable.walkers.held_out import HeldOut
from metastable.walkers.jarzynski import paced, shift_of
from metastable.walkers.population import Population

over = pytest.mark.parametrize
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Normal(nn.Module):
    """½|x|²/σ² with one parameter that shifts it, which does not move by itself."""

    def __init__(self, scale: float, dim: int = 1):
        super().__init__()
        self.scale, self.dim = scale, dim
        self.mean = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * ((x - self.mean) / self.scale).square().sum(1)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return self.mean.detach() + self.scale * torch.randn((n, self.dim), generator=rng)

    def log_partition(self) -> Tensor:
        return torch.tensor(self.dim * (math.log(self.scale) + 0.5 * math.log(2 * math.pi)))


def context_of(energy: nn.Module, data: Tensor) -> Context:
    scale = float(data.flatten(1).var(0).sum().sqrt())
    return Context(energy, {"energy": energy}, data, fit_gaussian(data), rng(), data_scale=scale)


def still(method, energy: nn.Module, updates: int, data: Tensor | None = None):
    """Updates in which nothing is learned; the last state and all metrics."""
    data = energy.sample(200, rng(7)) if data is None else data
    context = context_of(energy, data)
    state, rows = method.start(context), []
    for _ in range(updates):
        _, state, drawn = method.negatives(context, state, data)
        state, more = method.advance(context, state)
        rows.append(drawn | more)
        context.step += 1
    return state, rows


# ---- pace


def test_v_is_twice_the_divergence_of_a_step():
    """U = ½(x − θ)²: a step δ of θ is a KL divergence of δ²/2, whatever weights the walkers carry."""
    x = 1.5 * torch.randn(200_000, generator=rng(), dtype=F64)
    log_weight = -0.5 * x.square() * (1 - 1 / 1.5**2)  # of N(0, 1)
    delta = 0.3
    v = float(shift_of(log_weight, 0.5 * (x - delta).square() - 0.5 * x.square()))
    assert v == pytest.approx(delta**2, rel=0.02)
    unweighted = float(shift_of(torch.zeros_like(x), delta * x))
    assert unweighted == pytest.approx(1.5**2 * delta**2, rel=0.02)


def after(shift: float, factor: float = 1.0, pace: float = 0.03) -> float:
    return float(paced(torch.tensor(math.log(factor), dtype=F64), torch.tensor(shift, dtype=F64), pace).exp())


def test_the_factor_rests_at_the_bound_and_never_passes_one():
    assert after(0.03, factor=0.4) == pytest.approx(0.4)
    assert after(1e-9) == 1.0
    assert after(0.0, factor=0.5) == 1.0
    assert 0.9 < after(0.04) < 1.0


def test_a_jump_of_v_is_answered_at_once():
    """v goes with the square of the rate: a hundredfold jump needs a tenth of it."""
    factor = after(3.0)
    assert 3.0 * factor**2 < 3 * 0.03
    assert math.isfinite(math.log(after(math.inf)))


def test_the_mean_of_a_noisy_v_settles_at_the_bound():
    """v = rate² times a skewed noise: a rule that holds its median leaves the mean half as high again."""
    noise = torch.exp(torch.randn(20_000, generator=rng(3), dtype=F64) - 0.5)  # of mean 1
    log_factor, seen = torch.zeros((), dtype=F64), []
    for each in noise:
        seen.append(0.3 * torch.exp(2 * log_factor) * each)
        log_factor = paced(log_factor, seen[-1], 0.03)
    assert float(torch.stack(seen[500:]).mean()) == pytest.approx(0.03, rel=0.15)


@over("kernel", [None, ULA(0.02)], ids=["tuned", "ula"])
def test_a_learning_rate_a_hundredfold_too_high_is_slowed_to_the_pace(kernel):
    x = torch.randn((300, 1), generator=rng(1)) * 0.7 + 0.4
    energy = Tilted(Gaussian(torch.zeros(1), torch.ones(1)), MLP(1, (16,)))
    method = Jarzynski(walkers=512, populations=4, kernel=kernel, pace=0.01)
    options = {"steps": 20, "learning_rate": 0.3, "log_every": 4, "evaluate": False}
    rows = fit(energy, x, method, **options).history
    assert max(row["pace"] for row in rows) < 0.03
    assert rows[0]["rate_factor"] < 0.5
    assert all(row["learning_rate"] == 0.3 for row in rows)


def test_without_a_bound_the_same_rate_is_far_too_fast():
    x = torch.randn((300, 1), generator=rng(1)) * 0.7 + 0.4
    energy = Tilted(Gaussian(torch.zeros(1), torch.ones(1)), MLP(1, (16,)))
    method = Jarzynski(walkers=512, populations=4, pace=None)
    rows = fit(energy, x, method, steps=4, learning_rate=0.3, log_every=4, evaluate=False).history
    assert rows[0]["pace"] > 0.1
    assert "rate_factor" not in rows[0]


def test_a_bound_must_be_positive():
    with pytest.raises(ConfigError, match=r"jarzynski\.pace"):
        Jarzynski(pace=0.0)


def test_losses_on_other_samplers_pass_the_factor_on():
    source = Jarzynski(walkers=64, populations=4)
    energy = Normal(1.0, 2)
    context = context_of(energy, energy.sample(50, rng()))
    state = source.start(context)
    slower = state._replace(log_factor=torch.tensor(-3.0, dtype=F64))
    assert float(source.rate_factor(slower)) == pytest.approx(math.exp(-3))
    assert source.rate_factor(state._replace(log_factor=None)) is None
    assert torch.equal(FDivergence(source=source).rate_factor(slower), source.rate_factor(slower))
    both = Robust(source=source, beta=(0.1, 0.2)).rate_factor((state, slower))
    assert float(both) == pytest.approx(math.exp(-3))
    pcd = PersistentCD(walkers=10)
    assert pcd.rate_factor(pcd.start(context)) is None
    mixed = Mixed(sources=(source, pcd))
    assert float(mixed.rate_factor((slower, pcd.start(context)))) == pytest.approx(math.exp(-3))


# ---- steps


@over("scale", [0.01, 1.0])
def test_the_step_of_jarzynski_finds_its_acceptance(scale):
    """The data, and so the first step, are a hundred times wider than the model, or as wide."""
    energy = Normal(scale, 2)
    data = torch.randn((200, 2), generator=rng(3))
    _, rows = still(Jarzynski(walkers=512, populations=4), energy, 90, data)
    assert isinstance(Jarzynski().moves, MALA)
    late = torch.stack([row["acceptance"] for row in rows[-20:]]).mean()
    assert float(late) == pytest.approx(0.65, abs=0.06)
    steps = [float(row["step_size"]) for row in rows[-20:]]
    assert max(steps) < 1.5 * min(steps)


def test_the_step_of_an_update_was_known_before_it():
    energy = Normal(0.3, 2)
    context = context_of(energy, energy.sample(100, rng()))
    method = Jarzynski(walkers=64, populations=4)
    state = method.start(context)
    for _ in range(3):
        before = float(state.log_step.exp())
        state, metrics = method.advance(context, state)
        assert float(metrics["step_size"]) == before != float(state.log_step.exp())


@over("method", [PersistentCD(walkers=256), ShortRun(walkers=256, steps=20), ContrastiveDivergence(steps=2)])
def test_unadjusted_chains_find_a_step_that_fits_a_narrow_energy(method):
    """ULA with h = 0.05 explodes at a width of 0.1 already; a tenth of the variance is what is wanted."""
    energy = Normal(0.05, 2)
    data = (
        torch.randn((256, 2), generator=rng(3))
        if isinstance(method, ShortRun)
        else energy.sample(256, rng(3))
    )
    state, rows = still(method, energy, 60, data)
    h = float(state.log_step.exp())
    assert 0.02 * 0.05**2 < h < 0.3 * 0.05**2
    assert math.isfinite(float(rows[-1]["displacement"]))


def test_a_flat_energy_does_not_let_steps_grow_for_ever():
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.sum(1)

    state, _ = still(PersistentCD(walkers=64), Flat(), 60, torch.randn((200, 2), generator=rng(3)))
    assert float(state.log_step.exp()) <= 0.11


def test_a_step_that_is_given_stays():
    energy = Normal(0.3)
    for method in (Jarzynski(step_size=0.01), PersistentCD(step_size=0.01), PersistentCD(kernel=MALA(0.1))):
        assert not method.tuned
        state, rows = still(method, energy, 2)
        assert state.log_step is None
        assert "step_size" not in rows[-1]
    assert Jarzynski(step_size=0.01).moves == ULA(0.01)


# ---- meters


def test_meters_are_read_before_resampling():
    energy = Normal(1.0, 2)
    context = context_of(energy, energy.sample(100, rng()))
    method = Jarzynski(walkers=400, populations=4, threshold=1.0, order="none", step_size=0.3, pace=None)
    state = method.start(context)
    for k in range(1, 4):
        with torch.no_grad():
            energy.mean += 0.5
        state, metrics = method.advance(context, state)
        assert float(metrics["ess"]) < 0.98
        assert float(metrics["ess_held_out"]) < 0.98
        assert float(metrics["resampled"]) == 1.0
        assert float(metrics["resamplings"]) == k
        assert float(state.steering.ess()[0]) == pytest.approx(1.0)
    left = [len(part.unique()) for part in state.following.by_group(state.following.ancestor)]
    assert float(metrics["ancestors"]) == pytest.approx(min(left) / 50)
    gap = metrics["log_z_steering"] - metrics["log_z"]
    assert float(metrics["log_z_gap"]) == pytest.approx(float(gap))
    assert float(metrics["log_z_noise"]) == pytest.approx(float(state.following.noise().mean().sqrt()))


def with_log_z(*log_z: float, n: int = 100, noise: float = 0.0) -> Population:
    x = torch.randn((len(log_z) * n, 1), generator=rng(), dtype=F64)
    made = Population.start(x, x[:, 0], x[:0], torch.tensor(log_z, dtype=F64))
    return made._replace(past_noise=torch.full((len(log_z),), noise, dtype=F64))


def test_the_ess_of_pooled_populations_counts_their_log_z():
    method = Jarzynski(walkers=400, populations=2)
    energy = Normal(1.0)
    context = context_of(energy, energy.sample(100, rng()))
    alike = JarzynskiState(with_log_z(0.0), with_log_z(1.0, 1.0))
    assert method.log_partition(context, alike).ess == pytest.approx(200)
    apart = JarzynskiState(with_log_z(0.0), with_log_z(1.0, 31.0))
    assert method.log_partition(context, apart).ess == pytest.approx(100)


def test_populations_that_disagree_do_not_stand_for_the_model():
    """The highest of their log Z would take all the weight, by chance, and with it every other mode."""
    method, energy = Jarzynski(walkers=400, populations=2), Normal(1.0)
    context = context_of(energy, energy.sample(100, rng()))
    alike = method.current_walkers(context, JarzynskiState(with_log_z(0.0), with_log_z(0.1, 0.2)))
    assert alike.info["populations"] == [100, 100, 100]
    state = JarzynskiState(with_log_z(0.0), with_log_z(1.0, 31.0))
    apart = method.current_walkers(context, state)
    assert torch.equal(apart.x, state.steering.x)
    assert apart.info["ess_fraction"] == pytest.approx(1.0)


LEVEL = [0.01 * k for k in range(16)]


@over(
    ("walkers", "words"),
    [
        (with_log_z(*LEVEL), ""),
        (with_log_z(*LEVEL, n=20), "only 20 walkers"),
        (with_log_z(*LEVEL, noise=1.5), "uncertain by 1.22"),
        (with_log_z(*LEVEL[:-1], 5.0), "a few of them decide"),
        (with_log_z(*[0.06 * k for k in range(16)]), "weights predict 0.00"),
    ],
)
def test_each_meter_can_speak_against_log_z(walkers, words):
    doubts = HeldOut.of(walkers).doubts()
    assert bool(doubts) == bool(words)
    assert words in " ".join(doubts)


def test_few_ancestors_and_a_gap_speak_against_log_z():
    walkers = with_log_z(*LEVEL)
    few = walkers._replace(ancestor=walkers.ancestor // 100 * 100, resamplings=walkers.resamplings + 3)
    assert "descends from 1 of its 100" in " ".join(HeldOut.of(few).doubts())
    energy = Normal(1.0)
    context = context_of(energy, energy.sample(100, rng()))
    method = Jarzynski()
    for steering, doubted in ((with_log_z(-0.8), False), (with_log_z(-1.8), True)):
        z = method.log_partition(context, JarzynskiState(steering, walkers))
        assert z.trusted != doubted
        assert ("below this one" in " ".join(z.warnings)) == doubted


def test_a_small_spread_by_chance_is_not_believed():
    """Sixteen populations may agree by chance; their weights say how far they should be apart."""
    assert HeldOut.of(with_log_z(*LEVEL, noise=0.06**2)).error == pytest.approx(0.06 / 4, rel=0.01)
    plain = HeldOut.of(with_log_z(*LEVEL)).error
    assert HeldOut.of(with_log_z(*LEVEL, noise=0.9)).error == pytest.approx(1.5 * plain)


# ---- the whole of it, against quadrature


def trained(scale: float, method: Jarzynski, seed: int = 0):
    x = scale * torch.randn((500, 1), generator=rng(seed))
    energy = Tilted(fit_gaussian(x), MLP(1, (16,), seed=seed))
    run = fit(energy, x, method, steps=60, learning_rate=5e-3, seed=seed, evaluate=False, units="none")
    return run.log_partition, grid_density(run.energy, [(-8 * scale, 8 * scale)], points=4000).log_partition


@over("scale", [0.1, 0.17, 1.0])
def test_log_z_is_right_and_trusted_by_default(scale):
    z, exact = trained(scale, Jarzynski(walkers=2048))
    assert z.trusted, z.warnings
    assert abs(z.value - exact) < 4 * z.std_error
    assert abs(z.value - exact) < 0.1


@over(
    ("scale", "method"),
    [
        (0.17, Jarzynski(step_size=0.05, pace=None, walkers=2048)),
        (0.1, Jarzynski(step_size=0.05, walkers=2048)),
        (1.0, Jarzynski(kernel=ULA(0.05, noise=0.4, drift_clip=0.05), walkers=2048)),
    ],
)
def test_log_z_of_steps_that_do_not_fit_is_not_trusted(scale, method):
    z, exact = trained(scale, method)
    assert not z.trusted
    assert abs(z.value - exact) > 0.1, "a case in which nothing is wrong tests nothing"


# ---- walkers that are weighed when their turn comes


class Widening(Normal):
    """A normal density whose width is set from outside: log Z grows with it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x / self.mean.exp()).square().sum(1)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return self.mean.detach().exp() * torch.randn((n, self.dim), generator=rng, dtype=F64)

    def log_partition(self) -> Tensor:
        return self.mean.detach().sum() + 0.5 * self.dim * math.log(2 * math.pi)


def widened(method: Jarzynski, updates: int = 40):
    """Context, last state and the negatives of each update, of a density that widens by a half."""
    energy = Widening(1.0).double()
    context, found = context_of(energy, energy.sample(100, rng(1))), []
    state = method.start(context)
    for step in range(updates):
        context.step = step
        seen, state, _ = method.negatives(context, state, None)
        found.append(seen)
        with torch.no_grad():
            energy.mean += math.log(1.5) / updates
        state, metrics = method.advance(context, state)
    return context, state, found, metrics


@over("kernel", [MALA(1e-12), ULA(1e-12)], ids=lambda kernel: kernel.name)
def test_weights_of_walkers_that_wait_are_those_of_all_updates(kernel):
    plain = {"populations": 2, "kernel": kernel, "resample": "never", "pace": None}
    context, state, found, _ = widened(Jarzynski(walkers=64, gradient="moved", batch=4, **plain))
    for k in (
        1,
        20,
        39,
    ):  # walkers stand still: A is U₀ − U_k, of which those of a turn long ago know nothing
        factor = 1 - math.exp(-2 * k * math.log(1.5) / 40)
        assert torch.allclose(found[k].log_weight, 0.5 * factor * found[k].x[:, 0] ** 2, atol=1e-5)
    last = Jarzynski(walkers=64, gradient="moved", batch=4, **plain).current_walkers(context, state)
    exact = 0.5 * (1 - 1.5**-2) * last.x[:, 0] ** 2
    assert torch.allclose(last.log_weight - last.log_weight[0], exact - exact[0], atol=1e-5)
    assert not torch.allclose(
        state.steering.log_weight, 0.5 * (1 - 1.5**-2) * state.steering.x[:, 0] ** 2, atol=1e-2
    )


def test_those_that_moved_steer_the_next_update_and_no_others_do():
    method = Jarzynski(
        walkers=64, held_out=0.0, gradient="moved", batch=4, kernel=MALA(0.5), resample="never"
    )
    energy = Widening(1.0).double()
    context = context_of(energy, energy.sample(100, rng(1)))
    state = method.start(context)
    _, state, _ = method.negatives(context, state, None)
    state, _ = method.advance(context, state)
    again = method.load(method.save(state))
    moved = again.rows
    seen, _, _ = method.negatives(context, again, None)
    assert torch.equal(seen.x, state.steering.x[moved])
    assert moved.numel() == 4


@over("kernel", [MALA(0.5), ULA(0.1)], ids=lambda kernel: kernel.name)
def test_log_z_is_exact_when_walkers_are_weighed_in_turn(kernel):
    settings = {"populations": 16, "kernel": kernel, "threshold": 0.95, "pace": None}
    method = Jarzynski(walkers=8192, gradient="moved", batch=1024, **settings)
    context, state, _, metrics = widened(method)
    found = method.log_partition(context, state)
    exact = float(context.energy.log_partition())
    assert metrics["resamplings"] > 0
    assert abs(found.value - exact) < 4 * found.std_error < 0.1
    x = method.current_walkers(context, state)
    p = torch.softmax(x.log_weight, 0)
    assert abs(float((p * x.x[:, 0] ** 2).sum()) - 1.5**2) < 0.15


def test_a_share_of_walkers_draws_rows_of_its_own():
    """Rows of a whole population are not those of a part of it, as after a checkpoint of one process."""
    method = Jarzynski(walkers=64, gradient="moved", batch=4, populations=4)
    _, state, _, _ = widened(method)
    assert state.rows is not None
    assert state.own_part().rows is None
    assert state.gathered().rows is None


def test_weights_of_many_updates_have_no_error_and_no_cross_entropy():
    found = {}
    for gradient in ("batch", "moved"):
        method = Jarzynski(walkers=64, gradient=gradient, batch=4, populations=4)
        context, state, _, _ = widened(method)
        negatives = method.negatives(context, state, torch.zeros(4, 1))[0]
        _, told = method.loss(context, state, "energy", torch.zeros(4, 1), negatives)
        found[gradient] = told.keys() | method.advance(context, state)[1].keys()
    assert found["batch"] - found["moved"] == {"cross_entropy", "log_z_se"}
