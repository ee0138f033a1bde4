"""Whether Triton kernels can run here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os


@functools.cache
def triton_is_here() -> bool:
    """Whether a Triton is installed that takes tuples and computes with constants."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = importlib.import_module("triton").__version__
    return tuple(int(part) for part in version.split(".")[:2]) >= (3, 5)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device, to test them."""
    return os.environ.get("TRITON_INTERPRET") == "1"
