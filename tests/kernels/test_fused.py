"""Fused chains: the eager ones step by step where the noise is given, and the right law where it is their own.

They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1); what they know of an energy is checked anywhere.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_within, mean_and_error
from torch import Tensor, nn
from torch.nn.functional import gelu, leaky_relu, silu, softplus

from metastable.core.errors import ConfigError, UnsupportedError
from metastable.core.perceptron import Perceptron
from metastable.core.protocols import perceptron_of
from metastable.core.units import Coordinates, Units
from metastable.energies import MLP, Banana, Tilted, on_reference
from metastable.energies.in_units import InDataUnits, InTrainingUnits
from metastable.evaluation.whitened import Place, Whitened
from metastable.kernels import HMC, MALA, ULA, ChainResult, ChainState, Kernel, Noise, fused, run_chain
from metastable.kernels.fused import Plan, fused_chain, why_not
from metastable.proposals import Gaussian, Uniform
from metastable.proposals.scale_mixture import ScaleMixture
from metastable.walkers.path import Tempered

HOME = "cuda" if torch.cuda.is_available() else "cpu"
READY = fused.triton_is_here() and (HOME == "cuda" or fused.interpreted())
needs_triton = pytest.mark.skipif(not READY, reason="needs Triton, with a GPU or TRITON_INTERPRET=1")
over = pytest.mark.parametrize
FUNCTIONS = {"silu": silu, "softplus": softplus, "tanh": torch.tanh, "gelu": gelu, "leaky_relu": leaky_relu}
MANY = 8192
"""Chains of a statistical law: in the interpreter one block of them costs little more than a small one."""


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator(HOME).manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), device=HOME)


def network(D: int = 2, hidden: tuple[int, ...] = (12, 9), activation: str = "silu", seed: int = 1) -> MLP:
    return MLP(D, hidden, activation, seed).to(HOME)


def mixture(D: int = 2) -> ScaleMixture:
    factor = torch.eye(D) + torch.tril(torch.full((D, D), 0.4), -1)
    log_weight = torch.tensor([[0.3, -1.0], [0.0, 0.2]])
    means = torch.stack([torch.zeros(D), torch.full((D,), 2.0)])
    return ScaleMixture(log_weight, means, torch.stack([factor, 2 * factor]), torch.tensor([0.7, 1.6])).to(
        HOME
    )


def tilted(reference: nn.Module, **settings: Any) -> Tilted:
    return Tilted(reference.to(HOME), network(**settings), zero_start=False)


def units(kind: str) -> Coordinates:
    skewed = normal(60, 2, seed=4).cpu() @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]) + torch.tensor([20.0, -3.0])
    return Coordinates(Units.fit(skewed, kind))


def full() -> Gaussian:
    return Gaussian(torch.tensor([0.5, -1.0]), torch.tensor([[1.5, 0.0], [0.7, 0.8]]))


ENERGIES: dict[str, Any] = {
    "network": network,
    "one layer": lambda: network(hidden=(7,)),
    "three layers": lambda: network(hidden=(5, 20, 4)),
    "image": lambda: MLP((1, 2, 3), (8, 8)).to(HOME),
    "on a Gaussian": lambda: tilted(full()),
    "on independent numbers": lambda: tilted(Gaussian(torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.8]))),
    "on a mixture": lambda: tilted(mixture()),
    "of the data's units": lambda: InDataUnits(tilted(mixture()), units("whiten")),
    "of the data's scales": lambda: InDataUnits(network(), units("scale")),
    "in training's units": lambda: InTrainingUnits(tilted(full()), units("whiten")),
    "there and back": lambda: InDataUnits(InTrainingUnits(tilted(full()), units("scale")), units("whiten")),
    "between": lambda: Tempered(network(), mixture(), torch.tensor(0.3)),
}


def written_out(p: Perceptron, x: Tensor) -> Tensor:
    """The formula in the docstring of `Perceptron`, in float64."""
    x = x.flatten(1).double()
    h = x if p.centre is None else x - p.centre.double()
    for w, b in zip(p.weights, p.biases, strict=True):
        h = FUNCTIONS[p.activation](h @ w.double().T + b.double())
    energy = h @ p.head.double() + p.offset.double()
    if p.below is None:
        return energy
    log_peak, mean, factor, precision = (t.double() for t in p.below)
    square = torch.einsum("kij,nkj->nki", factor, x[:, None] - mean).square().sum(-1)
    log_q = torch.logsumexp((log_peak - 0.5 * precision * square[..., None]).flatten(1), 1)
    return energy - (1.0 if p.share is None else p.share.double()) * log_q


def events(energy: Any, n: int, seed: int = 0) -> Tensor:
    """Rows near where the energy has its mass."""
    shape = getattr(energy, "event_shape", (2,))
    x = normal(n, *shape, seed=seed)
    return x if not isinstance(energy, InDataUnits) else energy.coordinates.events.inverse(x).float()


@over("name", ENERGIES)
def test_the_layers_of_an_energy_are_the_energy(name):
    energy = ENERGIES[name]()
    x, layers = events(energy, 9), perceptron_of(energy)
    with torch.no_grad():
        torch.testing.assert_close(written_out(layers, x).float(), energy(x), rtol=2e-5, atol=2e-5)


def test_on_the_path_of_a_reference_only_the_network_is_scaled():
    model, x = tilted(full()), normal(9, 2)
    between = Tempered(model, model.reference, torch.tensor(0.3))  # pyright: ignore
    with torch.no_grad():
        torch.testing.assert_close(
            written_out(between.perceptron(), x).float(), between(x), rtol=1e-5, atol=1e-5
        )
    assert Tempered(model, full(), torch.tensor(0.3)).perceptron() is None  # another q than the one below


@over("own", [True, False])
@over("name", ["full", "independent"])
def test_layers_of_a_path_in_white_coordinates_are_the_path(name, own):
    widths = torch.tensor([1.5, 0.8]).to(HOME)
    reference = full().to(HOME) if name == "full" else Gaussian(torch.tensor([0.5, -1.0]).to(HOME), widths)
    model = tilted(reference) if own else network()
    white = Whitened(model, reference, Place(torch.float32, torch.device(HOME)), rng())
    z = normal(9, 2)
    between = Tempered(white.energy, white.reference, torch.tensor(0.3, device=HOME))
    with torch.no_grad():
        for energy in (white.energy, between):
            made = written_out(perceptron_of(energy), z).float()
            torch.testing.assert_close(made, energy(z), rtol=1e-5, atol=1e-5)


def by_eager_steps(
    kernel: Kernel, energy: Any, x: Tensor, noise: Noise, h: Tensor
) -> tuple[Any, Tensor, Tensor]:
    state, accepted, moved = (
        kernel.init(energy, x),
        torch.zeros(len(x), device=HOME),
        torch.zeros(len(x), device=HOME),
    )
    with torch.no_grad():
        for one, uniform in zip(noise.normal, noise.uniform, strict=True):
            state, info = kernel.step(energy, state, Noise(one, uniform), h)
            accepted, moved = accepted + info.acceptance, moved + info.moved
    return state, accepted / len(noise.uniform), moved / len(noise.uniform)


def given_noise(x: Tensor, steps: int) -> Noise:
    return Noise(normal(steps, *x.shape, seed=7), torch.rand(steps, len(x), generator=rng(8), device=HOME))


LARGE = Plan(64, 4, False)
EQUAL = [
    ("network", ULA(0.05), "ieee", None),
    ("three layers", MALA(0.3), "float32", None),
    ("three layers", MALA(0.3), "float32", LARGE),
    ("image", MALA(0.1), "float32", None),
    ("on a mixture", ULA(0.2, noise=0.3, drift_clip=0.05), "float32", LARGE),
    ("of the data's units", MALA(0.2), "float32", None),
    ("between", ULA(0.1), "bf16x3", None),
    ("three layers", HMC(0.4, leapfrog=3), "float32", None),
    ("on a mixture", HMC(0.3, leapfrog=1), "float32", LARGE),
    ("between", HMC(0.6, leapfrog=4, mass=2.5), "float32", None),
]


@needs_triton
@over(("name", "kernel", "precision", "plan"), EQUAL)
def test_with_given_noise_a_fused_chain_is_the_eager_one(name, kernel, precision, plan):
    energy = ENERGIES[name]()
    x = events(energy, 19)
    noise, h = given_noise(x, 3), torch.linspace(0.5, 1, 19, device=HOME).view(-1, *[1] * (x.dim() - 1))
    h = h * kernel.step_size  # one for each row
    state, accepted, moved = by_eager_steps(kernel, energy, x, noise, h)
    result = fused_chain(
        kernel,
        energy,
        kernel.init(energy, x),
        3,
        rng(),
        step_size=h,
        precision=precision,
        plan=plan,
        noise=noise,
        slopes=True,
    )
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result.state.x, state.x, **near)
    torch.testing.assert_close(result.info.acceptance, accepted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.info.moved, moved, rtol=1e-4, atol=1e-4)
    assert result.state.energy.shape == state.energy.shape
    if kernel.invariant:
        torch.testing.assert_close(result.state.energy, state.energy, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(result.state.grad, state.grad, rtol=1e-4, atol=1e-4)


@needs_triton
def test_chains_of_some_rows_are_those_of_a_copy_of_them():
    energy, x, rows = network(), normal(20, 2), torch.tensor([11, 3, 18, 0], device=HOME)
    start = MALA(0.3).init(energy, x)
    into = fused_chain(MALA(0.3), energy, start, 0, rng(1)).state
    before = ChainState(*(t.clone() for t in into))
    assert torch.equal(before.x, x)
    part = ChainState(x[rows], *start[1:])
    want = fused_chain(MALA(0.3), energy, part, 3, rng(2), precision="float32")
    got = fused_chain(MALA(0.3), energy, start, 3, rng(2), precision="float32", rows=rows, into=into)
    for all_of_them, moved, old in zip(got.state, want.state, before, strict=True):
        assert torch.equal(all_of_them, old.index_copy(0, rows, moved))
    assert torch.equal(got.info.acceptance, want.info.acceptance)
    assert not torch.equal(got.state.x, x)


@needs_triton
def test_a_chain_of_no_steps_draws_nothing():
    energy, x, source = network(), normal(5, 2), rng(3)
    fused_chain(MALA(0.1), energy, MALA().init(energy, x), 0, source)
    assert torch.equal(source.get_state(), rng(3).get_state())


@needs_triton
@over("activation", FUNCTIONS)
def test_every_activation_has_its_value_and_derivative(activation):
    energy, x = network(activation=activation), 2 * normal(16, 2)
    result = fused_chain(ULA(0.1), energy, ULA().init(energy, x), 0, rng(), energies=True, precision="ieee")
    y = x.clone().requires_grad_(True)
    value = energy(y)
    torch.testing.assert_close(result.state.energy, value.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        result.state.grad, torch.autograd.grad(value.sum(), y)[0], rtol=1e-4, atol=1e-6
    )
    assert torch.equal(result.state.x, x)


@needs_triton
def test_slopes_are_those_of_the_positions_moved_from():
    energy, x = network(), normal(5, 2)
    noise = given_noise(x, 2)
    result = fused_chain(
        ULA(0.1), energy, ULA().init(energy, x), 2, rng(), slopes=True, noise=noise, precision="ieee"
    )
    eager = iter(noise.normal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ULA, "draw", lambda self, x, rng, energy=None: Noise(next(eager), x.new_empty(0)))
        expected = run_chain(ULA(0.1), energy, ULA().init(energy, x), 2, rng(), slopes=True)
    torch.testing.assert_close(result.slope, expected.slope, rtol=1e-4, atol=1e-5)


@needs_triton
def test_the_generator_is_the_only_randomness():
    energy, x = network(), normal(5, 2)

    def chain(source: torch.Generator) -> Tensor:
        return fused_chain(MALA(0.1), energy, MALA().init(energy, x), 2, source).state.x

    source = rng(3)
    first, second = chain(source), chain(source)
    assert torch.equal(first, chain(rng(3)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, chain(rng(4)))


@needs_triton
@over("precision", ["float32", "bf16x3"])
def test_what_is_no_number_stays_none(precision):
    energy, x = network(), normal(4, 2)
    x[1] = math.nan
    x[2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as a GPU writes it
    made = fused_chain(ULA(), energy, ULA().init(energy, x), 0, rng(), energies=True, precision=precision)
    assert made.state.energy.isfinite().tolist() == [True, False, False, True]


@needs_triton
def test_tf32_is_near_and_float32_nearer():
    energy, x = network(hidden=(32, 32)), normal(16, 2)
    exact = written_out(perceptron_of(energy), x).float()

    def off(precision: str) -> float:
        state = ULA().init(energy, x)
        made = fused_chain(ULA(), energy, state, 0, rng(), energies=True, precision=precision).state.energy
        return float((made - exact).detach().abs().max())

    assert off("float32") < 1e-6 < 1e-5 < off("tf32") < 1e-3
    assert off("bf16x3") < 1e-5


# ---- the law of a chain with its own noise


def bumpy() -> Tilted:
    """A law on the line that is not symmetric: a sign error shows in its mean and third moment."""
    energy = on_reference(
        MLP(1, (16, 16), seed=3), torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    )
    with torch.no_grad():
        nn.init.normal_(energy.network.head.weight, std=2.0, generator=torch.Generator().manual_seed(2))  # pyright: ignore
    return energy.to(HOME)


def many(kernel: Kernel, energy: Any, x: Tensor, steps: int) -> ChainResult:
    plan = Plan(MANY) if HOME == "cpu" else None
    state = ULA().init(energy, x)  # the positions, which are all that is read
    return fused_chain(kernel, energy, state, steps, rng(11), precision="float32", plan=plan)


def assert_one_langevin_step(kernel: Kernel, energy: Any, truth: Any, h: float) -> None:
    """(y − x + h∇E(x))/√(2h) are standard normal: mean, square, third and fourth power, and not the next row's."""
    x = normal(MANY, 1, seed=5)
    y = many(kernel, energy, x, 1).state.x
    u = x.clone().requires_grad_(True)
    grad = torch.autograd.grad(truth(u).sum(), u)[0]
    xi = ((y - x + h * grad) / math.sqrt(2 * h)).double()[:, 0]
    powers = torch.stack([xi, xi**2, xi**3, xi**4, xi * xi.roll(1), xi * x.double()[:, 0]], 1)
    assert_within(*_against(powers, [0.0, 1.0, 0.0, 3.0, 0.0, 0.0]))


def _against(values: Tensor, truth: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    mean, error = mean_and_error(values.cpu())
    return mean, torch.tensor(truth, dtype=torch.float64), error


@needs_triton
def test_a_step_of_ula_has_its_drift_and_noise_and_mutants_have_not():
    energy, h = bumpy(), 0.5
    assert_one_langevin_step(ULA(h), energy, energy, h)
    with pytest.raises(AssertionError, match="standard errors"):  # the sign of the drift
        assert_one_langevin_step(ULA(h), energy, lambda x: -energy(x), h)
    with pytest.raises(AssertionError, match="standard errors"):  # √h in the place of √(2h)
        assert_one_langevin_step(ULA(h, noise=math.sqrt(h)), energy, energy, h)


def assert_left_invariant(kernel: Kernel, energy: Any, truth: Any) -> None:
    """Exact draws by the inverse distribution function stay such: means of sines and powers, by quadrature."""
    grid = torch.linspace(-9, 9, 40001, device=HOME)[:, None]
    with torch.no_grad():
        mass = torch.softmax(-truth(grid).double(), 0)
    uniform = (torch.arange(MANY, device=HOME) + torch.rand(MANY, generator=rng(6), device=HOME)) / MANY
    start = grid[torch.searchsorted(mass.cumsum(0), uniform.double()).clamp(max=len(grid) - 1)]
    y = many(kernel, energy, start, 5).state.x

    def features(x: Tensor) -> Tensor:
        x = x.double()
        return torch.cat([x, x**2, x**3, torch.sin(2 * x), torch.cos(3 * x)], 1)

    assert_within(*_against(features(y), (mass @ features(grid)).tolist()))


@needs_triton
def test_mala_leaves_the_law_as_it_is_and_mutants_do_not():
    energy = bumpy()
    assert_left_invariant(MALA(0.6), energy, energy)
    with pytest.raises(
        AssertionError, match="standard errors"
    ):  # no accept step, which the step size asks for
        assert_left_invariant(ULA(0.6), energy, energy)
    layers = perceptron_of(energy)
    with pytest.raises(AssertionError, match="standard errors"):  # the network pulls the wrong way
        assert_left_invariant(MALA(0.6), layers._replace(head=-layers.head), energy)


@needs_triton
def test_hmc_leaves_the_law_as_it_is_and_a_mutant_does_not():
    energy = bumpy()
    assert_left_invariant(HMC(1.0, leapfrog=3), energy, energy)
    layers = perceptron_of(energy)
    with pytest.raises(AssertionError, match="standard errors"):  # the network pulls the wrong way
        assert_left_invariant(HMC(1.0, leapfrog=3), layers._replace(head=-layers.head), energy)


# ---- in words


class Sharper(MLP):
    """A perceptron with a `forward` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Stay(Kernel):
    """A kernel of somebody else."""

    name = "stay"


def hooked() -> MLP:
    net = network()
    net.body[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


class Wrapped:
    """A perceptron behind what is no module, as at a temperature or in other units."""

    def __init__(self, energy: Any):
        self.energy = energy

    def __call__(self, x: Tensor) -> Tensor:
        return self.energy(x)

    def perceptron(self) -> Any:
        return self.energy.perceptron()


@over(
    ("kernel", "energy", "words"),
    [
        (Stay(), network, "kernel is 'stay', and only 'ula', 'mala' and 'hmc'"),
        (HMC(0.1, mass=(1.0, 2.0)), network, "masses of their own"),
        (HMC(0.1, mass_matrix=((2.0, 1.0), (1.0, 2.0))), network, "masses of their own"),
        (ULA(0.1), lambda: Banana(2, 1.0), "Banana.* is no perceptron"),
        (ULA(0.1), lambda: Sharper(2, (4,)), "Sharper.* is no perceptron"),
        (ULA(0.1), lambda: MLP(2, (4,), outputs=3), "MLP.* is no perceptron"),
        (
            ULA(0.1),
            lambda: Tilted(Uniform(-torch.ones(2), torch.ones(2)), MLP(2)),
            "Tilted.* is no perceptron",
        ),
        (ULA(0.1), hooked, "hooks, which would not be called"),
        (ULA(0.1), lambda: Wrapped(Wrapped(hooked())), "hooks, which would not be called"),
        (ULA(0.1), lambda: network().double(), "must be float32, and some are torch.float64"),
        (ULA(0.1), lambda: network(3), "an event has 2 numbers, and the first layer takes 3"),
    ],
)
def test_what_stands_against_a_fused_chain_is_said(kernel, energy, words, monkeypatch):
    monkeypatch.setattr(fused, "triton_is_here", lambda: True)
    monkeypatch.setattr(fused, "interpreted", lambda: True)
    x, made = torch.zeros(3, 2), energy()
    assert why_not(ULA(0.1), network(), x) is None
    with pytest.raises(UnsupportedError, match=words):
        fused_chain(kernel, made, ULA().init(made, x), 2, rng())


def test_a_place_without_triton_or_a_gpu_is_named(monkeypatch):
    x = torch.zeros(3, 2)
    monkeypatch.setattr(fused, "interpreted", lambda: False)
    monkeypatch.setattr(fused, "triton_is_here", lambda: True)
    assert why_not(ULA(0.1), network(), x) == "the chains are on 'cpu', and Triton runs on CUDA"
    monkeypatch.setattr(fused, "triton_is_here", lambda: False)
    assert "not installed" in str(why_not(ULA(0.1), network(), x))


def test_layers_too_wide_for_shared_memory_are_counted():
    wide, fits = (perceptron_of(MLP(2, hidden)) for hidden in ((512, 512), (128, 128)))
    room = 227 << 10
    for precision in fused.PRECISIONS:
        assert (
            fused.shared_bytes(fits, Plan(16), precision)
            < room
            < fused.shared_bytes(wide, Plan(16), precision)
        )


COMPILED = [  # event, layers, precision, block, bytes that Triton 3.6 takes for a program of compute capability 9.0
    (2, (128, 128), "float32", 64, 98816),
    (2, (128, 128), "tf32", 128, 131072),
    (2, (128, 128), "bf16x3", 128, 65536),
    (2, (128, 128), "tf32", 32, 147456),
    (2, (128, 128), "float32", 16, 208896),
    (2, (128, 128, 128), "float32", 64, 197120),
    (2, (256, 256), "tf32", 128, 525312),
    (16, (128, 128), "float32", 64, 111104),
    (16, (128, 128), "tf32", 128, 139264),
]


@over(("event", "hidden", "precision", "block", "taken"), COMPILED)
def test_shared_memory_is_about_what_a_compiled_kernel_takes(event, hidden, precision, block, taken):
    layers = perceptron_of(MLP(event, hidden))
    counted = fused.shared_bytes(layers, Plan(block), precision, hopper=True)
    assert taken <= counted < 1.15 * taken


@over(
    ("major", "hidden", "chains", "block"),
    [
        (9, (128, 128), 1024, 16),
        (9, (128, 128), 4096, 32),
        (9, (128, 128), 100_000, 64),
        (8, (128, 128), 100_000, 32),  # no room for 64 rows there
        (9, (128, 128, 128), 1024, 64),  # none for fewer
    ],
)
def test_plans_fill_the_device_with_what_fits(major, hidden, chains, block, monkeypatch):
    h200 = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    layers = perceptron_of(MLP(2, hidden))
    assert fused.plan_for(layers, chains, "float32", torch.device("cuda")).block == block


def test_an_unknown_precision_is_named():
    with pytest.raises(ConfigError, match="tf32"):
        why_not(ULA(0.1), network(), torch.zeros(3, 2), precision="tf23")
