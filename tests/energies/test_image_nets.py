"""The papers' image nets: their sizes, the sides they take, and that they are functions of x and nothing else."""

from __future__ import annotations

import pytest
import torch

from metastable.core.errors import InputError
from metastable.energies import AdaNCENet, ClassEnergy, FEBMNet, ShortRunNet, Tilted
from metastable.energies.build import ENERGIES

NAMES = ("short-run", "adance-a", "adance-c", "f-ebm")


def parameters(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_parameters_are_those_of_the_papers() -> None:
    """11.03 M and 2.76 M at n_f = 128 and 64, 5.97 M of model A, 11.80 M of model C."""
    assert parameters(ShortRunNet((3, 32, 32), filters=128)) == 11_031_809
    assert parameters(ShortRunNet((3, 32, 32), filters=64)) == 2_763_393
    assert parameters(AdaNCENet((1, 28, 28), "a")) == 5_967_105
    assert parameters(AdaNCENet((3, 32, 32), "c")) == 11_801_217


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 17), (1, 28, 28), (3, 32, 32)])
def test_any_side_from_eight_on(shape: tuple[int, int, int]) -> None:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    for make in (
        lambda **k: ShortRunNet(shape, 2, **k),
        lambda **k: FEBMNet(shape, 2, **k),
        lambda **k: AdaNCENet(shape, "a", **k),
    ):
        assert make()(x).shape == (2,)
        assert make(outputs=3)(x).shape == (2, 3)


@pytest.mark.parametrize("shape", [(1, 7, 8), (3, 32), (5,)])
def test_smaller_sides_are_refused_by_name(shape: tuple[int, ...]) -> None:
    for make in (ShortRunNet, AdaNCENet, FEBMNet):
        with pytest.raises(InputError, match=r"event_shape: must be .*sides of 8 or more.*got"):
            make(shape)


@pytest.mark.parametrize("name", NAMES)
def test_by_name_on_a_reference_with_classes_or_without(name: str) -> None:
    """Both start as the Gaussian exactly, spectrally normalised ones by their scale."""
    x = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = {"filters": 2} if name in ("short-run", "f-ebm") else {}
    plain = ENERGIES[name](**settings).build(x, seed=0)
    assert isinstance(plain, Tilted)
    assert torch.equal(plain(x), -plain.reference.log_prob(x))  # pyright: ignore
    by_class = ENERGIES[name](**settings, classes=3).build(x, seed=0)
    assert isinstance(by_class, ClassEnergy)
    assert by_class.exact_start(x) is by_class.reference


@pytest.mark.parametrize("name", NAMES)
def test_layout_and_half_precision_change_roundings_only(name: str) -> None:
    """Channels last, and bfloat16: the same energies, to what their digits hold; calling changes no buffer."""
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    settings = {"filters": 4} if name in ("short-run", "f-ebm") else {}
    net = ENERGIES[name](**settings, reference="none").build(x, seed=0).eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    E = net(x).detach()
    last = net.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, E, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = net(x).float().detach()
    spread = float((E - E.mean()).abs().max())
    assert float((half - E).abs().max()) < 0.05 * max(spread, float(E.abs().max()))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_rows_do_not_depend_on_each_other() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for net in (ShortRunNet((1, 8, 8), 4), FEBMNet((1, 8, 8), 4)):
        torch.testing.assert_close(net(x)[2:4], net(x[2:4]))
