"""Chunks of actions from a conditional run: draws, energies, and chains that know how actions vary together.

A chunk is smooth, so that its covariance given a context has a condition number of 10⁵ and more, and a chain with
one step size for all numbers hardly moves. Chains therefore move v with x = Lv, where LLᵀ = C is the covariance of
the proposal's draws given a context, averaged over contexts. L and the step size are found once, by `settle`.

The first numbers of a chunk can be frozen, so that it joins the one before. With p the frozen numbers and r the
others, draws are moved to x_r + C_rp C_pp⁻¹ (p − x_p), which is exact for a Gaussian, and chains move x_r = L_r v
on E([p, x_r] | context), where L_r L_rᵀ = C_rr − C_rp C_pp⁻¹ C_pr.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from metastable.core.configure import build_tagged
from metastable.core.errors import InputError, require
from metastable.core.protocols import Encoding, StepwiseSolved, has_time, is_costly, provides
from metastable.core.random import derive, generator
from metastable.core.types import Bound, Walkers, bind
from metastable.core.units import Units
from metastable.energies.normalised import AsEnergy
from metastable.kernels import KERNELS, MALA, Kernel
from metastable.kernels.adaptation import warm_up_each
from metastable.methods import Density
from metastable.methods.conditional_chains import run_chains
from metastable.methods.conditional_tuning import forget_tuning
from metastable.methods.draw_pool import OnDensity
from metastable.proposals.given import is_conditional, sample_given
from metastable.runs.model import Model
from metastable.runs.run import Run

RANKS = ("energy", "network", "weights")
"""By what a policy may choose among candidates; the last two are of energies on their proposal."""
RIDGE = 1e-6
"""Variance that every direction is given at least, as a share of the mean variance of a number."""
DRAWS, CONTEXTS = 32, 64
"""Draws for each context, and contexts, behind the covariance and the step size."""
PILOTS, WARM_UP, FIRST = 8, 100, 0.1
"""Chains for each context that find the step size, their steps, and where it begins, in units of v."""
IDLE = "left out for a density, and for an energy on one: no chain moves their draws"
UNSETTLED = (
    "which one that was fitted as a density or with steps=0 has not: fit it with freeze, or for chains with steps, "
    "above 0, whose number can be changed later, or call settle(contexts)"
)


@runtime_checkable
class ActionModel(Protocol):
    """What a policy asks of a model: chunks as vectors `(B, n, D)`, given packed contexts `(B, c)`.

    `has_chains` says whether draws can be moved on the energy: those of a density need not, and where an energy is
    an ODE solved they are ranked as they are.
    """

    has_chains: bool

    def draw(self, contexts: Tensor, n: int, seed: int) -> Tensor:
        """`n` chunks for each context, `(B, n, D)`."""
        ...

    def energy(self, x: Tensor, contexts: Tensor) -> Tensor:
        """E of each of them, `(B, n)`: low is likely, up to a constant for each context."""
        ...

    def move(
        self, x: Tensor, contexts: Tensor, steps: int, seed: int, frozen: Tensor | None = None
    ) -> Tensor:
        """Chunks after `steps` moves of a chain, the first numbers of each held at `frozen`, `(B, p)`."""
        ...


@runtime_checkable
class DrawsWithEnergy(Protocol):
    """What a model may offer beside: chunks that come with their energies, where no chain moves them."""

    def draw_with_energy(self, contexts: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """`n` chunks for each context, `(B, n, D)`, and E of each; None where these are not to be had at once."""
        ...


class RunActions:
    """The model of a conditional run: ranking and interpolating energies, implicit cloning, flows and diffusions.

    Args:
        run: trained on rows of `Windows.dataset`.
        algorithm: 2 draws from the run's proposal, from where chains may move; 4 draws by the run's own sampler,
            the three stages of an interpolating energy. A density has its own draws either way.
        covariance: C, from `settle`.
        step_size: of the chains, in units of v, from `settle`.
        rank: `energy`, or `network` for that part alone of an energy on its proposal: how much likelier a chunk is
            than the proposal says, which costs no density; `weights` is the same here.
        kernel: of the chains, or a table of it such as `{"name": "ula", "step_size": 1e-4}`; it moves u, the chunks
            as the run was trained on them. None for MALA on v, and for what the run's own sampler takes.
        sampler_step: of the run's own sampler where it would look for one, from `settle`: what it found for one
            context would depend on those before.
        ode: Heun steps of a flow or diffusion that draws; None for those that it was trained with. Densities below
            an energy on its proposal keep theirs.
        options: of `Run.sample`, for algorithm 4.
    """

    def __init__(
        self,
        run: Run,
        algorithm: int = 2,
        covariance: Tensor | None = None,
        step_size: float | None = None,
        rank: str = "energy",
        kernel: Mapping[str, Any] | Kernel | None = None,
        sampler_step: float | None = None,
        ode: int | None = None,
        **options: Any,
    ):
        if not run.conditional or len(run.event_shape) != 1:
            raise InputError("run: a policy needs one of chunks given contexts; see Windows.dataset")
        require(algorithm in (2, 4), "algorithm", "2 or 4", algorithm)
        stands = provides(run.model.energy, OnDensity)
        rule = "'energy', or 'weights' or 'network' for an energy on its proposal"
        require(rank == "energy" or (rank in RANKS and stands), "policy.rank", rule, rank)
        self.rank = rank
        self.how = {
            "rank": rank,
            "algorithm": algorithm,
            "kernel": kernel,
            "ode": ode,
            "sampling": {**options},
        }
        named = isinstance(kernel, Mapping)
        self.kernel: Any = build_tagged(KERNELS, kernel, "policy.kernel") if named else kernel
        if algorithm == 4 and self.kernel is not None:
            options["kernel"] = self.kernel
        self.run, self.options, self.algorithm = run, options, algorithm
        self.model = run.model if ode is None else solved_in(run.model, ode)
        self.covariance, self.step_size, self.sampler_step = covariance, step_size, sampler_step
        self.free: dict[Hashable, tuple[FreeActions, Tensor]] = {}
        self.units = None if run.coordinates is None else run.coordinates.events
        self.density = isinstance(run.trained_with, Density)
        self.has_chains = not self.density and not is_costly(self.model.energy)  # whose gradient is an ODE's
        self.time = None if self.density or not has_time(self.model.energy) else 1.0
        known = stands or self.density or {"kernel", "eta", "tune"} & set(options)
        self.tunes = algorithm == 4 and not known
        self.blind = self.has_chains and not is_conditional(self.model.players.get("proposal"))

    def acting(self, run: Run, **changed: Any) -> RunActions:
        """A run by others of the settings `how`, with what was settled."""
        how: dict[str, Any] = {**self.how, **changed}
        found = {name: vars(self)[name] for name in ("covariance", "step_size", "sampler_step")}
        return RunActions(run, **found, **how.pop("sampling"), **how)

    def refuse_idle(self, asked: Mapping[str, Any]) -> None:
        """Refuse settings of chains that are asked for where no chain moves what is drawn."""
        names = ("steps", "kernel") if self.density or self.algorithm == 2 else ("steps",)
        for name in () if self.has_chains else names:
            require(not asked.get(name), f"policy.{name}", IDLE, asked.get(name))

    def refuse_options(self) -> None:
        """Refuse options that the run's own sampler does not take."""
        if self.density or self.algorithm == 4:
            self.model.refuse_options(self.options)

    @torch.no_grad()
    def draw(self, contexts: Tensor, n: int, seed: int) -> Tensor:
        """`n` chunks for each context, `(B, n, D)`."""
        if self.density or self.algorithm == 4:
            return self._sampled(contexts, n, seed).x.to(self.model.home)
        given = self.model.as_contexts(contexts)
        rng = generator(derive(seed, "draw actions"), given.device)
        u = sample_given(self.model.players["proposal"], n, rng, given)
        return (u if self.units is None else self.units.inverse(u)).to(self.model.home)

    def draw_with_energy(self, contexts: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """The chunks of `draw` and their energies, `(B, n)`, of a flow or diffusion: its ODE is solved once."""
        if not self.density:
            return None
        made = self.model.given(contexts).sample_and_log_prob(n, seed=seed)
        return None if made is None else (made[0].to(self.model.home), -made[1])

    def _sampled(self, contexts: Tensor, n: int, seed: int) -> Walkers:
        """By the run's own sampler."""
        fixed = self.tunes and self.sampler_step is not None
        own = {"kernel": MALA(self.sampler_step)} if fixed else {}  # pyright: ignore
        return self.model.given(contexts).sample(n, seed=seed, **own, **self.options)

    @torch.no_grad()
    def energy(self, x: Tensor, contexts: Tensor) -> Tensor:
        """E of each chunk, `(B, n)`."""
        u = (x if self.units is None else self.units.forward(x)).to(self.model.home)
        ranking: Any = self.model.energy if self.rank == "energy" else self.model.energy.network
        target = bind(ranking, self.model.as_contexts(contexts), self.time)
        return target(u.flatten(0, 1)).view(x.shape[:2])

    def settle(self, contexts: Tensor, seed: int = 0, chains: bool = True) -> RunActions:
        """The same with a covariance and step sizes, found from `CONTEXTS` of these contexts, `(n, c)`.

        Args:
            contexts: of the demonstrations.
            seed: of everything random.
            chains: whether draws will be moved, for which a step size is needed.
        """
        rows = torch.randperm(len(contexts), generator=generator(derive(seed, "settle")))[:CONTEXTS]
        contexts = contexts[rows.to(contexts.device)]
        found = copy.copy(self)
        if self.tunes:
            forget_tuning(self.model.energy)
            found.sampler_step = None
            sampled = found._sampled(contexts, DRAWS, seed)
            x, step = sampled.x.to(self.model.home), sampled.info.get("step_size")  # none of a flow's own
            found.sampler_step = None if step is None else float(step.median())
        else:
            x = self.draw(contexts, DRAWS, seed)
        found.covariance, found.free = pooled_covariance(x), {}
        if chains and found.has_chains and self.kernel is None:
            target, root = found._target(contexts, x[:, 0, :0])
            v = whitened(x[:, :PILOTS], root).flatten(0, 1)
            rng = generator(derive(seed, "settle chains"), x.device)
            each = warm_up_each(MALA(), target, v, WARM_UP, rng, v.new_full((len(contexts),), FIRST))
            found.step_size = float(each.step_size.median())
        return found

    def move(
        self, x: Tensor, contexts: Tensor, steps: int, seed: int, frozen: Tensor | None = None
    ) -> Tensor:
        """Chunks after `steps` moves of MALA on E(· | context), `(B, n, D)`; a density's stay where they are."""
        x = x.to(self.model.home)
        fixed = x[:, 0, :0] if frozen is None else frozen.to(x)
        p = fixed.shape[1]
        if p:
            x = joined(x, fixed, self._settled())
        if not self.has_chains or not steps:
            return x
        if self.kernel is not None:
            return self._move_plainly(self.kernel, x, contexts, steps, seed, p)
        target, root = self._target(contexts, fixed)
        if self.step_size is None:  # what was settled for frozen actions alone has none
            raise InputError(f"policy: chains need a step size, {UNSETTLED}")
        v = whitened(x[..., p:], root)
        rng = generator(derive(seed, "move actions"), x.device)
        moved, _ = run_chains(target, v.flatten(0, 1), MALA(self.step_size), steps, rng, "auto")
        return torch.cat([x[..., :p], moved.view(v.shape) @ root.to(v).T], -1)

    def _move_plainly(
        self, kernel: Kernel, x: Tensor, contexts: Tensor, steps: int, seed: int, frozen: int
    ) -> Tensor:
        """Algorithm 2 as it is written: `steps` moves of one kernel for all numbers and contexts."""
        require(frozen == 0, "policy.freeze", "0 with a kernel, which moves whole chunks", frozen)
        target = bind(self.model.energy, self.model.as_contexts(contexts), self.time)
        u = (x if self.units is None else self.units.forward(x)).to(self.model.home)
        rng = generator(derive(seed, "move actions"), x.device)
        moved, _ = run_chains(target, u.flatten(0, 1), kernel, steps, rng, "auto")
        moved = moved.view(u.shape)
        return (moved if self.units is None else self.units.inverse(moved)).to(x)

    def _settled(self) -> Tensor:
        if self.covariance is None:
            raise InputError(f"policy: chains and frozen actions need the actions' covariance, {UNSETTLED}")
        return self.covariance

    def _target(self, contexts: Tensor, frozen: Tensor) -> tuple[Bound, Tensor]:
        """E of v given contexts and frozen numbers, and L.

        The energy is made once for each number of frozen ones, and anew where the model has another or has moved:
        what is recorded of it serves all later chunks.
        """
        p, given, inner = frozen.shape[1], self.model.as_contexts(contexts), self.model.energy
        key = (p, self.model.home.dtype, self.model.home.device)
        if key not in self.free or self.free[key][0].inner is not inner:
            kind = EncodedFreeActions if provides(inner, Encoding) else FreeActions
            with torch.inference_mode(False), torch.no_grad():  # it may serve outside of inference mode
                root = free_root(self._settled(), p)
                self.free[key] = kind(inner, self.units, root.to(self.model.home), p), root  # pyright: ignore
        energy, root = self.free[key]
        return bind(energy, torch.cat([given, frozen.to(given)], 1), self.time), root


class FreeActions(nn.Module):
    """E of v: the numbers of a chunk that are free, x_r = Lv, where its first ones are given with the context.

    Args:
        inner: E(u | given) in the units of training.
        units: those of u; None where they are the data's own.
        root: L.
        frozen: how many numbers are given, behind the context.
    """

    root: Tensor

    def __init__(self, inner: nn.Module, units: Units | None, root: Tensor, frozen: int):
        super().__init__()
        self.inner, self.units, self.frozen = inner, units, frozen
        self.register_buffer("root", root)
        self.event_shape = (len(root),)
        self.time = has_time(inner)

    def forward(self, v: Tensor, given: Tensor, t: Tensor | None = None) -> Tensor:
        """E, `(B, K, r)` to `(B, K)`; `given` are contexts with the frozen numbers behind them."""
        cut = given.shape[1] - self.frozen
        return self.inner(self.chunks(v, given[:, cut:]), given[:, :cut], *(() if t is None else (t,)))

    def chunks(self, v: Tensor, frozen: Tensor) -> Tensor:
        """u of whole chunks, `(B, K, D)`."""
        x = torch.cat([frozen[:, None].expand(-1, v.shape[1], -1), v @ self.root.T], -1)
        return x if self.units is None else self.units.forward(x).to(v)


class EncodedFreeActions(FreeActions):
    """The same for an energy that encodes its contexts once."""

    def encode(self, given: Tensor) -> Tensor:
        """Codes of the contexts with the frozen numbers behind them, `(B, …)` flattened."""
        cut = given.shape[1] - self.frozen
        code = self.inner.encode(given[:, :cut])  # pyright: ignore
        self.code_shape = code.shape[1:]
        return torch.cat([code.flatten(1), given[:, cut:].to(code)], 1)

    def score(self, v: Tensor, code: Tensor, t: Tensor | None = None) -> Tensor:
        """E for encoded contexts, `(B, K, r)` to `(B, K)`."""
        cut = code.shape[1] - self.frozen
        inner = code[:, :cut].unflatten(1, self.code_shape)
        return self.inner.score(self.chunks(v, code[:, cut:]), inner, t)  # pyright: ignore


def solved_in(model: Model, steps: int) -> Model:
    """The same model, the weights shared, its flow or diffusion solved in so many Heun steps."""

    def part(found: Any) -> Any:
        if isinstance(found, AsEnergy):
            inner = part(found.proposal)
            return found if inner is found.proposal else AsEnergy(inner)
        return found.with_steps(steps, found.scored) if provides(found, StepwiseSolved) else found

    players = {"energy": model.energy, **model.players}
    solved = {name: part(player) for name, player in players.items()}
    known = any(solved[name] is not players[name] for name in players)
    require(known, "policy.ode", "left out for a model whose draws solve no ODE", steps)
    return replace(model, energy=solved["energy"], players=solved)


def pooled_covariance(x: Tensor) -> Tensor:
    """C: the covariance of `(B, n, D)` within contexts, averaged over them, float64 `(D, D)`, never singular."""
    centred = (x - x.mean(1, keepdim=True)).double()
    C = torch.einsum("bni,bnj->ij", centred, centred) / (x.shape[0] * (x.shape[1] - 1))
    least = RIDGE * C.diagonal().mean().clamp(min=1e-12)
    return C + least * torch.eye(len(C)).to(C)


def free_root(C: Tensor, frozen: int) -> Tensor:
    """L with LLᵀ the covariance of the numbers behind the first `frozen`, given those."""
    C_rp, C_rr = C[frozen:, :frozen], C[frozen:, frozen:]
    return torch.linalg.cholesky(C_rr - C_rp @ torch.linalg.solve(C[:frozen, :frozen], C_rp.T))


def nearest(x: Tensor, frozen: Tensor, n: int) -> Tensor:
    """Those `n` of the chunks `(B, N, D)` that begin nearest to `frozen`, `(B, p)`: `joined` moves them little.

    One of another way around an obstacle would be moved onto this one, and go through it. Of a Gaussian draws that
    are chosen so and joined are still those of its conditional.
    """
    off = (x[..., : frozen.shape[1]] - frozen[:, None]).square().sum(-1)
    place = off.topk(n, dim=1, largest=False).indices.sort(1).values
    return x.take_along_dim(place[..., None], 1)


def joined(x: Tensor, frozen: Tensor, C: Tensor) -> Tensor:
    """Chunks `(B, n, D)` moved so that they begin with `frozen`, `(B, p)`: for a Gaussian, its conditional."""
    p = frozen.shape[1]
    off, gain = frozen[:, None] - x[..., :p], torch.linalg.solve(C[:p, :p], C[:p, p:]).to(x)
    return torch.cat([frozen[:, None].expand(-1, x.shape[1], -1), x[..., p:] + off @ gain], -1)


def whitened(x: Tensor, root: Tensor) -> Tensor:
    """v of x = Lv, `(…, r)`, solved in the precision of L."""
    v = torch.linalg.solve_triangular(root.to(x.device), x.to(root.dtype).mT, upper=False).mT
    return v.to(x.dtype).contiguous()
