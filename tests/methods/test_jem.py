"""JEM through the public door: labels, settings, errors, checkpoints, and where its chains begin."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metastable import api
from metastable.cli.settings import preset_names, read_settings, resolve
from metastable.core.errors import ConfigError, InputError
from metastable.energies import MLP, RBM, JointEnergy
from metastable.kernels import Gibbs
from metastable.methods import JEM, NCE, Context, FDivergence, Jarzynski, PersistentCD, Robust, ShortRun
from metastable.methods.jem import replay
from metastable.proposals import fit_gaussian, fit_signs
from metastable.walkers.starts import Box, ReplayBuffer


def blobs(n: int = 90) -> tuple[Tensor, Tensor]:
    """Three classes on a triangle."""
    labels = torch.arange(n) % 3
    angle = labels * (2 * torch.pi / 3)
    centre = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return centre + 0.3 * torch.randn((n, 2), generator=torch.Generator().manual_seed(0)), labels


def chains(**settings: Any) -> PersistentCD:
    usual = dict(walkers=60, batch=20, steps=3, step_size=1e-3, start_at="noise", noise="uniform")
    return PersistentCD(**usual | settings)


class Discs(nn.Module):
    """Logits of three normal densities, from which walkers do not run away."""

    classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        centres, labels = blobs(3)
        return self.shift[labels] - 0.5 * (x[:, None] - centres).square().sum(-1)


SETTINGS = {"name": "joint-mlp", "hidden": [16], "output_scale": 20.0}


def fitted(method: JEM | dict[str, Any], steps: int = 40, energy: Any = SETTINGS, **options: Any):
    x, labels = blobs()
    options = {"labels": labels, "batch_size": 30, "learning_rate": 1e-2, "evaluate": False} | options
    return api.fit(energy, x, method, steps, **options)


def test_it_learns_the_classes_and_says_how():
    run = fitted(JEM(source=Robust(source=chains(), beta=0.025)), steps=150)
    last = run.history[-1]
    assert last["accuracy"] > 0.95
    assert last["label_cross_entropy"] < 0.5
    assert last["beta_o"] == pytest.approx(0.5)
    assert {"grad_scale", "negatives_ignored", "energy_gap"} <= set(last)


def test_a_table_of_settings_makes_the_same_run():
    source = {
        "name": "robust",
        "beta": 0.025,
        "source": {"name": "pcd", "walkers": 60, "batch": 20, "steps": 3},
    }
    source["source"] |= {"step_size": 1e-3, "start_at": "noise", "noise": "uniform"}
    ours, table = (
        fitted(m)
        for m in (JEM(source=Robust(source=chains(), beta=0.025)), {"name": "jem", "source": source})
    )
    assert torch.equal(ours.walkers.x, table.walkers.x)


def test_a_run_is_resumed_bit_for_bit_and_read_back(tmp_path):
    method = JEM(source=Robust(source=chains(rejuvenation=0.2), beta=0.025))
    whole = fitted(method, 20)
    fitted(method, 10, out=tmp_path / "run", checkpoint_every=5)
    resumed = fitted(method, 20, out=tmp_path / "run", resume=True)
    assert torch.equal(whole.walkers.x, resumed.walkers.x)
    read = api.load_run(tmp_path / "run")
    x, _ = blobs()
    assert isinstance(read.energy, JointEnergy)
    assert (read.energy.classes, read.energy.output_scale) == (3, 20.0)
    assert torch.equal(read.energy.logits(x), resumed.energy.logits(x))
    described = json.loads((tmp_path / "run" / "config.json").read_text())["method"]
    assert described["source"]["source"]["noise"] == "uniform"


def test_β_and_o_come_as_one_number_in_the_log():
    method = JEM(source=Robust(source=chains(), beta=0.1, beta_start=0.0, anneal=100))
    assert method.beta_o(50, 20.0) == pytest.approx(1.0)
    several = JEM(source=Robust(source=chains(), beta=(0.0, 0.1)))
    assert several.beta_o(0, 20.0) == pytest.approx(1.0)  # their mean
    assert JEM(source=chains()).beta_o(0, 20.0) is None


def test_temperature_and_output_scale_are_two_ways_to_say_the_same():
    """o = 1 with chains of drift 1 and noise 0.01 is o = 20,000 with Langevin chains at temperature 1."""
    from metastable.kernels import ULA

    cold = JEM(source=Robust(source=PersistentCD(kernel=ULA(1.0, noise=0.01)), beta=2.5e-5))
    steep = JEM(source=Robust(source=PersistentCD(step_size=5e-5), beta=2.5e-5))
    assert cold.beta_o(0, 1.0) == pytest.approx(steep.beta_o(0, 20_000.0)) == pytest.approx(0.5)


def test_defaults_are_those_of_scenario_1():
    source = JEM().source
    assert isinstance(source, Robust)
    assert source.source == replay()
    assert JEM().beta_o(0, 20_000.0) == pytest.approx(1.0)
    assert replay().moves.sigma() == pytest.approx(0.01)
    assert replay().moves.step_size * 20_000 == pytest.approx(1.0)


# ---- bad input


@pytest.mark.parametrize("source", [NCE(), FDivergence(), JEM(), "pcd"])
def test_a_source_that_gives_no_gradient_of_log_p_is_refused(source):
    with pytest.raises(ConfigError, match=r"jem\.source: must be a method with chains, robust or adance"):
        JEM(source=source)


def test_a_weight_that_is_no_weight_is_refused():
    with pytest.raises(ConfigError, match=r"jem\.generative"):
        JEM(generative=-1.0)


def test_a_classifier_alone_moves_no_chain():
    alone = JEM(source=chains(rejuvenation=0.5), generative=0.0)
    run = fitted(alone, steps=100)
    assert run.history[-1]["accuracy"] > 0.95
    assert run.history[-1]["evaluations"] == 100 * 30


def test_cross_entropies_of_data_and_of_labels_have_names_of_their_own():
    """A weighted source logs log Z + E of the data; that of the labels stands beside it."""
    source = Jarzynski(walkers=32, populations=4, step_size=1e-3)
    last = fitted(JEM(source=source), 2, energy=JointEnergy(Discs(), output_scale=1.0)).history[-1]
    assert 0 < last["label_cross_entropy"] < 3
    assert last["cross_entropy"] != pytest.approx(last["label_cross_entropy"], abs=1e-3)


def test_a_classifier_alone_has_no_samples_and_no_log_z(tmp_path):
    """Its walkers are the noise that they began as; and its run is written and read like any other."""
    source = Jarzynski(walkers=32, populations=4, step_size=1e-3)
    run = fitted(JEM(source=source, generative=0.0), 2, energy=JointEnergy(Discs(), output_scale=1.0))
    assert run.walkers is None
    assert run.log_partition is None
    steep = {**SETTINGS, "output_scale": 20_000.0}  # of which log Z is not estimated
    alone = JEM(source=chains(), generative=0.0)
    run = fitted(alone, 2, energy=steep, out=tmp_path / "run", evaluate=True)
    assert run.walkers is None
    assert "energy_distance" not in run.scores
    read = api.load_run(tmp_path / "run")
    assert (read.walkers, read.log_partition) == (None, None)


def test_an_energy_without_logits_is_named():
    with pytest.raises(InputError, match=r"MLP has no 'logits'.*JointEnergy\(classifier\)"):
        fitted(JEM(source=chains()), energy=MLP(2))


def test_missing_labels_are_named():
    words = (
        "'jem' needs the class of each row.*labels=…, or give an .npz file with an array 'labels' of integers"
    )
    with pytest.raises(InputError, match=words):
        fitted(JEM(source=chains()), labels=None)


def test_labels_beyond_the_classes_are_named():
    _, labels = blobs()
    labels[7] = 5
    with pytest.raises(InputError, match="from 0 to 2, got 5 in row 7"):
        fitted(JEM(source=chains()), labels=labels, energy=JointEnergy(MLP(2, outputs=3), 20.0))


def test_a_class_whose_rows_are_all_held_out_is_one_of_the_classes(tmp_path):
    x, labels = blobs()
    labels = labels % 2
    labels[4] = 2  # the only row of its class
    seed = next(
        s for s in range(99) if 2 not in api.load_array(x).beside(labels=labels).split(0.3, s)[0].labels
    )
    run = fitted(JEM(source=chains()), 1, labels=labels, held_out=0.3, seed=seed, out=tmp_path / "run")
    assert run.energy.classes == 3
    read = api.load_run(tmp_path / "run")
    assert torch.equal(read.energy.logits(x), run.energy.logits(x))


# ---- uniform starts


def context_of(x: Tensor) -> Context:
    energy = MLP(tuple(x.shape[1:]))
    return Context(energy, {"energy": energy}, x, fit_gaussian(x), torch.Generator().manual_seed(0))


def test_uniform_noise_fills_the_range_of_each_column():
    x = torch.stack([torch.linspace(-1, 3, 50), torch.linspace(10, 11, 50)], 1)
    start = PersistentCD(walkers=4000, start_at="noise", noise="uniform").start(context_of(x)).buffer
    low, high = start.amin(0), start.amax(0)
    assert bool((low >= x.amin(0)).all() and (high <= x.amax(0)).all())
    torch.testing.assert_close(low, x.amin(0), rtol=0, atol=0.02)
    torch.testing.assert_close(high, x.amax(0), rtol=0, atol=0.02)
    # a uniform law of width w has variance w²/12; its estimate from n draws a relative error of √(0.8/n)
    torch.testing.assert_close(
        start.var(0), torch.tensor([16.0, 1.0]) / 12, rtol=6 * (0.8 / 4000) ** 0.5, atol=0
    )


def test_uniform_noise_for_images_has_the_range_of_all_pixels():
    x = torch.full((20, 1, 4, 4), -1.0)
    x[:, :, 1:3, 1:3] = torch.rand((20, 1, 2, 2), generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0, 0, 1, 1] = 1.0
    box = Box.around(x)
    assert (box.low == -1).all()
    assert (box.high == 1).all()
    border = box.sample(500, torch.Generator().manual_seed(0))[:, 0, 0, 0]
    assert border.min() < -0.95
    assert border.max() > 0.95


def test_fresh_chains_are_uniform_too():
    x, _ = blobs()
    context = context_of(x)
    method = chains(rejuvenation=1.0, step_size=1e-12)
    state = method.start(replace(context, data=x))
    state = state._replace(buffer=torch.full_like(state.buffer, 100.0))
    negatives, state, _ = method.negatives(context, state, x)
    assert negatives.x.abs().max() < 4  # fresh, from the data's box, and not where the buffer stood
    assert bool((negatives.x >= x.amin(0) - 1e-3).all() and (negatives.x <= x.amax(0) + 1e-3).all())
    kept = ReplayBuffer(state.buffer).read(20, context.rng, 0.0, Box.around(x))
    assert (kept.x == 100).all()


def test_units_have_no_uniform_noise():
    x = torch.ones((10, 6))
    energy = RBM((6,), 3)
    context = Context(energy, {"energy": energy}, x, fit_signs(x), torch.Generator())
    with pytest.raises(ConfigError, match=r"pcd\.noise"):
        PersistentCD(kernel=Gibbs(), noise="uniform").start(context)
    with pytest.raises(ConfigError, match=r"pcd\.noise"):
        PersistentCD(noise="white")


# ---- any module, any source


class Own(nn.Module):
    """A user's classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("source", [ShortRun(steps=2, step_size=1e-3), Robust(source=chains(), beta=0.01)])
def test_a_classifier_of_ones_own_is_trained_in_place(source):
    energy = JointEnergy(Own(), output_scale=20.0)
    run = fitted(JEM(source=source), 30, energy=energy, data_noise=0.03)
    assert run.energy is energy
    assert run.history[-1]["accuracy"] > 0.8


def test_a_plain_classifier_is_made_an_energy_and_read_back(tmp_path):
    classifier, folder = Own(), tmp_path / "run"
    method = JEM(source=Robust(source=chains(step_size=1e-6), beta=5e-5))
    run = fitted(method, 60, energy=classifier, out=folder)
    assert isinstance(run.energy, JointEnergy)
    assert run.energy.network is classifier
    assert (run.energy.output_scale, run.energy.classes) == (20_000.0, 3)
    assert run.history[-1]["accuracy"] > 0.8
    x, _ = blobs()
    for again in (Own(), JointEnergy(Own())):  # as it was given, or as it was trained
        assert torch.equal(api.load_run(folder, again).energy.logits(x), run.energy.logits(x))
    with pytest.raises(InputError, match=r"trained your own Own; pass an instance"):
        api.load_run(folder)
    resumed = fitted(method, 61, energy=Own(), out=folder, resume=True)
    assert resumed.history[-1]["step"] == 61


def test_labels_beyond_a_plain_classifier_s_classes_are_named():
    with pytest.raises(InputError, match="labels: must be from 0 to 1, got 2"):
        fitted(JEM(source=chains()), 1, energy=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(2, 1), r"returned shape \(3, 1\) for 3 rows; it must be \(3,\): add .squeeze"),
        (nn.Linear(5, 3), "raised RuntimeError on a batch of shape"),
    ],
)
def test_a_module_that_is_no_classifier_is_still_named(module, words):
    with pytest.raises(InputError, match=words):
        fitted(JEM(source=chains()), 1, energy=module)


def test_methods_without_labels_make_no_classifier_an_energy():
    with pytest.raises(InputError, match=r"returned shape \(3, 3\)"):
        api.fit(nn.Linear(2, 3), blobs()[0], "pcd", 1)


# ---- presets


@pytest.mark.parametrize("k", range(1, 8))
def test_scenarios_of_appendix_m(k):
    """α, o, rate, chains and negatives of each scenario; what a gradient step and its noise are."""
    settings = read_settings(f"jem-{k}")
    trainer, source = settings["trainer"], settings["method"]["source"]["source"]
    o, alpha = settings["energy"]["output_scale"], 2 * source["step_size"]
    expected = {  # o, α, rate, SGLD steps, negatives
        1: (20_000, 1e-4, 1e-4, 20, 64),
        2: (20_000, 1e-4, 1e-4, 5, 64),
        3: (20_000, 1e-4, 1e-4, 20, 8),
        4: (40_000, 1e-4, 1e-4, 20, 64),
        5: (10_000, 1e-4, 1e-4, 20, 64),
        6: (5_000, 4e-4, 2.5e-5, 20, 64),
        7: (20_000, 2.5e-5, 1e-4, 20, 64),
    }[k]
    rate = trainer["optimiser"]["learning_rate"]
    assert (o, alpha, rate, source["steps"], source["batch"]) == pytest.approx(expected)
    gradient_step = {1: 1, 2: 1, 3: 1, 4: 2, 5: 0.5, 6: 1, 7: 0.25}[k]
    assert o * alpha / 2 == pytest.approx(gradient_step)
    assert trainer["steps"] == 200 * 703
    assert trainer["schedule"]["drops"] == [160 * 703, 180 * 703]
    energy, method = settings["energy"], settings["method"]
    assert (energy["name"], energy["depth"], energy["width"]) == ("joint-wrn", 28, 10)
    assert 0.05 <= method["source"]["beta"] * o <= 10
    assert "β" in settings["about"]


def test_every_preset_of_a_jem_can_be_resolved(monkeypatch):
    """With small digits in the place of CIFAR-10, whose files are not everywhere."""
    for name in (n for n in preset_names() if n.startswith("jem-")):
        job = resolve({**read_settings(name), "data": "toy:digits?n=20"})
        assert isinstance(job.method, JEM)
        assert job.trainer.data_noise == 0.03
