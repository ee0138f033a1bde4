"""The look at negatives when training ends: whose energies, from which chains, at which step."""

from __future__ import annotations

import json
import math
import shutil
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_scores
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import DivergenceError
from metastable.core.parts import energies_of
from metastable.kernels import HMC, MALA, ULA, Gibbs
from metastable.methods import (
    AdaptiveNCE,
    Context,
    ContrastiveDivergence,
    ExactDraws,
    FDivergence,
    Jarzynski,
    Mixed,
    PersistentCD,
    Robust,
    ScoreMatching,
    ShortRun,
)
from metastable.proposals import fit_gaussian
from metastable.summary import keep_histograms
from metastable.summary.negatives import CHAINS, LEAST_STEPS, Chains, enlarged, step_check

pytestmark = pytest.mark.usefixtures("quickly_judged")


class Bell(nn.Module):
    """E(x) = |x|²/2 with a parameter, so that it can be trained."""

    event_shape = (2,)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.scale * x.square().sum(1)

    def sample(self, n: int, rng: torch.Generator) -> Tensor:
        return torch.randn(n, 2, generator=rng)


def trained(method, n: int = 500, spread: float = 1.0) -> Chains:
    data = spread * torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    energy = Bell()
    rng = torch.Generator().manual_seed(1)
    players = {"energy": energy, **method.companions(energy, data, fit_gaussian(data), 0)}
    context = Context(energy, players, data, fit_gaussian(data), rng)
    return Chains(method, context, method.start(context))


# ------------------------------------------------------------------------------------------------ kernels


@each(
    "kernel, larger",
    [
        (ULA(0.1), ULA(0.4)),
        (ULA(1.0, noise=0.01, drift_clip=0.5), ULA(4.0, noise=0.02, drift_clip=2.0)),
        (MALA(0.1), MALA(0.4)),
        (HMC(0.1, leapfrog=3), HMC(0.2, leapfrog=3)),
        (Gibbs(), None),
    ],
)
def test_steps_grow_fourfold_at_the_same_temperature(kernel, larger):
    found = enlarged(kernel)
    assert found == larger
    if larger is not None:
        assert found.temperature == pytest.approx(kernel.temperature)


# ------------------------------------------------------------------------------------------------- chains


def test_chains_of_an_exact_sampler_do_not_change_with_the_step():
    """MALA leaves exp(−E) invariant at any step: ½χ² with two degrees of freedom has mean 1, for all three."""
    check = step_check(trained(PersistentCD(kernel=MALA(0.2), steps=5), n=2000))
    assert check is not None
    assert check.larger is not None
    assert check.steps == LEAST_STEPS
    for values in (check.data, check.negatives, check.larger):
        mean, error = mean_and_error(values)
        assert_within(mean, 1.0, error)
    assert len(check.negatives) == len(check.larger) == len(check.x) == CHAINS
    torch.testing.assert_close(check.negatives, energies_of(Bell(), check.x))


def test_short_chains_from_far_away_come_nearer_with_longer_steps():
    """x ← (1 − h)x + √(2h)ξ from N(0, s²): variance r²ᵏs² + (1 − r²ᵏ)·2h/(1 − r²), exact for both steps."""
    steps, h, s = 5, 0.02, 6.0
    check = step_check(trained(ShortRun(steps=steps, step_size=h), n=4000, spread=s))
    assert check is not None
    assert check.larger is not None
    assert check.steps == steps

    def mean_energy(h: float) -> float:
        r = (1 - h) ** (2 * steps)
        return r * s**2 + (1 - r) * 2 * h / (1 - (1 - h) ** 2)

    for values, expected in ((check.negatives, mean_energy(h)), (check.larger, mean_energy(4 * h))):
        mean, error = mean_and_error(values)
        assert_within(
            mean, expected, math.hypot(float(error), 0.05 * expected)
        )  # the noise is fitted to data
    mean, error = mean_and_error(check.larger)
    assert float(z_scores(mean, mean_energy(h), error)) > 8  # chains at the old step would be seen


@pytest.mark.parametrize(
    "method",
    [
        ContrastiveDivergence(walkers=64),
        ShortRun(steps=3),
        PersistentCD(walkers=100, batch=16, rejuvenation=0.1),
        Jarzynski(walkers=200, populations=4),
        Jarzynski(walkers=200, populations=4, batch=20, gradient="batch"),
        Mixed(sources=(PersistentCD(walkers=40), ShortRun(steps=2))),
        Robust(source=Jarzynski(walkers=200, populations=4), beta=0.3),
        Robust(source=ShortRun(steps=3), beta=(0.1, 0.5)),
        AdaptiveNCE(source=PersistentCD(walkers=40)),
        FDivergence(source=PersistentCD(walkers=40)),
        FDivergence(source=Jarzynski(walkers=200, populations=4)),
    ],
    ids=lambda m: m.name,
)
def test_every_method_with_chains_is_looked_at_and_left_alone(method):
    chains = trained(method)
    before = chains.context.rng.get_state()
    check = step_check(chains, seed=3)
    assert check is not None
    assert check.larger is not None
    assert torch.equal(chains.context.rng.get_state(), before)
    assert all(v.isfinite().all() for v in (check.data, check.negatives, check.larger))
    again = step_check(chains, seed=3)
    assert again is not None
    assert again.larger is not None
    assert torch.equal(check.larger, again.larger)
    assert not torch.equal(check.larger[: len(check.negatives)], check.negatives[: len(check.larger)])


def test_f_divergence_in_a_folder_comes_to_its_report(tmp_path):
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    ms.fit({"name": "mlp", "hidden": [8]}, x, "f-ebm", 3, out=tmp_path / "run")
    with np.load(tmp_path / "run" / "figures.npz") as stored:
        assert stored["energies_negatives"].shape == (CHAINS,)
    assert "Energies of data and negatives" in (tmp_path / "run" / "report.html").read_text()


def test_a_loss_on_a_loss_and_labels_are_looked_through():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    energy = ms.energies.JointEnergy(nn.Linear(2, 3), output_scale=2.0)
    source = Robust(source=PersistentCD(walkers=50, batch=8, steps=2), beta=0.1)
    method = ms.methods.JEM(source=source)
    rng = torch.Generator().manual_seed(1)
    labels = torch.arange(60) % 3
    context = Context(energy, {"energy": energy}, x, fit_gaussian(x), rng, given=labels)
    check = step_check(Chains(method, context, method.start(context)))
    assert check is not None
    assert check.larger is not None
    assert check.steps == LEAST_STEPS


def test_weighted_walkers_count_with_their_weights():
    """Walkers in two places, of which one has all the weight."""
    chains = trained(Jarzynski(walkers=200, held_out=0.0))
    steering = chains.state.steering
    far = torch.arange(200) < 100
    x = torch.where(far[:, None], torch.full((200, 2), 3.0), torch.zeros(200, 2))
    weight = torch.where(far, torch.zeros(200), torch.full((200,), -50.0)).double()
    state = chains.state._replace(steering=steering._replace(x=x, log_weight=weight))
    check = step_check(chains._replace(state=state))
    assert check is not None
    assert torch.allclose(check.negatives, torch.full_like(check.negatives, 9.0))


def test_methods_without_chains_or_steps():
    assert step_check(trained(ScoreMatching())) is None
    check = step_check(trained(ExactDraws()))
    assert check is not None
    assert check.larger is None  # nothing moves
    data = torch.randn(20, 2)
    given = trained(PersistentCD(walkers=10))
    assert (
        step_check(given._replace(context=ms.methods.Context(**vars(given.context) | {"given": data})))
        is None
    )


# ------------------------------------------------------------------------------------------------ the run


def test_a_run_keeps_the_energies_and_its_report_shows_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "metastable.summary.likelihood.affordable", lambda *_: False
    )  # log Z is not what is tested
    ms.fit("mixture", "toy:two-modes?n=200", ShortRun(steps=4), steps=3, out=tmp_path / "run")
    with np.load(tmp_path / "run" / "figures.npz") as stored:
        sizes = {k: stored[k].shape for k in stored.files if "energies" in k}
        assert int(stored["larger_steps"][0]) == 4
    assert sizes == {
        "energies_data": (200,),
        "energies_negatives": (CHAINS,),
        "energies_larger_steps": (CHAINS,),
    }
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Energies of data and negatives" in page
    assert "negatives at four times the step" in page


class Breaking(Bell):
    """A bell whose energies are of no use from the twelfth update on: far beyond any limit."""

    def __init__(self, beyond: float = 1e9):
        super().__init__()
        self.register_buffer("made", torch.zeros(()))
        self.beyond = beyond

    def after_step(self) -> None:
        self.made += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.beyond if self.made > 11 else 0.0)


def broken(out, energy: nn.Module, method=None, **settings) -> Tensor:
    """The data of a run that the guard stopped after its checkpoint of update 10."""
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    method = method or PersistentCD(walkers=400, batch=20, step_size=0.1)
    with pytest.raises(DivergenceError, match=r"energy_limit|is nan"):
        ms.fit(energy, x, method, 30, out=out, log_every=1, checkpoint_every=5, units="none", **settings)
    return x


def histograms_of(folder) -> dict[str, np.ndarray]:
    with np.load(folder / "figures.npz") as stored:
        return {k: stored[k] for k in stored.files}


def test_a_run_that_diverged_keeps_the_energies_of_its_last_good_checkpoint(tmp_path):
    energy = Breaking()
    x = broken(tmp_path / "run", energy)
    stored = histograms_of(tmp_path / "run")
    assert int(stored["negatives_step"][0]) == 10
    good = Breaking()
    ms.load_run(tmp_path / "run", good)
    expected = energies_of(good, x).numpy()
    assert good.scale.item() != 1
    np.testing.assert_allclose(np.sort(stored["energies_data"]), np.sort(expected))
    assert stored["energies_negatives"].shape == stored["energies_larger_steps"].shape == (CHAINS,)
    assert all(np.abs(stored[k]).max() < 1e3 for k in ("energies_negatives", "energies_larger_steps"))
    # what training left is left alone
    assert float(energy.made) > 11
    assert energy.scale.item() != good.scale.item()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Energies of data and negatives" in page
    assert "Seen at update 10, the last good checkpoint; training diverged by update 13." in page
    assert "Nothing was learned by then" not in page


class Bottomless(Breaking):
    """Not a number wherever a chain of four times the step comes, and nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        far = x.square().sum(1) > 1e6
        return super().forward(x) + torch.where(far, torch.nan, 0.0)


def test_energies_that_are_not_finite_do_not_break_the_picture(tmp_path):
    # at 4h = 4.8 every step ends 3.8 times as far out
    broken(tmp_path / "far", Bottomless(), ShortRun(steps=40, kernel=ULA(1.2)))
    stored = histograms_of(tmp_path / "far")
    assert np.isnan(stored["energies_larger_steps"]).all()
    assert np.isfinite(stored["energies_negatives"]).all()
    page = (tmp_path / "far" / "report.html").read_text()
    assert "Energies of data and negatives" in page
    broken(tmp_path / "nan", Lost())
    assert np.isnan(histograms_of(tmp_path / "nan")["energies_data"]).all()
    page = (tmp_path / "nan" / "report.html").read_text()
    assert "none of the data's is finite. Seen at update 10" in page.replace("&#x27;", "'")


class Lost(Bell):
    """Not a number for ever after its twelfth update, whatever weights are loaded."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def after_step(self) -> None:
        self.made += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (torch.nan if self.made > 11 else 0.0)


@pytest.mark.parametrize("damaged", [True, False])
def test_without_a_checkpoint_the_report_says_why_there_are_no_histograms(tmp_path, damaged):
    def spoil(row) -> None:
        if row["step"] != 11:
            return
        for folder in (tmp_path / "run" / "checkpoints").iterdir():
            if damaged:
                (folder / "manifest.json").write_text("{}")
            else:
                shutil.rmtree(folder)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # each damaged checkpoint is named
        broken(tmp_path / "run", Breaking(), progress=spoil)
    assert not (tmp_path / "run" / "figures.npz").exists()
    why = json.loads((tmp_path / "run" / "summary.json").read_text())["no_negatives"]
    assert ("none of 3 checkpoints is whole" if damaged else "holds none") in why
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"No energies of data and negatives to compare. {why.splitlines()[0]}" in page


def test_histograms_of_before_do_not_stay_when_there_are_no_later_ones(tmp_path):
    np.savez(tmp_path / "figures.npz", data=np.ones(3), energies_data=np.ones(3), negatives_step=np.ones(1))
    keep_histograms(tmp_path, None, 7)
    assert set(histograms_of(tmp_path)) == {"data"}
    check = step_check(trained(ShortRun(steps=3)))
    keep_histograms(tmp_path, check, 7)
    assert int(histograms_of(tmp_path)["negatives_step"][0]) == 7
    assert {"data", "energies_data", "energies_larger_steps"} < set(histograms_of(tmp_path))


def test_a_method_without_chains_diverges_without_histograms(tmp_path):
    broken(tmp_path / "run", Breaking(), ms.methods.NCE())
    assert not (tmp_path / "run" / "figures.npz").exists()
    assert "No energies of data" not in (tmp_path / "run" / "report.html").read_text()


# -------------------------------------------------------------------------------------- events of many dimensions


class Pixels(nn.Module):
    """A Gaussian over small pictures."""

    event_shape = (1, 15, 15)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.scale * x.flatten(1).square().sum(1)


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return torch.randn(300, 1, 15, 15, generator=torch.Generator().manual_seed(0))


def fitted(pictures: Tensor, method, monkeypatch, **settings):
    def refuse(*args, **kwargs):
        raise AssertionError("log Z of images takes minutes and must be asked for")

    monkeypatch.setattr("metastable.summary.likelihood.log_partition", refuse)
    return ms.fit(Pixels(), pictures, method, steps=2, held_out=0.2, **settings)


def test_images_get_no_log_z_and_are_told_so(pictures, tmp_path, monkeypatch):
    run = fitted(pictures, PersistentCD(walkers=80, step_size=0.01), monkeypatch, out=tmp_path / "run")
    assert run.log_partition is None
    assert "cross_entropy" not in run.scores
    assert "energy_distance" in run.scores
    finding = next(f for f in run.diagnosis if f.name == "log-z-not-estimated")
    assert finding.severity == "note"
    assert "225 dimensions" in finding.text
    assert f"metastable evaluate {tmp_path / 'run'} --log-z" in finding.advice
    assert "log Z was not estimated" in str(run)
    assert np.load(tmp_path / "run" / "samples.npy").shape[1:] == (1, 15, 15)
    again = ms.load_run(tmp_path / "run", Pixels())
    assert again.log_partition is None
    assert any(f.name == "log-z-not-estimated" for f in again.diagnosis)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "own walkers when training ended" in page
    assert "--log-z" in page


def test_images_of_a_method_without_walkers_show_its_negatives(pictures, tmp_path, monkeypatch):
    run = fitted(pictures, ShortRun(steps=2, step_size=0.01), monkeypatch, out=tmp_path / "run")
    assert run.walkers is None
    assert run.modes is None
    assert not (tmp_path / "run" / "samples.npy").exists()
    assert "no samples of the model" in (tmp_path / "run" / "report.html").read_text()


def test_a_method_that_gives_log_z_keeps_it_for_images(pictures, monkeypatch):
    run = fitted(pictures, Jarzynski(walkers=64, populations=2, step_size=0.01), monkeypatch)
    assert run.log_partition is not None
    assert "log_likelihood" in run.scores
    finding = next(f for f in run.diagnosis if f.name == "log-z-not-estimated")
    assert "not compared with an independent estimate" in finding.text


def test_small_events_are_normalised_as_before(monkeypatch):
    with pytest.raises(AssertionError, match="must be asked for"):
        fitted(torch.randn(50, 1, 14, 14), PersistentCD(walkers=20), monkeypatch)
