"""A rounded energy is a function of its own, and weights are exact for that one.

The energy of these laws is near 200, where bfloat16 has whole numbers only: as computed it is a staircase whose
steps move with θ, and log Z of the stairs is a sum over a grid.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from metastable.core.precision import cast_once, precision, unrounded
from metastable.core.types import EnergyGrad, energy_and_grad
from metastable.energies import MLP, Tilted
from metastable.energies.networks import patch_conv
from metastable.evaluation.rounding import rounding_of
from metastable.kernels import MALA, ULA, compiled, engine, run_chain
from metastable.methods import Context, Jarzynski, PersistentCD
from metastable.proposals import fit_gaussian
from metastable.training.config import Adam, TrainerConfig
from metastable.training.engine import Engine
from metastable.training.trainer import Trainer
from metastable.walkers.jarzynski import langevin_step, reweigh_then_move
from metastable.walkers.population import Population

GRID = torch.linspace(-6, 6, 24_001)[:, None]
WALKERS, UPDATES = 4000, 6
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


class Stairs(nn.Module):
    """E(x) = 200 + x²/2 + θ, of which autocast leaves whole numbers."""

    event_shape = (1,)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 200.0)
        self.theta = 0.0

    def forward(self, x):
        return self.layer(torch.cat([0.5 * x.square(), torch.full_like(x, self.theta)], 1))[:, 0]


class InFullAtFirst(MALA):
    """Energies in float32 where chains begin, which is where walkers are weighed: wrong."""

    def init(self, energy, x):
        with unrounded(x):
            return super().init(energy, x)


def log_z(energy) -> float:
    """Of the energy as it is computed."""
    with torch.no_grad():
        return float(torch.logsumexp(-energy(GRID).double(), 0)) + math.log(float(GRID[1] - GRID[0]))


def gap_in_errors(kernel, rows=None) -> float:
    """(log Z by the weights of walkers − that of the grid), in standard errors, after θ has moved some times."""
    energy, rng = Stairs(), torch.Generator().manual_seed(0)
    with precision("bf16-mixed", "cpu"):
        p = torch.softmax(-energy(GRID).double().detach(), 0)
        x = GRID[torch.multinomial(p, WALKERS, replacement=True, generator=rng)]
        x = x + (torch.rand(x.shape, generator=rng) - 0.5) * (GRID[1] - GRID[0])
        zero = torch.full((1,), log_z(energy), dtype=torch.float64)
        walkers = Population.start(x, *energy_and_grad(energy, x), zero)
        for _ in range(UPDATES):
            energy.theta += 0.15
            if isinstance(kernel, ULA):
                walkers, _ = langevin_step(kernel, energy, walkers, rows, rng)
            else:
                walkers, _ = reweigh_then_move(kernel, energy, walkers, rows, 2, rng, "eager")
        wanted = log_z(energy)
    assert walkers.energy.dtype == torch.float32
    assert walkers.log_weight.dtype == torch.float64
    return (float(walkers.log_partition()[0]) - wanted) / math.sqrt(float(walkers.noise()[0]))


SOME = torch.arange(0, WALKERS, 2)
MOVES = {"mala": (MALA(0.3), None), "mala, half of them": (MALA(0.3), SOME), "ula": (ULA(0.3), None)}


@pytest.mark.parametrize(("kernel", "rows"), MOVES.values(), ids=MOVES)
def test_weights_are_exact_for_the_function_as_computed(kernel, rows):
    assert abs(gap_in_errors(kernel, rows)) < 4


def test_an_energy_in_full_on_one_side_of_a_weight_is_seen():
    assert abs(gap_in_errors(InFullAtFirst(0.3))) > 8


def test_the_stairs_are_not_the_energy():
    """Else the laws above would say nothing."""
    energy = Stairs()
    energy.theta = 0.4
    with precision("bf16-mixed", "cpu"):
        coarse = log_z(energy)
    assert abs(coarse - log_z(energy)) > 0.1


class Watched(Tilted):
    """An energy that notes whether its products are rounded, wherever it is called."""

    def __init__(self, data):
        super().__init__(fit_gaussian(data), MLP(2, hidden=(4,)))
        self.seen = []

    def forward(self, x):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().forward(x)


METHODS = {
    "jarzynski": Jarzynski(walkers=32, populations=4),
    "mini-batch": Jarzynski(walkers=32, populations=4, batch=8),
    "ula": Jarzynski(walkers=32, populations=4, step_size=0.01),
    "pcd": PersistentCD(walkers=8),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_training_rounds_every_energy_alike(method, name):
    data = torch.randn((20, 2), generator=torch.Generator().manual_seed(0))
    energy = Watched(data)
    config = TrainerConfig(steps=3, optimiser=Adam(1e-3), engine="eager")
    players, noise, home = {"energy": energy}, fit_gaussian(data), Engine("cpu", name)
    made = Trainer(energy, players, data, method, config, noise=noise, engine=home, make_context=Context)
    made.run()
    assert set(energy.seen) == {name == "bf16-mixed"}


def test_a_reference_is_not_rounded():
    """log Z₀ = 0 is that of the Gaussian as it is, so that walkers drawn from it begin with exact weights."""
    x = (
        30
        * torch.randn((50, 3), generator=torch.Generator().manual_seed(0))
        @ torch.tensor([[1.0, 0.9, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]])
    )
    energy = Tilted(fit_gaussian(x), MLP(3, hidden=(4,)))
    with torch.no_grad():
        plain = energy(x)
        with precision("bf16-mixed", "cpu"):
            assert torch.equal(energy(x), plain)


def test_the_last_sum_of_a_network_is_not_rounded():
    """What rounding adds to an energy near 100 is far below the half that bfloat16 would leave of it."""
    energy = MLP(2, hidden=(64,))
    nn.init.constant_(energy.head.bias, 100.0)
    x = torch.randn((200, 2), generator=torch.Generator().manual_seed(0))
    found = rounding_of(energy, x, "bf16-mixed")
    assert 0 < found.std < 0.01
    assert abs(found.mean) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_network_that_is_kept_in_one_precision_runs_in_it(dtype):
    energy, x = MLP(2, hidden=(8,)).to(dtype), torch.ones(3, 2, dtype=dtype)
    assert energy(x).dtype == dtype
    image = torch.rand(2, 3, 4, 4).to(dtype)
    layer = nn.Conv2d(3, 2, 3, padding=1).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = patch_conv(layer, image), layer(image)
    assert found.dtype == plain.dtype
    torch.testing.assert_close(
        found, plain, **({} if dtype == torch.float64 else {"atol": 0.03, "rtol": 0.03})
    )


def test_what_rounding_adds_is_measured():
    x, energy = torch.linspace(-1, 1, 101)[:, None], Stairs()
    found = rounding_of(energy, x, "bf16-mixed")
    off = (200 + 0.5 * x.double().square()).round() - (200 + 0.5 * x.double().square())
    assert found.mean == pytest.approx(float(off.mean()), abs=1e-2)
    assert found.std == pytest.approx(float(off.std()), abs=1e-2)
    assert rounding_of(energy, x, "32-true") == (0.0, 0.0)


def test_chains_cast_a_weight_once():
    """And forget what was cast: the next chain has the weights of then."""
    energy = MLP(2, hidden=(4,))
    x = torch.randn((5, 2), generator=torch.Generator().manual_seed(0))

    def moved():
        with precision("bf16-mixed", "cpu"):
            return run_chain(MALA(0.1), energy, x, 3, torch.Generator().manual_seed(1), engine="eager").state

    before = moved()
    with torch.no_grad():
        energy.body[0].weight.mul_(2.0)
    after = moved()
    assert not torch.equal(before.energy, after.energy)
    with precision("bf16-mixed", "cpu"), cast_once(x.device):
        one = energy.body[0](x)
        with torch.no_grad():
            energy.body[0].weight.zero_()
        assert torch.equal(energy.body[0](x), one)
    with precision("bf16-mixed", "cpu"):
        assert not torch.equal(energy.body[0](x), one)
        assert torch.equal(energy_and_grad(energy, after.x)[1], torch.zeros_like(x))


def test_compiled_energies_weigh_walkers_everywhere(monkeypatch):
    """A compiled energy rounds in its own way, here by a whole nat: no weight may be made of it and of another."""

    def other(energy, x):
        values, grad = energy_and_grad(energy, x)
        return EnergyGrad(values + 1, grad)

    monkeypatch.setattr(compiled, "compiled_gradient", lambda: other)
    energy, rng = MLP(2, hidden=(4,)), torch.Generator().manual_seed(0)
    x = torch.randn((30, 2), generator=rng)
    start = Population.start(x, *other(energy, x), torch.zeros(1, dtype=torch.float64))
    for rows in (None, torch.arange(10)):
        walkers = start
        for _ in range(2):
            walkers, _ = reweigh_then_move(MALA(0.1), energy, walkers, rows, 2, rng, "compile")
        assert walkers.log_weight.abs().max() < 1e-5
        assert torch.allclose(walkers.energy, energy(walkers.x) + 1, atol=1e-5)


def test_energies_that_do_not_compile_weigh_walkers_as_they_are(monkeypatch):
    def gives_up(energy, x):
        raise torch._dynamo.exc.Unsupported("no")

    monkeypatch.setattr(compiled, "compiled_gradient", lambda: gives_up)
    energy, x = MLP(2, hidden=(4,)), torch.ones(3, 2)
    made = engine.weighing_energy(MALA(0.1), energy, x, torch.Generator(), "compile")
    with pytest.warns(RuntimeWarning, match="cannot be compiled"):
        assert torch.equal(made(x), energy(x))
    assert torch.equal(made.value_and_grad(x).grad, energy_and_grad(energy, x).grad)
    assert engine.weighing_energy(MALA(0.1), energy, x, torch.Generator(), "compile") is energy
