"""log Z and cross-entropy, as cards at the top of the page."""

from __future__ import annotations

from ..formatting import is_number, number, plus_minus
from ..markup import Html, card, tag
from ..read import Run, sequence
from .contexts import is_conditional


def log_z_card(run: Run) -> Html | None:
    """log Z with what speaks against it, or why there is none."""
    z = run.log_partition
    if z is None:
        return _no_log_z_card(run)
    if (z["value"], z.get("std_error")) == (0, 0):
        return card("log Z", "0", "Exactly: what was learned is a density.", tone="quiet")
    interval = sequence(z.get("interval"))
    warnings = [str(w) for w in sequence(z.get("warnings"))]
    span = f"95 %: {number(interval[0])} … {number(interval[1])}" if len(interval) == 2 else None
    trust = [tag("p", "Do not trust it: ", w, class_="note doubt") for w in warnings]
    # an earlier model, of which nothing more is known
    trust += [run.evaluated_at] if run.evaluated_at else []
    power, reverse = run.summary.get("power", 1), None
    of = None if power == 1 else f"Of exp(−{number(power)}·E), which is what was learned."
    if is_number(z.get("reverse")):
        value = plus_minus(z["reverse"], z.get("reverse_std_error"))
        reverse = f"Reverse estimate, which tends to lie above: {value}"
    notes = [span, of, reverse, *(trust or ["Nothing speaks against it."])]
    tone = "wide caution" if trust else "wide"
    return card("log Z", plus_minus(z["value"], z.get("std_error")), *notes, tone=tone)


def _no_log_z_card(run: Run) -> Html | None:
    if not run.summary:
        running, step = run.last("log_z"), number(run.last("step"))
        value = plus_minus(running, run.last("log_z_se"))
        return (
            None if running is None else card("log Z", value, f"at the last logged step, {step}", tone="wide")
        )
    if is_conditional(run):
        note = "One for each context, by importance sampling from the proposal: see What the model learned."
        return card("log Z", "of each context", note, tone="wide quiet")
    note = "No estimate was made: densities are known up to a factor."
    advice = [f.get("advice") for f in run.diagnosis if f.get("name") == "log-z-not-estimated"]
    return card("log Z", "not estimated", note, *advice, tone="wide quiet")


def cross_entropy_card(run: Run) -> Html | None:
    """Of held-out rows where there is a summary, else the last logged one."""
    value = run.summary.get("cross_entropy")
    value = value if is_number(value) else run.last("cross_entropy")
    return None if value is None else card("Cross-entropy", number(value), "nats per data point; low is good")
