"""Every number of every setting, as large and as small as nobody wants it: refused by name, or harmless."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz import DATA, SLOW, Case, judge, quick, unjudged

from metastable.core.configure import describe
from metastable.energies.build import ENERGIES
from metastable.kernels import KERNELS
from metastable.methods import METHODS
from metastable.training.config import OPTIMISERS, TrainerConfig

EXTREMES = ("1e300", "1e40", "1e-40", "1e-300")


def numbers(tree: dict[str, Any], place: str) -> Iterator[str]:
    """Dotted names of what is a number, or may be one."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{place}.{name}")
        elif value is None or isinstance(value, float):
            yield f"{place}.{name}"


def of_methods() -> Iterator[list[str]]:
    for name, kind in METHODS.items():
        if name != "density":
            for path in numbers(describe(kind()), "method"):
                yield ["--method", name, "--set", f"{path}=VALUE"]


def of_kernels() -> Iterator[list[str]]:
    for name, kind in KERNELS.items():
        for field in dataclasses.fields(kind):
            if "float" in str(field.type):
                value = f'method.kernel={{"name": "{name}", "{field.name}": VALUE}}'
                yield from (["--method", method, "--set", value] for method in ("jarzynski", "pcd"))


def of_trainers() -> Iterator[list[str]]:
    for path in numbers(describe(TrainerConfig()), "trainer"):
        yield ["--set", f"{path}=VALUE"]
    for name, kind in OPTIMISERS.items():
        for path in numbers(describe(kind()), ""):
            yield ["--set", f'trainer.optimiser={{"name": "{name}", "{path[1:]}": VALUE}}']


def of_energies() -> Iterator[list[str]]:
    for name, kind in ENERGIES.items():
        for path in numbers(describe(kind()), "energy"):
            if name not in SLOW:
                yield ["--method", "cd", "--energy", name, "--set", f"{path}=VALUE"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [of_methods, of_kernels, of_trainers, of_energies])
def test_numbers_beyond_reason_are_refused_by_name_or_harmless(settings, tmp_path):
    small = [
        "--steps",
        "2",
        "--no-progress",
        "--set",
        "trainer.log_every=1",
        "--set",
        "trainer.batch_size=16",
    ]
    wrong = []
    with quick(), unjudged():
        for i, words in enumerate(settings()):
            for value in EXTREMES:
                out: Path = tmp_path / f"{i}-{value}"
                given = [word.replace("VALUE", value) for word in words]
                case = Case.of("extremes", "train", "--data", DATA, "--out", out, *small, *given, "--dry-run")
                wrong += [f"{given}: {why}" for why in [judge(case)] if why]
    assert wrong == []
