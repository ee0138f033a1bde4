"""The page "paper by paper": what it names exists, and what does not is noticed."""

from __future__ import annotations

import pytest
from test_docs import ROOT, load


@pytest.fixture(scope="module")
def papers():
    return load("scripts/papers.py")


def test_everything_that_the_table_names_exists(papers):
    assert papers.problems() == []


def test_the_page_is_that_of_the_table(papers):
    assert (ROOT / papers.PAGE).read_text() == papers.rendered(), "run python scripts/papers.py"


def test_every_paper_and_every_experiment_on_one_is_there(papers):
    assert [paper["title"] for paper, _ in papers.read()] == [
        "R-NCE",
        "β-robust",
        "Jarzynski",
        "f-EBM",
        "AdaNCE",
    ]
    named = {name.removeprefix("?") for _, items in papers.read() for item in items for name in item.where}
    own = {"right-by-default", "jem-ood", "lasa"}  # of no paper
    assert papers.TITLES.keys() - named <= own


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"where": ["rnce-2e"]}, "no rnce-2e"),
        ({"where": ["?cifar11"]}, r"no \?cifar11"),
        ({"where": ["laws/test_ranking_laws.py::test_of_nothing"]}, "no laws"),
        ({"where": ["methods/ranking.md#nowhere"]}, "no methods"),
        ({"where": ["methods/nothing.md"]}, "no methods"),
        ({"note": "{nce-bias no such number}"}, "no number no such number"),
        ({"note": "{nce-bios optimum}"}, "no number optimum"),
        ({"state": "perhaps"}, "unknown state"),
        ({"where": ["methods/ranking.md"]}, "shown by no experiment"),
        ({"state": "law"}, "a law without a test"),
        ({"state": "cannot", "note": ""}, "does not say why"),
        ({"state": "does not hold", "note": "tried all"}, "without a number"),
    ],
)
def test_what_does_not_exist_is_said(papers, change, said):
    right = {"name": "Figure 1", "what": "-", "state": "shown", "where": ["nce-bias"], "note": ""}
    assert papers.wrong_with(papers.Item(**right), ROOT) == []
    with pytest.raises(AssertionError, match=said):
        assert papers.wrong_with(papers.Item(**{**right, **change}), ROOT) == []


def test_what_has_no_stored_result_is_not_measured_yet(papers, tmp_path):
    item = papers.Item("Figure 1", "-", "shown", ["nce-bias"], "")
    assert papers.standing(item, ROOT) == "shown"
    assert papers.standing(item, tmp_path) == "not measured yet"
    assert papers.number("nce-bias", "anything", tmp_path) is None
