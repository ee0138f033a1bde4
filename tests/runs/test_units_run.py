"""Runs that were trained in common units: every number comes back in the data's own."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import quadrature
from torch import nn

import metastable as ms
from metastable.cli.settings import resolve
from metastable.core.errors import InputError, UnsupportedError
from metastable.data import Dataset, load_array
from metastable.data.columns import columns_of, dequantised, oddities
from metastable.energies.in_units import InDataUnits
from metastable.kernels import MALA
from metastable.methods import PersistentCD
from metastable.proposals import Gaussian
from metastable.runs.load import load_chains

SMALL = {"name": "mlp", "hidden": (16,)}
QUICK = ms.methods.Jarzynski(walkers=256, populations=4)
pytestmark = pytest.mark.usefixtures("quickly_judged")


def humps(n=400, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random((n, 1)) < 0.4, rng.normal(-2, 0.5, (n, 1)), rng.normal(1, 0.7, (n, 1)))


def trained(x, **options):
    return ms.fit(SMALL, x, QUICK, **{"steps": 20, "seed": 0, "evaluate": False} | options)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_log_z_is_that_of_the_energy_in_the_datas_units(scale):
    run = trained(scale * humps())
    grid = quadrature(lambda x: run.energy(x), [(-8 * scale, 8 * scale, 4001)])
    assert abs(run.log_partition.value - grid.log_partition.item()) < 4 * run.log_partition.std_error + 1e-3


def test_densities_integrate_to_one_and_samples_follow_them():
    x = 1e4 * humps()
    run = trained(x, steps=60)
    points = torch.linspace(-8e4, 8e4, 8001, dtype=torch.float64)
    p = run.log_prob(points[:, None]).double().exp()
    assert float(torch.trapezoid(p, points)) == pytest.approx(1, abs=0.05)
    drawn = run.sample(2000, steps=20).resampled().x.double()
    mean = float(torch.trapezoid(p * points, points))
    sd = float(torch.trapezoid(p * (points - mean).square(), points).sqrt())
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.25 * sd)
    assert float(drawn.std()) == pytest.approx(sd, rel=0.15)


def test_the_same_rows_in_other_units_give_the_same_model():
    x = np.random.default_rng(0).normal(size=(300, 2)) @ np.array([[1.0, 0.7], [0.0, 0.5]])
    factor = np.array([1e5, 1e-4])
    one, two = trained(x), trained(x * factor + [3.0, 70.0])
    ours = one.log_prob(torch.tensor(x))
    theirs = two.log_prob(torch.tensor(x * factor + [3.0, 70.0])) + np.log(factor).sum()
    assert torch.allclose(ours.double(), theirs.double(), atol=5e-3)


def test_pictures_of_any_brightness_give_the_same_model():
    pictures = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for k in (2.0**-12, 2.0**10):
        method = ms.methods.PersistentCD(walkers=32, steps=2)
        run = ms.fit("conv", pictures * k, method, 3, evaluate=False, data_noise=0.1 * k)
        assert run.coordinates.events.kind == "common"
        found.append((run.energy(k * pictures[:5].float()) - 64 * math.log(k), run.walkers.x / k))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert ms.fit("conv", pictures.float(), "pcd", 1, evaluate=False).coordinates is None


def test_a_run_in_units_comes_back_from_its_folder_as_it_was(tmp_path):
    x = 1e3 * humps()
    run = trained(x, out=tmp_path / "run", evaluate=True)
    again = ms.load_run(tmp_path / "run")
    rows = torch.tensor(x[:20])
    assert torch.equal(run.log_prob(rows), again.log_prob(rows))
    assert torch.equal(run.energy(rows), again.energy(rows))
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["units"] == "whiten"
    assert kept["columns"][0]["scale"] == pytest.approx(float(x.std()), rel=1e-6)
    samples = np.load(tmp_path / "run" / "samples.npy")
    assert samples.std() == pytest.approx(x.std(), rel=0.5)
    rows_logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows_logged[-1]["energy_data"] == pytest.approx(run.energy(torch.tensor(x)).mean().item(), abs=0.5)
    with pytest.raises(InputError, match="resume: units differs"):
        trained(x, out=tmp_path / "run", resume=True, units="none")


class Bowl(nn.Module):
    """½((x − m)/s)² with a learned m, in the data's own units."""

    def __init__(self, scale):
        super().__init__()
        self.m, self.scale = nn.Parameter(torch.zeros(())), scale

    def forward(self, x):
        return 0.5 * ((x[:, 0] - self.scale * self.m) / self.scale).square()


def test_an_energy_of_ones_own_sees_its_own_units_and_a_step_means_the_same_for_every_data_set():
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    method = ms.methods.ContrastiveDivergence(step_size=0.05, steps=2)
    small, large = (
        ms.fit(Bowl(s), s * x, method, steps=10, seed=0, evaluate=False, learning_rate=0.1)
        for s in (1.0, 1e4)
    )
    assert isinstance(large.energy, Bowl)
    assert large.history[-1]["displacement"] == pytest.approx(small.history[-1]["displacement"], rel=1e-3)
    assert large.energy.m.item() == pytest.approx(small.energy.m.item(), abs=1e-4)
    plain = ms.fit(Bowl(1.0), x, method, steps=1, seed=0, evaluate=False, units="none")
    assert plain.coordinates is None


def test_checkpoints_of_an_energy_of_ones_own_are_its_own(tmp_path):
    x = 50 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    run = ms.fit(Bowl(50.0), x, "cd", steps=3, out=tmp_path / "run", evaluate=False)
    again = ms.load_run(tmp_path / "run", Bowl(50.0))
    assert torch.equal(run.energy.m, again.energy.m)
    assert isinstance(again.energy, Bowl)


def test_conditional_runs_come_back_in_the_datas_units():
    rng = np.random.default_rng(0)
    c = 1e-3 * rng.uniform(-1, 1, (1500, 1))
    y = 1e5 * (1e3 * c + 0.2 * rng.normal(size=c.shape))
    run = ms.fit(
        {"name": "conditional", "width": 32, "depth": 3},
        y,
        "ranking-nce",
        300,
        given=c,
        evaluate=False,
        seed=0,
    )
    given = torch.tensor([[-5e-4], [5e-4]], dtype=torch.float64)
    drawn = run.sample(400, given=given).x[..., 0].double()
    assert drawn.mean(1).tolist() == pytest.approx([-5e4, 5e4], abs=1.5e4)
    points = torch.linspace(-4e5, 4e5, 1601, dtype=torch.float64)
    p = run.log_prob(points[:, None], given=given[:1].expand(len(points), 1)).double().exp()
    assert float(torch.trapezoid(p, points)) == pytest.approx(1, abs=0.1)


def test_what_is_fitted_to_data_is_fitted_to_their_noise_as_well():
    x = torch.cat([torch.randn(500, 1), torch.zeros(500, 1)], 1)
    energy = {**SMALL, "reference": "gaussian"}
    run = ms.fit(energy, x, QUICK, steps=1, evaluate=False, units="none", data_noise=0.5)
    reference = run.energy.reference
    assert isinstance(reference, Gaussian)
    sd = (reference.scale @ reference.scale.T).diagonal().sqrt()
    assert float(sd[1]) == pytest.approx(1.2 * 0.5, rel=0.1)
    scaled = ms.fit(SMALL, x, QUICK, steps=1, evaluate=False, units="scale", data_noise=0.5)
    assert float(scaled.coordinates.events.inverse_matrix[1]) == pytest.approx(0.5, rel=0.1)


def test_units_are_refused_where_they_mean_nothing():
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 10)
    with pytest.raises(UnsupportedError, match="units: must be 'none' for units coded −1 and \\+1"):
        ms.fit("rbm", signs, {"name": "cd", "kernel": "gibbs"}, steps=1, units="scale")


def test_columns_say_what_has_no_density():
    n = 200
    rng = np.random.default_rng(0)
    table = np.stack([rng.normal(size=n), np.full(n, 3.0), rng.integers(0, 3, n), rng.normal(size=n)], 1)
    table[0, 3] = 1e6
    data = Dataset.of(torch.tensor(table), "table", columns=("a", "b", "c", "d"))
    assert [column.note for column in columns_of(data)] == ["", "constant", "few values", "far outliers"]
    words = " ".join(oddities(data))
    assert "b is 3 in every row" in words
    assert "c has 3 different values in 200 rows" in words
    assert "d has 1 values more than" in words
    copies = Dataset.of(torch.tensor(table[:20]).repeat(10, 1), "copies")
    assert any("90% of the rows are copies" in line for line in oddities(copies))


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_columns_that_follow_from_others_are_named(scale):
    x = np.random.default_rng(0).normal(size=(300, 3))
    table = np.column_stack(
        [x[:, 0], x[:, 0] * 1000 + 5, np.full(300, 2.0), x[:, 1], x[:, 1] + 1e-3 * x[:, 2], x.sum(1)]
    )
    data = Dataset.of(torch.tensor(scale * table), "table", columns=tuple("abcdef"))
    assert [line.split()[0] for line in oddities(data) if "follows from" in line] == ["b", "f"]
    assert not any("follows from" in line for line in oddities(Dataset.of(torch.tensor(x[:3]), "few")))


def test_remarks_on_a_table_know_of_its_noise(tmp_path):
    x = np.random.default_rng(0).normal(size=(100, 2))
    table = np.column_stack([x, x[:, 0] + x[:, 1], np.full(100, 3.0)])
    np.savetxt(tmp_path / "t.csv", np.vstack([table] * 2), delimiter=",", header="a,b,c,d", comments="")

    def remarks(**trainer: float) -> tuple[str, ...]:
        settings = {"data": str(tmp_path / "t.csv"), "method": "cd", "trainer": trainer}
        return tuple(note.removeprefix("data: ") for note in resolve(settings).notes)

    constant, follows, copies = remarks()
    assert "a ten-thousandth" in constant
    assert all("add a little noise (trainer.data_noise)" in words for words in (follows, copies))
    constant, follows, copies = remarks(data_noise=1e-7)
    assert "that of its noise, 1e-07" in constant
    assert all("set more noise than trainer.data_noise=1e-07" in words for words in (follows, copies))
    constant, copies = remarks(data_noise=0.01)  # c has a volume of its own
    assert "peaks as narrow as its noise: drop them, or set more noise than trainer.data_noise=0.01" in copies
    assert "trainer.data_noise_final=0" in remarks(data_noise=0.5, data_noise_final=0.0)[1]


def test_dequantised_codes_are_spread_between_their_neighbours_and_round_back():
    codes = torch.tensor([0.0, 1.0, 5.0] * 50)[:, None]
    x = dequantised(Dataset.of(torch.cat([codes, torch.randn(150, 1)], 1), "codes"), 0).x
    assert len(torch.unique(x[:, 0])) == 150
    assert (x[codes[:, 0] == 0, 0].abs() <= 0.5).all()
    assert ((x[codes[:, 0] == 1, 0] >= 0.5) & (x[codes[:, 0] == 1, 0] <= 3)).all()


def test_a_table_keeps_its_header_and_the_digits_of_a_date(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("when,amount\n" + "\n".join(f"{1_700_000_000 + i},{i % 7}" for i in range(1690)))
    data = load_array(path)
    assert data.columns == ("when", "amount")
    assert data.x.dtype == torch.float64
    assert len(torch.unique(data.x[:, 0])) == 1690
    run = ms.fit(SMALL, data, QUICK, steps=2, evaluate=False)
    assert isinstance(run.energy, InDataUnits)
    assert len(torch.unique(run.energy(data.x))) > 1000


def test_fewer_held_out_rows_than_columns_are_not_filled_with_noise():
    x = torch.randn((60, 8), generator=torch.Generator().manual_seed(0))
    energy = {"name": "mlp", "hidden": [4], "reference": "gaussian"}
    run = ms.fit(energy, x, "cd", 1, held_out=0.1, units="whiten")
    held = ms.data.Dataset.of(x, "x").split(0.1, 0)[1].x
    assert len(held) == 6
    assert run.scores["log_likelihood"] == pytest.approx(float(run.log_prob(held).mean()), abs=1e-3)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("method", [QUICK, "nce"])
def test_a_constant_column_has_the_noise_that_was_asked_for_and_no_more(scale, method):
    z = torch.randn((1000, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = scale * torch.stack([z[:, 0], 0.8 * z[:, 0] + 0.6 * z[:, 1], torch.full((1000,), 0.7)], 1)
    covariance = torch.cov(x.T, correction=0) + (0.1 * scale) ** 2 * torch.eye(3)
    law = torch.distributions.MultivariateNormal(x.mean(0), covariance)
    root = torch.linalg.cholesky(covariance)
    there = x.mean(0) + torch.randn((500, 3), generator=torch.Generator().manual_seed(1)).double() @ root.T
    run = ms.fit(None, x, method, 5, data_noise=0.1 * scale, evaluate=False)
    assert float((law.log_prob(there) - run.log_prob(there)).abs().mean()) < 0.06
    clean = there - (0.1 * scale) ** 2 * (there - x.mean(0)) @ covariance.inverse()
    assert float((run.denoised(there) - clean).std()) < 0.01 * scale


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_that_follow_from_others_have_the_noise_that_was_asked_for_and_no_more(noise, dtype):
    z = torch.randn((1000, 2), generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.stack([z[:, 0], 0.8 * z[:, 0] + 0.6 * z[:, 1], z[:, 0]], 1)
    mean, covariance = x.double().mean(0), torch.cov(x.double().T, correction=0) + noise**2 * torch.eye(3)
    law = torch.distributions.MultivariateNormal(mean, covariance)
    root, rng = torch.linalg.cholesky(covariance), torch.Generator().manual_seed(1)
    there = mean + torch.randn((500, 3), generator=rng, dtype=torch.float64) @ root.T
    run = ms.fit(None, x, QUICK, 5, data_noise=noise, evaluate=False)
    assert float((law.log_prob(there) - run.log_prob(there)).abs().mean()) < 0.06


def test_rows_whose_spread_is_their_noise_are_judged_with_it_and_scored_without():
    x = torch.randn((300, 1), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0] + [0.0] * 9])
    run = ms.fit(None, x, QUICK, 5, data_noise=0.1, held_out=0.2)
    held = Dataset.of(x, "x").split(0.2, 0)[1].x
    assert run.scores["log_likelihood"] == pytest.approx(float(run.log_prob(held).mean()), abs=1e-3)
    exact = 9 * -math.log(0.1 * math.sqrt(2 * math.pi)) - 0.5 * math.log(2 * math.pi * 1.01) - 0.5 / 1.01
    assert run.scores["log_likelihood"] == pytest.approx(exact, abs=1)
    assert not [finding for finding in run.diagnosis if finding.severity == "warning"]
    assert run.scores["energy_distance"] < 0.05


def test_energies_of_data_in_histograms_are_those_at_the_noise_that_training_ended_with(tmp_path):
    rng, folder = torch.Generator().manual_seed(0), tmp_path / "run"
    x = 1 - 2 * (torch.rand((500, 1), generator=rng) < 0.5) + 0.02 * torch.randn((500, 2), generator=rng)
    np.save(tmp_path / "x.npy", x)
    noise = {"data_noise": 0.5, "data_noise_final": 0.1}
    run = ms.fit(None, str(tmp_path / "x.npy"), "cd", 20, out=folder, **noise)
    there = run.energy(x + 0.1 * torch.randn(x.shape, generator=rng)).detach()
    with np.load(folder / "figures.npz") as kept:
        found = torch.from_numpy(kept["energies_data"])
    error = math.hypot(found.std() / len(found) ** 0.5, there.std() / len(there) ** 0.5)
    assert abs(found.mean() - there.mean()) < 4 * error
    again = load_chains(ms.load_run(folder), load_array(str(tmp_path / "x.npy"))).context.data
    left = run.coordinates.events.inverse(again) - x
    assert float(left.std()) == pytest.approx(0.1, rel=0.1)


def test_a_run_from_before_units_held_noise_goes_on_with_the_rows_that_it_had(tmp_path):
    x = torch.randn((300, 1), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0, 0.0]])
    options = {"data_noise": 0.2, "evaluate": False, "out": tmp_path / "run", "steps": 2}
    ms.fit(None, x, "cd", **options)
    kept = tmp_path / "run" / "config.json"
    settings = json.loads(kept.read_text())
    assert settings["coordinates"]["events"].pop("noise") == 0.2
    (tmp_path / "run" / "seals.json").unlink(missing_ok=True)
    kept.write_text(json.dumps(settings))
    run = ms.fit(None, x, "cd", **options | {"steps": 4}, resume=True)
    assert run.coordinates.events.noise == 0
    assert "noise" not in json.loads(kept.read_text())["coordinates"]["events"]


def test_what_begins_at_data_begins_at_rows_with_their_noise():
    """Rows that all lie at one point: without noise chains would begin there, at energies that nothing has."""
    x, ends = torch.ones(500, 3), {}
    for units in ("none", "scale"):
        method = PersistentCD(walkers=4000, start_at="data", kernel=MALA(1e-12))
        run = ms.fit("mlp", x, method, 1, units=units, data_noise=0.3, evaluate=False, seed=2)
        ends[units] = run.walkers.x
        assert ends[units].std(0).tolist() == pytest.approx([0.3] * 3, abs=5 * 0.3 / 1000**0.5)
        assert ends[units].mean(0).tolist() == pytest.approx([1.0] * 3, abs=5 * 0.3 / 500**0.5)
    plain = ms.fit("mlp", x, PersistentCD(walkers=40, kernel=MALA(1e-12)), 1, units="none", evaluate=False)
    assert (plain.walkers.x - 1).abs().max() < 1e-4
