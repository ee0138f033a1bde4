"""metastable: train energy-based models, sample them, and know what they are worth."""

from ._version import __version__

__all__ = ["__version__"]
