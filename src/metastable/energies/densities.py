"""Flows and diffusions by name, for configuration files and the command line; trained with `method=density`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import nn

from metastable.core.batch import Beside, Rows, as_batch
from metastable.core.errors import ConfigError
from metastable.core.random import derive
from metastable.proposals import Diffusion, DiffusionEnergy, Flow, InterpolantFlow, Regression
from metastable.proposals.encoders import Standardise

from .normalised import as_energy


@dataclass(frozen=True)
class DensityConfig:
    """Base: a model of `ms.proposals` standardised by the data, for events with contexts or without."""

    name: ClassVar[str] = ""
    kind: ClassVar[type[nn.Module]]
    paired: ClassVar[bool] = True
    called: ClassVar[dict[str, str]] = {}
    """What the model calls settings that have another name here."""

    def build(self, data: Rows, seed: int) -> nn.Module:
        """The model for this data, as an energy."""
        settings: dict[str, Any] = {self.called.get(f.name, f.name): vars(self)[f.name] for f in fields(self)}
        rows = as_batch(data)
        if rows.kind is Beside.LABELS:
            raise ConfigError("energy.name", f"must be a classifier for data with labels, got {self.name!r}")
        if rows.given is not None:
            shape = rows.context_shape or ()
            settings |= {"context_shape": shape, "encoder": Standardise(shape, rows.given)}
        return as_energy(self.kind(rows.event_shape, data=rows.x, seed=derive(seed, "energy"), **settings))


@dataclass(frozen=True)
class FlowConfig(DensityConfig):
    """A normalising flow with an exact density; see `Flow`."""

    layers: int = 3
    hidden: tuple[int, ...] = (64, 64)
    bins: int = 8

    name: ClassVar[str] = "flow"
    kind: ClassVar[type[nn.Module]] = Flow


@dataclass(frozen=True)
class InterpolantConfig(DensityConfig):
    """A continuous flow learned by stochastic interpolants, the paper's NF; see `InterpolantFlow`."""

    field: str | dict[str, Any] = "residual"
    width: int = 64
    layers: int = 8
    interpolant: str = "trigonometric"
    alpha: float = 2.0
    times: int = 1
    steps: int = 200
    scored: int = 64

    name: ClassVar[str] = "interpolant"
    kind: ClassVar[type[nn.Module]] = InterpolantFlow


@dataclass(frozen=True)
class DiffusionConfig(DensityConfig):
    """Diffusion-EDM; see `Diffusion`."""

    width: int = 64
    layers: int = 8
    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    steps: int = 512
    scored: int = 64
    network: str | dict[str, Any] = field(default="residual", kw_only=True)

    name: ClassVar[str] = "diffusion"
    kind: ClassVar[type[nn.Module]] = Diffusion


@dataclass(frozen=True)
class DiffusionEnergyConfig(DiffusionConfig):
    """Diffusion-φ, whose energy is minus the relative log-likelihood at σ_rel; see `DiffusionEnergy`."""

    sigma_rel: float = 0.02

    name: ClassVar[str] = "diffusion-phi"
    kind: ClassVar[type[nn.Module]] = DiffusionEnergy
    called: ClassVar[dict[str, str]] = {"network": "potential"}


@dataclass(frozen=True)
class RegressionConfig(DensityConfig):
    """Behaviour cloning by mean-squared error, for events with contexts; see `Regression`."""

    network: str | dict[str, Any] = "residual"
    width: int = 64
    layers: int = 8
    spread: float = 0.01

    name: ClassVar[str] = "regression"
    kind: ClassVar[type[nn.Module]] = Regression

    def build(self, data: Rows, seed: int) -> nn.Module:
        """The model for this data, as an energy."""
        if as_batch(data).kind is not Beside.CONTEXTS:
            raise ConfigError("energy.name", "'regression' is of events given contexts, and these have none")
        return super().build(data, seed)


DENSITIES = (FlowConfig, InterpolantConfig, DiffusionConfig, DiffusionEnergyConfig, RegressionConfig)
