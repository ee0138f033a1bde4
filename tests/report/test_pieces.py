"""Numbers, columns, bins and colours behind the pages."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from conftest import each
from hypothesis import given
from hypothesis import strategies as st

from metastable.report import figures, formatting, plots
from metastable.report.markup import Html, tag
from metastable.report.read import Run, read_metrics
from metastable.report.run_page import resampled_at
from metastable.report.sections import contexts

from .conftest import WEIGHTS, mixture_log_density

# ---------------------------------------------------------------------------------------------- numbers


@each(
    "value, text",
    [
        (0, "0"),
        (-0.5, "−0.5"),
        (1234.5678, "1,235"),
        (99999.6, "100,000"),
        (0.99996, "1"),
        (123456.7, "123,457"),
        (1.5e7 + 0.5, "1.5 × 10⁷"),
        (0.00012346, "0.0001235"),
        (float("nan"), "not a number"),
        (float("-inf"), "−∞"),
        (None, "–"),
        ("abc", "abc"),
        (10**400, str(10**400)),
        (np.float64(0.25), "0.25"),
    ],
)
def test_number(value, text):
    assert formatting.number(value) == text


@given(st.floats(-1e300, 1e300))
def test_number_keeps_four_digits(value):
    text = formatting.number(value).replace("−", "-").replace(",", "")
    mantissa, _, power = text.partition(" × 10")
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    back = float(mantissa) * 10.0 ** int(power.translate(digits) or 0) if abs(value) > 1e-300 else value
    assert math.isclose(back, value, rel_tol=5.1e-4)


@each(
    "value, error, text",
    [
        (1.8423, 0.0123, "1.842 ± 0.012"),
        (1.8423, 0.0996, "1.84 ± 0.10"),
        (1234.5, 56.7, "1,234 ± 57"),
        (1.0, float("inf"), "1 ± ∞"),
        (1.0, float("nan"), "1 ± not a number"),
        (None, None, "–"),
    ],
)
def test_plus_minus(value, error, text):
    assert formatting.plus_minus(value, error) == text


def test_escape_is_structural():
    assert tag("p", "<b>", Html("<i>x</i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i>x</i></p>'


# ------------------------------------------------------------------------------------------------- log


def test_metrics_become_columns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "a": 2, "note": "x"}\n\n{"step": 2, "a": NaN, "b": null}\n{"step": 3, "b": 4}\n'
    )
    columns, cut = read_metrics(path)
    assert not cut
    assert set(columns) == {"step", "a", "b"}
    np.testing.assert_array_equal(columns["a"], [2, np.nan, np.nan])
    np.testing.assert_array_equal(columns["b"], [np.nan, np.nan, 4])


@given(st.lists(st.integers(0, 30), max_size=40))
def test_steps_always_rise(steps):
    from metastable.report.read import _in_order

    kept = [row["step"] for row in _in_order([{"step": s} for s in steps])]
    assert all(a < b for a, b in pairwise(kept))
    assert not steps or kept[-1] == steps[-1]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([0, 0, 1, 1, 3], [30, 50]),
        ([0, 1, 0, 0, 1], [20, 50]),
        ([0, 0, 0, 0, 0], []),
        ([2, 2, 2, 2, 2], [10]),
    ],
)
def test_resampling_marks(tmp_path, column, expected):
    metrics = {"step": np.arange(10.0, 60, 10), "resamplings": np.array(column, dtype=float)}
    np.testing.assert_array_equal(resampled_at(Run(tmp_path, metrics=metrics)), expected)


# --------------------------------------------------------------------------------------------- drawing


def test_thinning_keeps_mean_and_extremes():
    rng = np.random.default_rng(0)
    x, y = np.arange(8000.0), rng.standard_normal(8000)
    y[[17, 5000]] = 40, -40
    centres, mean, low, high = plots.thinned(x, y)
    assert low is not None
    assert high is not None
    assert len(centres) == len(mean) == 160
    assert math.isclose(mean.mean(), y.mean(), abs_tol=1e-12)  # equal bins
    assert (low.min(), high.max()) == (-40, 40)


def test_window_mass_is_exact_for_a_density():
    x, y = np.linspace(-6, 6, 301), np.linspace(-6, 6, 281)
    log_density = mixture_log_density(np.stack(np.meshgrid(x, y), -1), WEIGHTS)
    assert abs(plots.log_window_mass(log_density + 2.5, x, y) - 2.5) < 1e-6
    assert abs(plots.log_window_mass(plots.scaled_to_window(log_density - 900, x, y), x, y)) < 1e-9


def test_blow_up_does_not_flatten_the_curve():
    y = np.concatenate([np.linspace(1, 2, 100), [1e6, 1e9]])
    line = plots.Series("a", np.arange(102.0), y, figures.palette.blue)
    assert "2 values outside the axis." in plots.curves("a", [line]).notes


def test_image_grid_is_scaled_by_the_given_range():
    import io

    from matplotlib.image import imread

    pixels = imread(io.BytesIO(plots.image_grid(np.stack([np.zeros((4, 4)), np.ones((4, 4))]), 0.0, 1.0)))
    opaque = pixels[..., 3] == 1
    assert sorted(np.unique(pixels[opaque][:, 0])) == [0.0, 1.0]


@each(
    "shape, side",
    [
        ((1, 28, 28), (28, 28)),
        ((3, 8, 9), (8, 9)),
        ((8, 8), (8, 8)),
        ((2,), None),
        ((3, 2), None),
        ((2, 8, 8), None),
    ],
)
def test_image_shapes(shape, side):
    assert plots.image_side(shape) == side


def test_svg_follows_the_page_and_names_no_address():
    def draw() -> str:
        figure = figures.new_figure(3, 2)
        figure.subplots().plot([0, 1], [0, 1])
        return figures.to_svg(figure, "a")

    svg = draw()
    assert "var(--blue)" in svg
    assert figures.palette.blue not in svg
    assert "http" not in svg
    assert "DejaVu" not in svg
    assert svg == draw()


def test_drawing_leaves_the_process_settings_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    figure = figures.new_figure()
    axes = figure.subplots()
    axes.plot([0, 1], [1, 0], label="a")
    axes.set_title("t")
    legend = axes.legend()
    figures.save_figure(figure, tmp_path / "deep" / "a.png")
    assert dict(matplotlib.rcParams) == before
    assert axes.get_title(loc="left") == "t"
    assert not legend.get_frame_on()


def test_a_legend_of_nothing_is_not_drawn(recwarn):
    axes = figures.new_figure().subplots()
    line = axes.plot([0, 1], [0, 1])
    assert axes.legend(fontsize=7) is None
    assert not recwarn.list
    assert [t.get_text() for t in axes.legend(line, ["given"]).get_texts()] == ["given"]
    axes.plot([0, 1], [1, 0], label="own")
    assert [t.get_text() for t in axes.legend().get_texts()] == ["own"]


def test_a_picture_takes_its_place_whole(tmp_path, monkeypatch):
    """Commands beside one another draw and read the same pictures of one folder."""

    def draw(level: float) -> bytes:
        figure = figures.new_figure(3, 2)
        figure.subplots().plot([0, 1], [0, level])
        return figures.save_figure(figure, tmp_path / "a.png").read_bytes()

    first, replaced = draw(1.0), []
    take = Path.replace

    def replace(partial: Path, path: Path) -> Path:
        replaced.append((path.read_bytes(), partial.name))
        return take(partial, path)

    monkeypatch.setattr(Path, "replace", replace)
    second = draw(2.0)
    assert second != first
    assert replaced == [(first, f"a.png.{os.getpid()}.partial")], "until then it is as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_saved_figures_are_reproducible(tmp_path):
    def draw(name: str) -> bytes:
        figure = figures.new_figure(3, 2)
        figure.subplots().plot([0, 1], [0, 1])
        return figures.save_figure(figure, tmp_path / name / "a.svg").read_bytes()

    assert draw("one") == draw("two")


def test_pixels_of_images_in_rows_are_not_blended(tmp_path):
    """Blends between pixels make files half as large again, and show pictures smoother than they are."""
    board = np.indices((8, 8)).sum(0)[None, None] % 2 * 2.0 - 1
    drawn = matplotlib.image.imread(figures.save_image_rows(tmp_path / "rows.png", {"": board}, 77))
    assert len(np.unique(drawn[..., :3])) == 2


def test_no_two_lines_look_the_same():
    looks = [str(figures.line_look(i)) for i in range(3 * len(figures.palette))]
    assert len(set(looks)) == len(looks)


def _simulated(colour: str, matrix: list[list[float]]) -> np.ndarray:
    """How a dichromat sees a colour, in CIE Lab: Viénot's matrices on linear RGB."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ (
        np.array(matrix) @ linear
    )
    f = np.cbrt(np.clip(xyz / [0.9505, 1.0, 1.089], 1e-6, None))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "matrix",
    [
        [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],  # no red cones
        [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],  # no green cones
    ],
)
def test_first_colours_stay_apart_for_colour_blind_readers(matrix):
    seen = [_simulated(colour, matrix) for colour in figures.palette[:5]]
    gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 15


def test_logarithmic_axes_have_plain_labels():
    from metastable.report.figures import new_figure, to_svg

    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1e-3, 1.0, 10.0])
    axes.set(yscale="log", xscale="log")
    to_svg(figure, "decades")
    labels = [t.get_text() for t in (*axes.get_yticklabels(), *axes.get_xticklabels())]
    assert any(labels)
    assert not any("$" in text for text in labels)


GIVEN = {
    "given": [[1.0], [2.0]],
    "log_z": [0.5, 0.25],
    "log_z_se": [0.1, 0.1],
    "ess": [9, 8],
    "draws": [10, 10],
}


@each(
    "key, value, shown",
    [
        ("given", [[1.0], [2.0]], True),
        ("given", [[1.0], ["a"]], True),
        ("given", [[1.0]], False),
        ("ess", [9, []], False),
        ("draws", ["", 10], False),
        ("log_z_on_grid", [0.5], False),
        ("log_z_on_grid", [0.5, 0.25], True),
    ],
)
def test_a_table_of_contexts_needs_as_many_of_each(tmp_path, key, value, shown):
    drawn = contexts._partitions(Run(tmp_path, summary={"contexts": GIVEN | {key: value}}))
    assert (drawn is not None) == shown
