"""Networks over tokens: their parts by their formulas, and what they must and must not see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import silu

import metastable as ms
from metastable.core.batch import Batch
from metastable.core.configure import build_tagged
from metastable.core.errors import ConfigError
from metastable.core.types import bind
from metastable.energies import OnProposal, TransformerEnergy
from metastable.energies.build import ENERGIES
from metastable.proposals import DiffusionEnergy, FilmField, InterpolantFlow, TransformerField
from metastable.proposals.encoders import Borrowed, Standardise
from metastable.proposals.nearness import Nearness
from metastable.proposals.pictures import PictureEncoder, SpatialSoftmax
from metastable.proposals.tokens import Attention, ConvPrior, Tokenizer, places

over = pytest.mark.parametrize
F64 = torch.float64
DISCS = {"past": [(0, 2, 2)], "tokens": [(4, 1, 2), (6, 3, 3)]}
"""Contexts of 15 numbers: two past places, a goal, three discs."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def bent(module: nn.Module, scale: float = 0.4) -> nn.Module:
    """In double precision and away from where it starts, its zeros too."""
    module.double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(scale * normal(*p.shape, seed=i))
    return module


def energy(**settings) -> TransformerEnergy:
    made = TransformerEnergy(8, 15, step=2, width=16, layers=2, **{**DISCS, **settings})
    return bent(made)  # pyright: ignore


# ---- parts


def test_attention_is_its_formula_head_by_head():
    layer = bent(Attention(6, 2))
    asked, tokens = normal(3, 2, 6, seed=1), normal(3, 5, 6, seed=2)
    q, (k, v) = layer.ask(asked), layer.offer(tokens).chunk(2, -1)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        share = (q[..., part] @ k[..., part].mT / math.sqrt(3)).softmax(-1)
        heads.append(share @ v[..., part])
    torch.testing.assert_close(layer(asked, tokens), layer.out(torch.cat(heads, -1)))


def test_the_prior_is_b2_and_its_gradient_that_of_finite_differences():
    prior = bent(ConvPrior(8, 3))
    h, tokens = normal(4, 5, 8, seed=1), normal(4, 5, 8, seed=1)
    for conv, norm, dense in zip(prior.convs, prior.norms, prior.dense, strict=True):
        kernel = conv.dense.weight.unflatten(1, (3, 8)).transpose(1, 2)
        h = functional.conv1d(h.mT, kernel, conv.dense.bias, padding=1)
        h = silu(dense(silu(norm(h)).mT))
    torch.testing.assert_close(prior(tokens), h.sum(1))
    assert torch.autograd.gradcheck(prior, tokens.requires_grad_())
    prior.start_at_zero()
    assert bool((prior(tokens) == 0).all())


def test_places_turn_by_one_angle_from_each_to_the_next():
    at = places(3, 4, 6).double().unflatten(1, (3, 2))
    turn = torch.atan2(at[..., 0], at[..., 1])
    torch.testing.assert_close(at.norm(dim=-1), torch.ones(4, 3, dtype=F64))
    torch.testing.assert_close(
        turn[:, 2], (3 + torch.arange(4.0, dtype=F64)) * 1e4 ** (-4 / 6), rtol=0, atol=1e-6
    )


def test_the_mean_place_moves_with_what_is_seen():
    seen = torch.zeros(2, 3, 9, 9, dtype=F64)
    seen[:, :, 2:5, 3:6] = normal(3, 3, 3).expand(2, -1, -1, -1)
    seen = seen.masked_fill(seen == 0, -50.0)
    moved = seen.roll((1, 2), (2, 3))
    shift = SpatialSoftmax()(moved) - SpatialSoftmax()(seen)
    torch.testing.assert_close(shift, torch.tensor([0.5, 0.25] * 3, dtype=F64).expand(2, -1))


def test_an_image_encoder_knows_where_things_are():
    eyes = bent(PictureEncoder((1, 16, 16), width=8, layers=2), 0.1)
    x = normal(3, 1, 16, 16)
    features = eyes(x)
    assert features.shape == (3, 8)
    eyes.at.zero_()
    assert (eyes(x) - features).abs().min() > 1e-6
    assert sum(p.numel() for p in PictureEncoder((3, 96, 96)).parameters()) == pytest.approx(
        312_000, rel=0.02
    )


def test_a_transformer_energy_is_figure_6():
    """By hand: tokens of the past at places 0 and 1, things, −log(1.1 − t), and steps from place 2 on."""
    E, x, given = energy(time=True, reads="path"), normal(5, 8, seed=1), normal(5, 15, seed=2)
    t = normal(5, seed=3).sigmoid()
    past, goal, discs = (
        given[:, a:b].unflatten(1, (-1, n)) for a, b, n in ((0, 4, 2), (4, 6, 2), (6, 15, 3))
    )
    lift, body = E.encoder.embed, E.body
    past, event = lift[0](past) + places(0, 2, 16), body.embed(x.unflatten(1, (4, 2))) + places(2, 4, 16)
    clock = E.from_time(-torch.log(1.1 - t)[:, None])[:, None]
    h = torch.cat([past, lift[1](goal), lift[2](discs), clock, event], 1)
    for block in body.blocks:
        white = functional.layer_norm(h, (16,), block.first.weight, block.first.bias)
        h = h + block.attention(white, white)
        h = h + block.dense(functional.layer_norm(h, (16,), block.second.weight, block.second.bias))
    end = body.norm(torch.cat([h[:, :2], h[:, -4:]], 1)).flatten(1)
    expected = body.head(silu(body.dense(end))) + body.prior(torch.cat([past, event], 1))
    torch.testing.assert_close(E(x, given, t), expected[:, 0])


def test_a_film_field_is_figures_8_and_9():
    """By hand: each query reads a γ and a β for a convolution of steps, whose places follow the past."""
    field = bent(FilmField(8, (15,), step=2, width=16, layers=2, heads=2, log_time=True, **DISCS))
    x, given, t = normal(5, 8, seed=1), normal(5, 15, seed=2), normal(5, seed=3).sigmoid()
    tokens = field.narrow(field.encoder(given).unflatten(1, (6, 16)))
    context = torch.cat([tokens, field.time(-torch.log(1.1 - t)[:, None])[:, None]], 1)
    h = field.embed(x.unflatten(1, (4, 2))) + places(2, 4, 16)
    for block in field.blocks:
        gain, shift = block.film(block.read(block.queries.expand(5, -1, -1), context)).chunk(2, -1)
        kernel = block.conv.dense.weight.unflatten(1, (3, 16)).transpose(1, 2)
        seen = functional.conv1d(h.mT, kernel, block.conv.dense.bias, padding=1).mT
        each = [(1 + gain[:, i, None]) * seen + shift[:, i, None] for i in range(2)]
        h, context = h + silu(block.mix(torch.cat(each, -1))), block.block(context)
    expected = field.head(silu(field.dense(h.flatten(1))))
    torch.testing.assert_close(field(x, given, t), expected)


# ---- what a network sees


def test_discs_are_a_set_and_the_past_is_not():
    E, x, given = energy(), normal(5, 4, 8, seed=1), normal(5, 15, seed=2)
    discs = given[:, 6:].unflatten(1, (3, 3))
    swapped = torch.cat([given[:, :6], discs[:, [2, 0, 1]].flatten(1)], 1)
    torch.testing.assert_close(E(x, swapped), E(x, given))
    past = torch.cat([given[:, 2:4], given[:, :2], given[:, 4:]], 1)
    assert (E(x, past) - E(x, given)).abs().min() > 1e-4
    steps = x.unflatten(-1, (4, 2)).flip(-2).flatten(-2)
    assert (E(steps, given) - E(x, given)).abs().min() > 1e-4


@over("time", [False, True])
def test_candidates_of_a_context_are_scored_as_one_by_one(time):
    E, x, given = energy(time=time, reads="path"), normal(5, 4, 8, seed=1), normal(5, 15, seed=2)
    t = (torch.rand(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0)),) if time else ()
    whole = E(x, given, *t)
    each = [E(x[:, k], given, *(u[:, k] for u in t)) for k in range(4)]
    torch.testing.assert_close(whole, torch.stack(each, 1))
    if time:
        torch.testing.assert_close(E(x, given), E(x, given, 1.0))
        assert (E(x, given, 0.5) - E(x, given)).abs().min() > 1e-5
    torch.testing.assert_close(bind(E, given, 1.0 if time else None)(x.flatten(0, 1)).view(5, 4), E(x, given))


@over("kind", [TransformerField, FilmField])
def test_a_time_that_all_share_is_the_time_of_each(kind):
    field = bent(kind(8, (15,), step=2, width=16, layers=2, log_time=True, **DISCS))
    x, code = normal(5, 4, 8, seed=1), field.encode(normal(5, 15, seed=2))[:, None]
    one = field.velocity(x, code, field.clock(torch.tensor(0.4, dtype=F64)))
    each = field.velocity(x, code, field.clock(torch.full((5, 4), 0.4, dtype=F64)))
    torch.testing.assert_close(one, each)
    assert (field.velocity(x, code.flip(0), field.clock(x.new_tensor(0.4))) - one).abs().max() > 1e-3


@over("kind", [TransformerField, FilmField])
@over("shape", [(7,), (7, 5, 1), (7, 5, 4)])
def test_velocities_of_many_times_are_those_of_each(kind, shape):
    field = bent(kind(8, (15,), step=2, width=16, layers=2, **DISCS))
    x, times = normal(5, 4, 8), normal(*shape, seed=1).sigmoid()
    for code in (None, field.encode(normal(5, 15, seed=2))[:, None]):
        found = torch.stack([v(x) for v in field.velocities(code, times)])
        expected = torch.stack([field.velocity(x, code, field.clock(t)) for t in times])
        torch.testing.assert_close(found, expected)


def test_steps_of_an_event_come_behind_the_longest_past():
    for past, steps in (((0, 1, 2), 2), ((0, 3, 2), 3)):
        made = Tokenizer((6 + 512,), 16, past=[past], pictures=(6, 2, 1, 16, 16))
        assert (made.past, made.steps, made.count) == (past[1], steps, past[1] + 2)


def test_pictures_and_numbers_of_a_context_are_both_seen():
    layout = {"past": [(0, 2, 2)], "pictures": (4, 2, 1, 16, 16)}
    made = TransformerEnergy(4, 4 + 512, step=2, width=16, layers=1, **layout)
    E, x, given = bent(made, 0.1), normal(3, 4, seed=1), normal(3, 516, seed=2)
    given = given.requires_grad_()
    (slope,) = torch.autograd.grad(E(x, given).sum(), given)
    assert bool((slope != 0).all())
    frames = torch.cat([given[:, :4], given[:, 260:], given[:, 4:260]], 1)  # the two images change places
    assert (E(x, frames) - E(x, given)).abs().min() > 1e-6


# ---- starts, players and names


def test_networks_start_as_nothing():
    x, given = normal(3, 4, 8), normal(3, 15)
    for field in ("transformer", "film"):
        table = {"name": field, "step": 2, "width": 16, "layers": 1, **DISCS}
        flow = InterpolantFlow(8, 15, data=Batch(x[:, 0], given), field=table, steps=4, scored=3)
        at_start = flow.log_prob(x, given)
        torch.testing.assert_close(at_start, flow.log_prob(x, given, at=0.0))
    on = OnProposal(TransformerEnergy(8, 15, step=2, width=16, layers=1, **DISCS).double())
    assert bool((on(x, given) == 0).all())


def test_a_potential_is_what_its_field_is_the_gradient_of():
    table = {"name": "transformer", "step": 2, "width": 16, "layers": 1, **DISCS}
    model = DiffusionEnergy(8, 15, potential=table)
    field = bent(model.field.network)
    x, code, clock = normal(5, 4, 8), field.encode(normal(5, 15, seed=2))[:, None], field.clock(normal(5, 1))
    rows = x.clone().requires_grad_()
    phi = field.potential(rows, code, clock)
    torch.testing.assert_close(field.velocity(x, code, clock), torch.autograd.grad(phi.sum(), rows)[0])
    (second,) = torch.autograd.grad(field.velocity(rows, code, clock).square().sum(), rows)
    assert bool((second != 0).all())  # what is trained is a derivative


@pytest.mark.parametrize("kind", ["transformer", "plain"])
def test_the_field_of_a_potential_is_one_whoever_asks(kind):
    """Drawing asks for a gradient and no more, which fused layers and kernels have; training asks for its own."""
    choice = kind if kind == "transformer" else lambda y, given, t: (y.sin().sum(-1) + given.sum(-1)) * t
    own = {"width": 16, "layers": 2, "heads": 2, "step": 2} if kind == "transformer" else {}
    potential = {"name": choice, **own} if own else choice
    model = DiffusionEnergy(6, (3,), potential=potential, seed=0).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    x, t = torch.randn(2, 5, 6).double(), torch.tensor(0.3).double()
    code = model.encode(torch.randn(2, 3).double()).detach()
    field, clock = model.field.network, model.field.network.clock(t).detach()
    with_graph = field.velocity(x.requires_grad_(), code, clock)
    with torch.no_grad():
        alone = field.velocity(x, code, clock)
        assert not alone.requires_grad
        assert torch.allclose(alone, with_graph, atol=1e-12)
        changes = torch.func.jvp(lambda y: field.velocity(y, code, clock), (x,), (torch.ones_like(x),))[1]
    (back,) = torch.autograd.grad(with_graph.sum(), x)  # H 1, as H is symmetric
    assert torch.allclose(changes, back, atol=1e-12)
    with torch.inference_mode():
        assert torch.allclose(field.velocity(x, code, clock), alone, atol=1e-12)


def test_a_potential_of_nothing_has_no_field():
    model = DiffusionEnergy(2, potential=lambda y, given, t: torch.zeros(y.shape[:-1]))
    with torch.no_grad():
        assert model.field.network.velocity(torch.ones(3, 2), None, torch.ones(())).eq(0).all()


@over("owner", ["energy", "proposal"])
def test_a_tokenizer_is_shared_and_moved_by_its_owner_alone(owner):
    rows = Batch(normal(40, 8).float(), normal(40, 15, seed=1).float())
    settings = {"name": "transformer", "step": 2, "width": 16, "layers": 1, **DISCS}
    made = build_tagged(ENERGIES, settings, "energy").build(rows, 0)
    flow = {"name": "film", "step": 2, "width": 8, "layers": 1}
    table = {"name": "interpolant", "field": flow, "steps": 4, "scored": 3}
    method = ms.methods.RankingNCE(3, proposal=table, encoder_owner=owner)
    proposal = method.companions(made, rows, None, 0)["proposal"]
    players = {"energy": made, "proposal": proposal}
    other = players["proposal" if owner == "energy" else "energy"]
    parts = {name: {id(p) for p in player.parameters()} for name, player in players.items()}
    assert not parts["energy"] & parts["proposal"]
    whole = made.encoder if owner == "energy" else proposal.field.encoder
    assert isinstance(whole, Tokenizer)
    assert isinstance(proposal.field.encoder if owner == "energy" else made.encoder, Borrowed)
    bent(proposal.field).float()
    loss = proposal.loss(rows.x, rows.given, rng=torch.Generator()) + made(rows.x, rows.given).sum()
    loss.backward()
    assert {id(p) for p in whole.parameters()} <= parts[owner]
    assert all(p.grad is not None for p in whole.parameters())
    assert not any("encoder" in name for name in other.state_dict())


@over(
    "chosen, method",
    [
        ({"name": "transformer", "on_proposal": True}, {"name": "ranking-nce", "proposal": "film"}),
        (
            {"name": "transformer", "time": True},
            {"name": "interpolating-nce", "proposal": "film", "times": 2},
        ),
        ({"name": "interpolant", "field": "transformer"}, "density"),
        ({"name": "diffusion", "network": "transformer"}, "density"),
        ({"name": "diffusion-phi", "network": "transformer"}, "density"),
    ],
    ids=lambda v: v["name"] if isinstance(v, dict) else "",
)
def test_by_name_they_train_and_are_read_back(chosen, method, tmp_path):
    shape = {"step": 2, "width": 8, "layers": 1, **DISCS}
    if "proposal" in method:
        flow = {"name": "interpolant", "field": {"name": "film", **shape}, "steps": 3, "scored": 3}
        method = {**method, "proposal": flow, "negatives_per_datum": 2}
        chosen = {**chosen, **shape, "heads": 2}
    else:
        key = "field" if "field" in chosen else "network"
        chosen = {**chosen, key: {"name": chosen[key], **shape}, "steps": 3, "scored": 3}
    data = ms.data.Dataset.of(normal(64, 8).float(), "chunks", given=normal(64, 15, seed=1).float())
    options = {"batch_size": 16, "evaluate": False, "units": "none", "out": tmp_path / "run"}
    run = ms.fit(chosen, data, method, 3, **options)
    x, given = torch.randn(2, 8), torch.randn(2, 15)
    back = ms.load_run(tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(back.model.energy(x, given), run.model.energy(x, given), rtol=0, atol=0)


@over(
    "table, words",
    [
        ({"name": "transformer", "depth": 3}, "field.depth: unknown setting of 'transformer'"),
        ({"name": "transformer", "step": 3}, "step: must be a divisor of the 8 numbers"),
        ({"name": "film", "width": 9}, "width: must be a multiple of heads"),
        ({"name": "film", "tokens": [(0, 9, 2)]}, "tokens: must be within the 15 numbers"),
        ({"name": "transformer", "pictures": (0, 2, 3, 9, 9)}, "pictures: must be start, count"),
    ],
)
def test_bad_settings_are_named(table, words):
    with pytest.raises(ConfigError, match=words):
        InterpolantFlow(8, 15, field=table)


# ---- things alike, and events among them


def sorted_things(n: int = 200) -> Tensor:
    """Contexts like `DISCS`, whose three discs are in order of their distance: the first are near in every row."""
    given = normal(n, 15, seed=5)
    discs = given[:, 6:].view(n, 3, 3)
    order = discs[..., :2].norm(dim=-1).argsort(1)[..., None]
    return torch.cat([given[:, :6], discs.take_along_dim(order, 1).flatten(1)], 1)


@over("kind", ["energy", "flow", "diffusion"])
def test_the_order_of_things_says_nothing_where_they_were_shown_in_order(kind):
    data = Batch(normal(200, 8, seed=6), given=sorted_things())
    settings = {"step": 2, "width": 16, "layers": 2, **DISCS}
    field = {"name": "transformer", **settings}
    made = {
        "energy": lambda: TransformerEnergy(8, 15, data=data, **settings),
        "flow": lambda: InterpolantFlow(8, 15, data=data, field=field),
        "diffusion": lambda: ms.proposals.Diffusion(8, 15, data=data, network=field),
    }[kind]()
    model = bent(made)
    given = data.given[:4]
    swapped = torch.cat([given[:, :6], given[:, 12:], given[:, 6:12]], 1)
    moved = torch.cat([given[:, :6], given[:, 6:] + 0.5], 1)
    said, again, other = (
        model(data.x[:4], g) if kind == "energy" else model.field(data.x[:4], g, 0.5)
        for g in (given, swapped, moved)
    )
    torch.testing.assert_close(said, again)
    assert (said - other).abs().max() > 1e-6


def test_numbers_that_mean_the_same_have_the_moments_of_all_their_rows():
    given = sorted_things()
    given[:, 8::3] += torch.arange(3.0)  # of which every thing has a mean of its own
    inner = Standardise((15,), given)
    Tokenizer((15,), 8, inner=inner, **DISCS)
    things = given[:, 6:].reshape(-1, 3)
    torch.testing.assert_close(inner.mean[6:9], things.mean(0))
    torch.testing.assert_close(inner.scale[9:12], things.std(0), rtol=0.01, atol=0)  # n or n − 1
    assert torch.equal(inner.scale[6:9], inner.scale[12:])
    inner.refit(given * 10)
    torch.testing.assert_close(inner.scale[6:9], 10 * things.std(0), rtol=0.01, atol=0)


def test_nearness_by_hand():
    near = Nearness(4, 2, (1, 2, 3), reach=0.1).double()
    near.stand(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.full((4,), 2.0))
    given = torch.tensor(
        [[9.0, 0.0, 0.0, 0.5, 5.0, 5.0, 0.1]], dtype=F64
    )  # discs of 0.5 at 0, of 0.1 at (5, 5)
    things = near.join(given[:, :0], given)
    event = torch.tensor([[0.6, 0.0, 0.0, -2.0]], dtype=F64)  # at (0.6, 0), 0.1 from the edge, and at (0, −2)
    white = (event - near.mean) / near.scale
    first, second = near(white, things)[0]
    size = math.sqrt((near.mean.square() + near.scale.square()).mean())
    said = torch.tensor([0.6 / size, 0.0, math.tanh(1.0), 1 - math.tanh(1.0) ** 2, 0.0], dtype=F64)
    torch.testing.assert_close(first, said, rtol=1e-4, atol=1e-6)
    assert second[2] > 0.999  # nothing is near, and then no side says anything
    assert second[3:].abs().max() < 1e-6


@over("things", [(0, 2), (0, 2, 4), (-1, 2, 3)])
def test_things_that_are_no_places_are_refused(things):
    with pytest.raises(ConfigError, match="near: must be start, count and size, which is 2 or 3"):
        Nearness(4, 2, things)


@over("kind", ["flow", "diffusion", "diffusion-phi"])
def test_a_field_among_things_has_its_divergence_and_knows_where_events_are(kind):
    data = Batch(normal(50, 8, seed=6) * torch.linspace(0.1, 3, 8, dtype=F64) + 2, given=sorted_things(50))
    table = {"name": "transformer", "step": 2, "width": 16, "layers": 1, **DISCS, "near": (6, 3, 3)}
    made = {
        "flow": lambda: InterpolantFlow(8, 15, data=data, field=table),
        "diffusion": lambda: ms.proposals.Diffusion(8, 15, data=data, network=table),
        "diffusion-phi": lambda: DiffusionEnergy(8, 15, data=data, potential=table),
    }[kind]()
    model = bent(made)
    field = model.field if kind == "flow" else model.field.network
    torch.testing.assert_close(field.body.near.mean, data.x.mean(0))
    torch.testing.assert_close(field.body.near.scale, data.x.std(0))
    x, code = normal(3, 8, seed=8), field.encode(data.given[:3])
    clock, jacobian = field.clock(torch.full((3,), 0.4, dtype=F64)), torch.autograd.functional.jacobian
    exact = [jacobian(lambda y, i=i: field.velocity(y, code[i], clock[i]), x[i]).trace() for i in range(3)]
    torch.testing.assert_close(field.divergence(x, code, clock), torch.stack(exact).detach())


def test_an_energy_among_things_has_its_gradient_and_is_kept_with_its_weights():
    data = Batch(normal(50, 8, seed=6), given=sorted_things(50))
    settings = {"step": 2, "width": 16, "layers": 1, **DISCS, "near": (6, 3, 3)}
    near = bent(TransformerEnergy(8, 15, data=data, **settings))
    x, given = data.x[:3].clone().requires_grad_(), data.given[:3]
    (g,) = torch.autograd.grad(near(x, given).sum(), x)
    step = 1e-6 * normal(3, 8, seed=9)
    change = (near(x + step, given) - near(x - step, given)) / 2
    torch.testing.assert_close((g * step).sum(1), change.detach(), rtol=1e-5, atol=1e-12)
    many = near(data.x[:6].view(3, 2, 8), given)
    torch.testing.assert_close(many[:, 0], near(data.x[0:6:2], given))
    kept = bent(TransformerEnergy(8, 15, **settings), 0.0)
    kept.load_state_dict(near.state_dict())
    torch.testing.assert_close(kept(data.x[:3], given), near(data.x[:3], given))


def test_what_never_changes_in_any_thing_stays_out():
    for n in range(900, 960):
        rows = torch.randn(n, 21, generator=torch.Generator().manual_seed(n))
        rows[:, 2::3] = 0.3
        inner = Standardise((21,), rows)
        inner.share([(0, 7, 3)])
        assert inner(rows * 1.01)[:, 2::3].abs().max() == 0


@over("near", [(13, 1, 3), (0, 8, 2)])
def test_things_lie_within_a_context(near):
    with pytest.raises(ConfigError, match="near: must be start, count and size within the 15 numbers"):
        TransformerEnergy(8, 15, step=2, width=16, near=near)
    with pytest.raises(ConfigError, match=r"near: .* within the 0 numbers"):
        TransformerField(8, None, step=2, width=16, near=near)


def test_things_are_trained_in_the_units_they_share():
    data = ms.data.Dataset.of(normal(40, 8).float(), "paths", given=sorted_things(40).float())
    table = {
        "name": "interpolant",
        "field": {"name": "transformer", "step": 2, "width": 8, "layers": 1, **DISCS},
    }
    assert ms.fit(table, data, "density", steps=1, evaluate=False).coordinates is None
    with pytest.raises(
        ms.core.errors.UnsupportedError, match="units: must be 'none' for things of a context"
    ):
        ms.fit(table, data, "density", steps=1, units="scale")


def test_a_flow_that_is_fitted_anew_holds_events_against_things_in_their_new_units():
    field = {"name": "transformer", "step": 2, "width": 8, "layers": 1, "near": (6, 3, 3), **DISCS}
    flow = InterpolantFlow(8, 15, field=field)
    flow.fit(Batch(3 + 2 * normal(40, 8).float(), given=sorted_things(40).float()), steps=1)
    near = flow.field.body.near
    assert torch.equal(near.mean, flow.mean)
    assert torch.equal(near.scale, flow.scale)
    assert float((near.mean - 3).abs().max()) < 1.5


def test_what_encodes_pictures_has_derivatives_of_all_kinds():
    """As transforms of torch.func ask for them, and the same in another layout of memory."""
    eyes, x = PictureEncoder((3, 16, 16), width=8, layers=1).double(), torch.rand(5, 3, 16, 16).double()
    each = torch.vmap(lambda one: eyes(one[None])[0])(x)
    torch.testing.assert_close(each, eyes(x))
    torch.testing.assert_close(eyes(x.contiguous(memory_format=torch.channels_last)), each)
    value, forwards = torch.func.jvp(eyes, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(value, each)
    z = x.clone().requires_grad_()
    (backwards,) = torch.autograd.grad(eyes(z).sum(), z)
    torch.testing.assert_close(forwards.sum(), backwards.sum())
