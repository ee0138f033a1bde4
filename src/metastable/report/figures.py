"""The look of every picture: one colour-blind-safe palette, one figure style, PNG and inline SVG.

Figures are made with matplotlib's object interface, so nothing here touches pyplot or changes the settings
of the process that draws.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


class Palette(NamedTuple):
    """Okabe and Ito's colours, which people with any common colour blindness tell apart.

    Index it for the n-th line of a plot, or name a colour.

    >>> palette[0] == palette.blue, len(palette)
    (True, 7)
    """

    blue: str = "#0072b2"
    vermillion: str = "#d55e00"
    green: str = "#009e73"
    purple: str = "#cc79a7"
    orange: str = "#e69f00"
    sky: str = "#56b4e9"
    grey: str = "#7a828e"


palette = Palette()

DATA = palette.blue
"""What came from the data set."""
MODEL = palette.vermillion
"""What came from the model: negatives, samples, its density."""
INK, MUTED, RULE = "#1d2129", "#5c6470", "#dfe2e7"
"""Text, quiet text and hairlines."""

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))

_THEMED = {**{colour: name for name, colour in palette._asdict().items()}}
_THEMED |= {INK: "ink", MUTED: "muted", RULE: "rule"}

_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelsize": 9,
    "axes.unicode_minus": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "axes.xmargin": 0.01,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "patch.linewidth": 0.7,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a metric's name may hold a dollar sign
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.7,
}


@contextmanager
def style() -> Iterator[None]:
    """The house style for whatever is drawn inside the `with`; the process's own settings come back after."""
    import matplotlib
    from cycler import cycler

    look: Any = {**_STYLE, "axes.prop_cycle": cycler(color=palette)}
    with matplotlib.rc_context(look):
        yield


def _plain_decades(axis: Any, scale: Any) -> None:
    """Decades of a logarithmic axis as 0.001 or 1e-05: its own labels need mathtext, which is off."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if scale == "log":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


@cache
def _figure_class() -> type[Figure]:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    class HouseAxes(Axes):
        """Titles and legends read their look when they are set, so they are set inside the style."""

        def set_title(self, *args: Any, **kwargs: Any) -> Any:
            with style():
                return super().set_title(*args, **kwargs)

        def legend(self, *args: Any, **kwargs: Any) -> Any:
            """None where nothing has a label, as of a training that ended before its first number."""
            given = args or {"handles", "labels"} & set(kwargs)
            if not given and not self.get_legend_handles_labels()[1]:
                return None
            with style():
                return super().legend(*args, **kwargs)

        def set_xscale(self, value: Any, **kwargs: Any) -> None:
            super().set_xscale(value, **kwargs)
            _plain_decades(self.xaxis, value)

        def set_yscale(self, value: Any, **kwargs: Any) -> None:
            super().set_yscale(value, **kwargs)
            _plain_decades(self.yaxis, value)

    class HouseFigure(Figure):
        """Axes read their look when they are made, so they are made inside the style."""

        def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
            if not {"projection", "polar", "axes_class"} & set(kwargs):
                kwargs["axes_class"] = HouseAxes
            with style():
                return super().add_subplot(*args, **kwargs)

    return HouseFigure


def new_figure(width: float = 5.2, height: float = 3.0) -> Figure:
    """An empty figure of `width` by `height` inches in the house style, apart from pyplot.

    Axes from `figure.subplots()` or `figure.add_subplot()` carry the style, their titles and legends too.

    >>> figure = new_figure(4, 3)
    >>> axes = figure.subplots()
    >>> lines = axes.plot([0, 1], [0, 1])
    >>> lines[0].get_color() == palette.blue
    True
    """
    with style():
        return _figure_class()(figsize=(width, height), layout="constrained")


@contextmanager
def picture(
    path: Path | str,
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    dpi: int = 160,
    **grid: Any,
) -> Iterator[Any]:
    """The axes of a new figure, which is written to `path` when the `with` ends.

    Args:
        path: of the file, by whose suffix it is a PNG or an SVG.
        width: in inches.
        height: in inches.
        rows: of axes.
        columns: of axes; one of each gives one `Axes`, more an array of them.
        dpi: pixels per inch of a PNG.
        grid: of `Figure.subplots`.
    """
    figure = new_figure(width, height)
    yield figure.subplots(rows, columns, **grid)
    save_figure(figure, path, dpi)


def draw_level(axes: Any, at: float, **look: Any) -> None:
    """A dashed line across at what is true, or was to be reached."""
    axes.axhline(at, **{"color": INK, "lw": 0.8, "ls": "--", **look})


def save_image_rows(path: Path | str, rows: Mapping[str, Any], dpi: int = 160) -> Path:
    """Write images in rows with a name beside each: arrays or tensors `(n, C, H, W)` with pixels in [−1, 1]."""
    count = max(len(images) for images in rows.values())
    figure = new_figure(0.6 * count + 1.6, 0.66 * len(rows))
    for (name, images), line in zip(
        rows.items(), figure.subplots(len(rows), count, squeeze=False), strict=True
    ):
        for image, axes in zip(images, line, strict=False):
            pixels = ((np.asarray(image).clip(-1, 1) + 1) / 2).transpose(1, 2, 0)
            # blends are large files
            look = {"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], **look)
        for axes in line:
            axes.set(xticks=[], yticks=[])
            axes.grid(False)
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return save_figure(figure, path, dpi)


def line_look(index: int) -> dict[str, Any]:
    """Colour and dashes of the n-th of many lines: colours first, then dashes, so that no two agree."""
    colour = palette[index % len(palette)]
    return {"color": colour, "linestyle": _DASHES[index // len(palette) % len(_DASHES)]}


def save_figure(figure: Figure, path: Path | str, dpi: int = 160) -> Path:
    """Write any figure as a PNG (or SVG, by the suffix) on white; the same figure gives the same bytes."""
    from PIL import Image

    path, drawn = Path(path), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:].lower()
    with style(), _salted(path.stem):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, dpi=dpi, facecolor="white", metadata=metadata)
    if kind == "png":  # again with 256 colours: a third of the size, and the same to the eye
        with Image.open(drawn) as picture:
            small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        drawn = io.BytesIO()
        small.save(drawn, "PNG", optimize=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # others may read or draw the same picture
    partial.write_bytes(drawn.getvalue())
    partial.replace(path)
    return path


def to_svg(figure: Figure, name: str, dpi: int = 180) -> str:
    """`figure` as SVG for the inside of an HTML page, in the page's own fonts and colours.

    Palette colours become CSS variables, so that one picture serves light and dark pages; identifiers are
    salted with `name`, so that two pictures on a page do not share clip paths.
    """
    buffer = io.StringIO()
    with style(), _salted(name):
        figure.savefig(buffer, format="svg", dpi=dpi, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # axes_1, line2d_3, …: the same in every picture
    svg = svg.replace("'DejaVu Sans'", "var(--sans)")
    for colour, variable in _THEMED.items():
        svg = re.sub(rf"{colour}\b", f"var(--{variable})", svg)
    return svg.strip()


@contextmanager
def _salted(salt: str) -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": salt}):
        yield


@cache
def density_colours() -> Colormap:
    """A sequential map from near-white through the palette's blue to ink; lightness falls evenly."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = ["#f7f9fb", "#cfe3f0", "#86bddb", "#3b8fc0", "#0d5f97", "#0b3563", "#0a1836"]
    return LinearSegmentedColormap.from_list("metastable", stops)
