"""Energies of data, of negatives, and of negatives from longer steps: whether chains draw from the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import plots
from ..figures import DATA, MODEL, palette
from ..formatting import count, is_number, number, sentence
from ..markup import Html, empty
from ..parts import key, picture, pictures
from ..read import Run, mapping

LONGER = palette.green
OF_DATA, DRAWN, FURTHER = "energies_data", "energies_negatives", "energies_larger_steps"
"""Names of the stored arrays."""
_FLATTER = 0.01
"""β from which chains on (1 − β)E are visibly flatter."""
_APART = 0.9
"""Share of pairs in one order from which two histograms count as apart."""
_EVALUATE = "metastable evaluate draws them from the last good checkpoint."


def negatives(run: Run) -> Html:
    """The histograms, and in words what their places mean; or why there are none."""
    if DRAWN not in run.arrays or OF_DATA not in run.arrays:
        return _none(run)
    clouds = energies(run)
    if OF_DATA not in clouds:
        return empty(f"No energies of data and negatives: none of the data's is finite. {_when(run)}".strip())
    shown = list(clouds.values())
    drawing = plots.overlaid("step-check", shown, "energy E(x), low is likely", reach=2)
    keys = [key(c.name, c.color, "block" if c.filled else "line") for c in shown]
    return pictures([picture("Energies of data and negatives", drawing, _caption(run, clouds), keys)], "full")


def _none(run: Run) -> Html:
    """Why a run with chains that did not come to its end has no histograms; nothing for any other run."""
    if "context_shape" in run.config:  # of a conditional run there never are any
        return Html()
    why = run.summary.get("no_negatives")
    if not why and "displacement" in run.metrics and run.status in ("diverged", "unfinished"):
        saved = any((run.folder / "checkpoints").glob("step-*"))
        why = _EVALUATE if saved else "They are drawn from a checkpoint, and the run's folder holds none."
    return empty(f"No energies of data and negatives to compare. {why}") if why else Html()


def _when(run: Run) -> str:
    """The update that the energies are of, where training went on after it."""
    stored = run.arrays.get("negatives_step")
    return "" if stored is None else run.seen_at(float(np.ravel(stored)[0]))


def energies(run: Run) -> dict[str, plots.Cloud]:
    """Data, negatives, and negatives from longer steps, those of them that were stored and are not all runaways."""
    looks = {
        OF_DATA: ("data", DATA, True),
        DRAWN: ("negatives", MODEL, False),
        FURTHER: ("negatives at four times the step", LONGER, False),
    }
    stored = {k: np.ravel(run.arrays[k]) for k in looks if k in run.arrays}
    return {k: plots.Cloud(looks[k][0], v, *looks[k][1:]) for k, v in stored.items() if np.isfinite(v).any()}


def _caption(run: Run, clouds: dict[str, plots.Cloud]) -> str:
    data, drawn, longer = (clouds.get(k) for k in (OF_DATA, DRAWN, FURTHER))
    n = count(np.size(run.arrays[DRAWN]), "negative")
    if data is None or drawn is None:
        lost = f"{n} as training draws them, none of finite energy: all chains ran away. Take shorter steps."
        return f"{_when(run)} {lost}".lstrip()
    words = [
        _when(run),
        f"{n} as training draws them: where the model fits and its chains reach it, they agree with data.",
        _gap(data, drawn),
    ]
    if _beta(mapping(run.config.get("method"))) >= _FLATTER:
        words.append("Chains of β are flatter than the model, so that some of a gap is meant.")
    if longer is not None:
        steps = run.arrays.get("larger_steps")
        how_many = "" if steps is None else f"{number(float(np.ravel(steps)[0]))} "
        words.append(f"{how_many}steps four times as long, at the same temperature, should change nothing.")
        words[-1] = sentence(words[-1])
        words.append(_moved(drawn, longer))
    return " ".join(w for w in words if w)


def _beta(method: dict[str, Any]) -> float:
    """β of the method, or of the one that it stands on; 0 where there is none."""
    beta = method.get("beta")
    values = [v for v in (beta if isinstance(beta, list) else [beta]) if is_number(v)]
    return max(values) if values else _beta(mapping(method["source"])) if method.get("source") else 0.0


def _gap(data: plots.Cloud, drawn: plots.Cloud) -> str:
    lower = share_below(drawn, data)
    if max(lower, 1 - lower) < _APART:
        return ""
    side, meaning = ("lower", "they have fallen into regions that the data do not support")
    if lower < 0.5:
        side, meaning = ("higher", "the chains do not reach the regions that the model finds likely")
    return f"Here negatives lie {side} (median {_median(drawn)}, data {_median(data)}): {meaning}."


def _moved(drawn: plots.Cloud, longer: plots.Cloud) -> str:
    lower = share_below(longer, drawn)
    if max(lower, 1 - lower) < _APART:
        return ""
    medians = f"median {_median(longer)} against {_median(drawn)}"
    if lower > 0.5:
        return (
            f"Here they find lower energies ({medians}): negatives stand for the sampler, not for the model."
        )
    return f"Here they end at higher energies ({medians}): these chains bear no longer steps than they have."


def share_below(first: plots.Cloud, second: plots.Cloud) -> float:
    """Share of pairs in which the first has the lower value; ties count half, and what is not finite is high."""
    a, b = (np.sort(np.where(np.isfinite(c.values), c.values, np.inf)) for c in (first, second))
    below, upto = np.searchsorted(b, a, "right"), np.searchsorted(b, a, "left")
    return float(1 - (below + upto).mean() / (2 * len(b)))


def _median(cloud: plots.Cloud) -> str:
    return number(float(np.median(cloud.values[np.isfinite(cloud.values)])), 3)
