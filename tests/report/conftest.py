"""Folders as training, comparisons and reproductions write them, with numbers that look like theirs."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import drawn

MEANS = np.array([[-2.0, 0.0], [2.0, 1.0], [0.5, -2.2]])
WEIGHTS = np.array([0.2, 0.5, 0.3])
SCALE = 0.45


@pytest.fixture(scope="module", autouse=True)
def real_pictures() -> Iterator[None]:
    with drawn():
        yield


def mixture_log_density(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    distance = ((points[..., None, :] - MEANS) ** 2).sum(-1)
    parts = np.log(weights) - distance / (2 * SCALE**2) - np.log(2 * np.pi * SCALE**2)
    return np.logaddexp.reduce(parts, axis=-1)


def mixture_draws(n: int, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return MEANS[rng.choice(3, n, p=weights)] + SCALE * rng.standard_normal((n, 2))


def metric_rows(steps: int = 600, every: int = 5, drift: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    rng, rows, resamplings, ess = np.random.default_rng(seed), [], 0, 1.0
    for step in range(every, steps + 1, every):
        ess *= 0.965
        if ess < 0.5:
            ess, resamplings = 1.0, resamplings + 1
        decay = np.exp(-step / 120)
        data = 1.9 + 3 * decay + 0.05 * rng.standard_normal()
        gap = 2 * decay + drift * step / steps + 0.08 * rng.standard_normal()
        rows.append(
            {
                "step": step,
                "seconds": step * 0.0312,
                "energy_data": data,
                "energy_negatives": data + gap,
                "energy_gap": gap,
                "grad_norm": float(40 * decay + np.exp(0.3 * rng.standard_normal())),
                "learning_rate": 1e-3 * min(step / 100, 1),
                "ess": ess,
                "ess_held_out": max(ess - 0.06, 0.05),
                "log_z": 1.84 + 2 * decay + 0.02 * rng.standard_normal(),
                "log_z_se": 0.03 + 0.2 * decay,
                "cross_entropy": 2.35 + 1.4 * decay + 0.02 * rng.standard_normal(),
                "resamplings": resamplings,
                "displacement": 0.31 + 0.02 * rng.standard_normal(),
                "acceptance": 0.87 + 0.01 * rng.standard_normal(),
                "weight_entropy": 0.8 + 0.05 * rng.standard_normal(),
            }
        )
    return rows


def summary_of(method: str, learned: np.ndarray, **changes: Any) -> dict[str, Any]:
    found = {
        "status": "finished",
        "message": "Finished 600 steps; the last checkpoint is checkpoints/step-600.",
        "steps": 600,
        "seconds": 71.2,
        "event_shape": [2],
        "method": method,
        "log_partition": {
            "value": 1.8423,
            "std_error": 0.0123,
            "interval": [1.8182, 1.8664],
            "ess": 2310.4,
            "warnings": [],
            "reverse": 1.8511,
            "reverse_std_error": 0.014,
        },
        "cross_entropy": 2.3514,
        "diagnosis": [
            {
                "name": "step_size_large",
                "severity": "note",
                "text": "Walkers move further per step than a mode is wide.",
                "evidence": {"displacement": 0.31, "mode_width": 0.45},
                "advice": "Halve the step size if acceptance falls.",
            },
            {
                "name": "mode_weights_off",
                "severity": "problem",
                "text": "The model gives mode 2 more weight than the data do, by more than chance allows.",
                "evidence": {"mode": 2, "data": 0.5, "samples": 0.5612, "standard_errors": 5.6},
                "advice": "Use more walkers, or resample at a higher threshold.",
            },
            {
                "name": "weights_collapse",
                "severity": "warning",
                "text": "The effective sample size fell below a half before each resampling.",
                "evidence": {"lowest_ess": 0.5003},
                "advice": "Lower the learning rate.",
            },
        ],
        "modes": {
            "centers": MEANS.tolist(),
            "data": WEIGHTS.tolist(),
            "samples": learned.tolist(),
            "std_error": [0.009, 0.011, 0.010],
        },
        "scores": {"kl_exact": 0.0123, "mmd": 0.00041, "held_out_log_likelihood": -2.3514},
    }
    return {**found, **changes}


CONFIG = {
    "version": "0.1.0",
    "seed": 0,
    "device": "cpu",
    "precision": "float32",
    "data": {"name": "three-gaussians", "n": 10000},
    "energy": {"name": "mlp", "hidden": [128, 128], "activation": "silu"},
    "method": {"name": "jarzynski", "walkers": 4096, "kernel": {"name": "ula", "step_size": 0.1}},
    "optimiser": {"name": "adam", "learning_rate": 0.001},
    "trainer": {"steps": 600, "clip": None, "log_every": 5},
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_run(
    folder: Path,
    method: str = "jarzynski",
    learned: np.ndarray | None = None,
    drift: float = 0.0,
    seed: int = 0,
) -> Path:
    """A finished training on a plane, with every file."""
    learned = np.array([0.18, 0.56, 0.26]) if learned is None else learned
    rng = np.random.default_rng(seed)
    x, y = np.linspace(-4, 4.4, 90), np.linspace(-4.2, 3.2, 80)
    grid = np.stack(np.meshgrid(x, y), -1)
    write_json(folder / "config.json", {**CONFIG, "method": {**CONFIG["method"], "name": method}})
    write_json(folder / "summary.json", summary_of(method, learned))
    write_metrics(folder, metric_rows(drift=drift, seed=seed))
    samples = mixture_draws(1500, learned, rng)
    np.save(folder / "samples.npy", samples)
    np.savez(
        folder / "figures.npz",
        data=mixture_draws(1500, WEIGHTS, rng),
        samples=samples,
        grid_x=x,
        grid_y=y,
        log_density=mixture_log_density(grid, learned) + 0.1 * np.sin(3 * grid[..., 0]),
        truth_log_density=mixture_log_density(grid, WEIGHTS),
        box=np.array([[-4, -4.2], [4.4, 3.2]]),
    )
    return folder


def build_comparison(folder: Path) -> Path:
    """Three methods at the same cost, one of which diverged."""
    learned = {"jarzynski": [0.205, 0.49, 0.305], "pcd": [0.33, 0.34, 0.33], "cd": [0.05, 0.9, 0.05]}
    rows = []
    for i, (method, weights) in enumerate(learned.items()):
        build_run(folder / method, method, np.array(weights), drift=-0.4 * i, seed=i)
        rows.append(
            {
                "method": method,
                "run": method,
                "mode_weights": weights,
                "kl": [0.009, 0.08, 0.001][i],
                "kl_exact": [0.0081, 0.0912, 0.0007][i],
                "log_z": 1.84 + i,
                "log_z_se": 0.012,
                "ess": [0.71, 0.4, 0.2][i],
                "seconds": 60.2 + i,
            }
        )
    stopped = {"status": "diverged", "message": "Stopped at step 580: the energy gap is not finite."}
    summary = summary_of("cd", np.array(learned["cd"]), log_partition=None, **stopped)
    write_json(folder / "cd" / "summary.json", summary)
    table = {
        "data": "three-gaussians",
        "budget": "60s",
        "columns": ["mode_weights", "kl", "kl_exact", "log_z", "log_z_se", "ess", "seconds"],
        "rows": rows,
        "truth": {"mode_weights": WEIGHTS.tolist(), "log_z": 1.84},
    }
    write_json(folder / "compare.json", table)
    return folder


def tiny_png() -> bytes:
    """One white pixel."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    body = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\x00\xff")), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


RESULT_ROWS = [
    ("mode_weight_error/jarzynski", 0.008123, "<=", 0.02, None, True),
    ("mode_weight_error/pcd", 0.21, ">=", 0.1, 0.3, True),
    ("log_z_error/jarzynski", 0.09, "<=", 0.05, 0.02, False),
    ("seconds_per_step_ratio", 1.04, None, None, None, None),
]


def build_result(folder: Path) -> Path:
    """A reproduction with one row that fails and one that nobody judges."""
    names = ("metric", "value", "relation", "target", "paper", "ok")
    result = {
        "experiment": "jarzynski-gmm",
        "scale": "cpu",
        "seed": 0,
        "version": "0.1.0",
        "device": "cpu",
        "seconds": 71.2,
        "rows": [dict(zip(names, row)) for row in RESULT_ROWS],
        "settings": {"walkers": 4096},
    }
    write_json(folder / "result.json", result)
    (folder / "mode_weights.png").write_bytes(tiny_png())
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("folders") / "run-a")


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_comparison(tmp_path_factory.mktemp("folders") / "compare")


@pytest.fixture(scope="session")
def result_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_result(tmp_path_factory.mktemp("folders") / "result")
