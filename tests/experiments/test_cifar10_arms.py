"""Arms and rows of `cifar10-adance`, `cifar10-divergences` and `jem-cifar10`."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from metastable.core.errors import ConfigError
from metastable.energies.network_configs import ShortRunConfig
from metastable.evaluation.frechet import needed
from metastable.experiments import cifar10_adance, cifar10_divergences, image_figures, jem_cifar10
from metastable.experiments.base import Bench, Result, Row, changed, written
from metastable.experiments.image_runs import from_noise
from metastable.experiments.joined import join
from metastable.experiments.pieces import Piece
from metastable.kernels import ULA
from metastable.methods import JEM, AdaptiveNCE, FDivergence, PersistentCD
from metastable.report import figures

SMALL = {"steps": 2, "walkers": 12, "batch": 4, "images": 12, "log_every": 1}
CHAINS = {"chains": 4, "chain_steps": 2, "energy": ShortRunConfig(filters=2)}
OWN: dict[str, dict] = {
    "cifar10_adance": CHAINS,
    "cifar10_divergences": CHAINS | {"followed": (0, 2)},
    "jem_cifar10": {"histogram": 20},
}


def bench(room: ModuleType, folder, **changes) -> Bench:
    own = OWN[room.__name__.rpartition(".")[2]]
    settings = changed({**room.EXPERIMENT.scales["smoke"], **SMALL, **own}, changes)
    return Bench(settings, "smoke", 0, "cpu", folder)


@pytest.mark.parametrize(
    ("room", "arms", "rows", "pictures"),
    [
        (cifar10_adance, ("noise", "data"), {"var_log_g/noise/minutes=10"}, {"curves.png"}),
        (
            cifar10_divergences,
            ("js", "theorem1"),
            {"updates/theorem1/minutes=10", "exponent_min/js/minutes=10", "exponent_max/theorem1/minutes=10"},
            {"followed.png", "table-1.png"},
        ),
        (
            jem_cifar10,
            ("s3-b2", "s1-b200"),
            {"accuracy/s3-b2", "stopped/s3-b2", "accuracy/s1-b200"},
            {"figure-12.png", "figure-13.png", "figure-14.png"},
        ),
    ],
)
def test_pieces_are_made_and_gathered(room, arms, rows, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(image_figures, "COLUMNS", 2)
    monkeypatch.setattr(cifar10_divergences, "CLASSES", 2)
    own = bench(room, tmp_path, arms=arms, parcels=False, required=())
    found = {row.metric for row in room.EXPERIMENT.compared(own, room.body(own))}
    assert rows <= found
    assert {"samples.png", "distances.png"} | pictures <= {path.name for path in tmp_path.glob("*.png")}
    assert not any(name.startswith("fid") for name in found)


def test_intervals_and_starts_are_the_thesiss(tmp_path):
    asked = bench(cifar10_adance, tmp_path)
    methods: dict[str, Any] = {
        arm: cifar10_adance.arm_of(asked, arm).method for arm in cifar10_adance.ALL_ARMS
    }
    assert all(isinstance(method, AdaptiveNCE) and not method.tempered for method in methods.values())
    assert [methods[f"interval-{k}"].interval for k in (1, 5, 10, 20, 50)] == [1, 5, 10, 20, 50]
    assert methods["noise"].source.rejuvenation == 1
    assert methods["interval-5"].source.rejuvenation == 0.1
    assert methods["data"].source.name == "cd"


def test_samples_between_two_renewals_are_the_whole_buffer(tmp_path):
    """The last update is no multiple of 𝒦: weights exp(20,000·(E_frozen − E)) would leave one walker."""
    own = bench(cifar10_adance, tmp_path, arms=("interval-10",), steps=7, rate=1e-3, required=())
    rows = {row.metric: row.value for row in cifar10_adance.body(own)}
    assert rows["images/interval-10/minutes=10"] == pytest.approx(12)
    assert math.isfinite(rows["pixels_over_noise/interval-10/minutes=10"])


def test_a_table_of_intervals_needs_a_mark_that_all_of_them_have(tmp_path):
    asked = bench(cifar10_adance, tmp_path)
    rows = [Row(f"pixels_over_noise/{arm}/minutes=1", 0.3) for arm in cifar10_adance.PAPER]
    cifar10_adance.compared(asked, rows[:-1])
    assert {path.name for path in tmp_path.glob("*.png")} == {"distances.png"}
    cifar10_adance.compared(asked, rows)
    assert (tmp_path / "table-5-2.png").is_file()


def result_of(room: ModuleType, folder, arms):
    """As a command for these arms leaves it, with FID."""
    at = [f"{arm}/minutes=2" for arm in arms]
    rows = [row for arm in at for row in (Row(f"fid/{arm}", 90.0 + len(arm)), Row(f"fid_se/{arm}", 5.0))]
    folder.mkdir()
    (folder / "samples.png").write_bytes(repr(arms).encode())
    room.EXPERIMENT.compared(bench(room, folder), rows)
    written(Result(room.EXPERIMENT.name, "smoke", 0, "cpu", 1.0, rows, {"arms": arms}), folder)
    return folder


@pytest.mark.parametrize(
    ("room", "first", "second", "table"),
    [
        (cifar10_divergences, ("js", "kl"), ("cd",), "table-1.png"),
        (
            cifar10_adance,
            ("interval-1", "interval-5"),
            ("interval-10", "interval-20", "interval-50"),
            "table-5-2.png",
        ),
    ],
)
def test_tables_of_joined_arms_are_of_all_of_them(room, first, second, table, tmp_path):
    folders = [result_of(room, tmp_path / arms[0], arms) for arms in (first, second)]
    whole = result_of(room, tmp_path / "whole", first + second)
    join(room.EXPERIMENT, "smoke", 0, folders, tmp_path / "out")
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    assert found[table] == (whole / table).read_bytes()
    assert found["samples.png"] == repr(first).encode()
    assert found[f"samples-{'-'.join(second)}.png"] == repr(second).encode()
    assert found.keys() - {"distances.png"} == {table, "samples.png", f"samples-{'-'.join(second)}.png"}


def texts(path, monkeypatch, draw) -> list[str]:
    """Names in the legend of the picture that is drawn at `path`."""
    seen = []

    def watched(figure, place, *more):
        if place == path:
            seen.extend(text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts())
        return place

    monkeypatch.setattr(figures, "save_figure", watched)
    draw()
    return seen


def test_table_1_says_what_is_the_papers(tmp_path, monkeypatch):
    asked = bench(cifar10_divergences, tmp_path)
    for name, said in (("fid", ["paper", "ours"]), ("frechet_distance", ["ours"])):
        rows = [Row(f"{name}/{arm}/minutes=2", 90.0) for arm in ("js", "cd")]
        seen = texts(tmp_path / "table-1.png", monkeypatch, lambda: cifar10_divergences.compared(asked, rows))  # noqa: B023
        assert sorted(seen) == sorted(said)


@pytest.mark.parametrize(("marks", "shown"), [((2.0,), True), ((1.0, 2.0), False)])
def test_arms_with_one_mark_stand_side_by_side(marks, shown, tmp_path, monkeypatch):
    """A line over minutes with one point says nothing, and points above each other cannot be told apart."""
    arms = cifar10_adance.ALL_ARMS
    rows = [Row(f"fid/{arm}/minutes={mark:g}", 90.0) for arm in sorted(arms) for mark in marks]
    seen = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path, dpi: seen.update({path.name: figure}))
    cifar10_adance.compared(bench(cifar10_adance, tmp_path), rows)
    (axes,) = seen["distances.png"].axes
    assert ([tick.get_text() for tick in axes.get_xticklabels()] == list(arms)) is shown
    assert (axes.get_ylabel() == "FID, 2 min") is shown
    ticks = [tick.get_text() for tick in seen["table-5-2.png"].axes[0].get_xticklabels()]
    assert ticks == ["1", "5", "10", "20", "50"]


def test_pieces_are_in_the_order_of_arms_and_no_row_of_samples_is_named_as_the_data(tmp_path, monkeypatch):
    """There is an arm `data`, whose samples are no data."""
    own = bench(
        cifar10_adance, tmp_path, arms=("data", "interval-5", "interval-10"), parcels=False, required=()
    )
    seen = []
    monkeypatch.setattr(image_figures, "save_image_rows", lambda path, rows, dpi: seen.extend(rows))
    cifar10_adance.body(own)
    firsts = list(dict.fromkeys(name.partition(",")[0] for name in seen))
    assert firsts == ["training pictures", "interval-5", "interval-10", "data"]


def test_the_noise_that_all_chains_begin_with_is_shown_once(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cifar10_divergences, "save_image_rows", lambda path, rows, dpi: seen.extend(rows))
    piece = Piece("", {}, {"followed": np.zeros((5, 1, 1, 4, 4), np.uint8)})
    own = bench(cifar10_divergences, tmp_path, followed=(0, 1, 2, 3, 4))
    cifar10_divergences.draw_followed(own, {("js", 2.0): piece, ("cd", 2.0): piece})
    assert seen == ["noise", "js, 2 steps", "js, 4 steps", "cd, 2 steps", "cd, 4 steps"]


@pytest.mark.parametrize(("arms", "rows"), [(4, 9), (5, 6)])
def test_samples_of_many_arms_have_a_row_each(arms, rows, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(image_figures, "save_image_rows", lambda path, rows, dpi: seen.extend(rows))
    piece = Piece("", {}, {"samples": np.zeros((40, 1, 4, 4), np.uint8)})
    found = {(f"arm-{n}", 2.0): piece for n in range(arms)}
    image_figures.draw_samples(bench(cifar10_adance, tmp_path), found, torch.zeros(40, 1, 4, 4))
    assert len(seen) == rows


def test_divergences_are_of_labelled_chains(tmp_path):
    asked = bench(cifar10_divergences, tmp_path)
    for arm in cifar10_divergences.ALL_ARMS:
        method = cifar10_divergences.method_of(asked, arm)
        if arm == "cd":
            assert isinstance(method, PersistentCD)
            assert method.labels
            continue
        assert isinstance(method, FDivergence)
        assert method.source.labels
        assert method.divergence.name == ("js" if arm == "theorem1" else arm)
        assert method.estimator == ("theorem1" if arm == "theorem1" else "theorem3")


@pytest.mark.parametrize("scale", ["smoke", "cpu", "gpu"])
def test_every_divergence_holds_the_constant_of_its_energy(scale, tmp_path):
    """At equal rates of E and H it drifts without end, and kl and reverse-kl end at a bound of the exponent."""
    asked = Bench(cifar10_divergences.EXPERIMENT.scales[scale], scale, 0, "cpu", tmp_path)
    for arm in cifar10_divergences.ALL_ARMS:
        method: Any = cifar10_divergences.method_of(asked, arm)
        source = method if arm == "cd" else method.source
        assert arm == "cd" or method.energy_rate == 1
        assert source.energy_l2 == 1e-3
        if arm != "cd":
            assert (
                method.exponent_l2 > 0
            )  # else H tells pictures from chains beyond doubt, and nothing is learned
            assert method.normalise == (arm != "theorem1")


@pytest.mark.parametrize(
    ("number", "drift", "noise"), [(1, 1.0, 0.01), (4, 2.0, 0.01), (5, 0.5, 0.01), (6, 1.0, 0.02)]
)
def test_a_scenario_moves_chains_as_the_paper_says(number, drift, noise, tmp_path):
    arm = jem_cifar10.arm_of(bench(jem_cifar10, tmp_path), jem_cifar10.name_of(number, 0.0))
    method: JEM = arm.method  # pyright: ignore
    o = jem_cifar10.SCENARIOS[number].output_scale
    kernel: Any = method.source.source.moves  # pyright: ignore
    assert kernel.step_size * o == pytest.approx(drift)
    assert math.sqrt(2 * kernel.step_size) == pytest.approx(noise)
    assert method.generative == 1 / o


def test_every_published_number_stands_beside_its_own_beta():
    assert jem_cifar10.PAPER_ACCURACY["s2-b2"] == 0.883
    assert "s2-b0.5" not in jem_cifar10.PAPER_ACCURACY
    assert jem_cifar10.PAPER_FID["s2-b0.5"] == 48.0
    for arm in jem_cifar10.PAPER_FID.keys() | jem_cifar10.PAPER_ACCURACY.keys():
        scenario, beta_o = jem_cifar10.parsed(arm)
        assert jem_cifar10.name_of(scenario.number, beta_o) == arm
    assert jem_cifar10.parsed("s3-b2") == (jem_cifar10.SCENARIOS[3], 2.0)


@pytest.mark.parametrize(
    "arm", ["s8-b1", "s1-b", "s1-b4.0", "s1-bnan", "s1-b1.2.3", "s1b1", "s1-b-1", "s1-b1e+999"]
)
def test_what_is_no_scenario_at_a_beta_is_refused_before_anything_is_trained(arm, tmp_path):
    with pytest.raises(ConfigError, match="arms: must be sN-bB, a scenario N from 1 to 7"):
        jem_cifar10.body(bench(jem_cifar10, tmp_path, arms=("s1-b0", arm)))
    with pytest.raises(ConfigError, match=r"arms: must be at a β·o below o = 20000, got 's1-b20000'"):
        jem_cifar10.body(bench(jem_cifar10, tmp_path, arms=("s1-b0", "s1-b20000")))
    assert not (tmp_path / "training").exists()


def test_figures_of_appendix_l_are_in_the_order_of_beta_and_wrap(tmp_path, monkeypatch):
    betas = (0, 0.5, 2, 10, 200)  # β = 0.01 is the last
    arrays = {name: np.arange(3.0) for name in ("f_data", "f_buffer", "f_larger", "curve_step")}
    arrays |= {f"curve_energy_{name}": np.arange(3.0) for name in ("data", "negatives")}
    numbers = {"validation_accuracy": 0.5, "test_accuracy": 0.5}
    found = {(f"s1-b{b:g}", 3.0): Piece("", numbers, arrays) for b in sorted(betas, key=str)}
    found = jem_cifar10.in_order(found)
    assert [arm for arm, _ in found] == [f"s1-b{b:g}" for b in betas]
    seen = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path, dpi: seen.update({path.name: figure}))
    jem_cifar10.draw_over_beta(bench(jem_cifar10, tmp_path), found)
    assert seen.keys() == {"figure-12.png", "figure-13.png", "figure-14.png"}
    for figure in seen.values():
        shown = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
        assert shown == [arm for arm, _ in found]
        assert len(figure.axes) == 8
        assert figure.get_size_inches()[0] < 14
    line = seen["figure-12.png"].axes[0].lines[0]
    assert line.get_ydata()[-1] == pytest.approx(-2 / 20_000)


def test_larger_steps_are_four_times_those_of_training(tmp_path):
    asked = bench(jem_cifar10, tmp_path, chain_share=1.0)
    method: JEM = jem_cifar10.arm_of(asked, "s2-b10000").method  # pyright: ignore
    run: Any = SimpleNamespace(energy=lambda x: 400 * x.flatten(1).square().sum(1), trained_with=method)
    x = torch.ones(2000, 1, 2, 2)
    moved = jem_cifar10.larger_steps(asked, run, x)
    h = 4 * 0.5e-4  # on (1 − β)E with β = 0.5, five times
    kept = (1 - h * 400) ** 5
    assert moved.mean() == pytest.approx(kept, abs=2e-3)
    assert moved.std() == pytest.approx(
        math.sqrt(2 * h * sum((1 - h * 400) ** (2 * k) for k in range(5))), rel=0.05
    )


def test_few_negatives_have_a_buffer_that_minutes_can_move(tmp_path):
    chains = {
        number: jem_cifar10.arm_of(
            bench(jem_cifar10, tmp_path, batch=64, walkers=100), f"s{number}-b0"
        ).method.source.source  # pyright: ignore
        for number in (1, 3)
    }
    assert (chains[1].walkers, chains[1].batch) == (100, 64)
    assert (chains[3].walkers, chains[3].batch) == (50, 8)
    assert jem_cifar10.EXPERIMENT.scales["gpu"]["few_walkers"] >= needed(2048)  # enough for FID


def test_accuracy_is_that_of_the_best_validation(tmp_path):
    def piece(validation, test):
        return Piece("", {"validation_accuracy": validation, "test_accuracy": test}, {})

    found = {
        ("s1-b0", 1.0): piece(0.4, 0.3),
        ("s1-b0", 2.0): piece(0.6, 0.5),
        ("s1-b0", 3.0): piece(0.5, 0.9),
    }
    found["s2-b0", 1.0] = Piece("", {"stopped": 9}, {})
    rows = {row.metric: row.value for row in jem_cifar10.accuracy_rows(bench(jem_cifar10, tmp_path), found)}
    assert rows["accuracy/s1-b0"] == 0.5
    assert rows["best_minutes/s1-b0"] == 2
    assert rows["stopped/s1-b0"] == 0
    assert rows["stopped/s2-b0"] == 1
    assert "accuracy/s2-b0" not in rows


def test_chains_from_noise_begin_at_the_same_noise_and_move_by_the_energy(tmp_path):
    asked = bench(cifar10_divergences, tmp_path)
    run: Any = SimpleNamespace(event_shape=(1, 8, 8), energy=lambda x: 50 * x.flatten(1).square().sum(1))
    start, again, moved = (from_noise(asked, run, ULA(0.005, noise=1e-6), 7, steps) for steps in (0, 0, 1))
    assert torch.equal(start, again)
    assert start.abs().max() <= 1
    assert start.std() > 0.5
    assert torch.allclose(moved, start / 2, atol=1e-4)


def test_a_required_classifier_that_stopped_does_not_hold(tmp_path):
    asked = bench(jem_cifar10, tmp_path, required=("s1-b4",))
    rows = jem_cifar10.accuracy_rows(asked, {("s1-b4", 10.0): Piece("", {"stopped": 5}, {})})
    assert [row.metric for row in rows if not row.ok] == ["accuracy/s1-b4"]
