"""Fréchet distance between features: FID where the features are Inception's.

|μ₁ − μ₂|² + tr Σ₁ + tr Σ₂ − 2 tr (Σ₁Σ₂)^½, the squared Wasserstein distance of two Gaussians with the features'
means and covariances. With few images it lies too high: of n images of the same law it is about c/n, which
neither interval nor weights take away. So the number of images and the floor, fresh data at the same number,
belong beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.weights import ess_fraction, require_weight

BLOCK = 4096
"""Rows that are made float64 at once."""
NAMES = {"mean": ("mean", "mu"), "covariance": ("covariance", "sigma"), "upper": ("covariance_upper",)}
"""What arrays of a statistics file may be called, here and in other tools."""


@dataclass(frozen=True)
class Statistics:
    """Mean `(D,)` and covariance `(D, D)` of features in float64, and how many images they are worth.

    Attributes:
        mean: `(D,)`.
        covariance: `(D, D)`, unbiased.
        images: effective number of images behind them; NaN where nobody knows.
    """

    mean: Tensor
    covariance: Tensor
    images: float = math.nan

    @property
    def width(self) -> int:
        """D."""
        return len(self.mean)

    def to(self, device: torch.device | str) -> Statistics:
        """The same on another device."""
        return Statistics(self.mean.to(device), self.covariance.to(device), self.images)

    def root(self) -> Tensor:
        """The symmetric square root of the covariance, by eigenvectors; rounding below zero is zero."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    def save(self, path: Path, **beside: Any) -> None:
        """As an .npz file that `load` reads, the covariance as its upper triangle."""
        rows, columns = np.triu_indices(self.width)
        upper = self.covariance.cpu().numpy()[rows, columns]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, mean=self.mean.cpu().numpy(), covariance_upper=upper, images=self.images, **beside)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """From an .npz file with `mean` and `covariance`, or `mu` and `sigma`; `images` may lie beside them."""
        try:
            with np.load(Path(path).expanduser(), allow_pickle=False) as file:
                there = {own: n for own, names in NAMES.items() for n in names if n in file.files}
                stored = {own: np.asarray(file[n], np.float64) for own, n in there.items()}
                images = float(file["images"]) if "images" in file.files else math.nan
        except Exception as error:  # zipfile and the header parser have errors of their own
            raise InputError(f"fid_statistics: {path} is not a readable .npz file ({error})") from error
        mean = stored.get("mean", np.empty(0))
        D, covariance = mean.size, stored.get("covariance")
        if covariance is None and "upper" in stored and stored["upper"].size == D * (D + 1) // 2:
            covariance = np.zeros((D, D))
            covariance[np.triu_indices(D)] = stored["upper"]
            covariance = covariance + np.triu(covariance, 1).T
        if mean.ndim != 1 or not D or covariance is None or covariance.shape != (D, D):
            raise InputError(
                f"fid_statistics: {path} must hold mean (D,) and covariance (D, D), or mu and sigma, "
                f"got {', '.join(stored)} of the shapes {', '.join(str(np.shape(v)) for v in stored.values())}"
            )
        for name, values in {"mean": mean, "covariance": covariance}.items():
            wrong = 0 if images < 2 else int((~np.isfinite(values)).sum())  # one image has no covariance
            if wrong:
                raise InputError(
                    f"fid_statistics: {name} in {path} must be finite, got {wrong} NaN or infinite of {values.size}"
                )
        return cls(torch.from_numpy(mean), torch.from_numpy(covariance), images=images)


def statistics_of(
    features: Tensor, log_weight: Tensor | None = None, device: torch.device | None = None
) -> Statistics:
    """Mean and unbiased covariance of features, `(N, D)`, weighted where there are weights.

    With normalised weights p: μ = Σpᵢxᵢ and Σ = Σpᵢ(xᵢ − μ)(xᵢ − μ)ᵀ/(1 − Σpᵢ²), which is n − 1 below for equal
    ones. Weights are used as they are: resampling walkers first would add its own noise and copies, and a
    covariance of copies is that of fewer images. Both are worth the effective sample size, which is what
    `images` says. They are made on `device`, by default where the features lie, a block at a time.

    >>> found = statistics_of(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0.0, 0.0, -torch.inf]))
    >>> float(found.mean), round(float(found.covariance), 6), found.images
    (1.0, 2.0, 2.0)
    """
    raw = torch.zeros(len(features)) if log_weight is None else require_weight(log_weight)
    p = torch.softmax(raw.to(device or features.device).double(), 0)
    blocks = list(zip(features.split(BLOCK), p.split(BLOCK), strict=True))
    mean = sum((q @ x.to(q) for x, q in blocks), torch.zeros((), dtype=torch.float64, device=p.device))
    D = features.shape[1]
    covariance = torch.zeros(D, D, dtype=torch.float64, device=p.device)
    for x, q in blocks:
        away = (x.to(q) - mean) * q.sqrt()[:, None]
        covariance += away.T @ away
    images = float(ess_fraction(raw.double())) * len(raw)
    return Statistics(mean, covariance / (1 - p.square().sum()), images)


def frechet_distance(a: Statistics, b: Statistics, root: Tensor | None = None) -> float:
    """|μ_a − μ_b|² + tr Σ_a + tr Σ_b − 2 tr (Σ_aΣ_b)^½, in float64.

    The last trace is the sum of the roots of the eigenvalues of Σ_b^½ Σ_a Σ_b^½, which is symmetric: no product
    of two covariances has to be taken apart, whose eigenvalues rounding makes complex.

    Args:
        a: statistics of some images.
        b: those of others.
        root: `b.root()`, where it is known already.
    """
    if a.width != b.width:
        raise InputError(
            f"fid_statistics: must be of {a.width} features, as the network gives, got {b.width}"
        )
    root = b.root() if root is None else root
    values = torch.linalg.eigvalsh(root @ a.covariance @ root).clamp(min=0)
    squared = (a.mean - b.mean).square().sum()
    return float(squared + a.covariance.trace() + b.covariance.trace() - 2 * values.sqrt().sum())


def needed(width: int) -> int:
    """Images without which a covariance of `width` features has directions that it knows nothing of."""
    return width + 1


def require_images(images: float, width: int, name: str = "images") -> None:
    """Refuse a Fréchet distance of fewer images than its covariance needs."""
    if images < needed(width) - 0.5:
        raise InputError(
            f"{name}: a Fréchet distance of {width} features needs {needed(width)} images or more, whose "
            f"covariance has "
            f"an inverse, got {images:.0f} (effective); draw more, or take KID, which is unbiased at any number"
        )
