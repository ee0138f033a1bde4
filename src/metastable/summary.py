"""What a finished run is worth: samples, log Z, scores, modes, diagnosis, and the files that keep them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.parts import energies_of, in_parts
from metastable.core.random import derive, generator
from metastable.core.types import LogPartition, Walkers, is_discrete
from metastable.core.units import Coordinates, Units
from metastable.data import ToySet
from metastable.evaluation.diagnosis import SEVERITIES, Facts, Finding, diagnose
from metastable.evaluation.distances import BANDWIDTH_FACTORS, energy_distance, median_distance, mmd2
from metastable.evaluation.entropy import excess_mass, nearest_neighbour_entropy
from metastable.evaluation.log_partition import log_partition
from metastable.evaluation.modes import find_modes, mode_weight_errors, mode_weights
from metastable.evaluation.quadrature import bounding_box, grid_density, kl_on_grid
from metastable.evaluation.rays import far_share, holds_density, radii
from metastable.kernels import Kernel
from metastable.methods.base import ChainMethod, Objective
from metastable.methods.contrastive import ExactDraws
from metastable.methods.mixed import Mixed
from metastable.proposals import fit_gaussian
from metastable.runs.folder import read_summary, write_json
from metastable.runs.run import Run
from metastable.step_check import Chains, StepCheck, step_check
from metastable.walkers.importance import importance_log_partition, importance_walkers
from metastable.walkers.starts import random_rows

SHOWN = 2000
"""Rows of data and samples that a report shows."""
GRID = 161
SHOWN_NUMBERS = 1 << 20
"""Numbers in them at most, so that the arrays of images do not weigh more than their checkpoint."""
DISAGREEMENT = 3.0
"""Standard errors between two estimates of log Z beyond which the first is doubted."""
LOOKED_AT = 10_000
"""Rows of the data behind means of their energies."""
COSTLY_ROWS, COSTLY_GRID = 1000, 61
"""The same, and points along a side of a picture, where each energy is an ODE solved."""
MOST_DIMENSIONS = 200
"""Dimensions of an event above which log Z by sequential Monte Carlo takes minutes, and is left to be asked for."""
MOST_SCALE = 100.0
"""The same for the output scale of a joint energy."""


def evaluate_run(
    run: Run,
    train: Tensor,
    validation: Tensor,
    toy: ToySet | None,
    *,
    seed: int,
    chains: Chains | None = None,
    coordinates: Coordinates | None = None,
) -> Run:
    """What a run is worth, in the data's units, written to its folder where it has one.

    Everything is found in the units of training, where no column counts for more than another, and then told in the
    data's own.

    log Z and samples come from the method's own walkers where it has weighted ones (Jarzynski). For the others
    both come from sequential Monte Carlo on the trained energy: chains that start at the data would show the
    data's mode weights, not the model's. A method's own log Z is compared with that of sequential Monte Carlo,
    which shares nothing with the training and is believed where it is surer of itself.

    Events of many dimensions (images) get no sequential Monte Carlo, which would take minutes: their samples are
    the method's own walkers, where it has any, and a finding says that log Z was not estimated.

    Args:
        run: what training gave, in its own units.
        train: the rows it was trained on, likewise.
        validation: rows for scores, likewise.
        toy: where the rows were drawn from, if that is known, likewise.
        seed: of every random number.
        chains: the method as training left it, for a look at its negatives.
        coordinates: the units of training; None where they are the data's own.
    """
    second, known, disagreement = None, run.normalised, None
    if known:  # a density has log Z = 0, and draws for itself
        run.walkers = run.sample(SHOWN, seed=derive(seed, "evaluate"))
    elif (own := _weighted_draws(run, seed)) is not None:
        run.walkers, run.log_partition = own, importance_log_partition(own)
        known = True
    elif affordable(run.learned_energy, train):
        second = log_partition(run.learned_energy, data=train, seed=derive(seed, "evaluate"))
        disagreement = _take(run, second)
    run.modes, separated = _modes(run, train, toy, seed)
    run.scores = _scores(run, validation, toy) | _second_scores(second)
    run.diagnosis = _diagnosis(run, train, validation, separated)
    if disagreement is not None:
        run.diagnosis = sorted([disagreement, *run.diagnosis], key=lambda f: SEVERITIES.index(f.severity))
    if second is None and not known:
        run.diagnosis.append(_skipped(run, train))
    check = None if chains is None or run.folder is None else step_check(chains, seed=seed)
    run = run.outward(coordinates)
    if run.folder is not None:
        units = None if coordinates is None else coordinates.events
        rows = train if units is None else units.inverse(train)
        _write(run, rows, toy_outside(toy, coordinates), seed, _in_data_units(check, units, run.power))
    return run


def toy_within(toy: ToySet, coordinates: Coordinates | None) -> ToySet:
    """What is known of the rows' law, in the units of training."""
    if coordinates is None:
        return toy
    units, log_density = coordinates.events, toy.log_density

    def within(u: Tensor) -> Tensor:
        assert log_density is not None
        return log_density(units.inverse(u).float()) - units.log_det

    centers = None if toy.centers is None else units.forward(toy.centers).float()
    return dataclasses.replace(toy, centers=centers, log_density=None if log_density is None else within)


def toy_outside(toy: ToySet | None, coordinates: Coordinates | None) -> ToySet | None:
    """The same in the data's units again."""
    if toy is None or coordinates is None:
        return toy
    units, log_density = coordinates.events, toy.log_density

    def outside(x: Tensor) -> Tensor:
        assert log_density is not None
        return log_density(units.forward(x)) + units.log_det

    centers = None if toy.centers is None else units.inverse(toy.centers)
    return dataclasses.replace(toy, centers=centers, log_density=None if log_density is None else outside)


def _in_data_units(check: StepCheck | None, units: Units | None, power: float) -> StepCheck | None:
    """Negatives where the data are, with their energies there."""
    if check is None or units is None:
        return check
    offset = units.log_det / power
    return dataclasses.replace(
        check,
        x=units.inverse(check.x),
        data=check.data - offset,
        negatives=check.negatives - offset,
        larger=None if check.larger is None else check.larger - offset,
    )


def _weighted_draws(run: Run, seed: int) -> Walkers | None:
    """Draws of an energy that also is a density up to what its draws' weights put right: a diffusion's φ."""
    if not hasattr(run.energy, "with_steps"):
        return None
    return importance_walkers(run.learned_energy, run.model.own_draws, SHOWN, seed)


def affordable(energy: Any, x: Tensor) -> bool:
    """Whether log Z of an energy of such events is a matter of seconds.

    Units coded −1 and +1 are listed where they can be, and annealed by Gibbs sweeps, which are cheap.
    """
    return is_discrete(energy) or (x[0].numel() <= MOST_DIMENSIONS and _scale(energy) <= MOST_SCALE)


def why_costly(energy: Any, x: Tensor) -> str:
    """What makes log Z of an energy of such events a matter of minutes, in words."""
    dimensions = x[0].numel()
    if dimensions > MOST_DIMENSIONS:
        return f"events have {dimensions} dimensions, where sequential Monte Carlo takes minutes"
    scale = _scale(energy)
    return f"the energy has an output scale of {scale:g}, where sequential Monte Carlo takes minutes"


def _scale(energy: Any) -> float:
    """What a joint energy multiplies log Σ e^h with."""
    return getattr(energy, "output_scale", 1.0)


def _take(run: Run, second: LogPartition) -> Finding | None:
    """log Z and samples from an independent estimate, where the method has none or this one is to be believed.

    Of two that disagree it is said which one is believed, and why.
    """
    own = run.log_partition
    if own is None:
        run.log_partition, run.walkers = second, second.walkers or run.walkers
        run.log_z_source = run.samples_source = "independent"
        return None
    found = _disagreement(own, second)
    if _better(second, own):
        run.log_partition, run.log_z_source = second, "independent"
        if found is not None or not own.trusted:
            run.walkers, run.samples_source = second.walkers or run.walkers, "independent"
    elif found is not None:
        words = f"an independent estimate says {second.value:.3f} ± {second.std_error:.3f}"
        run.log_partition = dataclasses.replace(own, warnings=(*own.warnings, words))
    return found


def _better(second: LogPartition, own: LogPartition) -> bool:
    """Whether to believe the estimate that shares nothing with the training: trusted, and surer of itself."""
    return second.trusted and (not own.trusted or not own.std_error <= second.std_error)


def _disagreement(own: LogPartition, second: LogPartition) -> Finding | None:
    """Two estimates of one log Z that are further apart than both errors allow.

    The spread between populations cannot show what all of them missed, such as mass that training put where no
    walker was; a path from the reference goes there.
    """
    error = math.hypot(own.std_error, second.std_error)
    apart = abs(own.value - second.value)
    if not apart > DISAGREEMENT * error + 0.01:
        return None
    how = "enumeration" if second.std_error == 0 else "sequential Monte Carlo on the finished energy"
    believed = _better(second, own)
    why = (
        "the second is believed: it shares nothing with the training, and nothing speaks against it"
        if believed
        else "neither is to be trusted: something speaks against the second one too"
    )
    text = (
        f"Two estimates of log Z disagree: the walkers of training say {own.value:.3f} ± {own.std_error:.3f}, "
        f"{how} {second.value:.3f} ± {second.std_error:.3f}. Of these {why}."
    )
    evidence: dict[str, Any] = {
        "log_z_training": own.value,
        "log_z_independent": second.value,
        "apart": apart,
    }
    advice = (
        "Nothing, for log Z, likelihoods and samples are those of the second. The gradients of training came from "
        "walkers that were off, though: use more walkers, a smaller learning rate or a smaller pace."
        if believed
        else "Use more walkers, a smaller learning rate or a smaller pace."
    )
    return Finding("log-z-disagree", "warning" if believed else "problem", text, evidence, advice)


def _skipped(run: Run, train: Tensor) -> Finding:
    what = "log Z was not estimated"
    if run.log_partition is not None:
        what = "The method's own log Z was not compared with an independent estimate"
    where = "RUN" if run.folder is None else str(run.folder)
    text = f"{what}: {why_costly(run.learned_energy, train)}."
    evidence: dict[str, Any] = {"dimensions": train[0].numel(), "most": MOST_DIMENSIONS}
    if hasattr(run.energy, "output_scale"):
        evidence |= {"output_scale": _scale(run.learned_energy), "most_scale": MOST_SCALE}
    advice = f"Ask for it with `metastable evaluate {where} --log-z`."
    return Finding("log-z-not-estimated", "note", text, evidence, advice)


def _second_scores(second: LogPartition | None) -> dict[str, float]:
    """The estimate that shares nothing with the training, under the name of what it is."""
    if second is None:
        return {}
    if second.std_error == 0:
        return {"log_z_exact": second.value}
    return {"log_z_smc": second.value, "log_z_smc_se": second.std_error}


def _equal_weights(run: Run, n: int, seed: int) -> Tensor:
    assert run.walkers is not None
    return run.walkers.resampled(n, seed=derive(seed, "samples")).x


def _modes(run: Run, train: Tensor, toy: ToySet | None, seed: int) -> tuple[dict[str, Any] | None, bool]:
    """Mode weights of data and model, around the toy set's centres or the modes found in the data.

    Also whether gaps of low density lie between parts of the data, which can be so with a single centre. Units
    coded −1 and +1 have no density to find modes in.
    """
    if is_discrete(run.energy):
        return None, False
    if toy is not None and toy.centers is not None:
        centers, separated = toy.centers.to(train), True
        truth = None if toy.weights is None else toy.weights.tolist()
    else:
        found = find_modes(train, seed=derive(seed, "modes") % 2**31)
        centers, separated, truth = found.centers.to(train), found.separated, None
    if run.walkers is None or len(centers) < 2:
        return None, separated
    in_data = mode_weights(train, centers)
    spread = (in_data * (1 - in_data) / len(train)).sqrt()
    errors = mode_weight_errors(
        run.walkers.x,
        centers,
        in_data,
        run.walkers.log_weight,
        target_std_error=spread,
        effective_size=independent_size(run.walkers, centers),
    )
    found = {
        "centers": centers.flatten(1).tolist() if centers[0].numel() <= 64 else None,
        "data": in_data.tolist(),
        "truth": truth,
        "samples": errors.weights.tolist(),
        "std_error": errors.std_error.tolist(),
    }
    return found, separated


def independent_size(walkers: Walkers, centers: Tensor) -> float | None:
    """How many independent samples the walkers are worth for mode weights, from the spread between populations.

    Walkers that share ancestors agree with each other more than their weights say; populations share none.
    None where there are no populations to compare.
    """
    sizes = walkers.info.get("populations", [])
    least = min(sizes, default=0)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True) if size == least]
    if len(groups) < 4:
        return None
    each = torch.stack([mode_weights(walkers.x[g], centers, walkers.log_weight[g]) for g in groups])
    mean, variance = each.mean(0), each.var(0)
    share = (mean * (1 - mean) / variance.clamp(min=1e-12)).min()
    return float(share) * sum(sizes) / least


def _scores(run: Run, validation: Tensor, toy: ToySet | None) -> dict[str, float]:
    scores: dict[str, float] = {}
    z = run.log_partition
    validation = _some(run, validation) if _costly(run) else validation
    if z is not None:
        energies = energies_of(run.learned_energy, validation)
        scores["log_likelihood"] = float(-energies.mean()) - z.value
        scores["log_likelihood_se"] = math.hypot(
            float(energies.std()) / math.sqrt(len(energies)), z.std_error
        )
        scores["cross_entropy"] = -scores["log_likelihood"]
    if "log_partition" in run.players:  # a method that learns log Z beside the energy
        scores["log_z_learned"] = float(run.players["log_partition"]().detach())
    if run.walkers is not None:
        w = run.walkers.resampled(min(2000, len(run.walkers)))
        drawn, held = w.x.flatten(1), validation[:2000].flatten(1)
        scores["energy_distance"] = float(energy_distance(drawn, held))
        scores["mmd"] = distance_of_means(drawn, held)
    if toy is not None and toy.log_density is not None and z is not None:
        own = toy.log_density(validation.cpu().float()).double().mean()
        scores["kl_estimated"] = scores["cross_entropy"] + float(own)
        scores |= {} if _costly(run) else _exact_scores(run, validation, toy)
    return scores


def distance_of_means(samples: Tensor, data: Tensor) -> float:
    """MMD of samples and data; 0 where the unbiased estimate of its square is negative.

    The kernel's widths are ½, 1 and 2 times the median distance within the data, the same for every model of
    them, so that models can be compared.
    """
    width = median_distance(data, data)
    squared = float(mmd2(samples, data, [factor * width for factor in BANDWIDTH_FACTORS]))
    return math.sqrt(max(squared, 0.0))


def _exact_scores(run: Run, data: Tensor, toy: ToySet) -> dict[str, float]:
    """In two dimensions everything can be had exactly, by quadrature: log Z, KL and mode weights."""
    if data.dim() != 2 or data.shape[1] > 2 or toy.log_density is None or is_discrete(run.energy):
        return {}
    box = bounding_box(data, 1.0)
    density = grid_density(run.learned_energy, box, 401)
    scores = {
        "log_z_exact": density.log_partition,
        "kl_exact": kl_on_grid(toy.log_density, run.learned_energy, box, 401, mass_tolerance=1e-2),
        "edge_mass": density.edge_mass,
    }
    return scores


def exact_mode_weights(run: Run, data: Tensor, centers: Tensor) -> list[float]:
    """The model's own mode weights by quadrature, for data in one or two dimensions."""
    density = grid_density(run.learned_energy, bounding_box(data, 1.0), 401)
    points = torch.cartesian_prod(*density.axes).view(-1, len(density.axes))
    return mode_weights(points, centers.double().cpu(), density.density.flatten().log()).tolist()


def _diagnosis(run: Run, train: Tensor, validation: Tensor, separated: bool) -> list[Finding]:
    modes = run.modes or {}
    facts = Facts(
        method=run.method,
        negatives_per_datum=run.config.get("method", {}).get("negatives_per_datum"),
        data_mode_weights=modes.get("data"),
        sample_mode_weights=modes.get("samples"),
        mode_weight_se=modes.get("std_error"),
        separated=separated,
        steps=int(run.kept_history[-1]["step"]) if run.kept_history else None,
        power=run.power,
        output_scale=getattr(run.learned_energy, "output_scale", None),
        **_sample_facts(run, train),
        **_held_out_facts(run, train, validation),
        **_energy_facts(run, train),
        **_density_facts(run, train),
    )
    findings = diagnose(run.kept_history, facts)
    z = run.log_partition
    if z is not None and z.warnings:
        text = "log Z should not be trusted: " + "; ".join(z.warnings) + "."
        evidence: dict[str, Any] = {"log_z": z.value, "std_error": z.std_error}
        findings.append(Finding("log-z-doubtful", "warning", text, evidence, "Use more walkers."))
    return findings


def _sample_facts(run: Run, train: Tensor) -> dict[str, float]:
    """Spread of the samples against the data's, and the share of walkers that stand where another one does."""
    if run.walkers is None:
        return {}
    x = run.walkers.resampled(min(4000, len(run.walkers))).x.flatten(1)
    ratio = x.var(0).sum().sqrt() / train.flatten(1).var(0).sum().sqrt().clamp(min=1e-12)
    held = run.walkers.x.flatten(1)
    if is_discrete(run.energy):  # few states: that walkers share one says nothing
        return {"sample_std_ratio": float(ratio)}
    shaped = x.view(-1, *train.shape[1:])
    away = {"far_share": far_share(shaped, train), "sample_radius": float(radii(shaped, train).median())}
    direction = torch.randn(held.shape[1], generator=generator(0), dtype=torch.float64).to(held.device)
    distinct = len(torch.unique(in_parts(lambda part: (part * direction).sum(1), held)))
    return {"sample_std_ratio": float(ratio), "duplicates": 1 - distinct / len(held), **away}


def _energy_facts(run: Run, train: Tensor) -> dict[str, float]:
    """Spread of P·E, the energy of what was learned, over data and as much noise."""
    if is_discrete(run.energy) or run.normalised:  # a density has no chains
        return {}
    x = train[:SHOWN]
    noise = fit_gaussian(x).sample(len(x), generator(0, x.device)).to(x)
    return {"energy_spread": float(energies_of(run.learned_energy, torch.cat([x, noise])).std())}


def _density_facts(run: Run, train: Tensor) -> dict[str, Any]:
    """Whether the energy can hold a density, and what tells a log-likelihood that none can have.

    Entropy and likelihood must be in the same coordinates: those of the rows that the energy was given.
    """
    if is_discrete(run.energy) or run.normalised or _costly(run):
        return {}
    facts: dict[str, Any] = {"dimensions": train[0].numel()}
    if not hasattr(run.energy, "logits"):  # a classifier's density is a by-product
        facts["rays_down"] = holds_density(run.learned_energy, train).share_bad
        facts["bare"] = getattr(run.energy, "reference", None) is None
    z = run.log_partition
    if z is None or "log_likelihood" not in run.scores:
        return facts
    facts |= {key: run.scores[key] for key in ("log_likelihood", "log_likelihood_se")}
    facts["excess_mass"] = excess_mass(run.learned_energy, z.value, train)
    if train[0].numel() <= MOST_DIMENSIONS:
        value, error, copies = nearest_neighbour_entropy(train)
        facts |= {"entropy": value, "entropy_se": error, "copies": copies}
    return facts


def kernel_of(method: Any) -> Kernel | None:
    """The kernel that moves a method's chains, of several samplers the first one's; None where nothing moves."""
    if isinstance(method, Objective):
        return kernel_of(method.source)
    if isinstance(method, Mixed):
        return next((k for k in map(kernel_of, method.sources) if k is not None), None)
    moving = isinstance(method, ChainMethod) and not isinstance(method, ExactDraws)
    return method.moves if moving else None


def _held_out_facts(run: Run, train: Tensor, validation: Tensor) -> dict[str, float]:
    if validation is train or len(validation) == len(train):
        return {}
    own, other = (energies_of(run.learned_energy, _some(run, rows)) for rows in (train, validation))
    error = math.hypot(float(own.std()) / math.sqrt(len(own)), float(other.std()) / math.sqrt(len(other)))
    return {"held_out_energy_gap": float(other.mean() - own.mean()), "held_out_energy_gap_se": error}


def _some(run: Run, rows: Tensor) -> Tensor:
    most = min(len(rows), COSTLY_ROWS if _costly(run) else LOOKED_AT)
    return rows[random_rows(len(rows), most, generator(0, rows.device), rows.device)]


def _costly(run: Run) -> bool:
    """Whether one energy is an ODE solved, so that scores do with fewer rows, and pictures with fewer points."""
    return bool(getattr(run.energy, "costly", False))


def _write(run: Run, train: Tensor, toy: ToySet | None, seed: int, check: StepCheck | None) -> None:
    from metastable.report import write_report

    assert run.folder is not None
    shown = min(SHOWN, max(64, SHOWN_NUMBERS // train[0].numel()))
    figures: dict[str, Any] = {"data": train[:shown].cpu().numpy()}
    if run.walkers is not None:
        x = _equal_weights(run, max(SHOWN, min(len(run.walkers), 10_000)), seed).cpu().numpy()
        np.save(run.folder / "samples.npy", x)
        figures["samples"] = x[np.random.default_rng(seed).permutation(len(x))[:shown]]
        figures |= _runaway(run, figures["samples"], train)
    figures |= _grids(run, train, toy) | _histograms(check)
    np.savez_compressed(run.folder / "figures.npz", **figures)
    _keep_walkers(run)
    write_json(run.folder / "summary.json", run.summary())
    write_report(run.folder)


def _keep_walkers(run: Run) -> None:
    """Weighted walkers that no checkpoint holds, since they come from sequential Monte Carlo."""
    assert run.folder is not None
    path = run.folder / "walkers.npz"
    path.unlink(missing_ok=True)
    if run.walkers is None or run.samples_source == "training":
        return
    sizes = np.array(run.walkers.info.get("populations", [len(run.walkers)]))
    x, log_weight = run.walkers.x.cpu().numpy(), run.walkers.log_weight.cpu().numpy()
    np.savez_compressed(path, x=x, log_weight=log_weight, populations=sizes)


def _kept_walkers(folder: Path) -> Walkers | None:
    """The inverse of `_keep_walkers`; equally weighted samples where a folder has only those."""
    path, samples = folder / "walkers.npz", folder / "samples.npy"
    if path.is_file():
        with np.load(path, allow_pickle=False) as kept:
            x, log_weight = (torch.from_numpy(kept[name]) for name in ("x", "log_weight"))
            return Walkers(x, log_weight, {"populations": kept["populations"].tolist()})
    return (
        Walkers.equal(torch.from_numpy(np.load(samples, allow_pickle=False))) if samples.is_file() else None
    )


def _runaway(run: Run, samples: np.ndarray, train: Tensor) -> dict[str, Any]:
    """Distances of data and samples from the data's centre, for the picture of mass that has run away."""
    if not any(finding.name == "mass-ran-away" for finding in run.diagnosis):
        return {}
    train = train.cpu()
    return {
        "radius_data": radii(train[:SHOWN], train).numpy(),
        "radius_samples": radii(torch.from_numpy(samples), train).numpy(),
    }


def _histograms(check: StepCheck | None) -> dict[str, Any]:
    """Energies of data, of negatives, and of negatives from longer steps; some of the negatives themselves."""
    if check is None:
        return {}
    arrays = {"energies_data": check.data, "energies_negatives": check.negatives, "negatives": check.x[:64]}
    if check.larger is not None:
        arrays |= {"energies_larger_steps": check.larger, "larger_steps": torch.tensor([check.steps])}
    return {name: values.cpu().numpy() for name, values in arrays.items()}


HISTOGRAMS = (
    "energies_data",
    "energies_negatives",
    "energies_larger_steps",
    "larger_steps",
    "negatives",
    "negatives_step",
)
"""Arrays of a step check in `figures.npz`; the last is the update that they are of, where that is not the end."""


def keep_histograms(
    folder: Path,
    check: StepCheck | None,
    step: int,
    coordinates: Coordinates | None = None,
    power: float = 1.0,
) -> None:
    """Put the histograms of update `step` into a run's `figures.npz`, in the place of those from before.

    For a run that ended without an evaluation: `evaluate_run` writes those of one that did.
    """
    path, before = folder / "figures.npz", {}
    if path.is_file():
        with np.load(path, allow_pickle=False) as stored:
            before = {name: stored[name] for name in stored.files if name not in HISTOGRAMS}
    units = None if coordinates is None else coordinates.events
    made = _histograms(_in_data_units(check, units, power))
    if made:
        made["negatives_step"] = np.array([step])
    if made or before:
        np.savez_compressed(path, **before, **made)


def _grids(run: Run, train: Tensor, toy: ToySet | None) -> dict[str, Any]:
    """Log-densities for pictures of one- and two-dimensional models."""
    if train.dim() != 2 or train.shape[1] > 2 or is_discrete(run.energy):
        return {}
    points_a_side = COSTLY_GRID if _costly(run) else GRID
    density = grid_density(run.learned_energy, bounding_box(train, 0.2), points_a_side)
    offset = 0.0 if run.log_partition is None else density.log_partition - run.log_partition.value
    log_density = (density.density.clamp(min=1e-300).log() + offset).numpy()
    grids = {"grid_x": density.axes[0].numpy()}
    if train.shape[1] == 1:
        return grids | {"log_density": log_density}
    grids |= {"grid_y": density.axes[1].numpy(), "log_density": log_density.T}
    if toy is not None and toy.log_density is not None:
        points = torch.cartesian_prod(*density.axes).float()
        grids["truth_log_density"] = toy.log_density(points).view(points_a_side, points_a_side).numpy().T
    return grids


def load_summary(run: Run) -> Run:
    """What a run's `summary.json` knows, put back into the run."""
    assert run.folder is not None
    kept = read_summary(run.folder)
    own = run.log_partition is not None
    weighted = own and kept.get("samples_source") != "independent"
    if kept.get("log_partition") and (not own or kept.get("log_z_source") == "independent"):
        run.log_partition = LogPartition.from_json(kept["log_partition"])
    run.status = kept.get("status", "unfinished")
    run.scores = kept.get("scores", {})
    run.modes, run.contexts = kept.get("modes"), kept.get("contexts")
    run.kept = kept.get("kept")
    run.ended = kept.get("ended", "")
    run.log_z_source = kept.get("log_z_source", "training")
    run.samples_source = kept.get("samples_source", "training")
    run.seconds = kept.get("seconds", 0.0)
    if kept:  # numbers of a run from before there was a power are those of exp(−E)
        run.power = kept.get("power", 1.0)
    names = {f.name for f in dataclasses.fields(Finding)}
    run.diagnosis = [Finding(**{k: v for k, v in f.items() if k in names}) for f in kept.get("diagnosis", [])]
    if not weighted:  # a buffer of chains has the data's mode weights, not the model's
        walkers = _kept_walkers(run.folder)
        if walkers is not None:
            device = run._home.device
            x, log_weight = walkers.x.to(device), walkers.log_weight.to(device)
            run.walkers = dataclasses.replace(walkers, x=x, log_weight=log_weight)
    return run
