"""The page of one training run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import plots
from .figures import DATA, INK, MODEL, palette
from .formatting import clock, is_number, label, method_title, number, plus_minus, sentence, share
from .markup import Html, card, document, empty, join, section, tag
from .parts import contents, findings, key, masthead, picture, pictures, settings, status_badge
from .read import Run, mapping
from .sections.classifier import classifier
from .sections.contexts import contexts, is_conditional, objective, ranked_among
from .sections.data import data
from .sections.density import model
from .sections.images import images
from .sections.likelihood import cross_entropy_card, log_z_card
from .sections.modes import modes, modes_card
from .sections.negatives import negatives
from .sections.registered import number_table, registered

_DRAWN_TOGETHER = {
    "step",
    "seconds",
    "energy_data",
    "energy_negatives",
    "energy_gap",
    "energy_noisy",
    "score_loss",
    "density_loss",
    "grad_norm",
    "ess",
    "ess_held_out",
    "log_z",
    "log_z_se",
    "cross_entropy",
    "label_cross_entropy",
    "accuracy",
    "resamplings",
    "grad_scale",
    "weight_data_max",
    "weight_negatives_max",
    "negatives_ignored",
}


def run_page(run: Run) -> str:
    """The whole page."""
    sections = [
        section("diagnosis", "Diagnosis", findings(run)),
        section("data", "Data", data(run)),
        section("training", "Training", training(run)),
        section("weights", "Weights and log Z", weights(run)),
        section("negatives", "Negatives", negatives(run)),
        section("model", "What the model learned", contexts(run) if is_conditional(run) else model(run)),
        section("classifier", "As a classifier", classifier(run)),
        section("images", "As pictures", images(run)),
        section("modes", "Mode weights", modes(run)),
        section("scores", "Scores", scores(run)),
        *registered(run),
        section("other", "Other metrics", other_metrics(run)),
        settings({k: v for k, v in run.config.items() if k not in ("coordinates", "columns")}),
    ]
    return document(f"{title(run)} · metastable", header(run), contents(sections), cards(run), *sections)


# ----------------------------------------------------------------------------------------------- top


def title(run: Run) -> str:
    """Method and data."""
    data = run.data_name
    return f"{method_title(run.method)} on {data}" if data else method_title(run.method)


def header(run: Run) -> Html:
    """Title, status, what the run was made with, and its last words."""
    config = run.config
    facts = [
        tag("code", run.folder.resolve().name),
        f"version {config['version']}" if "version" in config else None,
        f"seed {config['seed']}" if "seed" in config else None,
        *(f"{k} {config[k]}" for k in ("device", "precision") if isinstance(config.get(k), str)),
        f"event shape {tuple(run.event_shape)}" if run.event_shape is not None else None,
    ]
    message = run.summary.get("message")
    words = tag("p", message, class_=f"message {run.status}") if message else None
    ended = run.summary.get("ended")
    how = tag("p", ended, class_="message") if ended else None
    return join([masthead("run", title(run), status_badge(run.status), facts), words, how])


def cards(run: Run) -> Html:
    """The numbers that matter."""
    found = [
        log_z_card(run),
        _accuracy_card(run),
        cross_entropy_card(run),
        _ess_card(run),
        modes_card(run),
        _cost_card(run),
    ]
    return tag("div", *[c for c in found if c], class_="cards")


def _accuracy_card(run: Run) -> Html | None:
    found = mapping(run.evaluation.get("classifier"))
    if found:
        value = plus_minus(found.get("accuracy"), found.get("accuracy_se"))
        return card("Accuracy", value, f"on {number(found.get('rows'))} labelled events")
    last = run.last("accuracy")
    return None if last is None else card("Accuracy", number(last), "on the last batches of training")


def _ess_card(run: Run) -> Html | None:
    last, walkers = run.last("ess"), mapping(run.log_partition).get("ess")
    known = is_number(walkers) and math.isfinite(walkers)
    behind = "walkers behind log Z"
    if last is None:
        return card("Effective sample size", number(walkers, 3), behind) if known else None
    column = run.metrics["ess"]
    low = float(column[np.isfinite(column)].min())
    notes = [f"lowest {share(low)}", f"{number(walkers, 3)} {behind}" if known else None]
    return card("Effective sample size", share(last), *notes)


def _cost_card(run: Run) -> Html | None:
    steps, seconds = run.summary.get("steps"), run.summary.get("seconds")
    steps = steps if is_number(steps) else run.last("step")
    seconds = seconds if is_number(seconds) else run.last("seconds")
    if seconds is None and steps is None:
        return None
    pace = f"{number(1000 * seconds / steps, 3)} ms a step" if is_number(seconds) and steps else None
    return card("Time", clock(seconds), f"{number(steps)} steps" if steps is not None else None, pace)


# -------------------------------------------------------------------------------------------- curves


def training(run: Run) -> Html:
    """Energies, their gap, the gradient and the cross-entropy over the steps."""
    if not run.metrics:
        return empty("No steps were logged (metrics.jsonl is missing or empty).")
    drawn = [
        objective(run),
        _energies(run),
        single(
            run,
            "energy_gap",
            "Energy gap",
            f"{_gap_order(run)} Settles near zero where negatives are draws of the model.",
            level=0,
        ),
        single(
            run,
            "score_loss",
            "Score-matching loss",
            "Up to a constant of the data, the Fisher divergence; low is good.",
        ),
        single(run, "density_loss", "Loss of the density", "−log p, or the regression it is learned by."),
        single(run, "grad_norm", "Gradient norm", log=True),
        single(
            run,
            "cross_entropy",
            "Cross-entropy",
            "Estimated with the running log Z; low is good.",
            unit="nats",
        ),
        single(
            run,
            "label_cross_entropy",
            "Cross-entropy of the labels",
            "−log p(y | x) in the batches of training; low is good.",
            unit="nats",
        ),
        single(run, "accuracy", "Accuracy", "Of the classifier, on the batches of training.", ceiling=1.02),
    ]
    cut = tag("p", "The last line of metrics.jsonl was cut short and is left out.", class_="empty")
    return join([cut if run.broken_tail else None, pictures([d for d in drawn if d])])


def weights(run: Run) -> Html:
    """What weights say: effective sample size and log Z, and what data and negatives count for under β."""
    belief = [
        ("grad_scale", "mean (GradScale)", INK),
        ("weight_data_max", "heaviest datum", DATA),
        ("weight_negatives_max", "heaviest negative", MODEL),
    ]
    drawn = (
        _ess_trace(run),
        _log_z_trace(run),
        _several(
            run,
            "belief",
            belief,
            "Weights of data and negatives",
            "What data and negatives count for in an update; 1 without β. Near 0, negatives are not believed.",
            y_label="weight",
            log=True,
            level=1,
        ),
        single(
            run,
            "negatives_ignored",
            "Ignored negatives",
            "Negatives that count for less than a hundredth of what they would without β.",
            unit="share of negatives",
            floor=0,
            ceiling=1.02,
        ),
    )
    return pictures([d for d in drawn if d])


def _several(
    run: Run, name: str, parts: list[tuple[str, str, str]], heading: str, caption: str = "", **look: Any
) -> Html | None:
    """Metrics `(metric, name, colour)` in one picture, those of them that were logged."""
    logged = [part for part in parts if _has(run, part[0])]
    if not logged:
        return None
    drawing = plots.curves(name, [_series(run, m, c, n) for m, n, c in logged], **look)
    return picture(heading, drawing, caption, [key(n, c) for _, n, c in logged])


def _has(run: Run, metric: str) -> bool:
    return metric in run.metrics and bool(np.isfinite(run.metrics[metric]).any())


def _series(run: Run, metric: str, color: str, name: str = "", **kwargs: Any) -> plots.Series:
    return plots.Series(name or label(metric), run.metrics["step"], run.metrics[metric], color, **kwargs)


def single(
    run: Run, metric: str, heading: str, caption: str = "", *, unit: str = "", **kwargs: Any
) -> Html | None:
    """One metric as a picture, or None where it was not logged."""
    if not _has(run, metric):
        return None
    drawing = plots.curves(
        metric, [_series(run, metric, palette.blue)], y_label=unit or label(metric), **kwargs
    )
    return picture(heading, drawing, caption)


def _gap_order(run: Run) -> str:
    """Which way round the gap was logged, read off the energies themselves."""
    if not {"energy_data", "energy_negatives", "energy_gap"} <= set(run.metrics):
        return ""
    data, negatives, gap = (run.metrics[k] for k in ("energy_data", "energy_negatives", "energy_gap"))
    finite = np.isfinite(data) & np.isfinite(negatives) & np.isfinite(gap)
    difference = (negatives - data)[finite]
    forward, backward = (np.abs(gap[finite] - sign * difference).sum() for sign in (1, -1))
    return "Negatives minus data." if forward < backward else "Data minus negatives."


def _energies(run: Run) -> Html | None:
    parts = [
        ("energy_data", "data", DATA),
        ("energy_noisy", "noisy data", DATA),
        ("energy_negatives", "negatives", MODEL),
    ]
    names = [name for metric, name, _ in parts if _has(run, metric)]
    heading = f"Energy of {names[0]}" if len(names) == 1 else "Energy of data and of negatives"
    return _several(run, "energies", parts, heading, y_label="mean energy")


def _ess_trace(run: Run) -> Html | None:
    parts = [("ess", "walkers", palette.blue), ("ess_held_out", "held out", palette.green)]
    parts = [part for part in parts if _has(run, part[0])]
    if not parts:
        return None
    fraction = all(np.nanmax(run.metrics[m]) <= 1.001 for m, _, _ in parts)  # rounding may pass 1
    unit, ceiling = ("fraction", 1.02) if fraction else ("walkers", None)
    ticks, lines = resampled_at(run), [_series(run, m, c, n) for m, n, c in parts]
    drawing = plots.curves("ess", lines, y_label=unit, ticks=ticks, floor=0, ceiling=ceiling)
    marked = 0 < len(ticks) <= plots.MOST_TICKS
    keys = [key(n, c) for _, n, c in parts] + ([key("resampled", INK, "tick")] if marked else [])
    caption = "How evenly the weight is spread over the walkers; high is good."
    if len(ticks) and not marked:
        caption += f" Resampled at {number(len(ticks))} of {number(len(run.metrics['step']))} logged steps."
    return picture("Effective sample size", drawing, caption, keys)


def resampled_at(run: Run) -> np.ndarray:
    """Logged steps at which the walkers had been resampled since the step before.

    `resamplings` may be a running count or the number since the last logged step: a column that never falls
    is read as a running count.
    """
    if "resamplings" not in run.metrics:
        return np.empty(0)
    times = np.nan_to_num(run.metrics["resamplings"])
    rises = np.diff(times, prepend=0.0)
    return run.metrics["step"][(rises if (rises >= 0).all() else times) > 0]


def _log_z_trace(run: Run) -> Html | None:
    if not _has(run, "log_z"):
        return None
    band = 2 * run.metrics["log_z_se"] if _has(run, "log_z_se") else None
    drawing = plots.curves("log-z", [_series(run, "log_z", palette.blue, band=band)], y_label="log Z")
    keys = (
        [key("log Z", palette.blue), key("± 2 standard errors", palette.blue, "block")]
        if band is not None
        else []
    )
    if "log_z_learned" in mapping(run.summary.get("scores")):
        words = "Learned beside the energy. The number at the top was measured when training had ended."
    else:
        words = "The energy moves, so log Z moves with it."
    return picture("log Z along training", drawing, words, keys)


def other_metrics(run: Run) -> Html:
    """Every numeric metric that no other picture shows."""
    together = _DRAWN_TOGETHER | ({"objective"} if ranked_among(run) else set())
    names = [m for m in run.metrics if m not in together and _has(run, m)]
    drawn = [single(run, m, sentence(label(m)), log=True, small=True) for m in names]
    return pictures([d for d in drawn if d], "third")


# -------------------------------------------------------------------------------------------- numbers


def scores(run: Run) -> Html:
    """Named numbers of the summary."""
    found = mapping(run.summary.get("scores"))
    return number_table({name: value for name, value in found.items() if "/" not in name})
