"""Energies by name, for configuration files, the command line and the estimator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import ConfigError, require, require_choice, require_count, require_positive
from metastable.core.random import derive
from metastable.proposals import fit_gaussian, fit_reference, fit_signs

from .analytic import GaussianMixture
from .conditional import ConditionalNet
from .densities import DENSITIES
from .discrete import RBM, BoltzmannMachine
from .joint import OUTPUT_SCALE, JointEnergy
from .networks import MLP, ConvNet, Tilted
from .on_proposal import OnProposal
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
    """

    reference: str = "auto"
    inflate: float | None = None
    spectral_norm: bool = False
    scale: float | None = None

    name: ClassVar[str] = ""

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

    def network(self, event_shape: tuple[int, ...], seed: int) -> nn.Module:
        """The network f."""
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

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """The energy for this data."""
        config = self.settled(data)
        network = self.network(tuple(data.shape[1:]), derive(seed, "energy"))
        if self.spectral_norm:
            network = normalise(network, self.scale or 1.0, self.scale is None, derive(seed, "spectral"))
        if config.reference == "none":
            return network
        if config.reference == "mixture":
            rule = "'gaussian', 'none' or 'auto' for events that are no vectors"
            require(data.dim() == 2, "energy.reference", rule, "mixture")
            return Tilted(fit_reference(data, derive(seed, "reference")), network)
        return Tilted(fit_gaussian(data, inflate=config.inflate or INFLATE), network)


@dataclass(frozen=True)
class MLPConfig(EnergyConfig):
    """A multilayer perceptron."""

    hidden: tuple[int, ...] = (128, 128)
    activation: str = "silu"

    name: ClassVar[str] = "mlp"

    def network(self, event_shape: tuple[int, ...], seed: int) -> nn.Module:
        """See `MLP`."""
        return MLP(event_shape, tuple(self.hidden), self.activation, seed)


@dataclass(frozen=True)
class ConvConfig(EnergyConfig):
    """The small convolutional network, for `(C, H, W)` images."""

    name: ClassVar[str] = "conv"

    def network(self, event_shape: tuple[int, ...], seed: int) -> nn.Module:
        """See `ConvNet`."""
        return ConvNet(event_shape, seed)


@dataclass(frozen=True)
class WideResNetConfig(EnergyConfig):
    """WRN-depth-width without normalisation, for `(C, H, W)` images."""

    depth: int = 10
    width: int = 1

    name: ClassVar[str] = "wrn"

    def network(self, event_shape: tuple[int, ...], seed: int) -> nn.Module:
        """See `WideResNet`."""
        return WideResNet(event_shape, self.depth, self.width, seed=seed)


@dataclass(frozen=True)
class JointConfig:
    """Base: a classifier that is an energy of p(x, y), for data with labels; trained with `method=jem`.

    Attributes:
        output_scale: o, see `JointEnergy`.
        classes: how many there are; by default one more than the largest label.
    """

    output_scale: float = OUTPUT_SCALE
    classes: int | None = None

    name: ClassVar[str] = ""
    paired: ClassVar[bool] = True
    """`build` is given the labels too."""

    def __post_init__(self) -> None:
        require_positive("energy.output_scale", self.output_scale)
        if self.classes is not None:
            require_count("energy.classes", self.classes, 2)

    def network(self, event_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
        """The classifier."""
        raise NotImplementedError

    def build(self, data: Rows, seed: int) -> JointEnergy:
        """The energy for this data."""
        rows, classes = as_batch(data), self.classes
        if classes is None and rows.given is None:
            raise ConfigError(
                "energy.classes",
                "say how many there are, or use data with labels and a method that needs them (jem)",
            )
        classes = classes or max(int(rows.given.max()) + 1, 2)  # pyright: ignore
        network = self.network(rows.event_shape, classes, derive(seed, "energy"))
        return JointEnergy(network, self.output_scale, classes)


@dataclass(frozen=True)
class JointMLPConfig(JointConfig):
    """A multilayer perceptron as p(x, y)."""

    hidden: tuple[int, ...] = (128, 128)
    activation: str = "silu"

    name: ClassVar[str] = "joint-mlp"

    def network(self, event_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
        """See `MLP`."""
        return MLP(event_shape, tuple(self.hidden), self.activation, seed, classes)


@dataclass(frozen=True)
class JointConvConfig(JointConfig):
    """The small convolutional network as p(x, y)."""

    name: ClassVar[str] = "joint-conv"

    def network(self, event_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
        """See `ConvNet`."""
        return ConvNet(event_shape, seed, classes)


@dataclass(frozen=True)
class JointWRNConfig(JointConfig):
    """WRN-depth-width as p(x, y)."""

    depth: int = 10
    width: int = 1

    name: ClassVar[str] = "joint-wrn"

    def network(self, event_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
        """See `WideResNet`."""
        return WideResNet(event_shape, self.depth, self.width, classes, seed)


@dataclass(frozen=True)
class MixtureConfig:
    """A trainable mixture of Gaussians with the data's overall scale, means starting near the centre."""

    components: int = 2
    scale: float = 1.0

    name: ClassVar[str] = "mixture"

    def __post_init__(self) -> None:
        require_count("energy.components", self.components)
        require_positive("energy.scale", self.scale)

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """Means at random around the data's mean, a tenth of its spread apart."""
        require(
            data.dim() == 2, "energy.name", "another than 'mixture' for events that are no vectors", "mixture"
        )
        rng = torch.Generator().manual_seed(derive(seed, "energy"))
        noise = torch.randn((self.components, data.shape[1]), generator=rng).to(data)
        return GaussianMixture(data.mean(0) + 0.1 * data.std(0) * noise, self.scale, trainable=True)


@dataclass(frozen=True)
class RBMConfig:
    """A restricted Boltzmann machine, for data coded −1 and +1; trained with `kernel=gibbs`.

    Attributes:
        hidden: hidden units.
        scale: standard deviation of the first weights. The first visible biases are those of the data's means.
    """

    hidden: int = 64
    scale: float = 0.01

    name: ClassVar[str] = "rbm"
    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("energy.hidden", self.hidden)
        require_positive("energy.scale", self.scale)

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """See `RBM`."""
        rbm = RBM(tuple(data.shape[1:]), self.hidden, self.scale, derive(seed, "energy"))
        with torch.no_grad():
            rbm.visible_bias.copy_(fit_signs(data).fields.flatten())
        return rbm


@dataclass(frozen=True)
class BoltzmannConfig:
    """A Boltzmann machine of visible units, for data coded −1 and +1; trained with `kernel=gibbs`.

    Attributes:
        scale: standard deviation of the first couplings. The first biases are those of the data's means.
    """

    scale: float = 0.01

    name: ClassVar[str] = "boltzmann"
    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive("energy.scale", self.scale)

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """See `BoltzmannMachine`."""
        machine = BoltzmannMachine(tuple(data.shape[1:]), self.scale, derive(seed, "energy"))
        with torch.no_grad():
            machine.bias.copy_(fit_signs(data).fields.flatten())
        return machine


@dataclass(frozen=True)
class ConditionalConfig:
    """E(x | given), or E(x | given, t): see `ConditionalNet`; for events with contexts, or with none.

    Attributes:
        width: of the dense layers.
        depth: dense layers.
        time: whether the energy has a time, as interpolating energies have.
        reference: `gaussian` adds −log of a Gaussian fitted to the events, so that exp(−E) can always be
            normalised; `none` gives the bare network.
        inflate: the Gaussian's standard deviations are the data's times this.
    """

    width: int = 64
    depth: int = 8
    time: bool = False
    reference: str = "gaussian"
    inflate: float = 1.2

    name: ClassVar[str] = "conditional"
    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("energy.width", self.width)
        require_count("energy.depth", self.depth, 2)
        require_choice("energy.reference", self.reference, ("gaussian", "none"))
        require_positive("energy.inflate", self.inflate)

    def build(self, data: Rows, seed: int) -> ConditionalNet:
        """The energy for this data."""
        rows = as_batch(data)
        return ConditionalNet(
            rows.event_shape,
            rows.context_shape,
            self.width,
            self.depth,
            self.time,
            data=rows,
            inflate=self.inflate if self.reference == "gaussian" else None,
            seed=derive(seed, "energy"),
        )


@dataclass(frozen=True)
class OnProposalConfig(ConditionalConfig):
    """A `ConditionalNet` on the proposal of its method, and zero at first; see `OnProposal`."""

    reference: str = "none"

    name: ClassVar[str] = "on-proposal"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("energy.reference", self.reference, ("none",))
        require(not self.time, "energy.time", "False: the density of a proposal is that at t = 1", self.time)

    def build(self, data: Rows, seed: int) -> nn.Module:  # pyright: ignore
        """The energy for this data."""
        return OnProposal(super().build(data, seed))


ENERGIES: dict[str, type] = {
    c.name: c
    for c in (
        MLPConfig,
        ConvConfig,
        WideResNetConfig,
        JointMLPConfig,
        JointConvConfig,
        JointWRNConfig,
        MixtureConfig,
        RBMConfig,
        BoltzmannConfig,
        ConditionalConfig,
        OnProposalConfig,
        *DENSITIES,
    )
}


def default_config(event_shape: tuple[int, ...], beside: str = "", time: bool = False) -> Any:
    """A convolutional network for images, a perceptron for everything else.

    `beside` is `labels` for events with classes, whose energy is that of a classifier, and `given` for events with
    contexts. `time` asks for an energy that has one.
    """
    if beside == "given" or time:
        return ConditionalConfig(time=time)
    image = len(event_shape) == 3 and event_shape[0] in (1, 3) and min(event_shape[1:]) >= 8
    if beside == "labels":
        return JointWRNConfig() if image else JointMLPConfig()
    return ConvConfig() if image else MLPConfig()
