"""Numbers as people read them."""

from __future__ import annotations

import json
import math
import numbers
import sys
from typing import Any, TypeGuard

ABSENT = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_NAMES = {
    "ess": "effective sample size",
    "ess_held_out": "effective sample size, held out",
    "log_z": "log Z",
    "log_z_se": "standard error of log Z",
    "grad_norm": "gradient norm",
    "beta_o": "output scale times β",
    "kl": "KL",
    "kl_exact": "KL, exact",
    "exact_kl": "KL, exact",
    "kl_estimated": "KL, estimated",
    "kl_estimate": "KL, estimated",
    "estimated_kl": "KL, estimated",
    "seconds": "time",
    "nll": "negative log-likelihood",
}
_WORDS = {
    "ess": "ESS",
    "kl": "KL",
    "z": "Z",
    "mmd": "MMD",
    "auc": "AUC",
    "fid": "FID",
    "nll": "NLL",
    "se": "s.e.",
}

SHORT_WORDS = frozenset({"run", "my", "own", "new", "on", "of", "the"})
"""Parts of a name that are short without being abbreviations."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a real number; True and False are not, nor an integer beyond every float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real)


def number(value: Any, digits: int = 4) -> str:
    """`value` to `digits` significant digits; whole numbers with separators.

    >>> number(0.0123456), number(-1234567), number(2.0), number(1.5e-7), number(None)
    ('0.01235', '−1,234,567', '2', '1.5 × 10⁻⁷', '–')
    """
    if not is_number(value):
        return ABSENT if value is None else str(value)
    value = float(value)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("−∞" if value < 0 else "∞")
    if value == int(value) and abs(value) < 1e12:
        return _minus(f"{int(value):,}")
    size = _exponent(value, digits)
    if size < -4 or size >= 6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_minus(_trimmed(mantissa))} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return _minus(_trimmed(f"{value:,.{max(digits - 1 - size, 0)}f}"))


def plus_minus(value: Any, error: Any) -> str:
    """`value ± error`, the error to two significant digits and the value to as many places.

    >>> plus_minus(-2.30994, 0.01234), plus_minus(3.2, 0), plus_minus(3.25, None)
    ('−2.310 ± 0.012', '3.2 ± 0', '3.25')
    """
    if not (is_number(value) and math.isfinite(value) and is_number(error) and error > 0):
        return number(value) + (f" ± {number(error)}" if is_number(error) else "")
    if not 1e-6 <= error < 1e6:
        return f"{number(value)} ± {number(error, 2)}"
    places = max(1 - _exponent(error, 2), 0)
    return f"{_minus(f'{value:,.{places}f}')} ± {error:,.{places}f}"


def clock(seconds: Any) -> str:
    """Seconds as m:ss, with hours where there are any; below one second as they are.

    >>> clock(71.2), clock(3725), clock(0.4213), clock(59.7)
    ('1:11', '1:02:05', '0.42 s', '1:00')
    """
    if not is_number(seconds) or not math.isfinite(seconds) or seconds < 0:
        return ABSENT
    if seconds < 1:
        return f"{number(seconds, 2)} s"
    minutes, rest = divmod(round(float(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def share(value: Any) -> str:
    """An effective sample size: a fraction as per cent, a count as a number.

    >>> share(0.6234), share(812.0)
    ('62.3 %', '812')
    """
    if is_number(value) and 0 <= value <= 1.001:  # rounding may pass 1
        return f"{_trimmed(f'{100 * value:.1f}')} %"
    return number(value)


def value_text(value: Any) -> str:
    """Any JSON value for a table: numbers rounded, lists joined, the rest as JSON."""
    if is_number(value) or value is None:
        return number(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and len(value) <= 16 and all(is_number(v) or v is None for v in value):
        return ", ".join(number(v, 3) for v in value)
    return exact(value)


def exact(value: Any, longest: int = 240) -> str:
    """A setting as it stands in its file, cut where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def label(name: str) -> str:
    """A metric's name in words.

    >>> label("energy_gap"), label("log_z"), label("test_kl")
    ('energy gap', 'log Z', 'test KL')
    """
    if name in _NAMES:
        return _NAMES[name]
    return " ".join(_WORDS.get(word, word) for word in name.replace("_", " ").split(" "))


def method_title(name: str) -> str:
    """A method's name for a heading: first letter raised, abbreviations in capitals.

    >>> [method_title(name) for name in ("jarzynski", "pcd", "adaptive-nce", "short-run", "PersistentCD")]
    ['Jarzynski', 'PCD', 'Adaptive-NCE', 'Short-run', 'PersistentCD']
    """
    parts = name.split("-")
    return sentence("-".join(p.upper() if len(p) <= 3 and p not in SHORT_WORDS else p for p in parts))


def sentence(text: str) -> str:
    """The first letter raised, the rest left alone."""
    return text[:1].upper() + text[1:]


def count(n: int, noun: str) -> str:
    """`1 problem`, `3 problems`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _exponent(value: float, digits: int) -> int:
    """The power of ten of the leading digit, after rounding to `digits`."""
    return int(f"{value:.{digits - 1}e}".split("e")[1])


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _minus(text: str) -> str:
    return text.replace("-", "−")
