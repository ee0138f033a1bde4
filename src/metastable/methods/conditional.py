"""Conditional noise contrast: which of two points is the datum, and which the noise that was made from it?

C. Ceylan, M. Gutmann, *Conditional noise-contrastive estimation of unnormalised models*, ICML 2018; equation
numbers are those of N. Xu, MSc thesis, 2022.

| symbol | here |
|---|---|
| x, y | a row of the batch, a noisy point made from it |
| p_n(y given x) | `noise` |
| σ | `sigma` |
| κ | `negatives_per_datum` |
| G | the log-odds that x is the datum of the pair (x, y) |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from metastable.core.errors import (
    ConfigError,
    InputError,
    require,
    require_choice,
    require_count,
    require_positive,
)
from metastable.core.protocols import is_symmetric
from metastable.core.random import generator, normal_like
from metastable.core.types import Proposal

from .base import Context, Method, Metrics, Negatives, Nothing, gap_metrics

SATURATED = 5.0
"""|G| beyond which the posterior is within 0.7 % of certainty."""


@runtime_checkable
class ConditionalNoise(Protocol):
    """A density p_n(y given x) that samples and scores; one that is symmetric in x and y says `symmetric`."""

    def sample(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """One y for each row of x, `(B, *event)`."""
        ...

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log p_n(y given x), row by row, `(B,)`."""
        ...


class GaussianSteps(nn.Module):
    """N(x, σ²I), which is symmetric: in (3.2) its densities cancel."""

    sigma: Tensor
    symmetric = True

    def __init__(self, sigma: float | Tensor):
        super().__init__()
        self.register_buffer("sigma", torch.as_tensor(sigma, dtype=torch.get_default_dtype()))

    def sample(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """x + σ·noise."""
        return x + self.sigma * normal_like(x, rng)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """Normalised, `(B,)`."""
        white = ((y - x) / self.sigma).flatten(1)
        constant = white.shape[1] * (self.sigma.log() + 0.5 * math.log(2 * math.pi))
        return -0.5 * white.square().sum(1) - constant


def pair_logit(E_x: Tensor, E_y: Tensor, log_noise_ratio: Tensor | None = None) -> Tensor:
    """G, the log-odds of (3.2) with v = 1: log p_θ(x) p_n(y given x) − log p_θ(y) p_n(x given y).

    Args:
        E_x: energies of the data, `(B, 1)`.
        E_y: energies of the noise, `(B, κ)`.
        log_noise_ratio: log p_n(y given x) − log p_n(x given y), `(B, κ)`; None where noise is symmetric.
    """
    G = E_y - E_x
    return G if log_noise_ratio is None else G + log_noise_ratio


@dataclass(frozen=True)
class ConditionalNCE(Method[Nothing]):
    """CNCE: noise is made from each datum, and pairs (x, y) are classified by the posterior (3.2).

    Minimises the mean of log(1 + e^{−G}) over κ pairs for each datum, the negative log-likelihood of the right
    order. log Z cancels within a pair, and so does symmetric noise. The optimum is the truth for any noise that
    can lead from everywhere to everywhere, but not the variance: with σ too small G is about 0 and pairs say
    nothing, with σ too large every pair is told apart at once; both leave no gradient. For Gaussian data of
    standard deviation s in d dimensions the estimate is most precise at σ = 2s/√d, whatever d, where
    |G| is 2.3 on average. What the pairs really are is logged as `pair_logit` (mean |G|), `saturated` (share of
    |G| > 5) and `pair_weight` (mean 1 − posterior), and judged by the diagnosis.

    Noise that never leaves a mode compares points inside it only, so mode weights are learned as far as σ
    reaches. The energy is learned up to a constant.

    Attributes:
        negatives_per_datum: κ.
        sigma: of the Gaussian noise; by default s/√d with s the root mean square of the data's standard
            deviations, half of what is best for one Gaussian, since parts of the data are narrower than the whole.
        noise: `gaussian`, or any module with `sample(x, rng)` and `log_prob(y, x)` instead, which need not be
            symmetric.

    >>> import metastable as ms
    >>> x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    >>> run = ms.fit(None, x, ms.methods.ConditionalNCE(), steps=5, evaluate=False)
    >>> round(run.players["noise"].sigma.item(), 1)
    0.5
    """

    negatives_per_datum: int = 8
    sigma: float | None = None
    noise: str | ConditionalNoise = "gaussian"

    name: ClassVar[str] = "conditional-nce"
    gap_vanishes: ClassVar[bool] = False
    mode_weights_advice: ClassVar[str] = (
        "Raise sigma, so that noise made in one mode reaches the next, or use ranking-nce."
    )

    def moving(self, batch: int, rows: int) -> int:
        """κ for each datum."""
        return self.negatives_per_datum * batch

    def stored(self, batch: int, rows: int) -> int:
        """Nothing is carried."""
        return 0

    def __post_init__(self) -> None:
        require_count("conditional-nce.negatives_per_datum", self.negatives_per_datum)
        if self.sigma is not None:
            require_positive("conditional-nce.sigma", self.sigma)
        if isinstance(self.noise, str):
            require_choice("conditional-nce.noise", self.noise, ("gaussian",))
            return
        if self.sigma is not None:
            raise ConfigError("conditional-nce.sigma", "give either sigma or a noise of your own, not both")
        fits = isinstance(self.noise, nn.Module) and isinstance(self.noise, ConditionalNoise)
        rule = "'gaussian', or a module with sample(x, rng) and log_prob(y, x)"
        require(fits, "conditional-nce.noise", rule, self.noise)

    def phase(self, context: Context) -> Hashable:
        """None: pairs are the same in every update."""
        return None

    def companions(self, energy: nn.Module, data: Tensor, noise: Proposal, seed: int) -> dict[str, nn.Module]:
        """The noise, with its σ."""
        if isinstance(self.noise, nn.Module):
            return {"noise": copy.deepcopy(self.noise)}
        return {"noise": GaussianSteps(default_sigma(data) if self.sigma is None else self.sigma)}

    def start(self, context: Context) -> Nothing:
        """Nothing is carried; noise that does not fit the data is refused."""
        require_way_back(_noise(context), context.data[:256], "conditional-nce.noise")
        return Nothing()

    def negatives(
        self, context: Context, state: Nothing, batch: Tensor
    ) -> tuple[Negatives, Nothing, Metrics]:
        """κ noisy points for each datum, row by row."""
        with torch.no_grad():
            y = _noise(context).sample(batch.repeat_interleave(self.negatives_per_datum, 0), context.rng)
        return Negatives(y), state, {}

    def loss(
        self, context: Context, state: Nothing, player: str, batch: Tensor, negatives: Any
    ) -> tuple[Tensor, Metrics]:
        """(2.12) for the posterior (3.2)."""
        y, shape = negatives.x, (len(batch), self.negatives_per_datum)
        E_x, E_y = context.energy(torch.cat([batch, y])).split([len(batch), len(y)])
        ratio = log_noise_ratio(_noise(context), batch.repeat_interleave(shape[1], 0), y)
        G = pair_logit(E_x[:, None], E_y.view(shape), None if ratio is None else ratio.view(shape))
        return -logsigmoid(G).mean(), _metrics(G.detach(), E_x, E_y)

    def evaluations(self, context: Context, batch: int) -> int:
        """One energy for each datum and each noisy point."""
        return batch * (1 + self.negatives_per_datum)

    def load(self, tree: dict[str, Any]) -> Nothing:
        """Nothing was saved."""
        return Nothing()


def default_sigma(data: Tensor) -> float:
    """s/√d with s² the mean variance of the d coordinates."""
    flat = data.flatten(1)
    return max(math.sqrt(float(flat.var(0).mean()) / flat.shape[1]), 1e-12)


@torch.no_grad()
def log_noise_ratio(noise: Any, x: Tensor, y: Tensor) -> Tensor | None:
    """log p_n(y given x) − log p_n(x given y), `(B,)`; None for noise that says it is symmetric."""
    if is_symmetric(noise):
        return None
    return noise.log_prob(y, x) - noise.log_prob(x, y)


@torch.no_grad()
def require_way_back(noise: Any, x: Tensor, field: str) -> None:
    """Refuse noise of another shape than the data, and noise from which the datum could not be made in turn."""
    y = noise.sample(x, generator(0, x.device))
    if y.shape != x.shape:
        raise InputError(
            f"{field}: sample must give one y for each x, {tuple(x.shape)}, got {tuple(y.shape)}"
        )
    there, back = noise.log_prob(y, x), noise.log_prob(x, y)
    for name, value in (("log_prob(y, x)", there), ("log_prob(x, y)", back)):
        finite = torch.isfinite(value)
        if value.shape != x.shape[:1] or not bool(finite.all()):
            raise InputError(
                f"{field}: {name} must be finite for y made from x, one number for each row; "
                f"{int((~finite).sum())} of {len(x)} are not (shape {tuple(value.shape)}). Noise must be able to "
                "lead back to the datum"
            )


def _noise(context: Context) -> Any:
    return context.players["noise"]


def _metrics(G: Tensor, E_x: Tensor, E_y: Tensor) -> Metrics:
    size = G.abs()
    return {
        "pair_logit": size.mean(),
        "saturated": (size > SATURATED).to(G.dtype).mean(),
        "pair_weight": torch.sigmoid(-G).mean(),
        **gap_metrics(E_x.mean(), E_y.mean()),
    }
