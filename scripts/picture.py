"""The picture of README.md and of the site's first page: the demo's densities, the true one and the learned ones.

`make demo` draws it into runs/demo; `python scripts/picture.py` puts the same one into docs/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from metastable.report.figures import new_figure
from metastable.report.read import Comparison, Run, read_folder

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "runs" / "demo"
TARGET = ROOT / "docs" / "images" / "two-modes.png"
TITLES = {
    "cd": "contrastive divergence",
    "pcd": "persistent CD",
    "short-run": "short-run",
    "jarzynski": "Jarzynski",
}
MOST_BYTES = 200_000
WINDOW = ((-5.0, 5.0), (-2.2, 2.8))


def command(found: Comparison) -> str:
    """What was compared, as the command that does it; kept in the picture, so that it says what it shows."""
    return f"metastable compare --data {found.table['data']} --methods {','.join(found.table['methods'])}"


def panels(found: Comparison) -> list[tuple[str, str, np.ndarray, list[float]]]:
    """Title, caption, density on the grid and mode weights of the truth and of each method."""
    truth = found.truth["mode_weights"]
    first = next(run for run in found.runs if run is not None)
    made = [("true density", "with the data's mode weights", _density(first, "truth_log_density"), truth)]
    for row, run in zip(found.rows, found.runs, strict=True):
        if run is not None:
            caption = f"weights off by {row['mode_weight_error']:.3f}, KL {row['kl_exact']:.3f}"
            made.append((TITLES[row["method"]], caption, _density(run, "log_density"), row["mode_weights"]))
    return made


def _density(run: Run, name: str) -> np.ndarray:
    """exp of a stored log-density, normalised on its grid: log Z of the estimate must not colour the picture."""
    values = np.exp(run.arrays[name])
    cell = np.diff(run.arrays["grid_x"][:2])[0] * np.diff(run.arrays["grid_y"][:2])[0]
    return values / (values.sum() * cell)


def draw(found: Comparison, target: Path = TARGET) -> Path:
    """One row of maps on one colour scale, each mode with its weight above it."""
    from matplotlib.colors import PowerNorm

    first: Any = next(run for run in found.runs if run is not None)
    x, y = first.arrays["grid_x"], first.arrays["grid_y"]
    made = panels(found)
    top = max(float(density.max()) for *_, density, _ in made)
    figure = new_figure(2.9 * len(made), 2.2)
    for axes, (title, caption, density, weights) in zip(np.atleast_1d(figure.subplots(1, len(made))), made):
        axes.imshow(
            density,
            origin="lower",
            extent=(x[0], x[-1], y[0], y[-1]),
            cmap="Blues",
            norm=PowerNorm(0.6, 0, top),  # so that the lighter mode can be seen beside the heavier
            interpolation="bilinear",
        )
        for centre, weight in zip((-3.0, 3.0), weights, strict=True):
            axes.text(centre, 2.1, f"{weight:.0%}", ha="center", fontsize=11, fontweight="bold")
        axes.set(xlim=WINDOW[0], ylim=WINDOW[1], xticks=[], yticks=[], xlabel=caption)
        axes.grid(False)
        axes.set_facecolor("#f7fbff")  # the map's own white, beyond the grid
        axes.spines[:].set_visible(False)
        axes.set_title(title)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, facecolor="white", metadata={"Description": command(found)})
    return target


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="The picture of README.md.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEMO, help="a comparison on toy:two-modes")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args(arguments)
    if not given.folder.exists():
        parser.error(f"{given.folder} is not there; `make demo` makes it")
    found = read_folder(given.folder)
    if not isinstance(found, Comparison):
        parser.error(f"{given.folder} is not a comparison")
    path = draw(found, given.out)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
