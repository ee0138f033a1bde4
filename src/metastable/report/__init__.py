"""A folder of results as one self-contained HTML page, and the look that every picture shares.

Reads files only (JSON, NumPy arrays, PNG); torch is never imported here.
"""

from .figures import new_figure, palette, save_figure, style
from .page import write_report

__all__ = ["new_figure", "palette", "save_figure", "style", "write_report"]
