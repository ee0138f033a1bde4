"""Runs of p(x | y), from the command line."""

from __future__ import annotations

import dataclasses

import pytest

from metastable.methods import METHODS

LABELLED = "toy:digits?n=120"


def label_settings() -> dict[str, str]:
    """For every method whose chains can carry labels, the setting that makes them."""
    found = {"mixed": 'method={"name": "mixed", "labels": true, "sources": [{"name": "cd", "labels": true}]}'}
    for name, kind in METHODS.items():
        fields = {f.name for f in dataclasses.fields(kind)}
        if "labels" in fields:
            found.setdefault(name, "method.labels=true")
        elif "source" in fields:
            found.setdefault(name, "method.source.labels=true")
    return {name: words for name, words in found.items() if name not in ("exact", "jem")}  # those refuse


@pytest.mark.parametrize("method", label_settings())
def test_a_dry_run_of_every_method_by_class_begins(method, metastable, tmp_path):
    words = ["train", "--data", LABELLED, "--out", tmp_path / "run", "--dry-run"]
    words += [] if method == "mixed" else ["--method", method]
    result = metastable(*words, "--set", label_settings()[method], "--energy", "mlp")
    assert result.exit_code == 0, result.output
    assert "ClassEnergy" in result.output
    assert "dry run: nothing was written" in result.output
