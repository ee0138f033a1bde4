"""Precisions are in force where they are asked for and nowhere else; images lie as convolutions want them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core.capture import in_force
from metastable.core.errors import ConfigError
from metastable.core.precision import channels_last, laid_out, on_tensor_cores, unrounded
from metastable.energies import ConvNet, Tilted
from metastable.energies.image_nets import AdaNCENet, FEBMNet, ShortRunNet
from metastable.energies.networks import dense_conv, patch_conv
from metastable.energies.wide_resnet import WideResNet
from metastable.kernels.engine import fused_precision
from metastable.methods import Context, PersistentCD
from metastable.proposals import fit_gaussian
from metastable.training.config import SGD, Adam, TrainerConfig
from metastable.training.engine import Engine, choose_engine
from metastable.training.trainer import Trainer


def flags() -> tuple:
    """What a precision may change of the process."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, autocast


PLACES = [("32-true", "cuda"), ("tf32", "cpu"), ("tf32", "cuda"), ("bf16-mixed", "cpu")]


def test_what_must_not_be_rounded_is_not_by_tf32_either():
    there, here = SimpleNamespace(device=torch.device("cuda")), torch.zeros(1)
    with ms.precision("tf32", "cuda"):
        rounded = flags()
        with unrounded(there):  # pyright: ignore
            assert flags() == ("highest", False, False)
        with unrounded(here):
            assert flags() == rounded
        assert flags() == rounded == ("high", True, False)
    before = flags()
    with unrounded(there):  # pyright: ignore
        assert flags() == before


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_a_precision_ends_where_it_ends(name, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before, inside = flags(), []

    def fail() -> None:
        with ms.precision(name, device):
            inside.append(flags())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    coarse = (name, device) == ("tf32", "cuda")
    assert inside == [("high", True, False) if coarse else (*before[:2], name == "bf16-mixed")]
    assert flags() == before


def test_a_precision_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="precision"), ms.precision("64-true"):
        pass


@pytest.fixture
def newer_words():
    """Precision set by torch's `fp32_precision`, of which its older words may not be asked any more."""
    products, convolutions = torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None)
    if convolutions is None or not hasattr(products, "fp32_precision"):
        pytest.skip("this torch has the older words only")
    products.fp32_precision, convolutions.fp32_precision = "tf32", "ieee"
    yield products
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def test_precision_set_in_torchs_newer_words_is_left_be(newer_words):
    with unrounded(SimpleNamespace(device=torch.device("cuda"))):  # pyright: ignore
        assert newer_words.fp32_precision == "tf32"
    assert not on_tensor_cores(torch.zeros(1))


def test_recordings_and_fused_chains_ask_for_torchs_newer_words(newer_words):
    def asked() -> tuple:
        return in_force(torch.device("cpu")), fused_precision()

    (rounded, name), newer_words.fp32_precision = asked(), "ieee"
    exact = asked()
    assert (name, exact[1]) == ("tf32", "float32")
    assert rounded != exact[0]


def test_training_in_tf32_leaves_the_process_as_it_was():
    before, home = flags(), Engine("cpu", "tf32")
    with home.autocast(), home.rounded():
        pass
    assert flags() == before
    assert home.dtype == torch.float32


def test_what_must_not_be_rounded_is_not():
    x = torch.full((1, 1), 1.003)
    with ms.precision("bf16-mixed", "cpu"), unrounded(x):
        assert (x @ torch.ones(1, 1)).dtype == torch.float32


def assert_the_convolution(other, layer, x):
    """`other(layer, x)` has the values, gradients and layout of `layer(x)`, channels last."""
    made, plain = other(layer, x), layer(x)
    torch.testing.assert_close(made, plain)
    rows = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((y * rows).sum(), [x, *layer.parameters()]) for y in (made, plain)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_convolution_as_one_product_is_the_convolution(channels):
    layer = nn.Conv2d(channels, 4, 5, stride=2, padding=4)
    x = torch.randn((3, channels, 9, 9), generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert_the_convolution(dense_conv, layer, x)


def test_only_rounded_products_are_for_tensor_cores():
    x = torch.zeros(1)
    assert not on_tensor_cores(x)
    with ms.precision("bf16-mixed", "cpu"):
        assert on_tensor_cores(x)
    with ms.precision("tf32", "cuda"):
        assert on_tensor_cores(x)


def test_images_lie_as_the_kernels_do_and_only_on_a_gpu():
    x, energy = torch.zeros(2, 3, 4, 4), nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 1, 3))
    values = [p.clone() for p in energy.parameters()]
    assert laid_out(x, channels_last(energy)) is x
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in energy)
    assert all(torch.equal(a, b) for a, b in zip(energy.parameters(), values, strict=True))
    placed = Engine("cpu", "bf16-mixed").place_module(nn.Conv2d(3, 5, 2))
    assert placed.weight.is_contiguous()


def images(folder, steps: int) -> Trainer:
    """A small training on images, with channels side by side as on a GPU."""
    x = torch.randn((400, 2, 6, 6), generator=torch.Generator().manual_seed(0))
    energy = channels_last(Tilted(fit_gaussian(x), ConvNet((2, 6, 6))))
    config = TrainerConfig(steps=steps, optimiser=Adam(1e-2), checkpoint_every=2, batch_size=4)
    folder.mkdir(exist_ok=True)
    noise, players = fit_gaussian(x), {"energy": energy}
    given = {"noise": noise, "engine": Engine("cpu"), "make_context": Context, "folder": folder}
    return Trainer(energy, players, x, PersistentCD(walkers=4), config, **given)


def test_a_training_on_images_resumes_bit_for_bit(tmp_path):
    whole, first = images(tmp_path / "whole", 6), images(tmp_path / "parts", 2)
    whole.run()
    first.run()
    rest = images(tmp_path / "parts", 6)
    rest.run(resume=True)
    for a, b in zip(whole.energy.parameters(), rest.energy.parameters(), strict=True):
        assert torch.equal(a, b)
    for weight, kept in rest.optimisers["energy"].state.items():
        assert kept["exp_avg"].stride() == weight.stride()


def test_compiled_updates_are_recorded_on_a_gpu():
    method, gpu = PersistentCD(walkers=4), torch.device("cuda")
    assert choose_engine("compile", gpu, method, 10)[:3] == ("captured", "", "compile")
    assert choose_engine("compile", torch.device("cpu"), method, 10)[::2] == ("compile", "compile")


def test_an_optimiser_that_cannot_be_recorded_keeps_compiled_chains(monkeypatch):
    x = torch.randn((12, 2), generator=torch.Generator().manual_seed(0))
    energy = Tilted(fit_gaussian(x), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)))
    config = TrainerConfig(steps=2, optimiser=SGD(1e-2), engine="compile")
    home = Engine("cpu")
    monkeypatch.setattr(Engine, "device", torch.device("cuda"))
    monkeypatch.setattr(
        "metastable.training.trainer.choose_engine",
        lambda wanted, device, *rest: choose_engine(wanted, torch.device("cuda"), *rest),
    )
    given = {"noise": fit_gaussian(x), "engine": home, "make_context": Context}
    made = Trainer(energy, {"energy": energy}, x, PersistentCD(walkers=4), config, **given)
    assert (made.choice.chosen, made.context.engine, made.captured) == ("compile", "compile", None)


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 2), (1, 0)])
def test_a_convolution_by_patches_is_the_convolution(stride, padding):
    layer = nn.Conv2d(3, 5, (3, 4), stride=stride, padding=padding)
    x = torch.randn((2, 3, 9, 8), generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert_the_convolution(patch_conv, layer, x)
    with ms.precision("bf16-mixed", "cpu"):
        torch.testing.assert_close(patch_conv(layer, x), layer(x), rtol=2e-2, atol=2e-2)


IMAGE_ENERGIES = [
    ConvNet((3, 32, 32)),
    ShortRunNet((3, 32, 32), 8),
    AdaNCENet((3, 32, 32), "c"),
    FEBMNet((3, 32, 32), 8),
    WideResNet((3, 32, 32), depth=10, width=1),
]


@pytest.mark.parametrize("energy", IMAGE_ENERGIES, ids=lambda e: type(e).__name__)
def test_energies_of_rounded_networks_are_not_rounded_themselves(energy):
    x = torch.randn((4, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = energy(x)
        with ms.precision("bf16-mixed", "cpu"):
            rounded = energy(x)
    assert rounded.dtype == torch.float32
    assert not bool((rounded == rounded.bfloat16().float()).all())  # 7 bits of hundreds of nats would be nats
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_the_papers_net_is_the_same_function_on_tensor_cores(monkeypatch):
    net = ShortRunNet((3, 16, 16), 8)
    x = torch.randn((4, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    plain = net(x)
    monkeypatch.setattr("metastable.energies.image_nets.on_tensor_cores", lambda x: True)
    seen = type("Seen", (torch.Tensor,), {"is_cuda": True})
    torch.testing.assert_close(net(x.as_subclass(seen)).as_subclass(torch.Tensor), plain)
