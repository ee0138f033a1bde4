"""Log-densities of a continuous flow on two time scales, beside the ODE that carries the log-density along.

The usual way solves one ODE for the state and its log-density together, so each of the two stages of each
Heun step needs a divergence (Section 6 of S. Singh, S. Tu, V. Sindhwani, TMLR 2024). On two time scales the
divergence is taken at a few of the times only. Both start from the same latents, take the same steps and use
the same field, the paper's residual network, after a short training.

Where there is a GPU, also what recording the ODE as a CUDA graph gains: the negatives of one update of ranking NCE
with the small proposal of `rnce-2d`, drawn and scored, and its data scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metastable.core.random import derive, generator
from metastable.core.waiting import unwatched
from metastable.experiments.base import Row
from metastable.proposals import InterpolantFlow, MixtureField, VectorField

from .timing import by_turns, machine, on_cores

RATIOS = {2: 3.0, 20: 6.0}
"""How many times faster, at least, by dimension."""
LARGEST_DIFFERENCE = 0.02
LARGEST_ERROR = 0.01
LEAST_SCALE = 0.25
REPLAYED = 3.0
"""How many times faster a recorded ODE is on a GPU, at least."""

Divergence = Callable[[VectorField, Tensor, "Tensor | None", Tensor], Tensor]


def run(
    *,
    dims: Sequence[int] = (2, 20),
    rows: int = 512,
    steps: int = 375,
    scored: int = 64,
    width: int = 64,
    layers: int = 8,
    training: int = 300,
    rounds: int = 3,
    cores: int | None = 2,
    seed: int = 0,
) -> list[Row]:
    """Speed ratios, how far the log-densities are apart, and how far an exact field's are from the truth.

    Args:
        dims: d.
        rows: draws whose log-density is wanted; what there is to gain grows with them, as launching costs less.
        steps: Heun steps.
        scored: times with a divergence, on two time scales.
        width: of the network.
        layers: of the network.
        training: updates before it is timed.
        rounds: timings of each case.
        cores: CPUs to use.
        seed: of weights, data and latents.
    """
    with on_cores(cores):
        found: list[Row] = []
        for dim in dims:
            target = mixture(dim, seed)
            flow = InterpolantFlow(
                dim, field="residual", width=width, layers=layers, steps=steps, scored=scored
            )
            flow.fit(draws(target, 2000, seed), steps=training, batch=256, seed=seed)
            found += _speed_rows(flow, dim, rows, rounds, seed)
            exact = InterpolantFlow(dim, field=target, steps=steps, scored=scored).double()
            x = draws(target, rows, seed)
            with torch.no_grad():
                error = float((exact.log_prob(x) - target.log_prob(x)).abs().mean())
            found.append(Row(f"log_prob_error/exact_field/d={dim}", error, "<=", LARGEST_ERROR))
        if torch.cuda.is_available():
            found += _replay_rows(rounds, seed)
        return found + machine()


def mixture(dim: int, seed: int) -> MixtureField:
    """A mixture of three Gaussians, the narrowest of standard deviation 0.25, and its exact field."""
    means = torch.randn((3, dim), generator=generator(derive(seed, "means")))
    return MixtureField(means, LEAST_SCALE * torch.tensor([1.0, 1.5, 2.0]))


def draws(target: MixtureField, n: int, seed: int) -> Tensor:
    """Rows of the mixture, `(n, d)`."""
    rng = generator(derive(seed, "draws"))
    own = torch.multinomial(target.log_weights.exp(), n, replacement=True, generator=rng)
    noise = torch.randn((n, target.means.shape[1]), generator=rng)
    return target.means[own] + target.variances[own, None].sqrt() * noise


def with_log_density(
    field: VectorField, z: Tensor, code: Tensor | None, times: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """The augmented ODE d(z, ψ)/dt = (v, −div v) by Heun's rule: the end, and the change of log-density."""
    clocks, change = field.clock(times), z.new_zeros(z.shape[:-1])
    for i, length in enumerate(times.diff()):
        v, rate = field.velocity(z, code, clocks[i]), divergence(field, z, code, clocks[i])
        ahead = z + length * v
        v_ahead = field.velocity(ahead, code, clocks[i + 1])
        change = change - 0.5 * length * (rate + divergence(field, ahead, code, clocks[i + 1]))
        z = z + 0.5 * length * (v + v_ahead)
    return z, change


def own(field: VectorField, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
    """The divergence that the field brings."""
    return field.divergence(x, code, clock)


def by_products(field: VectorField, x: Tensor, code: Tensor | None, clock: Tensor) -> Tensor:
    """The divergence by d vector-Jacobian products, as the paper's reference implementation takes it (App. A)."""
    with torch.enable_grad():
        rows = x.detach().requires_grad_(True)
        v = field.velocity(rows, code, clock)
        columns = (
            torch.autograd.grad(v[..., i].sum(), rows, retain_graph=True)[0] for i in range(x.shape[-1])
        )
        return torch.stack([column[..., i] for i, column in enumerate(columns)]).sum(0)


def one_scale(
    flow: InterpolantFlow, n: int, rng: torch.Generator, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """The draws of `flow.sample_and_log_prob(n, rng)`, with log-densities on one time scale."""
    z = flow._latent(1, n, rng)
    x, change = with_log_density(flow.field, z, None, flow._grid(flow.mean.new_ones(())), divergence)
    return flow._event(x[0]), (flow._base(z) + change)[0]


def _speed_rows(flow: InterpolantFlow, dim: int, rows: int, rounds: int, seed: int) -> list[Row]:
    def rng() -> torch.Generator:
        return generator(derive(seed, "latents"))

    found: dict[str, Tensor] = {}
    cases: dict[str, Callable[[], Any]] = {
        "two": lambda: found.update(two=flow.sample_and_log_prob(rows, rng())[1]),
        "one": lambda: found.update(one=one_scale(flow, rows, rng(), own)[1]),
        "reference": lambda: found.update(reference=one_scale(flow, rows, rng(), by_products)[1]),
    }
    with torch.no_grad():
        cases["two"]()  # warm
        times = by_turns({name: cases[name] for name in ("two", "one")}, rounds)
        once = by_turns({name: cases[name] for name in ("two", "reference")}, 1)  # half a minute each
    apart = max(float((found[name] - found["two"]).abs().max()) for name in ("one", "reference"))
    required = (">=", RATIOS[dim]) if dim in RATIOS else (None, None)
    return [
        Row(f"speed_ratio/d={dim}", times.ratio("one", "two"), *required),
        Row(f"speed_ratio/vector_jacobian_products/d={dim}", once.ratio("reference", "two")),
        Row(f"log_prob_difference/d={dim}", apart, "<=", LARGEST_DIFFERENCE),
        *(Row(f"seconds/{name}/d={dim}", times.median(name)) for name in times.seconds),
    ]


def _replay_rows(rounds: int, seed: int, updates: int = 50) -> list[Row]:
    """One flow whose ODE is recorded, and one with the same weights whose ODE is launched kernel by kernel."""
    flow = InterpolantFlow(2, 1, layers=3, steps=16, scored=9, seed=seed).cuda()
    plain = InterpolantFlow(2, 1, layers=3, steps=16, scored=9, replay=False, seed=seed).cuda()
    rng = generator(derive(seed, "replay"), "cuda")
    x, given = (torch.randn((128, d), generator=rng, device="cuda") for d in (2, 1))

    def draw(flow: InterpolantFlow) -> None:
        with torch.no_grad(), unwatched():
            for _ in range(updates):
                flow.sample_and_log_prob(9, rng, given)
                flow.log_prob(x, given)
        torch.cuda.synchronize()

    for each in (flow, plain):
        draw(each)  # warm
    times = by_turns({"launched": lambda: draw(plain), "recorded": lambda: draw(flow)}, rounds)
    return [
        Row("speed_ratio/recorded", times.ratio("launched", "recorded"), ">=", REPLAYED),
        *(Row(f"milliseconds/{name}", 1e3 * times.median(name) / updates) for name in times.seconds),
    ]
