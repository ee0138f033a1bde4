"""Pictures for the page, each an SVG without title or legend: the page writes those as text around it."""

from .curves import MOST_TICKS, curves, thinned
from .drawing import Drawing, Series, Window
from .histograms import Cloud, draw_overlaid, histogram, overlaid
from .images import image_grid, image_side, value_range
from .modes import Weights, mode_weights, yerror
from .planes import area, coloured_scatter, density_map, log_window_mass, scaled_to_window, scatter, window_of
from .reliability import Bins, draw_reliability, reliability

__all__ = [
    "MOST_TICKS",
    "Bins",
    "Cloud",
    "Drawing",
    "Series",
    "Weights",
    "Window",
    "area",
    "coloured_scatter",
    "curves",
    "density_map",
    "draw_overlaid",
    "draw_reliability",
    "histogram",
    "image_grid",
    "image_side",
    "log_window_mass",
    "mode_weights",
    "overlaid",
    "reliability",
    "scaled_to_window",
    "scatter",
    "thinned",
    "value_range",
    "window_of",
    "yerror",
]
