"""What a run is worth: one judge, and a section for each thing that is looked at.

A section measures one thing (`Section`), `judge` runs those that apply, and the report draws the section of the
same name. `register` adds one of your own.
"""

from .density import Exact
from .folder import judged_step, judged_words, keep_histograms, load_summary
from .judge import SECTIONS, judge, judge_again, judge_training, register
from .likelihood import affordable, why_costly
from .negatives import Chains, step_check
from .section import Judged, Measured, Section
from .units import toy_within

__all__ = [
    "SECTIONS",
    "Chains",
    "Exact",
    "Judged",
    "Measured",
    "Section",
    "affordable",
    "judge",
    "judge_again",
    "judge_training",
    "judged_step",
    "judged_words",
    "keep_histograms",
    "load_summary",
    "register",
    "step_check",
    "toy_within",
    "why_costly",
]
