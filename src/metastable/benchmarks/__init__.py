"""Performance claims as programs: every claim is a ratio of two things timed in one run.

`SUITES` names them and `run_suite` runs one; a suite is imported when it is run, prints nothing, and returns
the same rows as an experiment, so that a claim which does not hold is a row that is not ok.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metastable.experiments.base import Row

Suite = Callable[..., "list[Row]"]


def _suite(module: str) -> Suite:
    def run(**options: Any) -> list[Row]:
        return importlib.import_module(f"{__name__}.{module}").run(**options)

    return run


SUITES: dict[str, Suite] = {
    "step-cost": _suite("step_cost"),
    "sampler": _suite("sampler"),
    "update": _suite("update"),
    "laws": _suite("laws"),
    "scoring": _suite("scoring"),
    "interpolant": _suite("interpolant"),
    "policy": _suite("policy"),
}
"""`step-cost`: what a Jarzynski update costs beside a PCD update. `sampler`: Langevin steps per second. `update`: a
whole training update, step by step and recorded. `laws`: every engine held to eager on this device. `scoring`:
candidates scored by an energy beside the ODE of a diffusion. `interpolant`: log-densities of a continuous flow on
two time scales and on one. `policy`: milliseconds of one chunk of actions, by model."""


def run_suite(name: str, **options: Any) -> list[Row]:
    """The rows of one suite; `options` are the arguments of its `run`."""
    from metastable.core.errors import require_choice

    require_choice("suite", name, SUITES)
    return SUITES[name](**options)


def write_rows(folder: Path, suites: Mapping[str, Sequence[Row]], partly: bool = False) -> Path:
    """Write the rows of some suites to DEVICE.json in `folder`; suites that it holds and are not given stay.

    So do, of suites that were run partly, rows that are not given.
    """
    return importlib.import_module(f"{__name__}.files").write_rows(folder, suites, partly)


__all__ = ["SUITES", "run_suite", "write_rows"]
