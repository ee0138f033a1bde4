"""Chains of any energy, and walkers that go on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import InputError, UnsupportedError, require_count
from metastable.core.memory import in_rows_that_fit, rows_in_words, within_memory
from metastable.core.parts import home_of
from metastable.core.protocols import event_shape_of
from metastable.core.random import derive, generator
from metastable.core.types import Bound, Energy, Proposal, Walkers, as_shape
from metastable.data import check_data
from metastable.energies import check_energy, inside_walls
from metastable.kernels import Gibbs, Kernel, run_chain, warm_up
from metastable.kernels.base import require_kernel
from metastable.kernels.engine import choose
from metastable.walkers.continuing import continue_walkers
from metastable.walkers.space import space_of

STARTS_AGAIN = 20
"""How often starts of chains are drawn again while some lie where the energy is +inf."""


def sample(
    energy: Energy,
    n: int,
    *,
    kernel: Kernel | None = None,
    steps: int = 1000,
    init: Tensor | np.ndarray | Proposal | None = None,
    event_shape: int | tuple[int, ...] | None = None,
    warmup: int = 0,
    seed: int = 0,
    engine: str = "auto",
    record: int = 0,
) -> Walkers:
    """`n` chains of `steps` steps, run together.

    Args:
        energy: any callable `(B, *event) → (B,)`.
        n: chains.
        kernel: by default MALA with a warmed-up step size, or Gibbs for a discrete energy.
        steps: steps of each chain.
        init: positions `(m, *event)` to start from (drawn with replacement if m is not n), a proposal, or
            None for a standard normal (random signs for a discrete energy), in which case `event_shape` or the
            energy's own says the shape. Where the energy is +inf no chain can begin: draws are made again,
            positions are refused.
        event_shape: shape of one event, or its dimension.
        warmup: steps of step-size adaptation before the chains proper, whose moves are thrown away.
        seed: of every random number.
        engine: how chains run, as `run_chain` takes it.
        record: keep every `record`-th position in `.trace`, for `.to_arviz()`.

    Returns:
        Walkers with `.x`, equal weights, and `.info`: `acceptance`, `distance` (RMS move of a step), `kernel`
        (with its final step size), `temperature`, the temperature at which the chain really samples, and `engine`,
        with why it is not a faster one.

    >>> import metastable as ms
    >>> w = ms.sample(ms.energies.DoubleWell(), 100, kernel=ms.kernels.MALA(step_size=0.05), steps=20)
    >>> w.x.shape, w.info["temperature"]
    (torch.Size([100, 1]), 1.0)
    """
    require_count("n", n)
    rng_seed = derive(seed, "sample")
    held = {"n": n} | ({"steps/record": steps // record} if record else {})
    with within_memory("sampling", lambda: f"{n} chains", held):
        x = _inside(energy, n, init, event_shape, rng_seed)
        rng = generator(rng_seed, x.device)
        check_energy(energy, x, walls=True)
        if kernel is None:
            space = space_of(energy)
            kernel, warmup = space.sampler, warmup or space.warmup
        require_kernel("kernel", kernel)
        with in_rows_that_fit(energy, x):
            if warmup:
                kernel, state = warm_up(kernel, energy, x, warmup, rng)
            else:
                state = kernel.init(energy, x)
            began = time.perf_counter()
            result = run_chain(kernel, energy, state, steps, rng, engine=engine, record=record)
    if not torch.isfinite(result.state.x).all():
        raise InputError(
            f"kernel.step_size: chains left every finite region with {kernel}; try a smaller step_size, MALA, "
            "or warmup=200"
        )
    info = {
        "acceptance": float(result.info.acceptance.mean()),
        "distance": float(result.info.moved.mean().sqrt()),
        "kernel": kernel,
        "temperature": kernel.temperature,
        "engine": str(choose(kernel, energy, x, steps, engine)),
        "seconds": time.perf_counter() - began,
    }
    return Walkers.equal(result.state.x, info=info, trace=result.trace)


def _inside(energy: Any, n: int, init: Any, event_shape: Any, seed: int) -> Tensor:
    """Starts of chains where the energy is not +inf; draws that fall outside such a region are drawn again."""
    x = starts_of(energy, n, init, event_shape, seed)
    inside = inside_walls(energy, x)
    if bool(inside.all()):
        return x
    if not (init is None or isinstance(init, Proposal)):
        raise InputError(
            f"init: the energy is +inf on {int((~inside).sum())} of {len(x)} starts, where no chain can begin; "
            "give positions inside the region where it is finite"
        )
    found = [x[inside]]
    for k in range(STARTS_AGAIN):
        x = starts_of(energy, max(n, 512), init, event_shape, derive(seed, "again", k))
        found.append(x[inside_walls(energy, x)])
        if sum(map(len, found)) >= n:
            return torch.cat(found)[:n]
    rows = torch.cat(found)
    if not len(rows):
        drawn = "a standard normal" if init is None else "init"
        raise InputError(
            f"init: the energy is +inf on every draw of {drawn}; give positions where it is finite"
        )
    return rows[torch.arange(n, device=rows.device) % len(rows)]


def starts_of(energy: Any, n: int, init: Any, event_shape: Any, seed: int) -> Tensor:
    """Where chains begin, in the dtype and on the device of the energy."""
    rng = generator(derive(seed, "init"))
    if init is None:
        shape = event_shape if event_shape is not None else event_shape_of(_module_of(energy))
        if shape is None:
            raise InputError("init: give starting positions, or event_shape (an integer or a shape)")
        shape = as_shape(shape)
        return space_of(energy).starts(n, shape, rng).to(home_of(_module_of(energy)))
    if isinstance(init, Proposal):
        return init.sample(n, generator(derive(seed, "init"), home_of(init).device))
    dtype = init.dtype if isinstance(init, Tensor) and init.is_floating_point() else torch.float32
    rows = torch.as_tensor(np.asarray(init) if not isinstance(init, Tensor) else init)
    x = check_data(torch.cat([rows, rows]) if len(rows) == 1 else rows, "init", dtype=dtype)[: len(rows)]
    return x.clone() if len(x) == n else x[torch.randint(len(x), (n,), generator=rng).to(x.device)]


def _module_of(energy: Any) -> Any:
    """The module behind an energy that is given labels or contexts; any other energy itself."""
    return energy.energy if isinstance(energy, Bound) else energy


def continue_sampling(
    energy: Energy,
    walkers: Walkers,
    n: int,
    *,
    steps: int = 100,
    step_size: float | None = None,
    seed: int = 0,
) -> Walkers:
    """Sampling that goes on from weighted walkers, with as many as you like, and keeps what the weights say.

    `n` walkers are drawn in proportion to the weights, systematically and side by side, so that modes keep their
    masses; then they move by MALA, whose accept step leaves exp(−E) invariant. Their weights are therefore equal
    and stay so. Each walker draws a step size for each move from a range that a warm-up found, short enough for
    the narrowest region and long enough for the widest. A discrete energy's walkers move by Gibbs sweeps.

    Args:
        energy: the model.
        walkers: weighted samples of it, e.g. `run.walkers`.
        n: how many.
        steps: moves of each walker, or Gibbs sweeps.
        step_size: one for all moves instead of the range; a discrete energy has none.
        seed: of every random number.

    Returns:
        Walkers of equal weight. `.ess` is never more than the effective size of `walkers`, which is
        `.info["start_ess"]`: moves that cross between modes are rare, so the masses of modes are known no better
        than they were. `.info` also has `kernel`, `step_sizes` (the range) and `acceptance`.

    >>> import metastable as ms
    >>> energy = ms.energies.GaussianMixture(torch.tensor([[-5.0], [5.0]]), torch.tensor([0.02, 1.0]))
    >>> start = ms.Walkers.equal(energy.sample(1000, torch.Generator().manual_seed(0)))
    >>> w = continue_sampling(energy, start, 4000, steps=20)
    >>> round(w.ess), abs(float((w.x < 0).double().mean() - (start.x < 0).double().mean())) < 0.001
    (1000, True)
    """
    require_count("n", n)
    if walkers.log_weight.dim() > 1:
        raise InputError("walkers: these belong to several contexts; take those of one, walkers.of(i)")
    rng = generator(derive(seed, "continue"), walkers.x.device)
    held = lambda: f"{n} chains from {rows_in_words(walkers.x, 'walkers')}"  # noqa: E731
    with within_memory("sampling", held, {"n": n}):
        if space_of(energy).has_volume:
            with in_rows_that_fit(energy, walkers.x[:1].expand(n, *walkers.x.shape[1:])):
                return continue_walkers(energy, walkers, n, steps, step_size, rng)
        if step_size is not None:
            raise UnsupportedError(f"step_size: Gibbs sweeps of a discrete energy have none, got {step_size}")
        start = walkers.resampled(n, seed=derive(seed, "resample"))
        moved = run_chain(Gibbs(), energy, Gibbs().init(energy, start.x), steps, rng)
    return Walkers.equal(moved.state.x, info={"kernel": Gibbs(), "start_ess": walkers.ess})
