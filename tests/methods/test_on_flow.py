"""Energies with a time on their flow: the flow's score, what they are ranked by, and where their SDE ends."""

import math

import pytest
import torch
from conftest import assert_within, mean_and_error, z_limit, z_scores
from torch import nn

import metastable as ms
from metastable.core import ConfigError
from metastable.energies import OnProposal
from metastable.evaluation.diagnosis import Facts, diagnose
from metastable.methods import interpolating_sde as sde
from metastable.methods.conditional_sampling import sample_interpolating
from metastable.proposals import InterpolantFlow
from metastable.proposals.interpolants import interpolant_named

F64 = torch.float64
over = pytest.mark.parametrize
CENTRE, SPREAD = 0.7, 0.4
GIVEN = torch.tensor([[-1.0], [0.5]], dtype=F64)
SCALES = torch.tensor([3.0, 0.01], dtype=F64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments(t, interpolant, centre, spread):
    a, b = interpolant.coefficients(t)
    return b * centre, a.square() + b.square() * spread**2


def flow_of(kind: str, units: float = 1.0) -> InterpolantFlow:
    """The exact flow to N(CENTRE + given, SPREAD²) in standardised units, of two numbers of other scales."""
    law = interpolant_named(kind)

    def velocity(w, given, t):
        (a, b), (da, db) = law.coefficients(t), law.derivatives(t)
        centre = CENTRE + given
        growth = (a * da + b * db * SPREAD**2) / (a.square() + b.square() * SPREAD**2)
        return db[..., None] * centre + growth[..., None] * (w - b[..., None] * centre)

    flow = InterpolantFlow(2, 1, field=velocity, interpolant=kind, steps=16, scored=5).double()
    flow.scale.copy_(units * SCALES)
    flow.mean.copy_(units * torch.tensor([5.0, -1.0], dtype=F64))
    return flow


def log_density(flow, x, given, t, centre=CENTRE, spread=SPREAD):
    mean, variance = moments(t, flow.interpolant, centre + given[:, None], spread)
    w = (x - flow.mean) / flow.scale
    return (-0.5 * ((w - mean).square() / variance + variance.log())).sum(-1) - flow.scale.log().sum()


class Ratio(nn.Module):
    """log p_ξ^t − log p^t for data N(CENTRE + given + 1, (2·SPREAD/3)²): E on the flow is then −log p^t."""

    def __init__(self, flow):
        super().__init__()
        self.flow, self.time, self.event_shape = (flow,), True, (2,)
        self.bias = nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, x, given, t):
        (flow,), t = self.flow, torch.as_tensor(t, dtype=F64)
        t = t.expand(x.shape[:2])[..., None]
        others = log_density(flow, x, given, t, CENTRE + 1, 2 * SPREAD / 3)
        return log_density(flow, x, given, t) - others + self.bias


def standing(flow) -> OnProposal:
    energy = OnProposal(Ratio(flow), zero_start=False)
    energy.attach(flow)
    return energy


@over("kind", ["linear", "trigonometric"])
@over("t", [0.0, 0.3, 0.95])
def test_the_score_of_a_flow_follows_from_its_velocity(kind, t):
    flow = flow_of(kind)
    x = (flow.mean + flow.scale * torch.randn(2, 5, 2, generator=rng(), dtype=F64)).requires_grad_()
    exact = torch.autograd.grad(log_density(flow, x, GIVEN, torch.tensor(t, dtype=F64)).sum(), x)[0]
    x = x.detach()
    torch.testing.assert_close(flow.score(x, flow.velocity(x, t, GIVEN), t), exact)
    left = 1 - t if kind == "linear" else math.cos(0.5 * math.pi * t)
    torch.testing.assert_close(flow.noise_variance(t), (left * flow.scale).square())


def test_draws_of_trajectories_are_the_same_without_their_densities():
    flow, times = flow_of("trigonometric"), torch.rand(2, 3, generator=rng(1), dtype=F64)
    x, log_prob = flow.trajectories(4, times, rng(2), GIVEN)
    same, none = flow.trajectories(4, times, rng(2), GIVEN, scored=False)
    assert torch.equal(x, same)
    assert not none.any()
    assert log_prob.abs().min() > 0


def test_the_energy_at_a_time_has_the_density_of_the_flow_cut_there():
    flow = flow_of("trigonometric")
    energy, x = standing(flow), flow.sample(3, rng(), GIVEN, until=0.6)
    t = torch.full((2, 3), 0.6, dtype=F64)
    expected = -log_density(flow, x, GIVEN, t[..., None], CENTRE + 1, 2 * SPREAD / 3) + math.log(2 * math.pi)
    torch.testing.assert_close(energy(x, GIVEN, t), expected, atol=0.02, rtol=0)


def walkers(units: float = 1.0, n: int = 4000, **settings):
    flow = flow_of("linear", units)
    settings = {"t_low": 0.0, "evaluations": 300, "eta": None, **settings}
    return flow, sample_interpolating(standing(flow), flow, n, GIVEN, rng(3), **settings).x


def off_by(flow, x):
    """Means and mean squares about the data's law, in its units, with their standard errors."""
    w = ((x - flow.mean) / flow.scale - (CENTRE + 1 + GIVEN[:, None])) / (2 * SPREAD / 3)
    rows = w.transpose(0, 1).flatten(1)
    mean, mean_se = mean_and_error(rows)
    square, square_se = mean_and_error(rows.square())
    return torch.cat([mean, square - 1]), torch.cat([mean_se, square_se])


@over("name", ["right", "no score", "half", "noise"])
def test_the_sde_on_a_flow_ends_at_the_law_of_the_energy(name, monkeypatch):
    normal, score = sde.normal_like, InterpolantFlow.score
    if name == "no score":
        monkeypatch.setattr(InterpolantFlow, "score", lambda *a: 0 * score(*a))
    if name == "half":
        monkeypatch.setattr(InterpolantFlow, "score", lambda *a: 0.5 * score(*a))
    if name == "noise":
        monkeypatch.setattr(sde, "normal_like", lambda x, g: normal(x, g) / math.sqrt(2))
    off, error = off_by(*walkers(evaluations=3000, n=1000))
    if name == "right":
        assert_within(off, torch.zeros_like(off), error)
    else:
        assert float(z_scores(off, 0.0, error).max()) > 2 * z_limit(len(off))


def test_defaults_do_not_depend_on_units():
    (flow, x), (other, y) = walkers(n=50), walkers(1000.0, n=50)
    torch.testing.assert_close((x - flow.mean) / flow.scale, (y - other.mean) / other.scale)


def test_without_a_network_it_is_the_flow():
    flow = flow_of("trigonometric")
    energy = standing(flow)
    monkey = type("Zero", (Ratio,), {"forward": lambda self, x, given, t: 0 * x.sum(-1)})
    energy.network = monkey(flow)
    x = sample_interpolating(energy, flow, 4000, GIVEN, rng(4), t_low=0.4, evaluations=300).x
    w = ((x - flow.mean) / flow.scale - (CENTRE + GIVEN[:, None])) / SPREAD
    rows = w.transpose(0, 1).flatten(1)
    mean, error = mean_and_error(rows)
    assert_within(mean, torch.zeros_like(mean), error)
    square, error = mean_and_error(rows.square())
    assert_within(square - 1, torch.zeros_like(square), error)


@over("asked", [{"kernel": ms.kernels.ULA(0.1)}, {"candidates": 2}, {"tune": True}, {"anneal": 0.5}])
def test_what_needs_a_chain_is_refused(asked):
    with pytest.raises(
        ConfigError, match=f"{next(iter(asked))}: must be left out for an energy on its proposal"
    ):
        walkers(**asked)


@over("eta", [1.0, 5.0])
def test_a_share_of_all_the_noise_is_refused(eta):
    with pytest.raises(ConfigError, match="eta: must be below 1 on a proposal"):
        walkers(eta=eta)
    walkers(eta=0.5, tune=False, n=2, evaluations=3)


def data(contexts: bool = True) -> ms.data.Dataset:
    x = torch.randn(256, 2, generator=rng(5))
    return ms.data.Dataset.of(x + 1, "mine", given=x[:, :1] if contexts else None)


def ranked(**settings):
    return {
        "name": "interpolating-nce",
        "negatives_per_datum": 3,
        "times": 2,
        "proposal": {"name": "interpolant", "width": 8, "steps": 4, "scored": 3},
        **settings,
    }


ON_FLOW = {"name": "on-proposal", "width": 8, "depth": 2, "time": True}


@pytest.mark.filterwarnings("ignore:Along")
@over("contexts", [True, False])
def test_it_starts_at_chance_and_needs_no_density(contexts, tmp_path, monkeypatch):
    method = ranked(train_proposal=False, pretrain=2, reuse=2, pool=64)
    monkeypatch.setattr(InterpolantFlow, "_along", lambda *a, **k: pytest.fail("no density is needed"))
    options = {"steps": 8, "batch_size": 32, "log_every": 1, "evaluate": False, "units": "none"}
    run = ms.fit(ON_FLOW, data(contexts), method, **options, out=tmp_path / "run")
    first = next(row for row in run.history if "objective" in row)
    assert first["objective"] == pytest.approx(-math.log(4), abs=1e-6)
    assert first["objective_new"] == pytest.approx(-math.log(4), abs=1e-6)
    if not contexts:
        return
    x = run.sample(5, given=torch.zeros(2, 1), seed=3, evaluations=6).x
    assert torch.equal(
        ms.load_run(tmp_path / "run").sample(5, given=torch.zeros(2, 1), seed=3, evaluations=6).x, x
    )


def test_draws_of_a_moving_flow_cannot_serve_again():
    with pytest.raises(
        ConfigError, match=r"interpolating-nce\.reuse: must be 1 for an energy on its proposal"
    ):
        ms.fit(ON_FLOW, data(), ranked(reuse=2), steps=2, evaluate=False)
    ms.fit(ON_FLOW, data(), ranked(), steps=2, batch_size=16, evaluate=False)


def test_what_cannot_be_cut_or_stood_on_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"energy\.time: must be False for 'ranking-nce'"):
        ms.fit(ON_FLOW, data(), {"name": "ranking-nce", "proposal": "flow"}, steps=2, evaluate=False)
    monkeypatch.delattr(InterpolantFlow, "noise_variance")
    with pytest.raises(ms.core.UnsupportedError, match="this one has no noise_variance"):
        ms.fit(ON_FLOW, data(), ranked(), steps=2, evaluate=False)


# ---- draws that are known by heart


@pytest.mark.filterwarnings("ignore:Along")
@over(("reuse", "pool", "known"), [(64, 64, True), (2, 4096, False)])
def test_a_small_pool_is_learned_by_heart_and_the_log_tells(reuse, pool, known):
    """Negatives of the data's own law: there is nothing to learn, and rows just drawn are told at chance."""
    proposal = ms.proposals.Gaussian(torch.zeros(8))
    method = ms.methods.RankingNCE(7, proposal, train_proposal=False, reuse=reuse, pool=pool)
    energy = ms.energies.MLP(8, hidden=(128, 128), seed=1)
    options = {"optimiser": ms.training.Adam(5e-3), "log_every": 4, "evaluate": False, "units": "none"}
    run = ms.fit(energy, torch.randn(4096, 8, generator=rng(6)), method, 600, batch_size=32, **options)
    late = [row for row in run.history[-75:] if "objective_new" in row]
    pooled, new = (sum(row[key] for row in late) / len(late) for key in ("objective", "objective_new"))
    assert new < -math.log(8) + 0.05
    assert (pooled - new > 0.25) == known
    assert ("pool-by-heart" in [finding.name for finding in diagnose(run.history)]) == known


def test_rows_just_drawn_are_compared_with_the_log_beside_them_alone():
    """A pool is filled at first, when the energy knows nothing: rows of that time say nothing about the end."""
    late = [
        {"step": 40 + k, "objective": -0.2, **({"objective_new": -0.25} if k % 5 == 0 else {})}
        for k in range(60)
    ]
    filling = [{"step": k, "objective": -2.0, "objective_new": -2.0} for k in range(40)]
    assert "pool-by-heart" not in [finding.name for finding in diagnose(filling + late)]


def test_a_course_is_read_off_rows_just_drawn_where_a_pool_is_known_by_heart():
    facts = Facts(method=ms.methods.RankingNCE(7, reuse=50), negatives_per_datum=7)
    behind = [{"step": k, "objective": -2.6 + 0.01 * math.sin(k)} for k in range(90)]
    some = [{**row, **({"objective_new": -2.6} if k % 5 == 0 else {})} for k, row in enumerate(behind)]
    assert (
        [f.name for f in diagnose(some, facts)]
        == [f.name for f in diagnose(behind, facts)]
        == ["energy-behind"]
    )
    heart = [{**row, "objective": -0.5, "objective_new": row["objective"]} for row in behind]
    assert {f.name for f in diagnose(heart, facts)} == {"pool-by-heart", "energy-behind"}


def test_what_is_learned_by_heart_is_said():
    rows = [{"step": k, "objective": -1.0, "objective_new": -1.0 - gap} for k, gap in enumerate([0.02] * 60)]
    assert "pool-by-heart" not in [finding.name for finding in diagnose(rows)]
    for gap, severity in ((0.5, "warning"), (2.0, "problem")):
        found = diagnose([{**row, "objective_new": -1.0 - gap} for row in rows])
        assert [f.severity for f in found if f.name == "pool-by-heart"] == [severity]
