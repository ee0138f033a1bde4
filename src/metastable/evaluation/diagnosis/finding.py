"""What a rule gives back, and how it is told."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from metastable.core.errors import require_choice

Evidence = dict[str, float | str | list]

SEVERITIES = ("problem", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that the numbers say.

    Attributes:
        name: what was found, in kebab-case.
        severity: `problem` (the model should not be used as it is), `warning` or `note`.
        text: what was seen, in words.
        evidence: the numbers behind it.
        advice: what to try; empty where there is nothing to do.
    """

    name: str
    severity: str
    text: str
    evidence: Evidence = field(default_factory=dict)
    advice: str = ""

    def __post_init__(self) -> None:
        require_choice(f"finding {self.name!r}.severity", self.severity, SEVERITIES)


def format_findings(findings: Sequence[Finding], width: int = 100) -> str:
    """Findings as plain text for a terminal, each with its evidence and what to try.

    >>> finding = Finding("stuck-chains", "problem", "No move.", {"acceptance": 0.0}, "Lower step_size.")
    >>> print(format_findings([finding]))
    problem: stuck-chains
      No move.
      evidence: acceptance 0
      try: Lower step_size.
    """
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.name}")
        shown = ", ".join(f"{key} {_show(value)}" for key, value in finding.evidence.items())
        for label, words in (("", finding.text), ("evidence: ", shown), ("try: ", finding.advice)):
            if words:
                lines += textwrap.wrap(label + words, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _show(value: float | str | list) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return f"{value:.4g}" if isinstance(value, (int, float)) else value
