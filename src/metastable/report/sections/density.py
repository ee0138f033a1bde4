"""What the model learned, drawn in the way that suits the shape of one data point."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from .. import plots
from ..figures import DATA, INK, MODEL, palette
from ..formatting import count, number, sentence
from ..markup import Html, empty, join, png, tag
from ..parts import frame, key, picture, pictures
from ..read import Run

_MOST_MARGINALS = 12


def model(run: Run) -> Html:
    """Data beside samples in the way that suits the shape of one data point."""
    shape = run.event_shape
    if shape is None or not ({"data", "samples", "log_density"} & set(run.arrays)):
        other = " Chunks of a policy are on the page of its rollouts: metastable rollout RUN --env …"
        words = "No pictures of the model: neither figures.npz nor samples.npy holds any."
        return empty(words + other if run.policy else words)
    dims = math.prod(shape)
    if plots.image_side(shape) is not None:
        drawn = _images(run, shape)
    elif shape == (2,):
        drawn = join(_plane_panels(run))
    else:
        drawn = _line(run) if dims == 1 else _marginals(run, dims)
    return join([_runaway(run), drawn or empty("The stored arrays do not fit the shape of a data point.")])


def _runaway(run: Run) -> Html | None:
    """How far out samples lie where the model's mass has left the data, on a scale that shows all of them."""
    far = {k: run.arrays.get(f"radius_{k}") for k in ("data", "samples")}
    if any(values is None or not values.size for values in far.values()):
        return None
    looks = {"data": (DATA, True), "samples": (MODEL, False)}
    clouds = [
        plots.Cloud(k, np.log10(np.maximum(values, 1e-3)), *looks[k])  # pyright: ignore
        for k, values in far.items()
    ]
    drawing = plots.overlaid("runaway", clouds, "log₁₀ of the distance from the data's centre")
    words = "In root mean square distances of the data: 0 is the data's spread, 2 a hundred times as far."
    keys = [key("data", DATA, "block"), key("samples", MODEL)]
    return pictures([picture("Mass that has run away", drawing, words, keys)], "full")


def flat(run: Run, name: str, dims: int) -> np.ndarray | None:
    """An array of points as `(n, dims)`, or None where there is none or it does not fit."""
    array = run.arrays.get(name)
    if array is None or array.ndim == 0 or array.size != len(array) * dims:
        return None
    return array.reshape(len(array), dims)


def grid_of(run: Run, name: str) -> np.ndarray | None:
    """A log-density that fits its grid and has a finite value, or None."""
    values, x, y = (run.arrays.get(k) for k in (name, "grid_x", "grid_y"))
    if values is None or x is None or y is None or x.ndim != 1 or y.ndim != 1:
        return None
    if values.shape != (len(y), len(x)) or min(values.shape) < 2:
        return None
    return values if np.isfinite(values).any() else None


def _plane_panels(run: Run) -> Iterable[Html]:
    x, y = run.arrays.get("grid_x"), run.arrays.get("grid_y")
    clouds = {k: c for k in ("data", "samples") if (c := flat(run, k, 2)) is not None}
    maps = {k: g for k in ("truth_log_density", "log_density") if (g := grid_of(run, k)) is not None}
    panels, notes = [], []
    window = plots.window_of(list(clouds.values())) if clouds else None
    if maps and x is not None and y is not None:
        window = plots.Window((x[0], x[-1]), (y[0], y[-1]))
        panels = density_panels([(_MAP_TITLES[k], g, x, y) for k, g in maps.items()])
        notes = [ramp(panels)]
        if "log_density" in maps and run.log_partition is not None:
            mass = math.exp(min(plots.log_window_mass(maps["log_density"], x, y), 700.0))
            text = f"With the estimated log Z the model has mass {number(mass)} in this window"
            end = " (above 1: log Z is too low)." if mass > 1.02 else "."
            notes.append(tag("p", text, end, class_="caption"))
    if window is not None:
        points = []
        for k, c in clouds.items():
            drawing = plots.scatter(k, c, window, DATA if k == "data" else MODEL)
            points.append(picture(sentence(k), drawing, f"{count(len(c), 'point')}.", class_="cloud"))
        yield pictures([p for p, _ in panels] + points, "quarter")
    yield from (note for note in notes if note)


_MAP_TITLES = {"truth_log_density": "True density", "log_density": "Model density"}


def density_panels(maps: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> list[tuple[Html, float]]:
    """Maps `(title, log_density, grid_x, grid_y)` on one colour scale, each with the scale's upper end."""
    scaled = [(t, plots.scaled_to_window(g, x, y), x, y) for t, g, x, y in maps]
    # the first map (the truth, where it is known) sets the scale: a model with one needle would blacken it
    highest = float(np.exp(scaled[0][1][np.isfinite(scaled[0][1])].max()))
    drawn = [plots.density_map(f"map {t}", g, x, y, highest) for t, g, x, y in scaled]
    return [(picture(t, d, class_="map"), highest) for (t, *_), d in zip(scaled, drawn)]


def ramp(panels: list[tuple[Html, float]]) -> Html | None:
    """The colour scale of density maps, as a line of text."""
    if not panels:
        return None
    scale = ["Density 0 ", tag("span", class_="ramp"), f" {number(panels[0][1], 3)} and above. "]
    rest = (
        "Each map is scaled to integrate to one over the window; contours lie 2, 4 and 8 nats below its peak."
    )
    return tag("p", scale, rest, class_="caption")


def _line(run: Run) -> Html:
    data, samples = flat(run, "data", 1), flat(run, "samples", 1)
    lines = [s for s in (_density_line(run, "log_density"), _density_line(run, "truth_log_density")) if s]
    if data is None and samples is None and not lines:
        return Html()
    drawing = plots.histogram("line", data, samples, "x", lines, small=False)
    keys = _cloud_keys(data, samples) + [key(s.name, s.color, dashes=s.linestyle) for s in lines]
    return pictures([picture("Density", drawing, "", keys)], "full")


def _density_line(run: Run, name: str) -> plots.Series | None:
    values, x = run.arrays.get(name), run.arrays.get("grid_x")
    if values is None or x is None or values.size != x.size or not np.isfinite(values).any():
        return None
    values = np.where(np.isfinite(values), values, -np.inf).ravel()
    y = np.exp(values - values.max())
    y = y / plots.area(y, x)
    if name.startswith("truth"):
        return plots.Series("truth", x, y, INK, (0, (4, 2)))
    return plots.Series("model", x, y, palette.green)


def _cloud_keys(data: np.ndarray | None, samples: np.ndarray | None) -> list[Html]:
    keys = [key("data", DATA, "block")] if data is not None else []
    return keys + ([key("samples", MODEL)] if samples is not None else [])


def _marginals(run: Run, dims: int) -> Html:
    data, samples = flat(run, "data", dims), flat(run, "samples", dims)
    if data is None and samples is None:
        return Html()
    shown = min(dims, _MOST_MARGINALS)
    drawn = []
    for i in range(shown):
        columns = [None if c is None else c[:, i] for c in (data, samples)]
        drawn.append(picture(f"Coordinate {i + 1}", plots.histogram(f"marginal {i}", *columns, x_label="")))
    note = f"The first {shown} of {dims} coordinates." if shown < dims else f"All {dims} coordinates."
    lead = tag("p", *_cloud_keys(data, samples), tag("span", note, class_="key"), class_="keys lead")
    return join([lead, pictures(drawn, "quarter small")])


def _images(run: Run, shape: tuple[int, ...]) -> Html:
    names = ("data", "samples" if "samples" in run.arrays else "negatives", "without_noise")
    flats = {k: c for k in names if (c := flat(run, k, math.prod(shape))) is not None}
    if not flats:
        return Html()
    reference = next(iter(flats.values()))  # data where there are any, so that both grids share one scale
    low, high = plots.value_range(reference)
    own = any(found.get("name") == "log-z-not-estimated" for found in run.diagnosis)
    origins = {  # where they are not draws of the finished energy
        "negatives": "As training draws them; the method keeps no samples of the model.",
        "samples": "The method's own walkers when training ended." if own else "",
        "without_noise": "The same samples without the noise that training put on the data.",
    }
    drawn = []
    for k, c in flats.items():
        grid = plots.image_grid(c.reshape(-1, *shape), low, high)
        image = png(grid, f"{k} as a grid of images", "pixels")
        drawn.append(frame(sentence(k.replace("_", " ")), image, origins.get(k, "")))
    return pictures(drawn)
