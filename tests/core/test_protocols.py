"""Optional members: one list, which the page shows and the code does not go beyond; duck typing stays."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core.protocols import (
    ClosedForm,
    Normalisable,
    Sampled,
    Shaped,
    event_shape_of,
    is_biased,
    members,
    provides,
    reference_of,
)

ROOT = Path(__file__).resolve().parents[2]
NOT_MEMBERS = {  # of functions, settings, states, modules of torch and the system, not of energies or proposals
    *(
        "__len__",
        "__name__",
        "__qualname__",
        "_fields",
        "build",
        "crowding",
        "device",
        "side",
        "forward",
        "hyper",
        "item",
    ),
    *("log_step", "name", "offset_", "paired", "per_module", "settled"),
    *("getloadavg", "sched_getaffinity", "sched_setaffinity"),
    *(
        "buffers",
        "fields",
        "moves",
        "noise",
        "proposal",
        "sample_given",
        "source",
        "steps",
        "symmetric",
        "times",
    ),
}
"""`fields` is of a discrete reference, `noise` and `symmetric` of moves, `times` and `steps` of flows."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("members", ROOT / "scripts/members.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def probed() -> dict[str, str]:
    """Every name that the library asks for by hasattr or getattr, with a file that does."""
    found = {}
    for path in (ROOT / "src/metastable").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                name = node.args[1]
                if node.func.id in ("hasattr", "getattr") and isinstance(name, ast.Constant):
                    found[name.value] = path.name
    return found


def test_the_page_lists_every_member(script):
    page = (ROOT / "docs/extending.md").read_text()
    assert script.written(page) == page, "run python scripts/members.py"
    assert len(script.members("energies")) > 20
    assert "`rsample(n, rng)`" in page


def test_a_member_without_a_line_of_documentation_is_refused(script):
    (bare,) = ast.parse("class Bare(Protocol):\n    def f(self): ...").body
    with pytest.raises(ValueError, match="Bare: no line of documentation for f"):
        script.documented(bare)


def test_nothing_is_asked_for_that_the_page_does_not_list(script):
    listed = {name.split("(")[0] for kind in ("energies", "proposals") for name in script.members(kind)}
    asked = probed()
    assert "value_and_grad" in asked
    assert {name: asked[name] for name in asked.keys() - listed - NOT_MEMBERS} == {}


class Around:
    """Hands on what it does not have, as wrappers do."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_what_a_thing_derives_from_does_not_matter():
    bare = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    assert not provides(bare, Sampled)
    assert not provides(lambda x: x.sum(1), Shaped)
    assert event_shape_of(bare) is None
    known = Around(ms.energies.Gaussian(torch.zeros(2), torch.eye(2)))
    assert provides(known, Sampled, Normalisable, ClosedForm) == provides(
        known.inner, Sampled, Normalisable, ClosedForm
    )
    assert provides(known, Sampled)
    assert event_shape_of(known) == (2,)


def test_modules_and_buffers_are_members_too():
    """torch keeps them beside the attributes of a module, where a look at the class does not find them."""
    tilted = ms.energies.Tilted(ms.proposals.Gaussian(torch.zeros(2)), nn.Linear(2, 1))
    assert reference_of(tilted) is tilted.reference
    assert reference_of(tilted) is not None
    assert not is_biased(tilted.reference)


def test_all_members_of_a_protocol_are_needed():
    class Half(nn.Module):
        def sample(self, n, rng):
            return torch.zeros(n)

    assert members(Sampled) == ("sample",)
    assert provides(Half(), Sampled)
    assert not provides(Half(), Sampled, Normalisable)
