"""Energies by name, for configuration files, the command line and the estimator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metastable.core.batch import Rows, as_batch
from metastable.core.errors import ConfigError, require, require_choice, require_count, require_positive
from metastable.core.random import derive
from metastable.proposals import fit_signs
from metastable.proposals.transformer import READS

from .analytic import GaussianMixture
from .boltzmann_hidden import MOST_HIDDEN, HiddenBoltzmannMachine
from .conditional import ConditionalNet
from .densities import DENSITIES
from .discrete import RBM, BoltzmannMachine
from .joint import OUTPUT_SCALE, JointEnergy
from .network_configs import (
    AdaNCEConfig,
    AdaNCELargeConfig,
    ConvConfig,
    FEBMConfig,
    MLPConfig,
    ShortRunConfig,
    WideResNetConfig,
)
from .networks import MLP, ConvNet
from .on_proposal import OnProposal
from .transformer import TransformerEnergy
from .wide_resnet import WideResNet


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
    """A Boltzmann machine, for data coded −1 and +1; trained with `kernel=gibbs`.

    Attributes:
        scale: standard deviation of the first couplings. The first biases are those of the data's means.
        hidden: hidden units, coupled to all others and to one another; at most 12, whose states are enumerated.
    """

    scale: float = 0.01
    hidden: int = 0

    name: ClassVar[str] = "boltzmann"
    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive("energy.scale", self.scale)
        require_count("energy.hidden", self.hidden, 0)
        enough = f"at most {MOST_HIDDEN}, whose states can be enumerated"
        require(self.hidden <= MOST_HIDDEN, "energy.hidden", enough, self.hidden)

    def build(self, data: Tensor, seed: int) -> nn.Module:
        """See `BoltzmannMachine` and `HiddenBoltzmannMachine`."""
        shape, seed = tuple(data.shape[1:]), derive(seed, "energy")
        if self.hidden:
            machine = HiddenBoltzmannMachine(shape, self.hidden, self.scale, seed)
        else:
            machine = BoltzmannMachine(shape, self.scale, seed)
        with torch.no_grad():
            fields = fit_signs(data).fields.flatten()
            machine.bias[: len(fields)].copy_(fields)
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

    def build(self, data: Rows, seed: int) -> nn.Module:  # pyright: ignore
        """The energy for this data."""
        return OnProposal(super().build(data, seed))


@dataclass(frozen=True)
class TransformerConfig:
    """E of chunks given contexts by a transformer over tokens; see `TransformerEnergy`.

    Attributes:
        step: numbers of a token of the event, such as those of one action.
        width: of a token.
        layers: blocks.
        heads: of each block.
        time: whether the energy has a time, as interpolating energies have.
        past: `[start, count, size]` each: numbers of the context that are steps in time.
        tokens: the same of sets, whose order does not matter; without any of them the context is one token.
        pictures: `[start, count, channels, height, width]`: images in time.
        reads: `future`, or `path` where the last layers see the past's tokens, too.
        prior: whether to add the convolutional prior.
        near: `[start, count, size]` of things among which the event's steps are places, see `Nearness`.
        reference: as of `ConditionalConfig`.
        inflate: likewise.
        on_proposal: whether it stands on the proposal of its method and is zero at first; see `OnProposal`.
        inherits: whether it then begins with the layers of the proposal's transformer that fit; likewise.
    """

    step: int = 1
    width: int = 64
    layers: int = 3
    heads: int = 4
    time: bool = False
    past: tuple[tuple[int, int, int], ...] = ()
    tokens: tuple[tuple[int, int, int], ...] = ()
    pictures: tuple[int, int, int, int, int] | None = None
    reads: str = "future"
    prior: bool = True
    near: tuple[int, int, int] | None = None
    reference: str = "gaussian"
    inflate: float = 1.2
    on_proposal: bool = False
    inherits: bool = False

    name: ClassVar[str] = "transformer"
    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("step", "width", "layers", "heads"):
            require_count(f"energy.{name}", vars(self)[name])
        require_choice("energy.reads", self.reads, READS)
        require_choice("energy.reference", self.reference, ("gaussian", "none"))
        require_positive("energy.inflate", self.inflate)
        require(self.on_proposal or not self.inherits, "energy.inherits", "false without on_proposal", True)

    def build(self, data: Rows, seed: int) -> nn.Module:
        """The energy for this data."""
        rows, own = as_batch(data), {f.name: vars(self)[f.name] for f in fields(self)}
        below, inflate, stands = (own.pop(name) for name in ("reference", "inflate", "on_proposal"))
        inherits = own.pop("inherits")
        own |= {"data": rows, "inflate": None if stands or below == "none" else inflate}
        energy = TransformerEnergy(rows.event_shape, rows.context_shape, seed=derive(seed, "energy"), **own)
        return OnProposal(energy, inherits=inherits) if stands else energy


ENERGIES: dict[str, type] = {
    c.name: c
    for c in (
        MLPConfig,
        ConvConfig,
        WideResNetConfig,
        ShortRunConfig,
        AdaNCEConfig,
        AdaNCELargeConfig,
        FEBMConfig,
        JointMLPConfig,
        JointConvConfig,
        JointWRNConfig,
        MixtureConfig,
        RBMConfig,
        BoltzmannConfig,
        ConditionalConfig,
        OnProposalConfig,
        TransformerConfig,
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
