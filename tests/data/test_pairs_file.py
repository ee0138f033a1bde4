"""Labels and contexts beside the rows of an `.npz` file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metastable.core.errors import InputError
from metastable.data import load_array

X = np.arange(12.0).reshape(6, 2)


def test_contexts_and_labels_come_with_their_rows(tmp_path):
    np.savez(tmp_path / "pairs.npz", x=X, given=X[:, :1] * 10, labels=np.arange(6) % 2)
    data = load_array(tmp_path / "pairs.npz")
    assert torch.equal(data.given[:, 0], 10 * data.x[:, 0])
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1]
    train, held = data.split(0.5, seed=0)
    for part in (train, held):
        assert torch.equal(part.given[:, 0], 10 * part.x[:, 0])


def test_one_array_beside_contexts_needs_no_name(tmp_path):
    np.savez(tmp_path / "pairs.npz", events=X, given=X)
    assert load_array(tmp_path / "pairs.npz").given.shape == (6, 2)


def test_labels_that_are_no_integers_are_left_alone(tmp_path):
    np.savez(tmp_path / "words.npz", x=X, labels=np.array(list("abcdef")))
    assert load_array(tmp_path / "words.npz").labels is None
    np.savez(tmp_path / "halves.npz", x=X, labels=np.arange(6) / 2)
    assert load_array(tmp_path / "halves.npz").labels is None


def test_labels_may_be_whole_numbers_of_another_kind(tmp_path):
    np.savez(tmp_path / "floats.npz", x=X, labels=np.arange(6.0))
    assert load_array(tmp_path / "floats.npz").labels.tolist() == [0, 1, 2, 3, 4, 5]
    np.savez(tmp_path / "truths.npz", x=X, labels=np.arange(6) > 3)
    assert load_array(tmp_path / "truths.npz").labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_contexts_alone_or_of_another_number_are_refused(tmp_path):
    np.savez(tmp_path / "alone.npz", given=X)
    with pytest.raises(InputError, match="must hold one array"):
        load_array(tmp_path / "alone.npz")
    np.savez(tmp_path / "short.npz", x=X, given=X[:4])
    with pytest.raises(InputError, match=r"short\.npz: given: must be one for each of 6 rows, got 4"):
        load_array(tmp_path / "short.npz")
    np.savez(tmp_path / "long.npz", x=X, labels=np.arange(7))
    with pytest.raises(InputError, match=r"long\.npz: labels: must be one for each of 6 rows"):
        load_array(tmp_path / "long.npz")
    np.savez(tmp_path / "nan.npz", x=X, given=X * np.nan)
    with pytest.raises(InputError, match="given"):
        load_array(tmp_path / "nan.npz")
