"""Laws of every energy: gradients, log Z, exact samples, and bits that survive a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from conftest import assert_within, each, mean_and_error, quadrature, z_limit, z_scores
from safetensors.torch import load, save
from torch import Tensor, nn

from metastable.core.errors import ConfigError, InputError
from metastable.core.types import energy_and_grad
from metastable.energies import (
    MLP,
    Banana,
    ConvNet,
    DoubleWell,
    Funnel,
    Gaussian,
    GaussianMixture,
    Tilted,
    check_energy,
    two_modes,
)
from metastable.proposals import Gaussian as GaussianProposal
from metastable.proposals import Uniform

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=F64)


def gaussian(shift: float = 0.0) -> Gaussian:
    return Gaussian(tensor(1.0, -0.5) + shift, tensor([2.0, 0.6], [0.6, 0.5]))


def mixture(shift: float = 0.0) -> GaussianMixture:
    means = tensor([-2.0, 0.0], [1.0, 2.0], [2.0, -1.0]) + shift
    return GaussianMixture(means, tensor(0.5, 1.0, 0.7), tensor(0.3, -1.0, 0.8))


# Each analytic member in at most two dimensions, with a box outside which it has no mass to 1e-12.
PLANAR: dict[str, tuple[Callable[[], nn.Module], list[tuple[float, float, int]]]] = {
    "gaussian": (gaussian, [(-13, 15, 400), (-8, 7, 400)]),
    "mixture": (mixture, [(-10, 10, 500), (-9, 11, 500)]),
    "two_modes": (lambda: two_modes(5.0, (1.0, 4.0), 2, dtype=F64), [(-11, 11, 400), (-8, 8, 300)]),
    "double_well_1d": (lambda: DoubleWell(1, tilt=0.5), [(-8, 8, 4001)]),
    "double_well_2d": (lambda: DoubleWell(2, 1.5, 2.0, tilt=-0.7), [(-7, 7, 801), (-8, 8, 300)]),
    "banana": (lambda: Banana(2, 1.2, 0.5), [(-9, 9, 300), (-9, 49, 600)]),
    "funnel": (lambda: Funnel(2, 0.8), [(-6, 6, 200), (-130, 130, 13_001)]),
}
# The same families in dimensions that no grid reaches.
DEEP: dict[str, Callable[[], nn.Module]] = {
    "gaussian": lambda: Gaussian(torch.arange(4).to(F64), torch.eye(4, dtype=F64) + 0.5),
    "mixture": lambda: GaussianMixture(3 * torch.eye(5, dtype=F64)[:3], 0.8, tensor(0.0, 1.0, -1.0)),
    "two_modes": lambda: two_modes(4.0, (0.2, 0.8), 6, dtype=F64),
    "double_well": lambda: DoubleWell(4, 1.0, 3.0, tilt=0.4),
    "banana": lambda: Banana(5, 2.0, 0.3),
    "funnel": lambda: Funnel(4, 1.0),
}
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": lambda seed: MLP(3, hidden=(8, 8), seed=seed),
    "mlp_image": lambda seed: MLP((1, 3, 4), hidden=(8,), activation="softplus", seed=seed),
    "convnet": lambda seed: ConvNet((1, 8, 8), seed=seed),
    "tilted": lambda seed: Tilted(
        GaussianProposal(torch.full((2,), float(seed)), 1.5), MLP(2, (8,), seed=seed), zero_start=False
    ),
}
EVERY: dict[str, Callable[[], nn.Module]] = (
    {name: make for name, (make, _) in PLANAR.items()}
    | {f"{name}_deep": make for name, make in DEEP.items()}
    | {name: lambda make=make: make(1).double() for name, make in NETWORKS.items()}
)
over = pytest.mark.parametrize


def some_rows(energy: nn.Module, n: int = 4) -> Tensor:
    return torch.randn((n, *energy.event_shape), generator=rng(7), dtype=F64)


@over("name", EVERY)
def test_gradient_is_the_finite_difference(name):
    energy, step = EVERY[name](), 1e-5
    x = some_rows(energy)
    result = energy_and_grad(energy, x)
    assert torch.allclose(result.energy, energy(x), rtol=1e-12, atol=1e-12)
    basis = torch.eye(x[0].numel(), dtype=F64).view(-1, *energy.event_shape)
    difference = torch.stack([(energy(x + step * e) - energy(x - step * e)) / (2 * step) for e in basis], 1)
    assert torch.allclose(result.grad.flatten(1), difference, rtol=1e-7, atol=1e-7)


@over("name", EVERY)
def test_closed_form_gradient_is_automatic_differentiation(name):
    energy = EVERY[name]()
    own = getattr(energy, "value_and_grad", None)
    assert (own is not None) == isinstance(energy, GaussianMixture)
    if own is None:
        return
    x = some_rows(energy).requires_grad_(True)
    (automatic,) = torch.autograd.grad(energy(x).sum(), x)
    value, grad = own(x.detach())
    assert torch.equal(value, energy(x.detach()))
    assert torch.allclose(grad, automatic, rtol=1e-12, atol=1e-12)


@over("name", EVERY)
def test_every_member_passes_the_check(name):
    energy = EVERY[name]()
    assert check_energy(energy, some_rows(energy)) is energy


@over("name", EVERY)
def test_parameter_gradients_are_left_alone(name):
    energy = EVERY[name]()
    energy_and_grad(energy, some_rows(energy))
    assert all(p.grad is None for p in energy.parameters())


@over("name", PLANAR)
def test_log_partition_is_the_integral(name):
    make, box = PLANAR[name]
    energy = make()
    assert float(energy.log_partition()) == pytest.approx(
        float(quadrature(energy, box).log_partition), abs=1e-9
    )


@over(
    ("separation", "height", "tilt"),
    [(2.0, 6.0, 3.0), (1.0, 0.01, -2.0), (100.0, 1e-3, 1.0), (0.1, 50.0, 0.0), (30.0, 5.0, -8.0)],
)
def test_double_well_integral_covers_its_mass(separation, height, tilt):
    from scipy.integrate import quad
    from scipy.optimize import minimize_scalar

    energy = DoubleWell(1, separation, height, tilt)

    def E(t: float) -> float:
        return height * ((t / separation) ** 2 - 1) ** 2 + tilt * t

    reach = separation * (3 + (200 / height) ** 0.25 + 2 * (abs(tilt) * separation / height) ** (1 / 3))
    lows = [minimize_scalar(E, bounds=b, method="bounded").x for b in ((-reach, 0), (0, reach))]
    lowest = min(E(low) for low in lows)
    total = sum(
        quad(lambda t: math.exp(lowest - E(t)), a, b, epsabs=0, limit=500)[0]
        for a, b in ((-reach, lows[0]), (lows[0], 0), (0, lows[1]), (lows[1], reach))
    )
    assert float(energy.log_partition()) == pytest.approx(math.log(total) - lowest, abs=1e-7)


def test_double_well_right_weight_is_its_share():
    energy = DoubleWell(1, tilt=0.3)
    share = quadrature(energy, [(-8, 8, 160_001)]).mean(lambda t: (t > 0).double())
    assert energy.right_weight() == pytest.approx(share.item(), abs=1e-5)
    assert DoubleWell(3).right_weight() == pytest.approx(0.5, abs=1e-9)


def bounded_functions(energy: nn.Module, x: Tensor) -> Tensor:
    """The energy, and functions of every coordinate that see location, spread, skew and dependence."""
    first, last = x[:, :1], x[:, -1:]
    parts = [energy(x)[:, None], torch.tanh(x), torch.cos(x), torch.sin(2 * x), torch.tanh(first * last)]
    return torch.cat(parts, 1)


@over("name", PLANAR)
def test_samples_have_the_expectations_of_the_integral(name):
    make, box = PLANAR[name]
    energy = make()
    exact = quadrature(energy, box).mean(lambda x: bounded_functions(energy, x))
    x = energy.sample(100_000, rng(1)).double()
    assert x.shape == (100_000, *energy.event_shape)
    mean, error = mean_and_error(bounded_functions(energy, x))
    assert_within(mean, exact, error)
    shifted, error = mean_and_error(bounded_functions(energy, x + 0.05))
    assert z_scores(shifted, exact, error).max() > z_limit(len(exact))


def reciprocal(energy: nn.Module, x: Tensor) -> Tensor:
    """Z·φ(x)·e^{E(x)} with φ uniform on a box where draws are many: its mean over exact draws is 1.

    A box, because the weights of any φ with tails may have no variance against tails like e^{−x⁴}.
    """
    low, high = (x[:2000].quantile(q, 0) for q in (0.2, 0.8))
    rest = x[2000:]
    inside = ((rest > low) & (rest < high)).all(1)
    return inside * torch.exp(energy(rest) + float(energy.log_partition())) / (high - low).prod()


@over("name", DEEP)
def test_samples_and_log_partition_agree(name):
    energy = DEEP[name]()
    ratio, error = mean_and_error(reciprocal(energy, energy.sample(200_000, rng(2)).double()))
    assert error < 0.04  # a log Z wrong by a fifth would be seen
    assert_within(ratio, 1.0, error)


def test_samples_come_from_the_generator_alone():
    for make in [m for m, _ in PLANAR.values()]:
        energy = make()
        before = torch.get_rng_state()
        first, second = energy.sample(50, rng(3)), energy.sample(50, rng(3))
        assert torch.equal(first, second)
        assert not torch.equal(first, energy.sample(50, rng(4)))
        assert torch.equal(before, torch.get_rng_state())


@over("make", [gaussian, mixture, *(lambda s, make=make: make(int(s)) for make in NETWORKS.values())])
def test_state_survives_a_file_bit_by_bit(make):
    original, other = make(1), make(2)
    x = torch.randn(
        (5, *original.event_shape), generator=rng(), dtype=next(iter(original.state_dict().values())).dtype
    )
    assert not torch.equal(original(x), other(x))
    other.load_state_dict(load(save(original.state_dict())))
    assert torch.equal(original(x), other(x))


def test_trainable_mixture_has_parameters_and_scales_stay():
    means = tensor([-1.0], [1.0])
    assert not list(GaussianMixture(means).parameters())
    energy = GaussianMixture(means, trainable=True)
    assert {name for name, _ in energy.named_parameters()} == {"means", "log_weights"}
    assert "scales" in dict(energy.named_buffers())
    energy(means).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in energy.parameters())
    with torch.no_grad():
        energy.means += 1
    assert torch.equal(means, tensor([-1.0], [1.0]))  # the caller's tensor is not shared


def test_mixture_mode_weights_are_normalised():
    weights = mixture().mode_weights()
    assert weights.sum().item() == pytest.approx(1.0)
    assert torch.allclose(weights.log().diff(), tensor(0.3, -1.0, 0.8).diff())


@over("reference", [GaussianProposal(tensor(1.0, -1.0), 2.0), Uniform(tensor(-1.0, -1.0), tensor(2.0, 3.0))])
def test_tilted_starts_as_its_reference(reference):
    network = MLP(2, (8,)).double()
    energy = Tilted(reference, network)
    x = reference.sample(50, rng())
    assert torch.equal(energy(x), -reference.log_prob(x))
    assert energy.exact_start(x) is reference
    with torch.no_grad():
        network.head.bias += 1e-6
    assert energy.exact_start(x) is None
    assert energy.event_shape == (2,)


def test_tilted_without_zero_start_is_no_reference():
    reference = GaussianProposal(torch.zeros(2))
    energy = Tilted(reference, MLP(2, (8,)), zero_start=False)
    assert energy.exact_start(reference.sample(5, rng())) is None
    with pytest.raises(InputError, match="no linear or convolutional layer"):
        Tilted(reference, nn.Flatten())


@over("network", [MLP((1, 8, 8), (4,)), ConvNet((1, 8, 8))])
def test_zero_start_reaches_the_last_layer_of_any_network(network):
    assert network(torch.ones(2, 1, 8, 8)).abs().min() > 0
    reference = GaussianProposal(torch.zeros(1, 8, 8))
    assert Tilted(reference, network).exact_start(torch.ones(2, 1, 8, 8)) is reference


@over("event", [3, (3,), (2, 3), (1, 4, 4)])
def test_mlp_takes_any_event(event):
    energy = MLP(event, hidden=(4, 5))
    assert energy(torch.zeros(7, *energy.event_shape)).shape == (7,)


@over("hidden", [(), (4,), (4, 5)])
def test_mlp_has_the_layers_it_is_asked_for(hidden):
    widths = [3, *hidden, 1]
    expected = sum(i * o + o for i, o in itertools.pairwise(widths))
    assert sum(p.numel() for p in MLP(3, hidden).parameters()) == expected


@over("make", [lambda seed: MLP(2, (4,), seed=seed), lambda seed: ConvNet((1, 8, 8), seed=seed)])
def test_a_seed_fixes_the_weights_and_touches_nothing_global(make, monkeypatch):
    touched: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched.append)
    before = torch.get_rng_state()
    first, second, other = make(3), make(3), make(4)
    assert torch.equal(before, torch.get_rng_state())
    assert not touched  # the states of other devices are global too
    weights = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_convnet_is_the_papers_size():
    energy = ConvNet((1, 28, 28))
    assert sum(p.numel() for p in energy.parameters()) == 76_993
    assert energy(torch.zeros(2, 1, 28, 28)).shape == (2,)


@each(
    "make, field",
    [
        (lambda: Gaussian(torch.zeros(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "covariance"),
        (lambda: Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "covariance"),
        (lambda: Gaussian(torch.zeros(2), torch.eye(3)), "covariance"),
        (lambda: GaussianMixture(torch.zeros(2)), "means"),
        (lambda: GaussianMixture(torch.zeros(2, 1), 0.0), "scales"),
        (lambda: GaussianMixture(torch.zeros(2, 1), log_weights=torch.zeros(3)), "log_weights"),
        (lambda: DoubleWell(0), "dim"),
        (lambda: DoubleWell(height=-1.0), "height"),
        (lambda: Banana(1), "dim"),
        (lambda: Funnel(width=0.0), "width"),
        (lambda: MLP(2, (0,)), "hidden.0"),
        (lambda: MLP(2, activation="sillu"), "activation"),
        (lambda: ConvNet((28, 28)), "event_shape"),
    ],
)
def test_a_bad_setting_is_named(make, field):
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.path == field


def test_two_modes_needs_two_positive_weights():
    with pytest.raises(InputError, match="weights"):
        two_modes(3.0, (1.0, 0.0), 2)
