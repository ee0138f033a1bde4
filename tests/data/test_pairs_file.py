"""Labels and contexts beside the rows of an `.npz` file."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from conftest import each

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
    np.savez(tmp_path / "signs.npz", x=X, labels=np.array([1.0, -1.0] * 3))
    assert load_array(tmp_path / "signs.npz").labels is None
    np.savez(tmp_path / "halves.npz", x=X, labels=np.arange(6) / 2)
    assert load_array(tmp_path / "halves.npz").labels is None


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array(list("abcdef")), "labels: must be integers, got <U1, 'a' in row 0 (counting from 0)"),
        (np.arange(6) / 2, "labels: must be integers, got torch.float64, 0.5 in row 1 (counting from 0)"),
        (np.eye(6), "labels: must be one integer for each row, got shape (6, 6)"),
    ],
)
def test_a_method_that_needs_labels_says_why_those_of_the_file_were_not_taken(tmp_path, labels, words):
    import metastable as ms

    path = tmp_path / "these.npz"
    np.savez(path, x=X, labels=labels)
    for options in ({}, {"held_out": 0.5}):  # the reason travels with both parts
        with pytest.raises(InputError, match=re.escape(f"not taken ({words}")) as caught:
            ms.fit(None, path, "jem", steps=1, **options)
        assert "these.npz" in str(caught.value)
    run = ms.fit(None, path, "pcd", steps=1, evaluate=False)  # which needs none
    assert run.status == "finished"


@each(
    "labels, words",
    [
        (["a"] * 6, "labels: must be integers, got <U1, 'a' in row 0 (counting from 0); numpy.unique("),
        ([0, 1, None, 0, 1, 0], "labels: must be integers, got object, None in row 2"),
        ([0, 1, 0.5, 0, 1, 0], "labels: must be integers, got torch.float64, 0.5 in row 2"),
        (np.float32([0, 1, np.nan, 0, 1, 0]), "labels: must be integers, got torch.float32, nan in row 2"),
        ([0, 1, 1e30, 0, 1, 0], "got torch.float64, 1e+30 in row 2"),
        (torch.full((6,), torch.inf), "got torch.float32, inf in row 0"),
        (torch.zeros(6, dtype=torch.complex64), "labels: must be integers, got torch.complex64"),
        ([[0], [1, 2]], "labels: must be one integer for each row"),
    ],
)
def test_labels_in_memory_follow_the_same_rule(labels, words):
    with pytest.raises(InputError, match=re.escape(words)):
        load_array(X).beside(labels=labels)


@each(
    "labels",
    [
        [0.0, 1, 0, 1, 0, 1],
        np.array([0, 1] * 3, np.float16),
        np.array([0, 1] * 3, ">f4"),
        np.array([0, 1] * 3, np.longdouble),
        np.array([0, 1] * 3, np.uint32),
        np.array([False, True] * 3),
        torch.tensor([0.0, 1.0] * 3),
        torch.tensor([False, True] * 3),
    ],
)
def test_whole_numbers_and_truth_values_are_labels(labels):
    found = load_array(X).beside(labels=labels).labels
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 1, 0, 1, 0, 1]


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
