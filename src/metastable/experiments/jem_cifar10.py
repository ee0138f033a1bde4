"""Appendices L and M of the β paper on CIFAR-10: seven scenarios of JEM, with and without β.

An arm `sN-bB` is scenario N at β·o = B, any number; figures stand in the order of β. The network is a smaller wide
residual one than the paper's WRN-28-10, and there are minutes in the place of 200 epochs. At every mark test
accuracy, accuracy on pictures that are held out for that, and the FID of the buffer are measured; an arm's accuracy
is that of the mark with the best validation. What the guard stops is told with the update. Eight negatives an
update, scenario 3, move a buffer of 10,000 too slowly: after minutes much of it is untouched noise. It is smaller.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.errors import require
from metastable.core.parts import energies_of
from metastable.core.powered import powered
from metastable.core.precision import precision
from metastable.core.random import derive, generator
from metastable.core.types import Walkers
from metastable.data import Dataset, load_array
from metastable.energies import JointEnergy, WideResNet
from metastable.kernels import ULA, run_chain
from metastable.methods import JEM, PersistentCD, Robust
from metastable.report.figures import DATA, MODEL, picture
from metastable.runs.run import Run
from metastable.training.config import Adam

from .base import Bench, Experiment, Row
from .image_figures import arms_of, draw_curves, draw_distances, draw_samples
from .image_runs import Found, ImageArm, ImageTrials, measures_of, pictures_of, rows_of
from .jem_stability import Scenario, accuracy_of
from .trials import by_scale

FEW = 8
"""Negatives of scenario 3."""
LARGER = 4.0
"""Times the step size of training, in Figure 14."""
COLUMNS = 4
"""Panels side by side."""
SCENARIOS = {
    1: Scenario(1),
    2: Scenario(2, steps=5),
    3: Scenario(3),
    4: Scenario(4, output_scale=40_000.0),
    5: Scenario(5, output_scale=10_000.0),
    6: Scenario(6, alpha=4e-4, output_scale=5_000.0, slower=4.0),
    7: Scenario(7, alpha=2.5e-5),
}


@dataclass(frozen=True)
class Published:
    """A line of Table 2: at β = 0, and the best with the β·o that it was measured at."""

    accuracy: tuple[float, float, float]
    fid: tuple[float, float, float]


TABLE_2 = {
    1: Published((0.905, 0.917, 4.0), (39.6, 38.9, 0.5)),
    2: Published((0.100, 0.883, 2.0), (439.6, 48.0, 0.5)),
    3: Published((0.893, 0.911, 2.0), (41.9, 42.0, 0.5)),
    4: Published((0.910, 0.928, 10.0), (41.7, 41.9, 0.5)),
    5: Published((0.876, 0.902, 2.0), (43.2, 41.8, 0.5)),
    6: Published((0.362, 0.924, 4.0), (154.1, 41.5, 0.5)),
    7: Published((0.865, 0.880, 1.0), (41.9, 42.7, 0.1)),
}


def name_of(number: int, beta_o: float) -> str:
    """Of an arm."""
    return f"s{number}-b{beta_o:g}"


def parsed(arm: str) -> tuple[Scenario, float]:
    """The scenario of an arm and its β·o."""
    found = re.fullmatch(r"s([1-7])-b(\d+(?:\.\d+)?(?:e[-+]\d+)?)", arm)
    number, beta_o = (int(found[1]), float(found[2])) if found else (0, math.nan)
    rule = "sN-bB, a scenario N from 1 to 7 at β·o = B, as in s2-b0.5"
    require(math.isfinite(beta_o) and name_of(number, beta_o) == arm, "arms", rule, arm)
    return SCENARIOS[number], beta_o


PAPER_FID = {
    name_of(n, at): value
    for n, line in TABLE_2.items()
    for at, value in ((0.0, line.fid[0]), (line.fid[2], line.fid[1]))
}
PAPER_ACCURACY = {
    name_of(n, at): value
    for n, line in TABLE_2.items()
    for at, value in ((0.0, line.accuracy[0]), (line.accuracy[2], line.accuracy[1]))
}


def arm_of(bench: Bench, arm: str) -> ImageArm:
    """A scenario at a β·o."""
    scenario, beta_o = parsed(arm)
    o, few = bench.scale_factor * scenario.output_scale, scenario.number == 3
    require(beta_o < o, "arms", f"at a β·o below o = {o:g}", arm)
    chains = PersistentCD(
        walkers=min(bench.few_walkers, bench.walkers) if few else bench.walkers,
        batch=min(FEW, bench.batch) if few else bench.batch,
        steps=max(1, round(bench.chain_share * scenario.steps)),
        step_size=scenario.alpha / 2,
        start_at="noise",
        noise="uniform",
        rejuvenation=0.05,
    )
    method = JEM(source=Robust(source=chains, beta=beta_o / o), generative=1 / o)
    settings = {"optimiser": Adam(bench.rate / scenario.slower)}

    def energy(data: Dataset, seed: int) -> JointEnergy:
        network = derive(seed, "network") % 2**31
        return JointEnergy(WideResNet(data.event_shape, bench.depth, bench.width, 10, network), o)

    return ImageArm(arm, method, energy, settings, labels=True)


def body(bench: Bench) -> list[Row]:
    """The pieces that were asked for, then rows and figures of all that are there."""
    rest, test = pictures_of(bench), None if bench.test is None else load_array(bench.test)
    if test is None:
        rest, test = rest.split(bench.held_out, seed=1)
    data, validation = rest.split(bench.held_out, seed=0)

    def more(run: Run, walkers: Walkers) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        energy: Any = run.energy
        some = torch.linspace(0, len(data) - 1, min(bench.histogram, len(data))).long()
        buffer = walkers.x[: bench.histogram]
        shown = {
            "f_data": data.x[some].to(bench.device),
            "f_buffer": buffer,
            "f_larger": larger_steps(bench, run, buffer),
        }
        seen = {"validation_accuracy": validation, "test_accuracy": test}
        numbers = {
            name: accuracy_of(energy, rows.x.to(bench.device), rows.labels.to(bench.device))  # pyright: ignore
            for name, rows in seen.items()
        }
        return numbers, {
            name: (-energies_of(energy, x) / energy.output_scale).detach().cpu().numpy()
            for name, x in shown.items()
        }

    def samples(run: Run) -> Walkers:
        assert run.walkers is not None
        return Walkers.equal(run.walkers.x)  # the buffer as it is, as in the paper

    trials = ImageTrials(
        bench, data, lambda name: arm_of(bench, name), measures_of(bench, data), more, samples
    )
    for name in bench.arms:
        arm_of(bench, name)  # what is no arm is refused before the first is trained
    found = in_order(trials.run(bench.arms))
    if found:
        draw_samples(bench, found, data.x)
        draw_curves(bench, found, (("energy_gap", "energy, data − negatives"),), "curves.png")
        draw_over_beta(bench, found)
    return accuracy_rows(bench, found) + rows_of(bench, found, PAPER_FID)


def in_order(found: Found) -> Found:
    """By scenario, β and minutes."""

    def place(key: tuple[str, float]) -> tuple[int, float, float]:
        scenario, beta_o = parsed(key[0])
        return scenario.number, beta_o, key[1]

    return {key: found[key] for key in sorted(found, key=place)}


def larger_steps(bench: Bench, run: Run, x: Tensor) -> Tensor:
    """Chains of the buffer after one more update's SGLD, its step size four times as large (Figure 14)."""
    robust: Any = run.trained_with.source
    rng = generator(derive(bench.seed, "larger steps"), bench.device)
    kernel = ULA(LARGER * robust.source.moves.step_size)
    with precision(bench.precision, bench.device):
        return run_chain(kernel, powered(run.energy, 1 - robust.beta), x, robust.source.steps, rng).state.x


def accuracy_rows(bench: Bench, found: Found) -> list[Row]:
    """Test accuracy at the mark with the best validation, then at each mark, and whether an arm was stopped."""
    ended = {arm for (arm, _), piece in found.items() if "stopped" not in piece.numbers}
    missing = sorted(set(bench.required) - ended)
    rows = [Row(f"accuracy/{arm}", math.nan, ">=", bench.least_accuracy) for arm in missing]
    for arm in arms_of(found):
        own = {mark: piece.numbers for (name, mark), piece in found.items() if name == arm}
        alive = {mark: numbers for mark, numbers in own.items() if "stopped" not in numbers}
        if alive:
            best = max(alive, key=lambda mark: alive[mark]["validation_accuracy"])
            judged = (">=", bench.least_accuracy) if arm in bench.required else (None, None)
            value, known = alive[best]["test_accuracy"], bench.scale == "gpu"  # the paper's pictures
            rows.append(
                Row(f"accuracy/{arm}", value, *judged, paper=PAPER_ACCURACY.get(arm) if known else None)
            )
            rows.append(Row(f"best_minutes/{arm}", best))
        for mark, numbers in alive.items():
            keys = ("validation_accuracy", "test_accuracy", "grad_scale")
            rows += [Row(f"{key}/{arm}/minutes={mark:g}", numbers[key]) for key in keys if key in numbers]
        rows.append(Row(f"stopped/{arm}", float(len(alive) < len(own))))
    return rows


def draw_over_beta(bench: Bench, found: Found) -> None:
    """Figures 12 to 14 at the last mark of each arm, a panel for each; the pictures of Figure 15 are samples.

    Figure 12 has log Σ eʰ of data and negatives over updates; 13 how it is distributed over data and the buffer;
    14 the same where the buffer's chains have gone on with larger steps.
    """
    last = {arm: found[max(key for key in found if key[0] == arm)].arrays for arm in arms_of(found)}
    last = {arm: arrays for arm, arrays in last.items() if "f_data" in arrays}
    columns, rows = min(COLUMNS, len(last)), -(-len(last) // COLUMNS)
    for number, negatives in ((12, "negatives"), (13, "buffer"), (14, "larger")) if last else ():
        size = 3.2 * columns, 2.6 * rows, rows, columns
        with picture(bench.folder / f"figure-{number}.png", *size, squeeze=False) as axes:
            for axis, (arm, arrays) in zip(axes.flat, last.items(), strict=False):
                axis.set(title=arm, xlabel="update" if number == 12 else "log Σ eʰ")
                for key, colour in (("data", DATA), (negatives, MODEL)):
                    look = {"color": colour, "label": "larger steps" if key == "larger" else key}
                    if number == 12:
                        o = bench.scale_factor * parsed(arm)[0].output_scale
                        axis.plot(arrays["curve_step"], -arrays[f"curve_energy_{key}"] / o, lw=0.9, **look)
                    else:
                        axis.hist(arrays[f"f_{key}"], bins=40, alpha=0.5, density=True, **look)
            for axis in axes.flat[len(last) :]:
                axis.set_visible(False)
            axes[0, 0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="jem-cifar10",
    title="CIFAR-10: seven scenarios of a classifier that is a density, with and without β (Table 2, Fig. 12–16)",
    paper="Energy-based model training objective robust to inaccurate SGLD samples, ICLR 2025 submission, L, M",
    scales=by_scale(
        {
            "parcels": True,
            "data_noise": 0.03,
            "final_rate": 1.0,
            "denoised": False,
            "pixels_target": 0.5,
            "held_out": 0.1,
            "histogram": 1000,
        },
        data=("toy:digits", "cifar10?n=5000&size=16", "cifar10"),
        test=(None, None, "cifar10?split=test"),
        arms=(("s1-b0", "s1-b4"), ("s1-b0", "s1-b4", "s2-b0", "s2-b2"), ("s1-b0", "s1-b4", "s2-b0", "s2-b2")),
        required=(("s1-b4",), (), ()),
        least_accuracy=(0.3, 0.2, 0.3),
        depth=(10, 10, 16),
        width=(1, 1, 4),
        scale_factor=(1.0, 1.0, 1.0),
        chain_share=(0.1, 1.0, 1.0),
        minutes=(10.0, 5.0, 3.0),
        marks=((10.0,), (2.0, 5.0), (1.0, 2.0, 3.0)),
        steps=(30, 10**6, 10**6),
        warmup=(0, 100, 200),
        log_every=(10, 20, 50),
        batch=(16, 32, 64),
        rate=(3e-3, 1e-3, 1e-4),
        walkers=(100, 1000, 10_000),
        few_walkers=(50, 500, 2500),
        augment=((), ("flip", "crop"), ("flip", "crop")),
        precision=("32-true", "32-true", "tf32"),
        images=(100, 1000, 10_000),
        fid=(False, False, True),
    ),
    body=body,
    compared=draw_distances,
)
