"""Table 1 and Figures 5 and 13 of the Jarzynski paper: FID on CIFAR-10 over minutes of one GPU.

The paper trains for 34 to 36 hours of an A100. Here every arm is measured after minutes, all of them on the
convolutional network of the paper's public code. Chains are those of all published image runs: a step of 1 along
the gradient with noise of 0.01, hence of temperature 5·10⁻⁵; what PCD learns is exp(−20,000·E).

- `pcd`: a buffer of chains, of which one in twenty begins afresh from uniform noise.
- `pcd-flip`: the same, chains mirrored at random before they move.
- `pcd-augmented`: the paper's second line: mirrored, zoomed, with paler colours, blurred.
- `pcd-kept`: without fresh chains, so that beside it weights are all that the next two have more.
- `jarzynski-systematic`, `jarzynski-multinomial`: Algorithm 2 on these cold chains. Weights follow
  exp(−`weight_power`·E), far below the power that the chains have: `Cold` says what that means. No chain begins
  afresh. Walkers that have just moved steer the next update, as those of PCD do, with their weights.
- `jarzynski-exact`: E = −log q + 20,000·f at temperature 1, MALA, every weight exact, and a bound on its pace.
- `jarzynski-annealed`: temperature 1, MALA, pace, data noise that falls from near 1, where the Gaussian that the
  walkers begin as is almost right; its widths are learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from metastable.core.errors import require_positive
from metastable.core.random import derive, generator, normal_like
from metastable.core.types import Energy, energy_and_grad, row_dot
from metastable.data import Dataset
from metastable.energies import Tilted
from metastable.energies.network_configs import EnergyConfig, ShortRunConfig
from metastable.kernels import ULA
from metastable.kernels.base import ChainState, Info, Noise, StepKernel
from metastable.methods import Jarzynski, Method, PersistentCD
from metastable.proposals import fit_gaussian

from .base import Bench, Experiment, Row
from .image_figures import draw_curves, draw_distances, draw_samples
from .image_runs import CIFAR10, COLD, ImageArm, ImageTrials, measures_of, pictures_of, rows_of
from .three_digits import Sharpened, sharpening
from .trials import by_scale

PAPER = {
    "pcd": 38.25,
    "pcd-flip": "36.43 to 38.25",
    "pcd-augmented": 36.43,
    "jarzynski-multinomial": 32.18,
    "jarzynski-systematic": 30.24,
}
"""FID of Table 1; mirrored chains have one of the four changes of its second line: they stand between the two."""
AUGMENTED = {
    "pcd": (),
    "pcd-flip": ("flip",),
    "pcd-augmented": ("flip", "rescale", "colour", "blur"),
    "pcd-kept": (),
}
ALL_ARMS = (
    *AUGMENTED,
    *("jarzynski-systematic", "jarzynski-multinomial"),
    *("jarzynski-exact", "jarzynski-annealed"),
)
EXACT = ("jarzynski-exact", "jarzynski-annealed")
"""Arms whose weights are those of the density that their walkers follow."""


@dataclass(frozen=True)
class Cold(StepKernel):
    """x′ = x − h∇E(x) + σξ, taken for a move that keeps the model: weights change with θ alone.

    It is no such move: it keeps exp(−E/T) with T = σ²/(2h), as far as an unadjusted one does. Weights that follow
    exp(−E) while walkers follow a far colder density say in which direction θ moved, not how far, so that they are
    no estimate of anything. Exact ones would change by ΔE/T in an update, thousands of nats, and leave one walker.

    Attributes:
        noise: σ.
    """

    noise: float = 0.01

    name: ClassVar[str] = "cold"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("cold.noise", self.noise)

    def init(self, energy: Energy, x: Tensor) -> ChainState:
        """Energies and gradients at `x`."""
        return ChainState(x, *energy_and_grad(energy, x))

    def step(
        self, energy: Energy, state: ChainState, noise: Noise, step_size: Tensor | float
    ) -> tuple[ChainState, Info]:
        """Move, then evaluate."""
        y = state.x - step_size * state.grad + self.noise * noise.normal
        moved = y - state.x
        new = ChainState(y, *energy_and_grad(energy, y))
        return new, Info(new.energy.new_ones(len(y)), row_dot(moved, moved))


class Scaled(nn.Module):
    """P·f, with walkers that begin as draws of `start`, where one is given, whatever f is at first."""

    def __init__(self, network: nn.Module, power: float, start: nn.Module | None = None):
        super().__init__()
        self.network, self.power, self.start = network, power, start

    def forward(self, x: Tensor) -> Tensor:
        """Energies `(B,)`."""
        return self.power * self.network(x)

    def exact_start(self, probe: Tensor) -> Any:
        """`start`, which is exact only for weights that do not count from the first model."""
        return self.start


def method_of(bench: Bench, arm: str) -> Method[Any]:
    """Of an arm."""
    N, n, steps, h = bench.walkers, bench.chains, bench.chain_steps, bench.chain_step
    if arm in AUGMENTED:
        fresh: dict[str, Any] = {"start_at": "noise", "noise": "uniform"}
        fresh["rejuvenation"] = 0.0 if arm == "pcd-kept" else bench.fresh
        kernel = ULA(h, noise=bench.chain_noise)
        return PersistentCD(walkers=N, batch=n, steps=steps, kernel=kernel, augment=AUGMENTED[arm], **fresh)
    plain: dict[str, Any] = {"walkers": N, "held_out": 0.0, "order": "none", "threshold": 0.5}
    if arm in EXACT:
        exact = {"batch": bench.exact_chains, "steps": bench.exact_steps, "pace": bench.pace}
        return Jarzynski(gradient="batch", **exact, **plain)
    kernel = Cold(h / bench.weight_power, noise=bench.chain_noise)
    scheme = "multinomial" if arm == "jarzynski-multinomial" else "systematic"
    plain |= {"batch": n, "steps": steps, "gradient": "moved", "pace": None}
    return Jarzynski(kernel=kernel, scheme=scheme, **plain)


def chain_power(bench: Bench) -> float:
    """P of what the cold chains follow, exp(−P·E)."""
    return 2 * bench.chain_step / bench.chain_noise**2


def energy_of(bench: Bench, arm: str, data: Dataset, seed: int) -> Any:
    """The bare network, or one with a Gaussian that the walkers begin as."""
    config: EnergyConfig = replace(bench.energy, reference="none")
    if arm in AUGMENTED:
        return config
    network = config.network(data.event_shape, derive(seed, "network") % 2**31)
    first = bench.first_noise if arm == "jarzynski-annealed" else bench.data_noise
    seen = data.x + first * normal_like(data.x, generator(derive(seed, "reference")))
    reference = fit_gaussian(seen, inflate=bench.inflate)
    if arm == "jarzynski-annealed":
        return Tilted(reference, Sharpened(network, seen.mean(0), bench.inflate * seen.std(0)))
    if arm == "jarzynski-exact":
        return Tilted(reference, Scaled(network, chain_power(bench)))
    return Scaled(network, bench.weight_power, reference)


def arm_of(bench: Bench, arm: str) -> ImageArm:
    """With what sets its training apart."""
    settings: dict[str, Any] = {}
    if arm == "jarzynski-annealed":
        settings = {
            "optimiser": sharpening(bench.annealed_rate, bench.faster),
            "data_noise": bench.first_noise,
            "data_noise_final": bench.last_noise,
            "data_noise_over": bench.annealed_over,
        }
    return ImageArm(
        arm,
        method_of(bench, arm),
        lambda data, seed: energy_of(bench, arm, data, seed),
        settings,
        rounded=arm not in EXACT,
        power=None if arm in (*AUGMENTED, *EXACT) else chain_power(bench) / bench.weight_power,
    )


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    data = pictures_of(bench)
    trials = ImageTrials(bench, data, lambda name: arm_of(bench, name), measures_of(bench, data))
    found = trials.run(ALL_ARMS)
    if found:
        draw_samples(bench, found, data.x)
        logged = (("energy_gap", "energy, data − negatives"), ("ess", "effective sample size"))
        draw_curves(bench, found, logged, "figure-13.png")
    return rows_of(bench, found, PAPER, bench.required)


EXPERIMENT = Experiment(
    name="cifar10",
    title="CIFAR-10 over minutes of one GPU: PCD, with augmentation, and Jarzynski (Table 1, Fig. 5, 13)",
    paper="Carbone, Hua, Coste, Vanden-Eijnden, NeurIPS 2023, Section 4.3 and Appendix B.3",
    scales=by_scale(
        {
            **COLD,
            "parcels": True,
            "fresh": 0.05,
            "pace": 0.03,
            "first_noise": 1.0,
            "last_noise": 0.1,
            "annealed_over": 0.8,
            "annealed_rate": 3e-4,
            "faster": 10.0,
            "inflate": 1.1,
        },
        **CIFAR10,
        energy=(ShortRunConfig(filters=4), ShortRunConfig(filters=16), ShortRunConfig(filters=64)),
        weight_power=(1.0, 1.0, 0.01),
        arms=(("pcd", "jarzynski-systematic"),) * 2 + (("pcd-flip", "jarzynski-systematic"),),
        required=(("pcd",), ("pcd",), ()),
        minutes=(10.0, 5.0, 20.0),
        marks=((10.0,), (2.0, 5.0), (1.0, 2.5, 5.0, 10.0, 15.0, 20.0)),
        falls_over=(None, 5.0, 20.0),
        final_rate=(1.0, 1.0, 0.1),
        chain_steps=(5, 20, 20),
        exact_chains=(32, 64, 512),
        exact_steps=(1, 1, 2),
        denoised=(False, False, True),
    ),
    body=body,
    compared=draw_distances,
)
