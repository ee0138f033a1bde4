"""Energies on a flow that begin with the flow's own layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import metastable as ms
from metastable.core import ConfigError
from metastable.core.random import generator
from metastable.data import Demonstrations, Scaling
from metastable.policies import PolicyConfig, fit_policy, load_policy
from metastable.policies.models import Sizes, layout_of, policy_model
from metastable.training.config import Schedule

TINY = Sizes(
    width=8, layers=2, field_width=8, field_layers=3, heads=2, negatives=2, reuse=4, pool=16, warmup=0
)
TINY = replace(TINY, inherits=True, ode=(3, 3), training_ode=(2, 2), batch_size=8, energy_rows=None)
CONFIG, SEEN = PolicyConfig(2, 4, 2, 3, 0, 0), torch.full((2, 2, 2), 0.3)
HOW = {"ema": 0.5, "noise": None}


def shown() -> Demonstrations:
    x = torch.randn(40, 2, generator=generator(0)).double().numpy()
    return Demonstrations.of(x, x[:, :1], [20, 40])


def fitted(name, sizes=TINY, **more):
    """A policy of a model by its name."""
    made = policy_model(name, layout_of(Scaling.fit(shown()), 2), sizes)
    acts = replace(CONFIG, **{"candidates": 3, **made.acting})
    return fit_policy(shown(), made.energy, made.method, acts, **{**made.options, **HOW, **more})


@pytest.fixture(scope="module")
def flow():
    return fitted("flow", steps=6)


@pytest.mark.parametrize("name", ["on-flow", "i-on-flow"])
def test_an_energy_begins_with_the_layers_of_its_flow_and_as_zero(flow, name):
    field = flow.model.model.energy.proposal.field.state_dict()
    for inherits in (True, False):
        sizes = replace(TINY, inherits=inherits, rates=(1e-30, 1e-30, 1e-30))  # nothing moves
        network = fitted(name, sizes, on=flow, steps=1).model.run.energy.network
        parts = {key: value for key, value in network.state_dict().items() if value.dim() > 1}
        parts = {
            key: value for key, value in parts.items() if key.startswith(("encoder.embed", "body.blocks"))
        }
        assert len(parts) > 8
        assert all(torch.equal(field[key], value) for key, value in parts.items()) == inherits
        x, given = torch.randn(5, 4, generator=generator(1)), torch.randn(5, 4, generator=generator(2))
        t = (torch.full((5,), 0.5),) if name == "i-on-flow" else ()
        assert (network(x, given, *t).abs() < 1e-20).all()


def test_what_was_learned_on_top_is_read_back(flow, tmp_path):
    how = {"on": flow, "schedule": Schedule("constant")}
    policy = fitted("on-flow", steps=5, out=tmp_path / "energy", **how)
    begun = flow.model.model.energy.proposal.field.state_dict()["body.embed.0.weight"]
    assert not torch.equal(policy.model.run.energy.network.state_dict()["body.embed.0.weight"], begun)
    stands = policy.model.run.players["proposal"].field.state_dict()["body.embed.0.weight"]
    assert torch.equal(stands, begun), "the flow stays"
    again = load_policy(tmp_path / "energy")
    assert torch.equal(again.predict_action_chunk(SEEN), policy.predict_action_chunk(SEEN))
    longer = fitted("on-flow", steps=8, out=tmp_path / "energy", resume=True, **how)
    whole = fitted("on-flow", steps=8, **how)
    for key, value in whole.model.run.energy.network.state_dict().items():
        assert torch.equal(longer.model.run.energy.network.state_dict()[key], value), key


def test_what_nobody_can_inherit_is_refused(flow):
    layout = layout_of(Scaling.fit(shown()), 2)
    model, below = (policy_model(name, layout, TINY) for name in ("on-flow", "flow"))
    method = {**model.method, "proposal": below.energy, "pretrain": 2}
    with pytest.raises(ConfigError, match=r"energy\.inherits: .* beside a proposal that has yet to learn"):
        fit_policy(shown(), model.energy, method, CONFIG, **{**model.options, **HOW, "steps": 3})
    for change in ({"width": 16}, {"heads": 4}):  # the flow has a width of 8 and 2 heads
        with pytest.raises(ConfigError, match=r"energy\.inherits: .* of the same tokens, width and heads"):
            fitted("on-flow", replace(TINY, **change), on=flow, steps=1)
    dense = {"name": "interpolant", "field": "residual", "width": 6, "layers": 3}
    other = fit_policy(shown(), dense, config=CONFIG, units="none", steps=1, **HOW)
    with pytest.raises(ConfigError, match=r"energy\.inherits: .* whose field is no transformer"):
        fitted("on-flow", on=other, steps=1)
    alone = {"name": "transformer", "step": 1, "inherits": True}
    with pytest.raises(ConfigError, match=r"energy\.inherits: must be false without on_proposal, got True"):
        fit_policy(shown(), alone, "ranking-nce", CONFIG, steps=1)


def test_a_run_is_read_with_a_proposal_of_any_kind(flow, tmp_path):
    fitted("on-flow", on=flow, steps=2, out=tmp_path / "energy")
    method = ms.methods.RankingNCE(proposal=flow.model.model.energy.proposal, train_proposal=True)
    assert ms.load_run(tmp_path / "energy", method=method).steps == 2
