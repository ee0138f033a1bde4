"""Networks on a reference that is fitted to the data, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import require, require_choice, require_count, require_positive
from metastable.core.random import derive
from metastable.proposals import fit_gaussian, fit_reference

from .by_class import ClassEnergy, shares_of
from .image_nets import AdaNCENet, FEBMNet, ShortRunNet
from .networks import MLP, ConvNet, Tilted
from .spectral import spectral_norm as normalise
from .wide_resnet import WideResNet

REFERENCES = ("auto", "gaussian", "mixture", "none")
MIXTURE_ROWS = 2000
"""Up to so many rows a mixture chosen by cross-validation knows more of them than a network learns."""
MIXTURE_COLUMNS = 64
INFLATE = 1.2
"""A single Gaussian is made so much wider than the data, so that it reaches around all of them."""


@dataclass(frozen=True)
class EnergyConfig:
    """Base: a network on top of a reference that is fitted to the data.

    Attributes:
        reference: `gaussian` gives E = −log q + f with q fitted to the data and f zero at the start, so that
            the first walkers and log Z₀ are exact; `mixture` the same with a mixture of Gaussians that
            cross-validation chooses, see `fit_reference`; `none` gives the bare network. `auto` is a mixture for at
            most `MIXTURE_ROWS` vectors of at most `MIXTURE_COLUMNS` numbers, of which a network would learn less,
            and else a Gaussian.
        inflate: the standard deviations of a Gaussian are the data's times this, 1.2 by default. A mixture has its
            own.
        spectral_norm: divide every layer of the network by its largest singular value (see `spectral_norm`).
        scale: what a spectrally normalised network is multiplied with; learned where none is given.
        classes: an energy for each of so many classes, see `ClassEnergy`. A method that takes labels (`pcd`,
            `jarzynski` and others with `labels=True`) has as many as the data; None for one energy.
    """

    reference: str = "auto"
    inflate: float | None = None
    spectral_norm: bool = False
    scale: float | None = None
    classes: int | None = None

    name: ClassVar[str] = ""
    paired: ClassVar[bool] = True
    """`build` is given the labels too."""

    def __post_init__(self) -> None:
        require_choice("energy.reference", self.reference, REFERENCES)
        if self.inflate is not None:
            require_positive("energy.inflate", self.inflate)
            rule = "left out for a mixture, whose widths are chosen by cross-validation"
            require(self.reference != "mixture", "energy.inflate", rule, self.inflate)
        if self.scale is not None:
            require_positive("energy.scale", self.scale)
            require(self.spectral_norm, "energy.scale", "left out unless spectral_norm is on", self.scale)
            rule = "'none' beside a given scale: a network on a reference starts at zero, by a learned scale"
            require(self.reference == "none", "energy.reference", rule, self.reference)
        if self.classes is not None:
            require_count("energy.classes", self.classes, 2)

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """The network f, of one output or several."""
        raise NotImplementedError

    def settled(self, data: Tensor) -> EnergyConfig:
        """These settings with what was left to the data decided, as a run records them."""
        reference = self.reference
        if reference == "auto":
            few = data.dim() == 2 and len(data) <= MIXTURE_ROWS and data.shape[1] <= MIXTURE_COLUMNS
            # a width that was asked for is one of a single Gaussian
            reference = "mixture" if few and self.inflate is None else "gaussian"
        inflate = None if reference == "mixture" else self.inflate or INFLATE
        return replace(self, reference=reference, inflate=inflate)

    def build(self, data: Rows, seed: int) -> nn.Module:
        """The energy for this data."""
        rows = as_batch(data)
        x, config = rows.x, self.settled(rows.x)
        network = self.network(rows.event_shape, derive(seed, "energy"), self.classes)
        if self.spectral_norm:
            network = normalise(network, self.scale or 1.0, self.scale is None, derive(seed, "spectral"))
        reference = None
        if config.reference == "mixture":
            rule = "'gaussian', 'none' or 'auto' for events that are no vectors"
            require(x.dim() == 2, "energy.reference", rule, "mixture")
            reference = fit_reference(x, derive(seed, "reference"))
        elif config.reference == "gaussian":
            reference = fit_gaussian(x, inflate=config.inflate or INFLATE)
        if self.classes is not None:
            return ClassEnergy(network, self.classes, reference, shares_of(rows, self.classes))
        return network if reference is None else Tilted(reference, network)


@dataclass(frozen=True)
class MLPConfig(EnergyConfig):
    """A multilayer perceptron."""

    hidden: tuple[int, ...] = (128, 128)
    activation: str = "silu"

    name: ClassVar[str] = "mlp"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `MLP`."""
        return MLP(event_shape, tuple(self.hidden), self.activation, seed, outputs)


@dataclass(frozen=True)
class ConvConfig(EnergyConfig):
    """The small convolutional network, for `(C, H, W)` images."""

    name: ClassVar[str] = "conv"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `ConvNet`."""
        return ConvNet(event_shape, seed, outputs)


@dataclass(frozen=True)
class WideResNetConfig(EnergyConfig):
    """WRN-depth-width without normalisation, for `(C, H, W)` images."""

    depth: int = 10
    width: int = 1

    name: ClassVar[str] = "wrn"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `WideResNet`."""
        return WideResNet(event_shape, self.depth, self.width, outputs, seed)


@dataclass(frozen=True)
class ShortRunConfig(EnergyConfig):
    """The convolutional network of short-run and CIFAR-10 Jarzynski training, for `(C, H, W)` images."""

    filters: int = 64

    name: ClassVar[str] = "short-run"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `ShortRunNet`."""
        return ShortRunNet(event_shape, self.filters, seed, outputs)


@dataclass(frozen=True)
class AdaNCEConfig(EnergyConfig):
    """Model A of the AdaNCE thesis, for `(C, H, W)` images; every layer spectrally normalised, as there."""

    spectral_norm: bool = True

    name: ClassVar[str] = "adance-a"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `AdaNCENet`."""
        return AdaNCENet(event_shape, self.name[-1], seed, outputs)


@dataclass(frozen=True)
class AdaNCELargeConfig(AdaNCEConfig):
    """Model C of the AdaNCE thesis, for `(C, H, W)` images; every layer spectrally normalised, as there."""

    name: ClassVar[str] = "adance-c"


@dataclass(frozen=True)
class FEBMConfig(EnergyConfig):
    """The residual network of f-EBM's image runs, for `(C, H, W)` images; spectrally normalised, as there."""

    spectral_norm: bool = True
    filters: int = 128

    name: ClassVar[str] = "f-ebm"

    def network(self, event_shape: tuple[int, ...], seed: int, outputs: int | None = None) -> nn.Module:
        """See `FEBMNet`."""
        return FEBMNet(event_shape, self.filters, seed, outputs)
