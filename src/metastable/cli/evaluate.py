"""`metastable evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .guard import STOPPED
from .options import Device, LogZ, OwnEnergy, Seed

if TYPE_CHECKING:
    from torch import Tensor

    from metastable.data import Dataset
    from metastable.runs.run import Run

    from .images import ImageOptions

IMAGE_ARRAYS = ("nearest_images", "nearest_distance")
"""What an evaluation of pictures keeps for the page."""


def evaluate(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run; none with --samples.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A file or toy:NAME; by default the run's held-out rows.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .json file to write; RUN/evaluation.json.")] = None,
    log_z: LogZ = False,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Data of another kind, for a classifier to tell apart; may be repeated."),
    ] = None,
    inception: Annotated[
        Path | None,
        typer.Option(
            help="TorchScript file of FID's network; else METASTABLE_INCEPTION's, or that of the extra fid."
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(help="Judge the run's samples as pictures, this many; all it kept by default."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Pictures to judge in place of the run's samples: a file, mnist:FOLDER, …"),
    ] = None,
    log_weight: Annotated[Path | None, typer.Option(help="Their log-weights, a .npy file.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="Pictures to compare with; by default those of training.")
    ] = None,
    fid_statistics: Annotated[
        Path | None, typer.Option(help="An .npz file with mean and covariance that stand for them in FID.")
    ] = None,
    class_shares: Annotated[
        bool, typer.Option("--class-shares", help="Train a classifier and tell the classes of samples.")
    ] = False,
    denoise: Annotated[
        bool, typer.Option("--denoise", help="Judge the run's samples without the noise of training on them.")
    ] = False,
    energy: OwnEnergy = None,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Score a trained model on data: likelihood, mode weights, distances and outliers.

    With --inception, --images or --samples its samples are judged as pictures: FID, KID, precision and recall, each
    beside what fresh data have, nearest training images, and --class-shares. Without a run, --samples are judged.

    A classifier that is an energy model is also scored as a classifier, where the data have labels. A conditional
    run is scored on pairs, an .npz file with the arrays x and given.
    """
    from metastable.core import processes
    from metastable.summary import judge_again, judged_step, judged_words

    from .bars import work_bar
    from .console import console, say
    from .images import ImageOptions, run_question, say_images
    from .runs import open_run, rows_for

    asked = ImageOptions(
        inception, images, samples, log_weight, reference, fid_statistics, class_shares, denoise
    )
    if run is None:
        of_runs = {"ood": ood, "log-z": log_z, "energy": energy, "denoise": denoise}
        with processes.together():
            processes.by_first(lambda: judge_pictures(asked, of_runs, data, out, seed, device))
        return
    found = open_run(run, device, energy)
    dataset, name = rows_for(found, data)
    outside = outsiders(found, dataset, ood or [])
    with work_bar("judging") as bar, processes.together():
        question = run_question(found, dataset, name, asked, seed, bar) if asked.asked else None
        result, arrays = judge_again(
            found, dataset, seed=seed, log_z=log_z, outsiders=outside, images=question
        )
    if not processes.is_first():
        return
    result |= {"classifier": {"data": name, **result["classifier"]}} if "classifier" in result else {}
    say(f"{run} on {name}, {result['rows']} {'pairs' if found.conditional else 'rows'}")
    say(*filter(None, [judged_words(found)]))
    if found.conditional:
        console().print(pair_table(result))
        say(*result["warnings"])
    else:
        say_scores(found, dataset, result)
    say_images(result.get("images"))
    target = out or run / "evaluation.json"
    write(target, {"run": str(run), "step": judged_step(found), "data": name, **result})
    if "stopped_at" in result:
        stopped_while_judging(result["stopped_at"], target)
    if target == run / "evaluation.json" and not found.conditional:
        with processes.alone():
            look_at_negatives(found, data, seed)
    kept = {k: v for k, v in arrays.items() if "classifier" in result or k in IMAGE_ARRAYS}
    write_figures(run, target, kept)
    say(f"wrote {target}")


def judge_pictures(
    asked: ImageOptions, of_runs: dict[str, Any], data: str | None, out: Path | None, seed: int, device: str
) -> None:
    """Two sets of pictures, neither of them a run's; options that are asked of runs are refused."""
    from metastable.core.errors import require
    from metastable.evaluation.image_measures import image_measures

    from .bars import work_bar
    from .console import say
    from .images import say_images, set_question

    for option, given in of_runs.items():
        require(not given, option, "left out where pictures are judged without a run", given)
    with work_bar("judging") as bar:
        result, arrays = image_measures(set_question(asked, data, device, bar), seed)
    say(f"{asked.samples} against {asked.reference or asked.fid_statistics}")
    say_images(result)
    if out is not None:
        write(out, {"images": result})
        say(f"wrote {out}", *(f"picture: {path}" for path in write_nearest(out, arrays)))


def write_nearest(target: Path, arrays: dict[str, Any]) -> list[Path]:
    """The picture of nearest images into the folder beside the JSON, where there is one."""
    from metastable.report.sections.images import nearest_png

    grid, path = nearest_png(arrays), target.with_suffix("") / "nearest.png"
    if grid is None:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(grid)
    return [path]


def say_scores(run: Run, dataset: Dataset, result: dict[str, Any]) -> None:
    """The scores of a density on the screen, and what speaks against them."""
    from metastable.summary import why_costly

    from .console import console, say

    say(f"samples of the model: {result['samples']}")
    if run.power != 1:
        say(f"what was learned is exp(−{run.power:g}·E), and all numbers are of that density")
    console().print(score_table(result))
    for warning in (result["log_partition"] or {}).get("warnings", []):
        say(f"log Z: {warning}")
    if result["log_partition"] is None:
        say(f"log Z was not estimated: {why_costly(run.learned_energy, dataset.x)}; ask for it with --log-z")
    if run.is_classifier and "classifier" not in result:
        say(f"not judged as a classifier: {dataset.unlabelled or 'the data have no labels'}")
    say_classifier(result.get("classifier"))


def write(target: Path, result: dict[str, Any]) -> None:
    """The scores as JSON."""
    from metastable.runs.folder import write_json

    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, result)


def stopped_while_judging(section: str, target: Path) -> NoReturn:
    """What was found before Ctrl-C is in the file."""
    from .console import note

    note(f"stopped by Ctrl-C at the section {section!r}; {target} holds what was found before it")
    raise typer.Exit(STOPPED)


def look_at_negatives(run: Run, data: str | None, seed: int) -> None:
    """Histograms of negatives for the page of a run without any, as it was killed or never evaluated."""
    from metastable.core.errors import InputError
    from metastable.report.read import read_arrays
    from metastable.runs.load import load_chains
    from metastable.summary import keep_histograms, step_check

    from .console import say
    from .runs import training_set

    assert run.folder is not None
    if "energies_negatives" in read_arrays(run.folder):
        return
    try:
        chains = load_chains(run, training_set(run, data))
    except InputError as error:  # rows of an array in memory, or of a file that is gone
        say(f"no histograms of negatives, which need the rows of training: {error}")
        return
    check = step_check(chains, seed=seed)
    keep_histograms(run.folder, check, chains.context.step, run.coordinates, run.power)


def classifies(run: Run, dataset: Dataset) -> bool:
    """Whether there is a classifier to judge, and labels to judge it by."""
    return run.is_classifier and dataset.labels is not None


def outsiders(run: Run, dataset: Dataset, sources: list[str]) -> dict[str, Tensor]:
    """Rows of every source of another kind, by its name."""
    from metastable.core.errors import InputError

    from .runs import rows_for

    if sources and not classifies(run, dataset):
        without = dataset.unlabelled or "the data have no labels"
        lack = without if run.is_classifier else "its energy has no logits"
        raise InputError(f"ood: needs a run of a classifier that is an energy model (jem), and {lack}")
    return {source: rows_for(run, source, "ood")[0].x for source in sources}


def score_table(result: dict[str, Any]) -> Any:
    """All scores with what a perfect model would have."""
    from metastable.summary.samples import OUTLIER_LEVEL

    from .console import number, plus_minus, table

    z = result["log_partition"] or {"value": None, "std_error": None}
    rows = [
        (
            "log-likelihood (nats a row)",
            plus_minus(result["log_likelihood"], result["log_likelihood_se"]),
            "",
        ),
        ("log Z", plus_minus(z["value"], z["std_error"]), ""),
        ("outlier share", number(result["outlier_share"]), f"{OUTLIER_LEVEL}"),
        ("MMD²", number(result["mmd2"]), "0"),
        ("energy distance", number(result["energy_distance"]), "0"),
    ]
    rows = [row for row in rows if row[1]]
    # registered sections
    rows += [(name, number(value), "") for name, value in result.items() if "/" in name]
    weights = result["mode_weights"] or {"data": [], "model": [], "std_error": []}
    columns = zip(weights["data"], weights["model"], weights["std_error"], strict=True)
    rows += [(f"weight of mode {i + 1}", plus_minus(m, e), f"{d:.3f}") for i, (d, m, e) in enumerate(columns)]
    return table(["score", "model", "data"], rows)


def pair_table(result: dict[str, Any]) -> Any:
    """Scores of a conditional run."""
    from .console import number, plus_minus, table

    value = plus_minus(result.get("log_likelihood"), result.get("log_likelihood_se"))
    rows = [
        ("log-likelihood given the context (nats a row)", value, ""),
        ("that of the proposal alone", number(result.get("proposal_log_likelihood")), ""),
        ("effective share of the proposal's draws", number(result.get("ess_proposal")), ""),
        ("energy distance of pairs", number(result.get("energy_distance")), "0"),
    ]
    return table(["score", "model", "data"], [row for row in rows if row[1]])


def say_classifier(found: dict[str, Any] | None) -> None:
    """Two tables: as a classifier, and against outsiders."""
    if found is None:
        return
    from metastable.report.sections.classifier import SCORES

    from .console import console, number, plus_minus, say, table

    ece, mass = found["calibration_error"], found["calibration_error_equal_mass"]
    rows = [
        ("accuracy", plus_minus(found["accuracy"], found["accuracy_se"]), "1"),
        ("calibration error", number(ece["value"]), number(ece["by_chance"])),
        ("calibration error, equal-mass bins", number(mass["value"]), number(mass["by_chance"])),
        ("negative log-likelihood (nats)", number(found["negative_log_likelihood"]), ""),
        ("Brier score", number(found["brier_score"]), "0"),
    ]
    console().print(table(["as a classifier", "model", "if perfect"], rows, "", f"{found['rows']} rows"))
    if "caveat" in found:
        say(f"warning: {found['caveat']}")
    if not found["ood"]:
        return
    rows = [
        (entry["name"], *(plus_minus(a["value"], a["std_error"]) for a in entry["auroc"].values()))
        for entry in found["ood"]
    ]
    names = [SCORES[score][0] for score in found["ood"][0]["auroc"]]
    console().print(table(["AUROC against", *names], rows))


def write_figures(run: Path, target: Path, arrays: dict[str, Any]) -> None:
    """Arrays and pictures into the folder beside the JSON, and the run's page anew where that is the run's own."""
    from dataclasses import replace

    import numpy as np

    from metastable.report import write_report
    from metastable.report.read import read_object, read_run
    from metastable.report.sections.classifier import save_classifier_figures

    from .console import say

    if arrays:
        folder = target.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "figures.npz", **arrays)
        seen = replace(read_run(run), evaluation=read_object(target), evaluation_arrays=arrays)
        written = save_classifier_figures(seen, folder) + write_nearest(target, arrays)
        say(f"pictures: {', '.join(str(path) for path in written)}")
    if target == run / "evaluation.json":
        say(f"report: {write_report(run)}")
