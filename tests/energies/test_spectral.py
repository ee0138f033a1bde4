"""Spectral normalisation: the singular value, the Lipschitz bound, one power iteration a step, and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core.errors import ConfigError, InputError
from metastable.energies import MLP, ConvNet, SpectralNorm, Tilted, spectral_norm
from metastable.energies.build import ConvConfig, MLPConfig
from metastable.kernels import ULA, run_chain
from metastable.methods import AdaptiveNCE, ContrastiveDivergence, PersistentCD
from metastable.proposals import fit_gaussian


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items() if k.endswith(("_u", "_v"))}


def matrices(net: SpectralNorm) -> list[torch.Tensor]:
    return [layer.weight.detach().flatten(1) for layer in net.layers()]


@pytest.mark.parametrize(
    "make", [lambda: MLP(3, (16, 16)), lambda: ConvNet((1, 12, 12))], ids=["mlp", "conv"]
)
def test_after_enough_iterations_the_largest_singular_value_is_one(make):
    net = spectral_norm(make().double(), seed=1)
    for _ in range(300):
        net.after_step()
    for matrix in matrices(net):
        assert abs(torch.linalg.matrix_norm(matrix, 2).item() - 1) < 1e-3


def test_a_perceptron_with_lipschitz_activations_is_lipschitz_with_its_scale():
    net = spectral_norm(MLP(4, (32, 32), "leaky_relu", seed=2).double(), scale=3.0)
    for _ in range(300):
        net.after_step()
    x, y = 5 * torch.randn((2, 4000, 4), generator=rng(), dtype=torch.float64)
    y = torch.cat([y, x + 1e-3 * torch.randn(x.shape, generator=rng(1), dtype=torch.float64)])
    x = torch.cat([x, x])
    ratio = (net(x) - net(y)).abs() / (x - y).norm(dim=1)
    assert ratio.max() <= 3.0 * (1 + 1e-3) ** 3
    plain = MLP(4, (32, 32), "leaky_relu", seed=2).double()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(10)
    assert ((plain(x) - plain(y)).abs() / (x - y).norm(dim=1)).max() > 3.0  # the bound is not for free


def test_a_convolution_is_bounded_by_its_kernel_positions():
    """torch normalises the kernel as a matrix: the operator may exceed 1, by at most √(kernel positions)."""
    layer = nn.Conv2d(1, 4, 3, padding=1, bias=False).double()
    nn.init.constant_(layer.weight, 0.1)
    net = spectral_norm(nn.Sequential(layer))
    for _ in range(50):
        net.after_step()
    eye = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    operator = net.network(eye).detach().flatten(1)
    norm = torch.linalg.matrix_norm(operator, 2).item()
    assert 1.5 < norm <= 3.0


def power_iteration(weight, v):
    """As torch orders it: u from v, then v from u; Algorithm 3.2 has the other half first."""
    u = nn.functional.normalize(weight @ v, dim=0, eps=1e-12)
    return u, nn.functional.normalize(weight.T @ u, dim=0, eps=1e-12)


def test_after_step_is_one_power_iteration_by_hand():
    net = spectral_norm(MLP(3, (8, 8), seed=4).double())
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=rng(2), dtype=p.dtype))
    before = net.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    net.after_step()
    stems = [k.removesuffix("original") for k in before if k.endswith("original")]
    assert len(stems) == 3
    for stem in stems:
        u, v = power_iteration(before[stem + "original"], before[stem + "0._v"])
        torch.testing.assert_close(net.state_dict()[stem + "0._u"], u)
        torch.testing.assert_close(net.state_dict()[stem + "0._v"], v)
        twice, _ = power_iteration(before[stem + "original"], v)
        if len(u) > 1:  # with a single output every iteration has the same sign for an answer
            assert (net.state_dict()[stem + "0._u"] - twice).abs().max() > 1e-6


def test_nothing_but_after_step_moves_the_vectors():
    net, x = spectral_norm(MLP(3, (8,))), torch.randn((5, 3), generator=rng())
    before = vectors(net)
    for mode in (True, False):
        net.train(mode)
        net(x)
        kernel = ULA(0.01)
        run_chain(kernel, net, kernel.init(net, x), 3, rng())
    nn.Sequential(net).train()
    net(x)
    after = vectors(net)
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_chain_makes_weights_once_and_walks_the_same_way():
    net, x = spectral_norm(MLP(3, (8,), seed=5)), torch.randn((5, 3), generator=rng())
    kernel = ULA(0.05)
    one = run_chain(kernel, net, kernel.init(net, x), 4, rng(1)).state.x
    other, source = x, rng(1)
    for _ in range(4):
        other = run_chain(kernel, net, kernel.init(net, other), 1, source).state.x
    assert torch.equal(one, other)
    with torch.no_grad():
        next(iter(net.layers())).parametrizations.weight.original.mul_(torch.tensor([[3.0, 1, 1]] * 8))
    assert not torch.equal(one, run_chain(kernel, net, kernel.init(net, x), 4, rng(1)).state.x)


def test_copies_are_independent():
    net = spectral_norm(MLP(3, (8,)))
    twin = copy.deepcopy(net)
    x = torch.randn((5, 3), generator=rng())
    assert torch.equal(net(x), twin(x))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=rng(9)))
    net.after_step()
    assert not torch.equal(net(x), twin(x))
    assert not any(torch.equal(a, vectors(twin)[k]) for k, a in vectors(net).items() if "head" not in k)


@pytest.mark.parametrize(
    "method",
    [
        ContrastiveDivergence(steps=2),
        AdaptiveNCE(PersistentCD(walkers=32, steps=2, rejuvenation=0.2), interval=3),
    ],
    ids=["cd", "adance"],
)
def test_resume_is_bit_exact_and_each_update_makes_one_iteration(method, tmp_path):
    x = torch.randn((64, 2), generator=rng())
    settings = dict(
        seed=3, batch_size=16, evaluate=False, checkpoint_every=5, device="cpu", learning_rate=1e-3
    )

    def net() -> nn.Module:
        return spectral_norm(MLP(2, (8,), "leaky_relu", seed=1), learn_scale=True, seed=2)

    calls = []
    whole = net()
    inner = whole.after_step
    whole.after_step = lambda: (calls.append(1), inner())  # type: ignore
    ms.fit(whole, x, method, 10, **settings)
    assert len(calls) == 10
    half, rest = net(), net()
    ms.fit(half, x, method, 5, out=tmp_path / "run", **settings)
    ms.fit(rest, x, method, 10, out=tmp_path / "run", resume=True, **settings)
    for (name, a), b in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not all(torch.equal(a, vectors(net())[k]) for k, a in vectors(rest).items())


# ---- scale and zero start


def test_a_learned_scale_starts_where_it_is_told_and_can_start_at_zero():
    net = spectral_norm(MLP(2, (8,)), scale=2.5, learn_scale=True)
    assert abs(net.scale.item() - 2.5) < 1e-6
    assert "raw_scale" in dict(net.named_parameters())
    data = torch.randn((40, 2), generator=rng())
    energy = Tilted(fit_gaussian(data), net)
    assert energy.exact_start(data) is not None
    assert net.scale.item() == 0
    (slope,) = torch.autograd.grad(energy(data).mean(), net.raw_scale)
    assert slope.abs() > 0  # it can leave zero again


def test_a_given_scale_cannot_start_at_zero_and_says_so():
    data = torch.randn((40, 2), generator=rng())
    with pytest.raises(InputError, match="learn_scale=True"):
        Tilted(fit_gaussian(data), spectral_norm(MLP(2, (8,)), scale=2.0))
    Tilted(fit_gaussian(data), spectral_norm(MLP(2, (8,)), scale=2.0), zero_start=False)
    other = nn.Sequential(MLP(2, (8,)))
    nn.utils.parametrizations.spectral_norm(other[0].head)
    with pytest.raises(InputError, match="start_at_zero"):
        Tilted(fit_gaussian(data), other)


def test_scale_is_needed_for_sharp_densities():
    """A slope of at most 1 per layer: over a distance of 0.1 such an energy cannot rise by more than 0.1."""
    net = spectral_norm(MLP(1, (32, 32), "leaky_relu"))
    x = torch.linspace(-0.05, 0.05, 50)[:, None]
    assert (net(x).max() - net(x).min()) < 0.1 * 1.1
    scaled = spectral_norm(MLP(1, (32, 32), "leaky_relu"), scale=100.0)
    torch.testing.assert_close(scaled(x), 100 * net(x))


def test_by_configuration_and_back_from_disk(tmp_path):
    x = torch.randn((64, 2), generator=rng())
    settings = {"name": "mlp", "hidden": (8,), "spectral_norm": True}
    run = ms.fit(settings, x, "cd", 3, out=tmp_path / "run", evaluate=False, device="cpu")
    again = ms.load_run(tmp_path / "run")
    assert torch.equal(run.energy(x), again.energy(x))
    assert isinstance(again.inside["energy"].network, SpectralNorm)
    assert isinstance(
        ConvConfig(reference="none", spectral_norm=True, scale=4.0).build(
            torch.randn((5, 1, 12, 12), generator=rng()), 0
        ),
        SpectralNorm,
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"scale": 2.0}, "energy.scale"),
        ({"spectral_norm": True, "scale": 2.0}, "energy.reference"),
        ({"spectral_norm": True, "scale": -2.0, "reference": "none"}, "energy.scale"),
    ],
)
def test_bad_configurations_are_named(settings, field):
    with pytest.raises(ConfigError) as caught:
        MLPConfig(**settings)
    assert caught.value.path == field


def test_what_cannot_be_normalised_is_refused():
    with pytest.raises(InputError, match="no linear or convolutional layer"):
        spectral_norm(nn.Tanh())
    with pytest.raises(InputError, match="parametrised already"):
        spectral_norm(spectral_norm(MLP(2, (8,))))
    zero = MLP(2, (8,))
    nn.init.zeros_(zero.head.weight)
    with pytest.raises(InputError, match=r"module\.head: its weights are all zero"):
        spectral_norm(zero)
    data = torch.randn((40, 2), generator=rng())
    with pytest.raises(InputError, match="normalise its network"):
        spectral_norm(Tilted(fit_gaussian(data), MLP(2, (8,))))
    with pytest.raises(ConfigError, match="scale"):
        spectral_norm(MLP(2, (8,)), scale=0.0)


def test_nothing_global_is_touched():
    before = torch.get_rng_state()
    first, second = (spectral_norm(MLP(2, (8,)), seed=s) for s in (1, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, vectors(second)[k]) for k, a in vectors(first).items())
