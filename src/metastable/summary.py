"""What a finished run is worth: samples, log Z, scores, modes, diagnosis, and the files that keep them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metastable.core.configure import build_tagged
from metastable.core.random import derive, generator
from metastable.core.types import LogPartition, Walkers, is_discrete
from metastable.data import ToySet
from metastable.evaluation.diagnosis import Facts, Finding, diagnose
from metastable.evaluation.distances import BANDWIDTH_FACTORS, energy_distance, median_distance, mmd2
from metastable.evaluation.log_partition import log_partition
from metastable.evaluation.modes import find_modes, mode_weight_errors, mode_weights
from metastable.evaluation.quadrature import bounding_box, grid_density, kl_on_grid
from metastable.kernels import KERNELS
from metastable.proposals import fit_gaussian
from metastable.run import Run, read_summary, write_json

SHOWN = 2000
"""Rows of data and samples that a report shows."""
GRID = 161
DISAGREEMENT = 3.0
"""Standard errors between two estimates of log Z beyond which the first is doubted."""


def evaluate_run(run: Run, train: Tensor, validation: Tensor, toy: ToySet | None, *, seed: int) -> Run:
    """Fill in what the run is worth, and write it to its folder where it has one.

    log Z and samples come from the method's own walkers where it has weighted ones (Jarzynski). For the others
    both come from sequential Monte Carlo on the trained energy: chains that start at the data would show the
    data's mode weights, not the model's. A method's own log Z is compared with that of sequential Monte Carlo,
    which shares nothing with the training, and doubted where the two disagree.
    """
    second = log_partition(run.energy, data=train, seed=derive(seed, "evaluate"))
    if run.log_partition is None:
        run.log_partition, run.walkers = second, second.walkers or run.walkers
    else:
        run.log_partition = _compared(run.log_partition, second)
    run.modes, separated = _modes(run, train, toy, seed)
    run.scores = _scores(run, validation, toy) | _second_scores(second)
    run.diagnosis = _diagnosis(run, train, validation, separated)
    if run.folder is not None:
        _write(run, train, toy, seed)
    return run


def _second_scores(second: LogPartition) -> dict[str, float]:
    """The estimate that shares nothing with the training, under the name of what it is."""
    if second.std_error == 0:
        return {"log_z_exact": second.value}
    return {"log_z_smc": second.value, "log_z_smc_se": second.std_error}


def _compared(own: LogPartition, second: LogPartition) -> LogPartition:
    """`own`, with a warning where an independent estimate contradicts it beyond both errors.

    The spread between populations cannot show what all of them missed, such as mass that training put where
    no walker was; a path from the reference goes there.
    """
    error = math.hypot(own.std_error, second.std_error)
    if not second.trusted or not abs(own.value - second.value) > DISAGREEMENT * error + 0.01:
        return own
    words = (
        f"an independent value ({'enumeration' if second.std_error == 0 else 'sequential Monte Carlo'}) is "
        f"{second.value:.3f} ± {second.std_error:.3f}, "
        f"{abs(own.value - second.value) / error:.1f} standard errors away; use more walkers, a smaller learning "
        "rate, or that estimate"
    )
    return dataclasses.replace(own, warnings=(*own.warnings, words))


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
    if z is not None:
        with torch.no_grad():
            energies = run.energy(validation).double()
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
        scores |= _exact_scores(run, validation, toy)
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
    density = grid_density(run.energy, box, 401)
    scores = {
        "log_z_exact": density.log_partition,
        "kl_exact": kl_on_grid(toy.log_density, run.energy, box, 401, mass_tolerance=1e-2),
        "edge_mass": density.edge_mass,
    }
    return scores


def exact_mode_weights(run: Run, data: Tensor, centers: Tensor) -> list[float]:
    """The model's own mode weights by quadrature, for data in one or two dimensions."""
    density = grid_density(run.energy, bounding_box(data, 1.0), 401)
    points = torch.cartesian_prod(*density.axes).view(-1, len(density.axes))
    return mode_weights(points, centers.double().cpu(), density.density.flatten().log()).tolist()


def _diagnosis(run: Run, train: Tensor, validation: Tensor, separated: bool) -> list[Finding]:
    modes = run.modes or {}
    facts = Facts(
        method=run.method,
        data_mode_weights=modes.get("data"),
        sample_mode_weights=modes.get("samples"),
        mode_weight_se=modes.get("std_error"),
        separated=separated,
        steps=int(run.history[-1]["step"]) if run.history else None,
        **_sample_facts(run, train),
        **_held_out_facts(run, train, validation),
        **_energy_facts(run, train),
    )
    findings = diagnose(run.history, facts)
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
    distinct = len(torch.unique(held[:, :8], dim=0))
    return {"sample_std_ratio": float(ratio), "duplicates": 1 - distinct / len(held)}


def _energy_facts(run: Run, train: Tensor) -> dict[str, float]:
    """Spread of E/T over data and as much noise, with T the temperature that the run's chains really had."""
    if is_discrete(run.energy):
        return {}
    x = train[:SHOWN]
    noise = fit_gaussian(x).sample(len(x), generator(0, x.device)).to(x)
    with torch.no_grad():
        energies = run.energy(torch.cat([x, noise])).double()
    return {"energy_spread": float(energies.std()) / _temperature(run.config.get("method", {}))}


def _temperature(method: dict[str, Any]) -> float:
    """The temperature of the kernel that a run's settings name; 1 where they name none of the library's."""
    kernel = method.get("kernel") or (method.get("source") or {}).get("kernel") or {}
    known = kernel.get("name") in KERNELS
    return build_tagged(KERNELS, kernel, "method.kernel").temperature if known else 1.0


def _held_out_facts(run: Run, train: Tensor, validation: Tensor) -> dict[str, float]:
    if validation is train or len(validation) == len(train):
        return {}
    with torch.no_grad():
        own, other = run.energy(train).double(), run.energy(validation).double()
    error = math.hypot(float(own.std()) / math.sqrt(len(own)), float(other.std()) / math.sqrt(len(other)))
    return {"held_out_energy_gap": float(other.mean() - own.mean()), "held_out_energy_gap_se": error}


def _write(run: Run, train: Tensor, toy: ToySet | None, seed: int) -> None:
    from metastable.report import write_report

    assert run.folder is not None
    figures: dict[str, Any] = {"data": train[:SHOWN].cpu().numpy()}
    if run.walkers is not None:
        x = _equal_weights(run, max(SHOWN, min(len(run.walkers), 10_000)), seed).cpu().numpy()
        np.save(run.folder / "samples.npy", x)
        figures["samples"] = x[np.random.default_rng(seed).permutation(len(x))[:SHOWN]]
    figures |= _grids(run, train, toy)
    np.savez_compressed(run.folder / "figures.npz", **figures)
    write_json(run.folder / "summary.json", run.summary())
    write_report(run.folder)


def _grids(run: Run, train: Tensor, toy: ToySet | None) -> dict[str, Any]:
    """Log-densities for pictures of one- and two-dimensional models."""
    if train.dim() != 2 or train.shape[1] > 2 or is_discrete(run.energy):
        return {}
    density = grid_density(run.energy, bounding_box(train, 0.2), GRID)
    offset = 0.0 if run.log_partition is None else density.log_partition - run.log_partition.value
    log_density = (density.density.clamp(min=1e-300).log() + offset).numpy()
    grids = {"grid_x": density.axes[0].numpy()}
    if train.shape[1] == 1:
        return grids | {"log_density": log_density}
    grids |= {"grid_y": density.axes[1].numpy(), "log_density": log_density.T}
    if toy is not None and toy.log_density is not None:
        points = torch.cartesian_prod(*density.axes).float()
        grids["truth_log_density"] = toy.log_density(points).view(GRID, GRID).numpy().T
    return grids


def load_summary(run: Run) -> Run:
    """What a run's `summary.json` knows, put back into the run."""
    assert run.folder is not None
    kept = read_summary(run.folder)
    weighted = run.log_partition is not None
    if kept.get("log_partition") and not weighted:
        run.log_partition = LogPartition.from_json(kept["log_partition"])
    run.status = kept.get("status", "unfinished")
    run.scores = kept.get("scores", {})
    run.modes = kept.get("modes")
    run.seconds = kept.get("seconds", 0.0)
    names = {f.name for f in dataclasses.fields(Finding)}
    run.diagnosis = [Finding(**{k: v for k, v in f.items() if k in names}) for f in kept.get("diagnosis", [])]
    samples = run.folder / "samples.npy"
    if not weighted and samples.is_file():  # a buffer of chains has the data's mode weights, not the model's
        run.walkers = Walkers.equal(torch.from_numpy(np.load(samples, allow_pickle=False)))
    return run
