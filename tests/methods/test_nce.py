"""Binary NCE through the training loop: log Z that is learned, log Z that is measured, and what is refused."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import assert_within, each
from torch import Tensor, nn

import metastable as ms
from metastable.core.errors import ConfigError, InputError
from metastable.energies import MLP, GaussianMixture
from metastable.methods import NCE, AdversarialContrastive, ContrastiveDivergence, FlowContrastive
from metastable.methods.nce import Logits
from metastable.proposals import Flow, Gaussian, Uniform
from metastable.training import SGD, Schedule

over = pytest.mark.parametrize
ROOT = Path(__file__).resolve().parents[2]
MEANS = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0, 0.0], [0.0, -1.0, 1.5, 0.0, 0.0]])
SCALES = torch.tensor([1.0, 0.8, 1.2])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def truth() -> GaussianMixture:
    """Three Gaussians in five dimensions, log Z = 1.68."""
    return GaussianMixture(MEANS, SCALES, torch.tensor([0.5, 1.0, 0.0]))


ROWS = truth().sample(100_000, rng())


@dataclass(frozen=True)
class Forgetful(NCE):
    """The mutant: ν is left out of the logit."""

    name: ClassVar[str] = "forgetful"

    def logits(self, context, x, y, log_prob_x, log_prob_y) -> Logits:
        made = super().logits(context, x, y, log_prob_x, log_prob_y)
        k = math.log(self.noise_ratio)
        return made._replace(G_data=made.G_data + k, G_noise=made.G_noise + k)


def learned_error(run) -> float:
    """The learned c minus the exact log Z of the energy as it is now."""
    return float((run.players["log_partition"]() - run.energy.log_partition()).detach())


def fit_log_z(method: NCE):
    """log Z alone: the true energy has no parameters, so c is all there is to train."""
    settings = {"optimiser": SGD(0.5), "schedule": Schedule("linear"), "batch_size": None}
    return ms.fit(truth(), ROWS, method, steps=15, evaluate=False, **settings)


def test_log_z_alone_is_learned_to_0_005():
    """Over data sets of this size the error has a standard deviation of 0.0013."""
    run = fit_log_z(NCE(noise_ratio=2.0))
    assert abs(learned_error(run)) <= 0.005
    assert "grad_norm" not in run.history[-1]  # nothing but c moved
    assert_within(run.log_partition.value, float(truth().log_partition()), run.log_partition.std_error)


def test_a_forgotten_noise_ratio_would_be_noticed():
    assert abs(learned_error(fit_log_z(Forgetful(noise_ratio=2.0)))) > 0.3


def fit_everything(method: NCE):
    start = MEANS + 0.3 * torch.randn(MEANS.shape, generator=rng(1))
    settings = {"learning_rate": 0.03, "schedule": Schedule("cosine"), "batch_size": 10_000}
    energy = GaussianMixture(start, SCALES, trainable=True)
    return ms.fit(energy, ROWS, method, steps=120, evaluate=False, **settings)


def test_log_z_is_learned_with_the_energy_to_0_03():
    run = fit_everything(NCE(noise_ratio=2.0))
    assert abs(learned_error(run)) <= 0.03
    assert bool(((run.energy.means - MEANS).abs() < 0.1).all())
    assert float((run.energy.mode_weights() - truth().mode_weights()).abs().max()) < 0.02


def small(seed: int = 0, n: int = 400) -> Tensor:
    return torch.randn((n, 2), generator=rng(seed)) + 1.0


def quick(method: NCE, **options):
    options = {"steps": 5, "evaluate": False} | options
    return ms.fit(None, small(), method, **options)


def test_c_begins_at_an_estimate_of_log_z():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MLP(2, hidden=(8,))

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * (x - 1).square().sum(1) - 40.0 + 0.0 * self.inner(x)

    run = ms.fit(Shifted(), small(), NCE(log_z_rate=1e-9), steps=1, evaluate=False)
    assert float(run.players["log_partition"]().detach()) == pytest.approx(
        40 + math.log(2 * math.pi), abs=0.1
    )


def test_a_fixed_c_makes_the_energy_normalise_itself():
    run = ms.fit(None, small(), NCE(learn_log_z=False), steps=80, learning_rate=0.01, evaluate=False)
    assert float(run.players["log_partition"]().detach()) == 0.0
    assert "grad_norm_log_partition" not in run.history[-1]
    assert abs(run.log_partition.value) < 0.25


def test_metrics_say_how_well_labels_are_told():
    row = quick(NCE(noise_ratio=3.0)).history[-1]
    chance = -math.log(4) + 0.75 * math.log(3)
    assert row["objective"] == pytest.approx(chance, abs=0.05)  # noise and data are the same Gaussian here
    assert row["positive_weight"] == pytest.approx(0.75, abs=0.05)
    assert row["negative_weight"] == pytest.approx(0.25, abs=0.05)
    assert row["accuracy"] == pytest.approx(0.75, abs=0.05)
    assert row["evaluations"] == 5 * 400 * 4


def test_a_finished_run_is_read_back_with_the_same_number(tmp_path, quickly_judged):
    run = quick(NCE(noise="uniform"), out=tmp_path / "uniform")
    assert run.log_partition is None  # mass outside the box would be missed
    run = quick(NCE(), out=tmp_path / "run", evaluate=True)
    again = ms.load_run(tmp_path / "run")
    assert again.log_partition.value == run.log_partition.value
    assert torch.equal(again.walkers.x, run.walkers.x)
    learned = run.players["log_partition"].value
    assert torch.equal(again.players["log_partition"].value, learned)
    assert torch.equal(again.inside["noise"].scale, run.inside["noise"].scale)
    assert again.scores["log_z_learned"] == pytest.approx(learned.item())


def test_a_noise_of_ones_own_is_copied_and_needed_again_to_read_a_run(tmp_path):
    noise = Flow(2, data=small(), layers=1, hidden=(4,))
    before = [p.clone() for p in noise.parameters()]
    method = NCE(noise=noise, noise_ratio=0.5)
    run = quick(method, out=tmp_path / "run")
    assert run.players["noise"] is not noise
    assert not any(p.requires_grad for p in run.players["noise"].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, noise.parameters(), strict=True))
    with pytest.raises(InputError, match=r"its 'noise' does not fit .* load_run\(method="):
        ms.load_run(tmp_path / "run")
    again = ms.load_run(tmp_path / "run", method=method)
    assert again.log_partition.value == run.log_partition.value


def test_weights_of_few_draws_give_no_log_z():
    far = Gaussian(torch.full((2,), 1.0), 60.0)
    run = quick(NCE(noise=far))
    assert run.log_partition is None
    assert run.walkers is None


def test_a_named_flow_is_fitted_first():
    x = truth().sample(500, rng(2))[:, :2]
    run = ms.fit(None, x, NCE(noise="flow", pretrain=20), steps=1, evaluate=False)
    raw = ms.fit(None, x, NCE(noise="flow", pretrain=0), steps=1, evaluate=False)
    fitted, unfitted = (r.players["noise"].log_prob(x).mean() for r in (run, raw))
    assert fitted > unfitted + 0.01


@over("method", [NCE(), FlowContrastive(), AdversarialContrastive()], ids=lambda m: m.name)
def test_the_page_shows_every_setting_with_its_default(method):
    text = (ROOT / "docs/methods/noise-contrastive.md").read_text()
    shown = set(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", text, re.MULTILINE))
    missing = [f.name for f in fields(method) if (f.name, str(getattr(method, f.name))) not in shown]
    assert missing == []


def test_the_example_shows_that_near_noise_teaches_more():
    spec = importlib.util.spec_from_file_location("noise_contrast", ROOT / "examples/noise_contrast.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    in_data, rows = example.compare(rows=400, steps=50, rate=0.08)
    by_name = {row.noise: row for row in rows}
    assert abs(by_name["gaussian"].left_weight - in_data) < 0.1
    weights = [by_name[name].positive_weight for name in ("wide gaussian", "uniform", "gaussian")]
    assert weights == sorted(weights)
    assert by_name["adversarial flow"].accuracy < by_name["gaussian"].accuracy


# ---- refused


@each(
    "make, path",
    [
        (lambda: NCE(noise_ratio=0.0), "nce.noise_ratio"),
        (lambda: NCE(noise_ratio=-1), "nce.noise_ratio"),
        (lambda: NCE(noise_ratio=math.inf), "nce.noise_ratio"),
        (lambda: NCE(noise="gausian"), "nce.noise"),
        (lambda: NCE(log_z_rate=0), "nce.log_z_rate"),
        (lambda: NCE(pretrain=-1), "nce.pretrain"),
        (lambda: NCE(walkers=0), "nce.walkers"),
    ],
)
def test_bad_settings_name_field_and_value(make, path):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.path == path


def test_data_outside_the_noise_are_refused():
    box = Uniform(torch.zeros(2), torch.ones(2))
    with pytest.raises(InputError, match=r"nce.noise: \d+ of 400 data rows lie outside"):
        quick(NCE(noise=box))


def test_noise_that_contradicts_itself_is_refused():
    class Liar(Uniform):
        def sample(self, n: int, rng: torch.Generator) -> Tensor:
            return super().sample(n, rng) + 100

    with pytest.raises(InputError, match="draws of the proposal have density zero"):
        quick(NCE(noise=Liar(torch.full((2,), -9.0), torch.full((2,), 9.0))))


def test_noise_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"nce.noise: events of the proposal have shape \(3,\)"):
        quick(NCE(noise=Gaussian(torch.zeros(3))))


def test_an_energy_that_is_infinite_on_the_noise_is_refused():
    class Wall(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * torch.where(x[:, 0] > 2.5, -math.inf, 0.0) + 0 * x.sum(1)

    x = small().clamp(max=2.0)
    with pytest.raises(InputError, match="energy: log Z over 4096 noise samples is"):
        ms.fit(Wall(), x, NCE(), steps=1, evaluate=False)


def test_nothing_to_train_is_still_refused():
    with pytest.raises(InputError, match="has no trainable parameters"):
        ms.fit(truth(), ROWS[:100], NCE(learn_log_z=False), steps=1, evaluate=False)
    with pytest.raises(InputError, match="has no trainable parameters"):
        ms.fit(truth(), ROWS[:100], ContrastiveDivergence(), steps=1, evaluate=False)
