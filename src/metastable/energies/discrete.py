"""Energies over units coded −1 and +1: Hopfield network, Boltzmann machine, restricted Boltzmann machine.

Everywhere s_i ∈ {−1, +1}, never {0, 1}: p(s) = exp(−E(s))/Z with Z a sum over 2^d states, so log-densities are
log-probabilities. With a field u_i (what multiplies s_i in −E) the conditional is P(s_i = +1 | rest) =
1/(1 + exp(−2 u_i)): the 2 is the distance between −1 and +1, and the 0/1 coding does not have it.

| symbol | here |
|---|---|
| W, b of (Hopfield, Boltzmann machine) | `weight`, `bias` |
| W, a, b of the restricted machine | `weight` `(V, H)`, `visible_bias`, `hidden_bias` |

Section 2.2.2 of Xu, *Energy-based models with self-adapting noise contrastive estimation* (thesis, 2022).
Each energy draws a whole Gibbs sweep itself (`sweep`, see `kernels.Gibbs`) and walks the path of inverse
temperatures that keeps its structure (`tempered`, see `walkers.smc`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from metastable.core.check import require_signs
from metastable.core.errors import InputError, require, require_choice, require_count, require_positive
from metastable.core.random import generator
from metastable.core.types import as_shape
from metastable.proposals.signs import MOST_UNITS, require_few, signs

from .couplings import Couplings, Layers, draw_units, enumerated

RULES = ("hebbian", "pseudo-inverse")


class DiscreteEnergy(nn.Module):
    """Base of the energies over s ∈ {−1, +1}^d: what `structure` gives, with exact answers where d is small.

    Attributes:
        discrete: True; how the rest of the library tells these energies from continuous ones.
        event_shape: shape of one event; a machine over images flattens them itself.
    """

    discrete = True

    def __init__(self, event_shape: int | Iterable[int]):
        super().__init__()
        shape = as_shape(event_shape)
        for size in shape or (0,):
            require_count("units", size)
        self.event_shape: tuple[int, ...] = shape

    @property
    def units(self) -> int:
        """d, how many units an event has."""
        return math.prod(self.event_shape)

    def structure(self) -> Couplings | Layers:
        """The energy as plain tensors."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Energies, `(B, *event)` of −1 and +1 to `(B,)`; other values are not looked for."""
        return self.structure()(x)

    @property
    def sweep_uniforms(self) -> int:
        """How many uniform numbers one sweep of one chain needs."""
        return self.units

    def sweep(
        self, x: Tensor, uniform: Tensor, free: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Every unit drawn once from its conditional; see `kernels.gibbs.Sweeps`."""
        return self.structure().sweep(x, uniform, free, order)

    def tempered(self, fields: Tensor, beta: Tensor | float) -> Couplings | Layers:
        """The energy at inverse temperature β on the path from independent units with `fields`."""
        return self.structure().tempered(fields, beta)

    @property
    def listed_units(self) -> int:
        """Units whose states have to be listed for exact answers."""
        return self.units

    @property
    def enumerable(self) -> bool:
        """Whether `log_partition` and `sample` can be had exactly."""
        return self.listed_units <= MOST_UNITS

    def log_partition(self) -> Tensor:
        """Exact log Z = log Σ_s exp(−E(s)) by enumeration, float64, shape `()`; refused beyond 2^22 states."""
        require_few(self.listed_units)
        return torch.logsumexp(enumerated(self._listed(), self.listed_units, self._device), 0)

    def exact_probabilities(self) -> Tensor:
        """p(s) of all 2^d states, float64, in the order of `proposals.signs.states`."""
        require_few(self.units)
        return torch.softmax(enumerated(self.structure().double(), self.units, self._device), 0)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` exact independent draws by enumeration, `(n, *event)`; refused beyond 2^22 states."""
        require_count("n", n)
        require_few(self.listed_units)
        p = torch.softmax(enumerated(self._listed(), self.listed_units, self._device), 0)
        rows = torch.multinomial(p, n, replacement=True, generator=rng)
        return self._from_listed(_state_rows(rows, self.listed_units, self._dtype), rng).view(
            n, *self.event_shape
        )

    def _listed(self) -> Couplings | Layers:
        """The energy of the units that are listed, in float64."""
        return self.structure().double()

    def _from_listed(self, drawn: Tensor, rng: torch.Generator) -> Tensor:
        """Events from draws of the units that are listed."""
        return drawn

    @property
    def _dtype(self) -> torch.dtype:
        return next(t.dtype for t in (*self.parameters(), *self.buffers()) if t.is_floating_point())

    @property
    def _device(self) -> torch.device:
        return next(t.device for t in (*self.parameters(), *self.buffers()))


def _state_rows(numbers: Tensor, units: int, dtype: torch.dtype) -> Tensor:
    """The states of these numbers, `(n, units)`."""
    bits = 2 ** torch.arange(units - 1, -1, -1, device=numbers.device)
    return signs((numbers[:, None] & bits) > 0, dtype)


class PairwiseEnergy(DiscreteEnergy):
    """Base of the energies in which every pair of n units is coupled, by the n(n − 1)/2 numbers of `coupling`."""

    rows: Tensor
    columns: Tensor

    def _couple(self, n: int, scale: float, seed: int) -> None:
        rows, columns = torch.triu_indices(n, n, 1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.coupling = nn.Parameter(scale * torch.randn(len(rows), generator=generator(seed)))
        self.bias = nn.Parameter(torch.zeros(n))

    @property
    def weight(self) -> Tensor:
        """W, `(n, n)`, symmetric with a zero diagonal."""
        n = len(self.bias)
        upper = self.bias.new_zeros(n, n).index_put((self.rows, self.columns), self.coupling)
        return upper + upper.T


class BoltzmannMachine(PairwiseEnergy):
    """E(s) = −½ sᵀWs − bᵀs, s ∈ {−1, +1}^d, every pair of units coupled.

    All units are visible. W is symmetric with a zero diagonal by construction: the parameters are the d(d − 1)/2
    couplings above the diagonal.

    Args:
        units: d, or the shape of an event.
        scale: standard deviation of the first couplings.
        seed: of them.

    >>> machine = BoltzmannMachine(3)
    >>> bool((machine.weight == machine.weight.T).all()), machine.weight.diagonal().tolist()
    (True, [0.0, 0.0, 0.0])
    """

    def __init__(self, units: int | Iterable[int], scale: float = 0.01, seed: int = 0):
        super().__init__(units)
        self._couple(self.units, scale, seed)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> BoltzmannMachine:
        """The machine with these couplings; `weight` `(d, d)` must be symmetric with a zero diagonal."""
        weight = torch.as_tensor(weight)
        square = weight.dim() == 2 and weight.shape[0] == weight.shape[1]
        require(square, "weight", "a square matrix", tuple(weight.shape))
        if not torch.equal(weight, weight.T) or bool((weight.diagonal() != 0).any()):
            raise InputError(
                "weight: must be symmetric with a zero diagonal; a diagonal only shifts the energy"
            )
        machine = cls(len(weight)).to(weight.dtype)
        with torch.no_grad():
            machine.coupling.copy_(weight[machine.rows, machine.columns])
            machine.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
        return machine

    def structure(self) -> Couplings:
        """W and b."""
        return Couplings(self.weight, self.bias)


class Hopfield(DiscreteEnergy):
    """An associative memory: E(s) = −½ sᵀWs with weights that make the stored patterns minima.

    `hebbian`: W = (1/d) Σ_μ ξ^μ ξ^μᵀ without its diagonal. Random patterns are stable up to about 0.14·d of them.
    `pseudo-inverse`: W projects onto the span of the patterns, which makes up to d − 1 independent patterns fixed
    points, however they are correlated.

    Args:
        patterns: ξ, `(P, *event)` of −1 and +1.
        rule: `hebbian` or `pseudo-inverse`.

    >>> ξ = torch.tensor([[1.0, 1, 1, 1, -1, -1, -1, -1], [1, -1, 1, -1, 1, -1, 1, -1]])
    >>> memory = Hopfield(ξ)
    >>> known = torch.tensor([True] * 3 + [False] * 5)
    >>> bool((memory.complete(ξ, known) == ξ).all())
    True
    """

    patterns: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, patterns: Tensor, rule: str = "hebbian"):
        patterns = torch.as_tensor(patterns)
        patterns = patterns if patterns.is_floating_point() else patterns.float()
        if patterns.dim() < 2 or len(patterns) == 0:
            raise InputError(f"patterns: must be (P, *event) with P ≥ 1, got shape {tuple(patterns.shape)}")
        require_choice("rule", rule, RULES)
        require_signs(patterns, "patterns")
        super().__init__(patterns.shape[1:])
        self.register_buffer("patterns", patterns.clone())
        self.register_buffer("weight", stored(patterns.flatten(1), rule))
        self.register_buffer("bias", patterns.new_zeros(self.units))

    def structure(self) -> Couplings:
        """W and no bias."""
        return Couplings(self.weight, self.bias)

    def complete(
        self,
        partial: Tensor,
        known: Tensor | None = None,
        *,
        beta: float | None = None,
        sweeps: int = 50,
        seed: int = 0,
    ) -> Tensor:
        """Patterns completed from their known units, `(B, *event)`.

        Known units are clamped. The others begin as "unknown" (no field from them) and are then updated one
        after the other: to the sign of their field until nothing changes, or at an inverse temperature by
        Gibbs sampling.

        Args:
            partial: −1 and +1 where known, `(B, *event)`; what stands elsewhere is not looked at.
            known: bool, `(*event)` or `(B, *event)`. None takes `partial` as a noisy pattern: every unit is free
                and begins there.
            beta: inverse temperature of clamped Gibbs sampling, which draws from exp(−β·E) given the known units;
                None is its limit β → ∞, which goes downhill.
            sweeps: passes over all units; the deterministic dynamics stops earlier where nothing changes.
            seed: of Gibbs sampling, and of ties.
        """
        require_count("sweeps", sweeps)
        x, free = self._begin(partial, known)
        rng = generator(seed, x.device)
        if beta is None:
            return self._descend(x, free, sweeps, rng)
        require_positive("beta", beta)
        model = Couplings(beta * self.weight, beta * self.bias)
        for _ in range(sweeps):
            uniform = torch.rand((len(x), self.units), generator=rng, device=x.device, dtype=x.dtype)
            x = model.sweep(x, uniform, free)
        return x

    def _begin(self, partial: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Where completion begins, and which units may move, `(B, d)`."""
        if tuple(partial.shape[1:]) != self.event_shape:
            raise InputError(f"partial: must be (B, *{self.event_shape}), got {tuple(partial.shape)}")
        partial = partial.to(self.weight)
        if known is None:
            require_signs(partial, "partial")
            return partial, None
        require(known.dtype == torch.bool, "known", "a tensor of bools", known.dtype)
        if tuple(known.shape) not in (self.event_shape, tuple(partial.shape)):
            raise InputError(f"known: must be {self.event_shape} or (B, *event), got {tuple(known.shape)}")
        known = known.to(partial.device).expand_as(partial)
        require_signs(partial[known], "partial")
        return torch.where(known, partial, torch.zeros_like(partial)), ~known.flatten(1)

    def _descend(self, x: Tensor, free: Tensor | None, sweeps: int, rng: torch.Generator) -> Tensor:
        ties = signs(torch.rand((len(x), self.units), generator=rng, device=x.device) < 0.5, x.dtype)
        model = self.structure()

        def downhill(field: Tensor, old: Tensor, k: int) -> Tensor:
            undecided = torch.where(old == 0, ties[:, k], old)
            return torch.where(field == 0, undecided, torch.sign(field))

        for _ in range(sweeps):
            new = model.pass_over(x, downhill, free)
            if torch.equal(new, x):
                break
            x = new
        return x


def stored(patterns: Tensor, rule: str) -> Tensor:
    """W, `(d, d)`, symmetric with zero diagonal, from patterns `(P, d)`."""
    if rule == "hebbian":
        weight = patterns.T @ patterns / patterns.shape[1]
    else:
        weight = (torch.linalg.pinv(patterns.double()) @ patterns.double()).to(patterns.dtype)
        weight = (weight + weight.T) / 2  # a projection is symmetric; rounding is not
    return weight - torch.diag(weight.diagonal())


class RBM(DiscreteEnergy):
    """A restricted Boltzmann machine over visible v ∈ {−1, +1}^V and hidden h ∈ {−1, +1}^H.

    E(v, h) = −vᵀWh − aᵀv − bᵀh. The energy of an event is the free energy, in which the hidden units have been
    summed out: each sum over h_j = ±1 of exp(h_j(b_j + W_jᵀv)) is 2 cosh, so

        E(v) = −log Σ_h exp(−E(v, h)) = −aᵀv − Σ_j log 2cosh(b_j + W_jᵀv).

    Args:
        visible: V, or the shape of an event.
        hidden: H.
        scale: standard deviation of the first weights.
        seed: of them.

    >>> rbm = RBM(4, 3)
    >>> v = torch.ones(1, 4)
    >>> h = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    >>> summed = -torch.logsumexp(-rbm.joint_energy(v.expand(8, 4), h), 0)
    >>> bool(torch.isclose(rbm(v)[0], summed))
    True
    """

    def __init__(self, visible: int | Iterable[int], hidden: int, scale: float = 0.01, seed: int = 0):
        super().__init__(visible)
        require_count("hidden", hidden)
        self.weight = nn.Parameter(scale * torch.randn(self.units, hidden, generator=generator(seed)))
        self.visible_bias = nn.Parameter(torch.zeros(self.units))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))

    @classmethod
    def of(cls, weight: Tensor, visible_bias: Tensor | None = None, hidden_bias: Tensor | None = None) -> RBM:
        """The machine with these parameters, `(V, H)`, `(V,)` and `(H,)`; biases are zero where not given."""
        weight = torch.as_tensor(weight)
        require(weight.dim() == 2, "weight", "a matrix (V, H)", tuple(weight.shape))
        rbm = cls(*weight.shape).to(weight.dtype)
        with torch.no_grad():
            rbm.weight.copy_(weight)
            for bias, given in ((rbm.visible_bias, visible_bias), (rbm.hidden_bias, hidden_bias)):
                bias.copy_(torch.zeros_like(bias) if given is None else given)
        return rbm

    @property
    def hidden(self) -> int:
        """H."""
        return len(self.hidden_bias)

    def structure(self) -> Layers:
        """W, a and b."""
        return Layers(self.weight, self.visible_bias, self.hidden_bias)

    @property
    def sweep_uniforms(self) -> int:
        """One for each hidden and each visible unit."""
        return self.units + self.hidden

    def joint_energy(self, v: Tensor, h: Tensor) -> Tensor:
        """E(v, h) = −vᵀWh − aᵀv − bᵀh, `(B,)`."""
        v = v.flatten(1)
        return -((v @ self.weight) * h).sum(1) - v @ self.visible_bias - h @ self.hidden_bias

    def hidden_probability(self, v: Tensor) -> Tensor:
        """P(h_j = +1 | v) = 1/(1 + exp(−2(b_j + W_jᵀv))), `(B, H)`."""
        return torch.sigmoid(2 * self.structure().hidden_field(v.flatten(1)))

    def visible_probability(self, h: Tensor) -> Tensor:
        """P(v_i = +1 | h) = 1/(1 + exp(−2(a_i + W_i h))), `(B, *event)`."""
        return torch.sigmoid(2 * self.structure().visible_field(h)).view(-1, *self.event_shape)

    @property
    def listed_units(self) -> int:
        """Those of the smaller layer."""
        return min(self.units, self.hidden)

    def _listed(self) -> Layers:
        own = self.structure().double()
        return own if self.units <= self.hidden else own.transposed()

    def _from_listed(self, drawn: Tensor, rng: torch.Generator) -> Tensor:
        if self.units <= self.hidden:
            return drawn
        with torch.no_grad():
            field = self.structure().visible_field(drawn)
            uniform = torch.rand(field.shape, generator=rng, device=field.device, dtype=field.dtype)
            return draw_units(field, uniform)
