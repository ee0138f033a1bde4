"""Which Ψ for Bregman ratio matching? Chapter 6 of the AdaNCE thesis asks; here with fixed noise and with its own.

With a fixed noise p_n every strictly convex Ψ has the same optimum (4.8), so what Ψ decides is the variance. For a
normal model of normal data that variance is known: with s = ∇_θ log p̃_θ (log Z among the parameters), g = p/p_n
and w = Ψ″(g)g, the minimum of (4.8) over n data and n noise samples has covariance I⁻¹ΣI⁻¹/n with

    I = E_p[w ssᵀ],   Σ = Cov_p[w s] + Cov_n[w g s],

by quadrature. It is measured over many samples, and held against that where fourth moments are finite too. Then the
same Ψ train networks on a pinwheel, against a Gaussian noise and in self-adapting form (AdaBRM, 4.10), where
KL(data ‖ model) is known by quadrature too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metastable.core.random import derive, generator
from metastable.kernels import MALA
from metastable.methods import NCE, AdaptiveNCE, Bregman, Method, PersistentCD
from metastable.methods.bregman import as_bregman
from metastable.report.figures import palette, picture

from .adance_chains import on_pinwheel
from .base import Bench, Experiment, Row
from .rnce_line import log_normal
from .trials import Arm, by_scale, mean

GRID = torch.linspace(-12, 12, 4801, dtype=torch.float64)
PSIS: dict[str, str | Callable[[Tensor], Tensor]] = {
    "nce": "nce",
    "kl": "kl",
    "squared": "squared",
    "root": lambda u: -4 * u.sqrt(),
}
"""Names and functions; the last one, Ψ = −4√u, is a user's; data above the noise weigh little."""


CLOSED = {
    "nce": Bregman("nce", softplus, lambda log_g: -softplus(-log_g)),
    "root": Bregman("root", lambda log_g: 2 * (0.5 * log_g).exp(), lambda log_g: -2 * (-0.5 * log_g).exp()),
}
"""S₀ and S₁ that Newton's method can differentiate twice for many samples at once; 2√g and −2/√g for Ψ = −4√u."""


def bregman_of(name: str) -> Bregman:
    """Of a Ψ by name."""
    return CLOSED.get(name) or as_bregman(PSIS[name])


# ---- a normal model: the variance of each Ψ


def model(theta: Tensor, x: Tensor) -> Tensor:
    """log p̃_θ of θ = (μ, log σ, c), `(…, 3)` and `(…, n)`: c stands for what log Z is off by, 0 at the truth."""
    mu, log_sigma, c = theta[..., :1], theta[..., 1:2], theta[..., 2:]
    return log_normal(x, mu, log_sigma) - c


def predicted(bregman: Bregman, width: float) -> Tensor:
    """I⁻¹ΣI⁻¹, `(3, 3)`, for data N(0, 1) and noise N(0, width²)."""
    x = GRID
    log_p, log_n = (log_normal(x, 0.0, torch.tensor(w).double().log()) for w in (1.0, width))
    s = torch.stack([x, x.square() - 1, -torch.ones_like(x)], 1)
    of_noise, of_data = bregman.weights(log_p - log_n, log_p - log_n)  # w g and w
    p, n = log_p.exp(), log_n.exp()

    def expected(values: Tensor) -> Tensor:
        return torch.trapezoid(values, x, dim=0)

    def covariance(rows: Tensor, density: Tensor) -> Tensor:
        middle = expected(density[:, None] * rows)
        second = expected((density[:, None, None] * rows[:, :, None]) * rows[:, None, :])
        return second - torch.outer(middle, middle)

    inner = expected((p * of_data)[:, None, None] * s[:, :, None] * s[:, None, :])
    spread = covariance(of_data[:, None] * s, p) + covariance(of_noise[:, None] * s, n)
    inverse = torch.linalg.inv(inner)
    return inverse @ spread @ inverse


def is_reached(bregman: Bregman, width: float) -> bool:
    """Whether samples come near `predicted`: fourth moments of w s and w g s are finite.

    Where only second ones are, few samples hold most of the variance, and thousands of them do not show it: of
    Ψ = −4√u with noise from √2 times as wide as the data on.
    """
    log_p, log_n = (log_normal(GRID, 0.0, torch.tensor(w).double().log()) for w in (1.0, width))
    of_noise, of_data = bregman.weights(log_p - log_n, log_p - log_n)
    terms = [log_p + 4 * of_data.log(), log_n + 4 * of_noise.log()]
    return all(bool(t[[0, -1]].max() < t.max() - 10) for t in terms)


def minimised(bregman: Bregman, data: Tensor, noise: Tensor, width: float, steps: int = 25) -> Tensor:
    """θ̂ of (4.8) for each row of `data` and `noise`, `(R, n)`, by Newton's method from the truth; `(R, 3)`."""
    log_n = [log_normal(x, 0.0, torch.tensor(width).double().log()) for x in (data, noise)]
    theta = data.new_zeros(len(data), 3)

    def loss(at: Tensor, x: Tensor, y: Tensor, log_x: Tensor, log_y: Tensor) -> Tensor:
        return bregman.loss(model(at, y) - log_y, model(at, x) - log_x)

    rows = (data, noise, *log_n)
    slope = torch.func.vmap(torch.func.grad(loss))
    curvature = torch.func.vmap(torch.func.hessian(loss))
    for _ in range(steps):
        step = torch.linalg.solve(curvature(theta, *rows), slope(theta, *rows)[..., None])[..., 0]
        theta = theta - step.clamp(-0.3, 0.3)
        if float(step.abs().max()) < 1e-9:
            break
    return theta


def samples(bench: Bench, width: float) -> tuple[Tensor, Tensor]:
    """Data and noise of every repeat, `(samples, n)`; for all Ψ the same."""
    rng, shape = generator(derive(bench.seed, "noise", width)), (bench.samples, bench.n)
    data, noise = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    return data, width * noise


def variances(bench: Bench) -> dict[tuple[str, float], tuple[Tensor, Tensor]]:
    """For each Ψ and width of the noise, n times the variances of (μ̂, log σ̂, ĉ): measured, and predicted."""
    cases = [(name, width) for width in bench.widths for name in PSIS if name in bench.psis]

    def measured(name: str, width: float) -> Tensor:
        make = lambda: minimised(bregman_of(name), *samples(bench, width), width)  # noqa: E731
        theta, _ = bench.finished.once(f"{name}, noise {width:g}", make)
        bench.say(f"{name}, noise {width:g}: {(found := bench.n * theta.square().mean(0)).tolist()}")
        return found

    each = bench.finished.each([partial(measured, *case) for case in cases])
    return {
        (name, width): (found, predicted(bregman_of(name), width).diagonal())
        for (name, width), found in zip(cases, each, strict=True)
    }


# ---- networks on a pinwheel


def arms(bench: Bench) -> list[Arm]:
    """Each Ψ against a Gaussian noise, and against its own frozen copy at each interval."""
    chains = PersistentCD(walkers=bench.walkers, kernel=MALA(0.03), steps=bench.langevin, rejuvenation=0.1)
    made: list[Arm] = []
    for name in bench.psis:
        psi: Any = PSIS[name]
        each: dict[str, Method[Any]] = {
            "fixed": NCE(noise="gaussian", noise_ratio=bench.noise_ratio, psi=psi)
        }
        each |= {f"K={K}": AdaptiveNCE(chains, psi=psi, interval=K) for K in bench.intervals}
        made += [Arm(f"{name}/{label}", method) for label, method in each.items()]
    return made


def body(bench: Bench) -> list[Row]:
    """Networks, and variances of a normal model."""
    network = lambda seed: {"name": "mlp", "hidden": bench.hidden}  # noqa: E731
    # clipped: a ratio that is far from 1 at first may weigh one row above all others
    found = on_pinwheel(bench, arms(bench), network, clip_grad_norm=1.0)
    measured = variances(bench)
    draw(bench, measured)
    rows = variance_rows(bench, measured)
    for name, trials in found.items():
        kls = [t.kept for t in trials if t.kept is not None]
        rows.append(Row(f"kl/{name}", mean(kls) if kls else math.inf))
        rows.append(Row(f"runs_stopped/{name}", float(len(trials) - len(kls))))
    return rows


def variance_rows(bench: Bench, measured: dict[tuple[str, float], tuple[Tensor, Tensor]]) -> list[Row]:
    """How far measured variances are from the theory, where that is finite; and the price of each Ψ."""
    rows = []
    for (name, width), (found, theory) in measured.items():
        off = float((found / theory - 1).abs().max())
        reached = width in bench.judged and is_reached(bregman_of(name), width)
        judged = ("<=", bench.tolerance) if reached else (None, None)
        rows.append(Row(f"variance_off_theory/{name}/noise={width:g}", off, *judged))
        for label, got, want in zip(("mu", "log_sigma", "log_z"), found, theory, strict=True):
            rows.append(Row(f"variance/{label}/{name}/noise={width:g}", float(got), oracle=float(want)))
    return rows


def draw(bench: Bench, measured: dict[tuple[str, float], tuple[Tensor, Tensor]]) -> None:
    """Theory as lines over the noise's width, measurements as dots, for each parameter."""
    widths = torch.linspace(min(bench.widths), max(bench.widths), 60).tolist()
    with picture(bench.folder / "variance.png", 10, 3.2, columns=3) as axes:
        for name, colour in zip(bench.psis, palette, strict=False):
            bregman = bregman_of(name)
            lines = torch.stack([predicted(bregman, w).diagonal() for w in widths])
            for k, axis in enumerate(axes):
                axis.plot(widths, lines[:, k], color=colour, lw=1.4, label=name)
                dots = [measured[name, w][0][k] for w in bench.widths]
                axis.plot(bench.widths, dots, "o", color=colour, ms=4)
        for axis, title in zip(axes, ("μ̂", "log σ̂", "log Z"), strict=True):
            axis.set(title=f"n · Var({title})", xlabel="standard deviation of the noise", yscale="log")
        axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="bregman-psi",
    title="Which Ψ: the variance of Bregman ratio matching against theory, and networks (Chapters 4 and 6)",
    paper="Nathaniel Xu, Self-adapting noise-contrastive estimation for energy-based models, 2022, Chapters 4, 6",
    scales=by_scale(
        {"noise_ratio": 1.0, "langevin": 10},
        psis=(("nce", "kl"), tuple(PSIS)),
        widths=((1.5,), (1.2, 1.5, 2.0, 3.0)),
        judged=((1.5,), (1.2, 1.5, 2.0)),
        n=(1000, 2000),
        samples=(200, 2000),
        tolerance=(0.4, 0.15),
        intervals=((20,), (1, 20)),
        rows=(2000, 5000),
        hidden=((32, 32), (64, 64)),
        walkers=(128, 256),
        steps=(40, 1200),
        rate=(1e-2, 5e-3),
        repeats=(1, 3),
    ),
    body=body,
)
