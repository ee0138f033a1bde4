"""What a launcher such as `torchrun` said to this process; found without torch, which commands import late."""

from __future__ import annotations

import os


def launched() -> int:
    """As how many processes this command was started; 1 where no launcher did."""
    return _number("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def launched_as() -> int:
    """Which of them this is."""
    return _number("RANK", 0) if launched() > 1 else 0


def _number(name: str, otherwise: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdigit() else otherwise
