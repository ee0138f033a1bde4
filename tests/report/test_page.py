"""Whole pages: what they say, what they leave out, what they refuse, and that they stand alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from metastable.core.errors import InputError
from metastable.report import write_report

from .conftest import CONFIG, build_run, metric_rows, summary_of, write_json, write_metrics


class Reader(HTMLParser):
    """Headings, text, addresses and element nesting of a page."""

    VOID = frozenset({"meta", "link", "img", "br", "hr"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "poster")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def read(path: Path) -> Reader:
    page = Reader(path.read_text(encoding="utf-8"))
    assert not page.open
    return page


@pytest.fixture(scope="module")
def run_report(run_folder: Path) -> Path:
    return write_report(run_folder)


@pytest.fixture(scope="module")
def comparison_report(comparison_folder: Path) -> Path:
    return write_report(comparison_folder)


@pytest.fixture(scope="module")
def result_report(result_folder: Path) -> Path:
    return write_report(result_folder)


@pytest.fixture(scope="module")
def run_page(run_report: Path) -> Reader:
    return read(run_report)


@pytest.fixture(scope="module")
def comparison_page(comparison_report: Path) -> Reader:
    return read(comparison_report)


@pytest.fixture(scope="module")
def result_page(result_report: Path) -> Reader:
    return read(result_report)


# ------------------------------------------------------------------------------------------- standing alone


@pytest.mark.parametrize("kind", ["run_report", "comparison_report", "result_report"])
def test_page_stands_alone(kind, request):
    path = request.getfixturevalue(kind)
    text, page = path.read_text(encoding="utf-8"), read(path)
    assert path.name == "report.html"
    assert "http:" not in text
    assert "https:" not in text
    assert "url(http" not in text
    assert "@import" not in text
    for address in page.addresses:
        assert address.startswith(("data:", "#", "./")), address
    assert "default-src 'none'" in text


def test_every_identifier_is_used_once(run_report):
    text = run_report.read_text(encoding="utf-8")
    found = re.findall(r'\bid="([^"]+)"', text)
    assert len(found) == len(set(found))


def test_local_links_lead_somewhere(run_report):
    text = run_report.read_text(encoding="utf-8")
    targets = set(re.findall(r'\bid="([^"]+)"', text))
    wanted = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted
    assert wanted <= targets


def test_report_does_not_import_torch_or_pyplot(run_folder, tmp_path):
    code = (
        "import sys; from metastable.report.page import write_report; "
        f"write_report({str(run_folder)!r}, {str(tmp_path / 'r.html')!r}); "
        "assert 'torch' not in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_same_folder_gives_the_same_bytes(run_folder, run_report, tmp_path):
    assert write_report(run_folder, tmp_path / "again.html").read_bytes() == run_report.read_bytes()


def test_out_may_be_a_file_or_a_folder(result_folder, tmp_path):
    assert write_report(result_folder, tmp_path / "new" / "a.html") == tmp_path / "new" / "a.html"
    assert write_report(result_folder, tmp_path) == tmp_path / "report.html"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "report.html"]


# -------------------------------------------------------------------------------------------------- a run


def test_run_has_every_section_in_order(run_page):
    assert run_page.headings == [
        "Diagnosis",
        "Training",
        "Weights and log Z",
        "What the model learned",
        "Mode weights",
        "Scores",
        "Other metrics",
        "Settings",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "Jarzynski on three-gaussians",
        "finished",
        "1.842 ± 0.012",
        "95 %: 1.818 … 1.866",
        "1.851 ± 0.014",
        "Nothing speaks against it.",
        "1:11",
        "600 steps",
        "2.351",
        "2,310 walkers behind log Z",
        "Energy of data and of negatives",
        "Negatives minus data.",
        "True density",
        "Model density",
        "resampled",
        "± 2 standard errors",
        "Learning rate",
        "Weight entropy",
        "method.kernel.step_size",
    ],
)
def test_run_says(run_page, words):
    assert words in run_page.text


def test_diagnosis_is_worst_first(run_page):
    at = [run_page.text.index(name) for name in ("Mode weights off", "Weights collapse", "Step size large")]
    assert at == sorted(at)
    assert at[-1] < run_page.text.index("Energy of data and of negatives")
    assert "Use more walkers" in run_page.text


def test_largest_mode_error_is_the_largest(run_page):
    assert "Largest mode error0.06mode 2: 0.56, data 0.5" in run_page.text


def test_distrusted_log_z_is_marked(tmp_path):
    z = {
        "value": 3.0,
        "std_error": 0.5,
        "interval": [2, 4],
        "ess": 3.0,
        "warnings": ["few effective walkers"],
    }
    write_json(tmp_path / "summary.json", summary_of("jarzynski", np.ones(3) / 3, log_partition=z))
    text = read(write_report(tmp_path)).text
    assert "Do not trust it: few effective walkers" in text
    assert "Nothing speaks against it." not in text


def test_window_mass_is_reported_only_with_log_z(run_folder, run_page, tmp_path):
    assert "has mass 1.0" in run_page.text
    folder = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("metrics.jsonl"))
    write_json(folder / "summary.json", summary_of("cd", np.ones(3) / 3, log_partition=None))
    text = read(write_report(folder)).text
    assert "has mass" not in text
    assert "not estimated" in text


def test_missing_pieces_are_said_in_a_sentence(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    page = read(write_report(tmp_path))
    assert page.headings == ["Diagnosis", "Training", "What the model learned", "Settings"]
    assert "unfinished" in page.text
    for words in ("No summary.json", "No steps were logged", "No pictures of the model"):
        assert words in page.text


def test_log_alone_makes_a_page(tmp_path):
    write_metrics(tmp_path, metric_rows(100))
    page = read(write_report(tmp_path))
    assert "at the last logged step" in page.text
    assert "No config.json" in page.text


def test_unused_metrics_do_not_make_sections(tmp_path):
    write_metrics(tmp_path, [{"step": i, "energy_gap": 1 / i} for i in range(1, 9)])
    page = read(write_report(tmp_path))
    assert "Weights and log Z" not in page.headings
    assert "Other metrics" not in page.headings
    assert page.tags.count("figure") == 1


def test_passed_checks_are_said(tmp_path):
    write_json(tmp_path / "summary.json", summary_of("cd", np.ones(3) / 3, diagnosis=[]))
    assert "Every check passed" in read(write_report(tmp_path)).text


def test_malicious_values_are_escaped(tmp_path):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    write_json(
        tmp_path / "config.json",
        {attack: {"seed": attack}, "data": attack, "version": attack, "device": attack},
    )
    found = {
        "name": attack,
        "severity": attack,
        "text": attack,
        "evidence": {attack: attack},
        "advice": attack,
    }
    changes = {"status": attack, "message": attack, "diagnosis": [found], "scores": {attack: attack}}
    write_json(tmp_path / "summary.json", summary_of(attack, np.ones(3) / 3, **changes))
    write_metrics(tmp_path, [{"step": i, attack: float(i), "$x_{": 1.0 * i} for i in range(5)])
    path = write_report(tmp_path)
    page = read(path)
    assert page.tags.count("script") == 1  # the page's own
    assert page.tags.count("img") == 0
    assert "onerror=alert" not in re.sub(r"&lt;.*?&gt;", "", path.read_text(encoding="utf-8"))
    assert "$x {" in page.text


@pytest.mark.parametrize(
    "junk", [None, 3, "x", [], [1, "a"], {}, {"value": "x"}, True, float("nan"), [None], [[1]]]
)
def test_junk_in_the_summary_is_survived(tmp_path, junk):
    keys = [*summary_of("x", np.ones(3)), "unknown"]
    write_json(tmp_path / "summary.json", dict.fromkeys(keys, junk))
    write_json(tmp_path / "config.json", dict.fromkeys(CONFIG, junk))
    assert read(write_report(tmp_path)).headings[0] == "Diagnosis"


@pytest.mark.parametrize(
    ("shape", "words", "images"),
    [
        ((1,), "Density", 0),
        ((), "Density", 0),
        ((5,), "All 5 coordinates.", 0),
        ((30,), "The first 12 of 30 coordinates.", 0),
        ((3, 2), "All 6 coordinates.", 0),
        ((1, 6, 6), "Samples", 2),
        ((3, 5, 7), "Samples", 2),
        ((8, 8), "Samples", 2),
    ],
)
def test_pictures_suit_the_shape(tmp_path, shape, words, images):
    rng = np.random.default_rng(0)
    clouds = {name: rng.standard_normal((40, *shape)) for name in ("data", "samples")}
    np.savez(tmp_path / "figures.npz", **clouds)
    write_json(tmp_path / "summary.json", {"status": "finished", "event_shape": list(shape), "method": "cd"})
    page = read(write_report(tmp_path))
    assert words in page.text
    assert page.tags.count("img") == images


def test_samples_file_stands_in(tmp_path):
    write_json(tmp_path / "summary.json", {"status": "finished", "event_shape": [2], "method": "cd"})
    np.save(tmp_path / "samples.npy", np.random.default_rng(0).standard_normal((5001, 2)))
    text = read(write_report(tmp_path)).text
    assert "1,667 points" in text
    assert "Data" not in text


@pytest.mark.parametrize("grid", [{}, {"grid_y": np.ones(3)}, {"grid_y": np.array(3.0)}])
def test_arrays_that_do_not_fit_are_said(grid, tmp_path):
    write_json(tmp_path / "summary.json", {"status": "finished", "event_shape": [2], "method": "cd"})
    arrays = {"data": np.ones((4, 3)), "log_density": np.ones((3, 3)), "grid_x": np.ones(2)}
    np.savez(tmp_path / "figures.npz", **(arrays | grid))
    assert "do not fit the shape" in read(write_report(tmp_path)).text


# ----------------------------------------------------------------------------------------------- damage


def test_cut_last_line_is_tolerated(tmp_path):
    write_metrics(tmp_path, metric_rows(50))
    with (tmp_path / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 55, "ener\xc3')
    text = read(write_report(tmp_path)).text
    assert "cut short" in text
    assert "50 steps" in text


def test_damaged_line_before_the_end_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, \n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "compare.json", "result.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{}"])
def test_damaged_json_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["figures.npz", "samples.npy"])
def test_damaged_arrays_are_refused_by_name(tmp_path, name):
    write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(InputError, match=name):
        write_report(tmp_path)


def test_pickled_arrays_are_never_run(tmp_path):
    write_json(tmp_path / "config.json", {})
    np.save(tmp_path / "samples.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"samples\.npy"):
        write_report(tmp_path)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"config\.json.*metrics\.jsonl.*compare\.json.*result\.json"
    ) as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(InputError, match="is not a folder"):
        write_report(tmp_path / "absent")


# ----------------------------------------------------------------------------------------- a comparison


def test_comparison_says_who_is_best(comparison_page):
    text = comparison_page.text
    assert "3 methods on three-gaussians" in text
    assert "Lowest KL, exactJarzynski" in text
    assert "Closest mode weightsJarzynski" in text
    assert "0.2 / 0.5 / 0.3" in text
    assert "1.840 ± 0.012" in text
    assert "budget 60s each" in text
    assert comparison_page.headings[0] == "Methods side by side"


def test_diverged_method_does_not_win(comparison_report):
    text = comparison_report.read_text(encoding="utf-8")
    best = re.findall(r'<td class="num best"[^>]*>([^<]*)</td>', text)
    assert best == ["0.205 / 0.49 / 0.305", "0.009", "0.0081", "0.71"]  # the diverged one has KL 0.001


def test_comparison_shows_truth_and_every_density(comparison_page):
    for words in ("Truth", "Jarzynski", "PCD", "CD", "diverged", "seconds of training"):
        assert words in comparison_page.text


def test_comparison_links_to_reports_that_exist(comparison_page, comparison_folder):
    links = [a for a in comparison_page.addresses if a.startswith("./")]
    assert links == ["./jarzynski/report.html", "./pcd/report.html", "./cd/report.html"]
    assert all((comparison_folder / link).exists() for link in links)


def test_links_follow_the_page(comparison_folder):
    elsewhere = comparison_folder.parent / "pages" / "c.html"
    links = [a for a in read(write_report(comparison_folder, elsewhere)).addresses if a.startswith("./")]
    assert all((elsewhere.parent / link).resolve().exists() for link in links)
    assert len(links) == 3


def test_rows_without_a_run_keep_their_numbers(tmp_path):
    rows = [
        {"method": "a", "run": "../outside", "kl": 1.0},
        {"method": "b", "run": "javascript:alert(1)", "kl": 2.0},
        {"method": "c", "kl": "failed"},
    ]
    write_json(tmp_path.parent / "outside" / "summary.json", {})
    write_json(tmp_path / "compare.json", {"rows": rows})
    page = read(write_report(tmp_path))
    assert "No run folder was found for a, b, c." in page.text.lower().replace("no run", "No run")
    assert not [a for a in page.addresses if not a.startswith(("#", "data:"))]


def test_comparison_without_rows(tmp_path):
    write_json(tmp_path / "compare.json", {})
    assert "has no rows" in read(write_report(tmp_path)).text


# ---------------------------------------------------------------------------------------- a reproduction


def test_result_sets_numbers_side_by_side(result_page):
    text = result_page.text
    assert "jarzynski-gmm" in text
    assert "does not hold" in text
    assert "2 of 3" in text
    assert "mode_weight_error/jarzynski0.008123≤ 0.02–holds" in text
    assert "log_z_error/jarzynski0.09≤ 0.050.02fails" in text
    assert "seconds_per_step_ratio1.04–––" in text
    assert "settings.walkers" in text
    assert result_page.tags.count("img") == 1


def test_result_with_an_exact_answer_shows_it(tmp_path):
    row = {"metric": "mu", "value": 1.02, "relation": None, "target": None, "paper": None, "ok": True}
    write_json(tmp_path / "result.json", {"experiment": "e", "rows": [row | {"oracle": 1.01}]})
    assert "mu1.021.01––" in read(write_report(tmp_path)).text


def test_result_that_holds(tmp_path):
    row = {"metric": "m", "value": 1.0, "relation": "<=", "target": 2.0, "paper": None, "ok": True}
    more = {"metric": "n", "value": 3.0, "relation": None, "target": None, "paper": None, "ok": True}
    write_json(tmp_path / "result.json", {"experiment": "e", "rows": [more, row]})
    text = read(write_report(tmp_path)).text
    assert "does not hold" not in text
    assert "1 of 1" in text, "nothing is asked of the other"
    assert "n3–––" in text
    assert text.index("m1≤ 2–holds") < text.index("n3–––"), "what is required stands first"
    assert "No pictures were written" in text


def test_false_picture_is_left_out(tmp_path):
    write_json(tmp_path / "result.json", {"rows": []})
    (tmp_path / "a<b>.png").write_bytes(b"<svg onload=alert(1)>")
    page = read(write_report(tmp_path))
    assert "is not a PNG file" in page.text
    assert page.tags.count("img") == 0


def test_resumed_log_keeps_what_happened_last(tmp_path):
    folder = build_run(tmp_path / "r")
    (folder / "summary.json").unlink()
    rows = [{"step": s, "energy_gap": 1.0} for s in (10, 20, 30)] + [{"step": 20, "energy_gap": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert "20 steps" in read(write_report(folder)).text


def test_mass_that_has_run_away_is_drawn(tmp_path):
    folder = build_run(tmp_path / "run")
    assert "Mass that has run away" not in write_report(folder).read_text(encoding="utf-8")
    with np.load(folder / "figures.npz") as stored:
        arrays = dict(stored)
    rng = np.random.default_rng(0)
    far = {"radius_data": rng.uniform(0.1, 2, 200), "radius_samples": rng.uniform(200, 400, 200)}
    np.savez(folder / "figures.npz", **arrays, **far)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Mass that has run away" in page
    assert (
        "outside the axis" not in page[page.index("Mass that has run away") :][:20_000]
    )  # all of it is shown
