"""Flows learned by interpolants as proposals: one density, whichever way it is asked for, given contexts or not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import assert_within, each, mean_and_error, z_limit
from safetensors.torch import load, save
from torch import Tensor, nn

from metastable.core.batch import Batch
from metastable.core.errors import ConfigError, InputError
from metastable.core.types import Proposal
from metastable.core.waiting import unwatched
from metastable.proposals import (
    Diffusion,
    DiffusionEnergy,
    Gaussian,
    InterpolantFlow,
    Mixture,
    MixtureField,
    fields,
    proposal_for,
    tiles,
)
from metastable.proposals.encoders import Borrowed, Standardise
from metastable.proposals.fields import ConcatSquash, ResidualField

F64 = torch.float64
over = pytest.mark.parametrize


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def bent(module: nn.Module, size: float = 0.3) -> nn.Module:
    """Weights far from where they start, so that the flow is no identity."""
    module.double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p += size * normal(*p.shape, seed=100 + i)
    return module


SMALL = {"width": 8, "steps": 20, "scored": 11}
PLAIN = {
    "vectors": lambda: bent(InterpolantFlow(2, **SMALL)),
    "residual": lambda: bent(InterpolantFlow(2, field="residual", layers=4, **SMALL)),
    "images, standardised": lambda: bent(
        InterpolantFlow((1, 2, 2), data=3 + 2 * normal(50, 1, 2, 2), layers=4, **SMALL)
    ),
}
GIVEN = {
    "contexts": lambda: bent(InterpolantFlow(2, 3, **SMALL)),
    "contexts, residual": lambda: bent(
        InterpolantFlow(2, (3,), field="residual", interpolant="linear", **SMALL)
    ),
    "an encoder": lambda: bent(
        InterpolantFlow(
            2, 3, encoder=nn.Sequential(nn.Linear(3, 5), nn.SiLU()), data=normal(20, 2) + 5, **SMALL
        )
    ),
}
EVERY = PLAIN | GIVEN
over_plain = over("make", PLAIN.values(), ids=PLAIN)
over_given = over("make", GIVEN.values(), ids=GIVEN)
over_all = over("make", EVERY.values(), ids=EVERY)


def contexts(flow: InterpolantFlow, n: int = 4) -> Tensor | None:
    return None if flow.context_shape is None else normal(n, *flow.context_shape, seed=7)


# ---- the protocol


@over_plain
def test_shapes_without_contexts(make):
    q = make()
    assert isinstance(q, Proposal)
    assert q.context_shape is None
    x, log_prob = q.sample_and_log_prob(6, rng())
    assert x.shape == (6, *q.event_shape)
    assert log_prob.shape == q.log_prob(x).shape == (6,)
    x, log_prob = q.trajectories(6, torch.tensor([0.2, 0.9, 0.5]), rng())
    assert x.shape == (3, 6, *q.event_shape)
    assert log_prob.shape == (3, 6)
    assert q.velocity(x[0], 0.3).shape == x[0].shape
    assert q.interpolate(x[0], torch.rand(6, 4), rng()).shape == (6, 4, *q.event_shape)
    assert q.loss(x[0], rng=rng()).shape == ()


@over_given
def test_shapes_with_contexts(make):
    q = make()
    given = contexts(q)
    x, log_prob = q.sample_and_log_prob(6, rng(), given)
    assert x.shape == (4, 6, *q.event_shape)
    assert log_prob.shape == q.log_prob(x, given).shape == (4, 6)
    assert q.log_prob(x[:, 0], given).shape == (4,)
    assert q.velocity(x, 0.3, given).shape == x.shape
    x, log_prob = q.trajectories(6, torch.rand(4, 3), rng(), given)
    assert x.shape == (4, 3, 6, *q.event_shape)
    assert log_prob.shape == (4, 3, 6)
    assert q.loss(x[:, 0, 0], given, rng=rng()).shape == ()


@over_all
def test_draws_come_from_the_generator_alone(make):
    q = make()
    given, before = contexts(q), torch.get_rng_state()
    assert torch.equal(q.sample(5, rng(3), given), q.sample(5, rng(3), given))
    assert torch.equal(q.sample(5, rng(3), given), q.rsample(5, rng(3), given))
    assert torch.equal(q.sample(5, rng(3), given), q.sample_and_log_prob(5, rng(3), given)[0])
    rows = q.sample(1, rng(3), given).flatten(0, 0 if given is None else 1)
    assert torch.equal(q.loss(rows, given, rng=rng(4)), q.loss(rows, given, rng=rng(4)))
    assert torch.equal(before, torch.get_rng_state())


@over_all
def test_state_survives_a_file_bit_by_bit(make):
    q = make()
    given = contexts(q)
    x = q.sample(1, rng(), given)
    other = copy.deepcopy(q)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.mul_(1.5).add_(0.1)
    assert not torch.equal(other.log_prob(x, given), q.log_prob(x, given))
    other.load_state_dict(load(save(q.state_dict())))
    assert torch.equal(other.log_prob(x, given), q.log_prob(x, given))
    assert torch.equal(other.sample(5, rng(1), given), q.sample(5, rng(1), given))


@over_all
def test_no_draws_are_no_rows(make):
    q = make()
    given = contexts(q)
    lead = (0,) if given is None else (4, 0)
    x, log_prob = q.sample_and_log_prob(0, rng(), given)
    assert x.shape == (*lead, *q.event_shape)
    assert log_prob.shape == q.log_prob(x, given).shape == lead


def test_pairs_standardise_both_events_and_contexts():
    pairs = Batch(500 + 20 * normal(300, 2), 1e4 * normal(300, 3, seed=1))
    q = InterpolantFlow(2, 3, data=pairs, **SMALL)
    assert q.field.encoder(pairs.given).std().item() == pytest.approx(1.0, abs=0.01)
    torch.testing.assert_close(q.mean, pairs.x.mean(0))
    before = [p.clone() for p in q.parameters()]
    q.fit(pairs, steps=2)
    assert any(not torch.equal(a, b) for a, b in zip(before, q.parameters(), strict=True))


@over_given
def test_a_context_changes_its_own_rows_only(make):
    """Rows of many contexts together are the rows of each alone."""
    q = make()
    given, t = contexts(q), torch.tensor([[0.1, 0.8], [1.0, 0.3], [0.4, 0.4], [0.0, 0.7]], dtype=F64)
    x, log_prob = q.trajectories(3, t, rng(2), given)
    together = q.log_prob(x[:, 0], given, at=t[:, 0])
    for i in range(4):
        torch.testing.assert_close(q.log_prob(x[i, 0][None], given[i : i + 1], at=t[i, 0])[0], together[i])
    other = given.clone()
    other[1] += 1
    y, other_log_prob = q.trajectories(3, t, rng(2), other)
    same = torch.tensor([True, False, True, True])
    assert torch.equal(y[same], x[same])
    assert torch.equal(other_log_prob[same], log_prob[same])
    assert not torch.allclose(y[1], x[1])


@over_given
def test_trajectories_have_the_density_of_the_flow_cut_there(make):
    q = make()
    q.steps, q.scored = 200, 201
    given, t = contexts(q), torch.rand((4, 3), generator=rng(1), dtype=F64)
    x, log_prob = q.trajectories(5, t, rng(2), given)
    flat = q.log_prob(x.flatten(1, 2), given, at=t.repeat_interleave(5, 1)).view(log_prob.shape)
    torch.testing.assert_close(flat, log_prob, rtol=0, atol=2e-3)
    j = t.argmax(1)
    for i in range(4):
        end = q.sample(5, rng(2), given, until=t.amax(1))[i]
        torch.testing.assert_close(x[i, j[i]], end)


@over_all
def test_memory_is_bounded_without_changing_numbers(make):
    q = make()
    given = contexts(q)
    t = torch.tensor([0.3, 0.9], dtype=F64)
    t = t if given is None else t.expand(4, 2)

    def everything() -> list[Tensor]:
        x, log_prob = q.sample_and_log_prob(7, rng(1), given)
        rows = q.log_prob(x, given)
        return [x, log_prob, rows, *q.trajectories(7, t, rng(2), given)]

    whole = everything()
    for chunk in (9, 40):
        q.chunk = chunk
        for small, large in zip(everything(), whole, strict=True):
            torch.testing.assert_close(small, large)
    if given is not None:
        at = torch.rand((4, 7), generator=rng(3), dtype=F64)
        small = q.log_prob(whole[0], given, at=at)
        q.chunk = None
        torch.testing.assert_close(small, q.log_prob(whole[0], given, at=at))


@over("kind", [InterpolantFlow, Diffusion])
def test_densities_of_a_wide_field_fit_into_the_memory_there_is(kind, monkeypatch):
    """A transformer holds far more for a row and a direction than a dense layer does."""
    network = {"name": "transformer", "step": 2, "width": 16, "layers": 2}
    q = bent(kind(8, 3, **{"field" if kind is InterpolantFlow else "network": network}, steps=4, scored=3))
    x, given = normal(6, 20, 8), normal(6, 3, seed=1)

    def ask() -> Tensor:
        with torch.no_grad():
            return q.log_prob(x, given)

    whole, needed = ask(), tiles.bytes_held(ask)
    monkeypatch.setattr(tiles, "HOST_BYTES", needed // 8)
    q.fitting.clear()
    assert tiles.bytes_held(ask) < needed / 4
    torch.testing.assert_close(ask(), whole)
    if kind is InterpolantFlow:
        t = torch.rand((6, 2), generator=rng(3), dtype=F64)
        some = q.trajectories(5, t, rng(2), given)
        q.chunk = 2**20
        torch.testing.assert_close(some, q.trajectories(5, t, rng(2), given))


def test_a_small_field_takes_as_many_rows_at_once_as_the_device_allows():
    q = InterpolantFlow(2, 3)
    q.log_prob(torch.zeros(4, 2), torch.zeros(4, 3))
    assert set(q.fitting.values()) == {tiles.FAST_MEMORY}


class Counted(nn.Module):
    """An encoder that counts the contexts it encodes."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(3, 4), 0

    def forward(self, given: Tensor) -> Tensor:
        self.rows += len(given)
        return self.linear(given)


def test_a_context_is_encoded_once_whatever_is_asked_of_it():
    encoder = Counted()
    q = InterpolantFlow(2, 3, encoder=encoder, times=5, **SMALL)
    given = torch.zeros(4, 3)
    for ask in (
        lambda: q.sample_and_log_prob(10, rng(), given),
        lambda: q.trajectories(10, torch.rand(4, 6), rng(), given),
        lambda: q.log_prob(torch.zeros(4, 10, 2), given),
        lambda: q.loss(torch.zeros(4, 2), given, rng=rng()),
    ):
        encoder.rows = 0
        ask()
        assert encoder.rows == 4


def test_a_borrowed_encoder_is_not_learned():
    encoder = Counted().double()
    own, borrowed = (
        bent(InterpolantFlow(2, 3, encoder=e, **SMALL)) for e in (copy.deepcopy(encoder), Borrowed(encoder))
    )
    names = [name for name, _ in own.named_parameters() if "encoder" in name]
    assert names
    assert not any("encoder" in name for name, _ in borrowed.named_parameters())
    borrowed.loss(normal(4, 2), normal(4, 3), rng=rng()).backward()
    assert encoder.linear.weight.grad is None
    own.loss(normal(4, 2), normal(4, 3), rng=rng()).backward()
    assert own.field.encoder.linear.weight.grad.abs().sum() > 0


# ---- gradients


@over_all
@over("what", ["log_prob", "rsample"])
def test_gradients_are_those_of_finite_differences(make, what):
    q = make()
    given = contexts(q)
    x = q.sample(1, rng(8), given)
    parameters = list(q.parameters())
    direction = [normal(*p.shape, seed=50 + i) for i, p in enumerate(parameters)]

    def value() -> Tensor:
        return (
            q.log_prob(x, given).mean() if what == "log_prob" else q.rsample(3, rng(5), given).square().mean()
        )

    gradient = torch.autograd.grad(value(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None)

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += by * d
            result = float(value())
            for p, d in zip(parameters, direction, strict=True):
                p -= by * d
        return result

    assert slope != 0
    assert (moved(1e-6) - moved(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_draws_with_their_density_carry_no_graph():
    q = PLAIN["vectors"]()
    assert not any(v.requires_grad for v in q.sample_and_log_prob(3, rng()))
    assert not any(v.requires_grad for v in q.trajectories(3, torch.tensor([0.5]), rng()))
    assert q.log_prob(torch.zeros(2, 2, dtype=F64)).requires_grad


# ---- units


def test_a_new_flow_is_the_gaussian_of_the_data():
    x = torch.tensor([1000.0, -5.0]) + torch.tensor([20.0, 0.1]) * torch.randn((500, 2), generator=rng())
    q = InterpolantFlow(2, data=x, **SMALL)
    draws = q.sample(4000, rng(1))
    mean, error = mean_and_error(draws)
    assert_within(mean, x.mean(0).double(), error)
    same = torch.distributions.Independent(torch.distributions.Normal(x.mean(0), x.std(0)), 1)
    assert torch.allclose(q.log_prob(x), same.log_prob(x), atol=1e-3)


def test_units_of_the_events_do_not_matter():
    """The flow of scaled and shifted events is the scaled and shifted flow, at every time."""
    q, other = PLAIN["vectors"](), PLAIN["vectors"]()
    shift, scale = torch.tensor([3.0, -1.0], dtype=F64), torch.tensor([2.0, 0.5], dtype=F64)
    other.mean.copy_(shift)
    other.scale.copy_(scale)
    x, times = normal(6, 2), torch.rand((6, 3), generator=rng(1), dtype=F64)
    moved = shift + scale * x
    torch.testing.assert_close(other.log_prob(moved, at=0.6), q.log_prob(x, at=0.6) - math.log(1.0))
    torch.testing.assert_close(other.velocity(moved, 0.6), scale * q.velocity(x, 0.6))
    path = q.interpolate(x, times, rng(2))
    torch.testing.assert_close(other.interpolate(moved, times, rng(2)), shift + scale * path)
    torch.testing.assert_close(other.loss(moved, rng=rng(3)), q.loss(x, rng=rng(3)))


def test_the_velocity_moves_the_draws():
    """dx/dt between two cuts of the same trajectories, in the events' units."""
    q = PLAIN["images, standardised"]()
    q.steps, h = 400, 1e-3
    x, _ = q.trajectories(5, torch.tensor([0.5 - h, 0.5, 0.5 + h], dtype=F64), rng(4))
    slope = (x[2] - x[0]) / (2 * h)
    torch.testing.assert_close(q.velocity(x[1], 0.5), slope, rtol=1e-3, atol=1e-4)


def test_any_callable_is_a_field():
    """dx/dt = c − x with c the context: the density at t is N(c(1 − e^{−t}), e^{−2t})."""
    q = InterpolantFlow(1, 1, field=lambda x, given, t: given - x, steps=100).double()
    given = torch.tensor([[2.0], [-1.0]], dtype=F64)
    for t in (0.5, 1.0):
        x, log_prob = q.sample_and_log_prob(50, rng(5), given, until=t)
        exact = torch.distributions.Normal(given * (1 - math.exp(-t)), math.exp(-t)).log_prob(x[..., 0])
        torch.testing.assert_close(log_prob, exact, rtol=0, atol=1e-3)


# ---- learning


@over("field", ["concatsquash", "residual"])
def test_a_flow_learns_a_conditional_density(field):
    """Two contexts, two mixtures; a Gaussian of the same moments is 0.3 nats worse."""
    truth = Mixture([Gaussian(torch.tensor([-2.0]), 0.5), Gaussian(torch.tensor([2.0]), 0.5)], (1.0, 3.0))
    x, fresh = truth.sample(2000, rng(6)), truth.sample(1000, rng(7))
    signs, fresh_signs = (1.0 - 2 * (torch.arange(n)[:, None] % 2) for n in (2000, 1000))
    q = InterpolantFlow(1, 1, field=field, layers=4, width=32, times=2, steps=60, scored=31)
    q.fit(x * signs, signs, steps=400, batch=256, learning_rate=2e-2)
    assert all(p.requires_grad and p.grad is None for p in q.parameters())
    with torch.no_grad():
        kl, error = mean_and_error(truth.log_prob(fresh) - q.log_prob(fresh * fresh_signs, fresh_signs))
    assert -z_limit() * error < kl < 0.06 + z_limit() * error


# ---- bad input


def flow() -> InterpolantFlow:
    return InterpolantFlow(2, 3, **SMALL)


X, C = torch.zeros(4, 2), torch.zeros(4, 3)


@each(
    "make, words",
    [
        (lambda: flow().sample(1, rng(), C, until=1.5), r"until: must be within \[0, 1\], got 1.5"),
        (
            lambda: flow().sample(1, rng(), C, until=torch.rand(3)),
            r"until: .*one for each context, got shape \(3,\)",
        ),
        (lambda: flow().log_prob(X, C, at=-0.1), r"at: must be within \[0, 1\], got -0.1"),
        (lambda: flow().log_prob(X, C, at=torch.rand(5)), r"at: .*one for each row of x, got shape \(5,\)"),
        (lambda: flow().velocity(X, 2.0, C), r"t: must be within \[0, 1\], got 2.0"),
        (
            lambda: flow().trajectories(1, torch.tensor([[2.0]] * 4), rng(), C),
            r"times: must be within \[0, 1\]",
        ),
        (
            lambda: flow().trajectories(1, torch.rand(3, 2), rng(), C),
            r"times: must have shape \(4, m\), got \(3, 2\)",
        ),
        (lambda: flow().interpolate(X, torch.full((4, 1), 2.0), rng()), r"times: must be within \[0, 1\]"),
        (lambda: flow().log_prob(X, C[:3]), r"one for each of the 4 rows of events, got 3 contexts"),
        (
            lambda: flow().log_prob(torch.zeros(4, 6, 2), C[:3]),
            r"one for each of the 4 rows of events, got 3 contexts",
        ),
        (lambda: flow().loss(X[:2], C, rng=rng()), r"one for each of the 2 rows of events, got 4 contexts"),
        (lambda: flow().log_prob(X), r"given: this flow needs contexts"),
        (
            lambda: flow().sample(2, rng(), torch.zeros(4, 5)),
            r"given: contexts must have shape \(3,\), got \(5,\)",
        ),
        (lambda: flow().log_prob(torch.zeros(4, 3), C), r"x: events must have shape \(2,\), got \(4, 3\)"),
        (lambda: InterpolantFlow(2).log_prob(X, C), r"given: this flow has no contexts"),
        (lambda: InterpolantFlow(2).log_prob(X[None]), r"x: must have shape \(B, \*event\), got \(1, 4, 2\)"),
        (lambda: InterpolantFlow(2, alpha=0.0), r"flow.alpha: must be a finite number above 0, got 0.0"),
        (lambda: InterpolantFlow(2, crowding=0.0), r"flow.crowding: must be a finite number above 0"),
        (lambda: InterpolantFlow(2, steps=0), r"flow.steps: .*at least 1, got 0"),
        (lambda: InterpolantFlow(2, scored=1), r"flow.scored: .*at least 2, got 1"),
        (lambda: InterpolantFlow(2, times=0), r"flow.times: .*at least 1, got 0"),
        (lambda: InterpolantFlow(2, layers=1), r"field.layers: .*at least 2, got 1"),
        (lambda: InterpolantFlow(2, field="concat"), r"field: unknown value 'concat'"),
        (lambda: InterpolantFlow(2, data=torch.zeros(5, 3)), r"data: must have shape"),
        (lambda: MixtureField(torch.zeros(2, 3), torch.ones(3)), r"means, scales, weights: must have shapes"),
        (lambda: MixtureField(torch.zeros(2, 3), torch.zeros(2)), r"scales, weights: must be positive"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises((ConfigError, InputError), match=words):
        make()


def explodes(x: Tensor, given: Tensor, t: Tensor) -> Tensor:
    """Not a number from t = ½ on, in contexts above 4."""
    bad = (given > 4) & (t[..., None] > 0.5)
    return torch.where(bad, torch.nan, x)


@over("field", [ConcatSquash, ResidualField])
@over("folded", [2**24, 0], ids=["folded", "too large to fold"])
@over("shape", [(7,), (7, 5, 1), (7, 5, 4)], ids=["one time", "a time for each context", "one for each row"])
def test_fields_at_given_times_are_the_field(field, shape, folded, monkeypatch):
    monkeypatch.setattr(fields, "FOLDED", folded)
    made = bent(field(2, (3,), width=8, layers=4))
    x, times = normal(5, 4, 2), normal(*shape, seed=1).sigmoid()
    for code in (None, made.encode(normal(5, 3, seed=2))[:, None]):
        found = torch.stack([v(x) for v in made.velocities(code, times)])
        expected = torch.stack([made.velocity(x, code, made.clock(t)) for t in times])
        torch.testing.assert_close(found, expected)


@over("field", ["concatsquash", "residual"])
def test_a_field_may_see_the_logarithm_of_what_is_left_of_time(field):
    plain, other = (
        bent(InterpolantFlow(2, field=field, layers=3, log_time=log, **SMALL)) for log in (False, True)
    )
    x = normal(4, 2)
    for t in (0.0, 0.3, 1.0):
        seen = -math.log(1.1 - t)
        expected = plain.field(x, None, seen)
        torch.testing.assert_close(other.field(x, None, t), expected)
        assert t == seen or not torch.allclose(other.field(x, None, t), plain.field(x, None, t))


WITHOUT_LOOKS = {
    "draws": lambda flow, x, given, t: flow.sample_and_log_prob(3, rng(), given),
    "trajectories": lambda flow, x, given, t: flow.trajectories(3, t[:, None], rng(), given),
    "densities": lambda flow, x, given, t: flow.log_prob(x, given, at=0.5),
    "densities, each at its time": lambda flow, x, given, t: flow.log_prob(x, given, at=t),
    "points on the way": lambda flow, x, given, t: flow.interpolate(x, t[:, None], rng()),
    "the loss": lambda flow, x, given, t: flow.loss(x, given, rng=rng()),
}


@over("ask", WITHOUT_LOOKS.values(), ids=WITHOUT_LOOKS)
def test_no_number_is_read_back_from_a_device_that_is_not_looked_at(ask):
    flow = InterpolantFlow(2, 3, width=8, steps=4, scored=3).to("meta")  # where nothing can be read
    x, given, t = (torch.zeros(5, *shape, device="meta") for shape in ((2,), (3,), ()))
    with unwatched():
        ask(flow, x, given, t)


def test_what_is_not_finite_is_named_with_its_time_and_context():
    q = InterpolantFlow(2, 1, field=explodes, steps=10, crowding=1.0)
    given = torch.arange(8.0)[:, None]
    assert q.sample(3, rng(), given, until=0.5).isfinite().all()
    for chunk in (None, 6):  # the index counts contexts, not those of a tile
        q.chunk = chunk
        for ask in (
            lambda: q.sample(3, rng(), given),
            lambda: q.sample_and_log_prob(3, rng(), given),
            lambda: q.trajectories(3, torch.full((8, 2), 0.95), rng(), given),
        ):
            with pytest.raises(
                InputError, match=r"flow is not finite at t = 0\.(6|57), first in context 5, row 0"
            ):
                ask()
        with pytest.raises(InputError, match=r"flow is not finite at t = 0\.9, first in context 5"):
            q.log_prob(torch.zeros(8, 3, 2), given)  # backwards, so the first step is the last


def test_a_divergence_that_is_not_finite_is_named():
    """√|x| is finite at zero, its slope is not."""
    q = InterpolantFlow(1, field=lambda x, given, t: x.abs().sqrt())
    with pytest.raises(
        InputError, match=r"divergence of its field is not finite at t = 1, first in context 0, row 1"
    ):
        q.log_prob(torch.tensor([[1.0], [0.0], [2.0]]))


# ---- contexts in units of their own


def far_pairs(n: int = 1500) -> Batch:
    """y ~ N(c', 0.3²) with c' in [−1, 1] for contexts c = 600 + 200 c'."""
    share = 2 * torch.rand((n, 1), generator=rng(1)) - 1
    return Batch(share + 0.3 * torch.randn((n, 1), generator=rng(2)), 600 + 200 * share)


@over("pairs", [lambda data: (data,), lambda data: (data.x, data.given)], ids=["pairs", "two tensors"])
def test_fitting_standardises_contexts_as_well(pairs):
    data, settings = far_pairs(), {"width": 16, "steps": 20, "scored": 11}
    late = InterpolantFlow(1, 1, **settings).fit(*pairs(data), steps=150)
    early = InterpolantFlow(1, 1, data=data, **settings).fit(*pairs(data), steps=150)
    assert torch.equal(late.log_prob(data.x, data.given), early.log_prob(data.x, data.given))
    least = -math.log(0.3 * math.sqrt(2 * math.pi * math.e))
    assert float(late.log_prob(data.x, data.given).detach().mean()) > least - 0.15
    other = Batch(data.x, data.given / 100)
    early.fit(other, steps=150)
    assert float(early.log_prob(other.x, other.given).detach().mean()) > least - 0.15


def test_an_encoder_of_ones_own_is_left_alone_by_fitting():
    data, kept = far_pairs(200), Standardise((1,), torch.tensor([[0.0], [2.0]]))
    flow = InterpolantFlow(1, 1, encoder=kept, width=8).fit(data, steps=2)
    assert flow.field.encoder is kept
    assert kept.mean.item() == 1


def test_contexts_are_taken_as_they_are_until_there_are_data():
    flow, given = InterpolantFlow(1, 2, width=8), normal(5, 2).float()
    assert torch.equal(flow.field.encoder(given), given)
    with pytest.raises(InputError, match=r"given: must have shape \(n ≥ 2, \(2,\)\), got \(9, 1\)"):
        flow.fit(normal(9, 1).float(), normal(9, 1).float(), steps=1)


def test_finely_raises_steps_and_never_lowers_them():
    flow = InterpolantFlow(1, width=8, steps=10, scored=100)
    fine = flow.finely()
    assert (fine.steps, fine.scored) == (128, 100)
    assert (flow.steps, flow.scored) == (10, 100)
    assert fine.field is flow.field


# ---- an encoder beside a field of one's own, and what is frozen


class Given(nn.Module):
    """v(x, given, t) from a vector that the encoder made, and a potential with the same signature."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 + 5 + 1, 2)

    def forward(self, x, given, t):
        lead = x.shape[:-1]
        parts = [x, given.expand(*lead, 5), t.expand(lead)[..., None]]
        return self.linear(torch.cat(parts, -1)).tanh()


class Scalar(Given):
    def forward(self, x, given, t):
        return super().forward(x, given, t).sum(-1)


def with_encoder(kind):
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh())
    if kind == "interpolant":
        return InterpolantFlow(2, (3, 2), field=Given(), encoder=encoder, steps=4, scored=3)
    if kind == "diffusion":
        return Diffusion(2, (3, 2), network=Given(), encoder=encoder, steps=4, scored=3)
    return DiffusionEnergy(2, (3, 2), potential=Scalar(), encoder=encoder, steps=4, scored=3)


@over("kind", ["interpolant", "diffusion", "phi"])
def test_an_encoder_beside_a_field_of_ones_own_is_learned_saved_and_used(kind):
    rng, x, given = torch.Generator().manual_seed(0), normal(9, 2).float(), normal(9, 3, 2).float()
    flow = with_encoder(kind)
    names = [name for name, _ in flow.named_parameters() if "encoder" in name]
    assert len(names) == 2
    flow.loss(x, given, rng=rng).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in flow.named_parameters() if n in names
    )
    before = flow.log_prob(x, given)
    other = with_encoder(kind)
    assert not torch.equal(other.log_prob(x, given), before)
    other.load_state_dict(flow.state_dict())
    assert torch.equal(other.log_prob(x, given), before)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            p.zero_() if "encoder" in name else None
    assert not torch.equal(flow.log_prob(x, given), before)  # it was used


def test_an_encoder_that_would_never_be_called_is_refused():
    own = ConcatSquash(2, (3,), width=8)
    with pytest.raises(
        InputError, match="encoder: ConcatSquash is a VectorField, which encodes contexts by its own"
    ):
        InterpolantFlow(2, 3, field=own, encoder=nn.Linear(3, 5))
    with pytest.raises(InputError, match="encoder: ConcatSquash is a VectorField"):
        Diffusion(2, 3, network=own, encoder=nn.Linear(3, 5))
    with pytest.raises(InputError, match="encoder: a density without contexts has none"):
        InterpolantFlow(2, field=Given(), encoder=nn.Linear(3, 5))
    with pytest.raises(InputError, match=r"encoder: must map contexts .* got \(1, 3, 5\)"):
        InterpolantFlow(2, (3, 2), field=Given(), encoder=nn.Linear(2, 5))


def test_a_field_of_ones_own_by_name_of_its_flow_sees_contexts_as_they_are():
    data = Batch(normal(9, 2).float(), 7 + normal(9, 5).float())
    flow = proposal_for({"name": "interpolant", "field": Given(), "steps": 2}, data, "proposal")
    assert torch.equal(flow.field.encode(data.given), data.given)
    coded = proposal_for(
        {"name": "interpolant", "field": Given(), "encoder": nn.Linear(5, 5), "steps": 2}, data, "proposal"
    )
    assert not torch.equal(coded.field.encode(data.given), data.given)


def test_frozen_parameters_stay_frozen_in_fit():
    data = far_pairs(200)
    encoder = nn.Linear(1, 3).requires_grad_(False)
    flow = InterpolantFlow(1, 1, encoder=encoder, width=8)
    before = {name: p.clone() for name, p in flow.named_parameters()}
    flow.fit(data, steps=3)
    for name, p in flow.named_parameters():
        frozen = "encoder" in name
        assert torch.equal(p, before[name]) == frozen, name
        assert p.requires_grad != frozen
        assert p.grad is None
    flow.requires_grad_(False)
    with pytest.raises(InputError, match="fit: every parameter of this InterpolantFlow is frozen"):
        flow.fit(data, steps=3)
