"""Flows and diffusions behind `fit`: trained, drawn from, scored, kept and read back as any other run."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_within, mean_and_error

import metastable as ms
from metastable.core.errors import InputError, UnsupportedError
from metastable.energies import MLP, AsEnergy, Tilted, as_energy
from metastable.methods import Density
from metastable.proposals import Diffusion, DiffusionEnergy, Flow, Gaussian, InterpolantFlow, fit_gaussian

SMALL = {"width": 16, "layers": 3, "steps": 24}


def line(n: int = 800, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x | c ~ N(2c, 0.3²) in one dimension, c uniform on [−1, 1]."""
    g = torch.Generator().manual_seed(seed)
    given = 2 * torch.rand((n, 1), generator=g) - 1
    return 2 * given + 0.3 * torch.randn((n, 1), generator=g), given


KINDS = {
    "flow": lambda **s: Flow(1, kind="affine", layers=1, hidden=(16,), **s),
    "interpolant": lambda **s: InterpolantFlow(1, width=16, steps=24, **s),
    "diffusion": lambda **s: Diffusion(1, **SMALL, **s),
    "diffusion-φ": lambda **s: DiffusionEnergy(1, **SMALL, **s),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_kind_learns_a_conditional_law(make):
    """Exact: the conditional log-likelihood of this law is −½log(2πe·0.09) = −0.215, without contexts −1.5."""
    x, given = line()
    model = make(context_shape=1, data=x)
    run = ms.fit(
        model, x, "density", given=given, steps=300, learning_rate=1e-2, evaluate=False, batch_size=200
    )
    y, c = line(300, seed=1)
    with torch.no_grad():
        score = model.log_prob(y, c).mean()
    assert -0.45 < float(score) < -0.1
    drawn = run.sample(400, given=torch.tensor([[-0.5], [0.5]]))
    assert drawn.x.shape == (2, 400, 1)
    assert (drawn.x.mean((1, 2)) - torch.tensor([-1.0, 1.0])).abs().max() < 0.2


def test_a_normalised_model_has_log_z_zero_and_draws_for_itself():
    x = torch.randn((400, 2), generator=torch.Generator().manual_seed(0)) + 3
    model = Flow(2, data=x, layers=1, hidden=(8,))
    run = ms.fit(model, x, "density", steps=5, evaluate=False)
    assert (run.log_partition.value, run.log_partition.std_error) == (0.0, 0.0)
    torch.testing.assert_close(run.log_prob(x), model.log_prob(x))
    drawn = run.sample(5000, seed=1)
    mean, error = mean_and_error(drawn.x)
    assert_within(mean, torch.full((2,), 3.0), (error**2 + 1 / 400) ** 0.5)


def test_the_loss_is_the_models_own_and_evaluations_count_its_times():
    x = torch.randn((50, 2), generator=torch.Generator().manual_seed(0))
    run = ms.fit(InterpolantFlow(2, width=8, times=3), x, "density", steps=4, evaluate=False, batch_size=None)
    assert run.history[-1]["evaluations"] == 4 * 50 * 3
    assert "density_loss" in run.history[-1]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_run_is_read_back(make, tmp_path):
    x, given = line(60)
    made = make(context_shape=1, data=x)
    ms.fit(made, x, "density", given=given, steps=3, evaluate=False, out=tmp_path / "run", batch_size=20)
    run = ms.load_run(tmp_path / "run", energy=make(context_shape=1))
    with torch.no_grad():
        again = run.energy if isinstance(run.energy, DiffusionEnergy) else run.energy.proposal
        assert torch.equal(again.log_prob(x, given), made.log_prob(x, given))


def test_the_energy_of_a_proposal_is_minus_its_log_density():
    q = Gaussian(torch.zeros(2), 2.0)
    energy = as_energy(q)
    x = torch.randn(5, 2)
    assert isinstance(energy, AsEnergy)
    assert torch.equal(energy(x), -q.log_prob(x))
    assert as_energy(energy) is energy  # an energy stays as it is
    phi = DiffusionEnergy(2, **SMALL)
    assert as_energy(phi) is phi


def test_what_cannot_be_trained_so_is_named():
    x = torch.randn((20, 2), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedError, match=r"'density' trains a model with loss.*Tilted has none"):
        ms.fit(Tilted(fit_gaussian(x), MLP(2, hidden=(4,))), x, Density(), steps=1)
    with pytest.raises(InputError, match=r"the density is one of events \(3,\), the data are \(2,\)"):
        ms.fit(Flow(3), x, "density", steps=1)
    with pytest.raises(InputError, match="given: the density needs contexts"):
        ms.fit(Flow(2, 1), x, "density", steps=1)
    with pytest.raises(InputError, match="given: the density has no contexts"):
        ms.fit(Flow(2), x, "density", steps=1, given=x[:, :1])
    with pytest.raises(InputError, match="proposal: must be a module with sample"):
        AsEnergy(MLP(2, hidden=(4,)))


@pytest.mark.parametrize("name", ["flow", "interpolant", "diffusion", "diffusion-phi"])
def test_models_by_name_are_built_trained_and_read_back(name, tmp_path):
    x, given = line(60)
    energy = {"name": name} if name == "flow" else {"name": name, "width": 8, "layers": 3, "steps": 8}
    made = ms.fit(
        energy, x, "density", given=given, steps=3, evaluate=False, out=tmp_path / "run", batch_size=20
    )
    run = ms.load_run(tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(run.energy(x, given), made.energy(x, given))
    assert torch.equal(run.sample(2, given=given[:3]).x, made.sample(2, given=given[:3]).x)


def test_a_density_for_classes_is_refused():
    x, labels = torch.zeros(20, 2), torch.arange(20) % 2
    with pytest.raises(InputError, match=r"energy\.name: must be a classifier for data with labels"):
        ms.fit("flow", x + torch.randn(20, 2), "jem", labels=labels, steps=1)


def test_evaluation_knows_that_log_z_is_zero(tmp_path):
    """Scores of a flow and of a diffusion agree with the entropy of their Gaussian, 1.419 nats."""
    x = torch.randn((600, 1), generator=torch.Generator().manual_seed(0))
    for name, model in {"flow": Flow(1, data=x, kind="affine"), "ode": Diffusion(1, data=x, **SMALL)}.items():
        run = ms.fit(model, x, "density", steps=20, out=tmp_path / name, held_out=0.2)
        assert run.log_partition.value == 0.0
        assert abs(run.scores["cross_entropy"] - 1.419) < 0.15
        assert len(run.walkers) == 2000
        assert not {f.name for f in run.diagnosis} & {"log-z-not-estimated", "log-z-doubtful"}
        assert (tmp_path / name / "report.html").is_file()
