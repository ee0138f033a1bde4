"""A policy against Gaussians, whose conditionals are known, and its bookkeeping by hand."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import metastable as ms
from metastable.core import ConfigError, InputError
from metastable.core.random import generator, normal_like
from metastable.core.units import Coordinates, Units
from metastable.data import Demonstrations, Scaling
from metastable.kernels import ULA
from metastable.methods.conditional_tuning import forget_tuning
from metastable.policies import Policy, PolicyConfig, RunActions, actions, fit_policy, load_policy
from metastable.policies.actions import free_root, joined, nearest, pooled_covariance
from metastable.policies.environments import Seen
from metastable.policies.scenes import first_chunks
from metastable.proposals import InterpolantFlow
from metastable.runs.run import Run

D = 6
STEPS = torch.arange(D, dtype=torch.float64)
COVARIANCE = torch.exp(-0.5 * ((STEPS[:, None] - STEPS) / 2.0) ** 2) + 1e-4 * torch.eye(D)
"""Of a smooth chunk: its condition number is 8·10³."""
CONTEXTS = torch.tensor([[0.0], [2.0]])


class Smooth(nn.Module):
    """−log N(c·1, Σ) as an energy and, with another width, as a proposal."""

    def __init__(self, width: float = 1.0):
        super().__init__()
        self.event_shape, self.context_shape = (D,), (1,)
        self.register_buffer("root", width * torch.linalg.cholesky(COVARIANCE).float())
        self.register_buffer("precision", (torch.linalg.inv(COVARIANCE) / width**2).float())

    def forward(self, x, given):
        given = given[:, None] if x.dim() == 3 else given
        off = x - given
        return 0.5 * ((off @ self.precision) * off).sum(-1)

    def sample(self, n, rng, given):
        noise = normal_like(given.new_empty(len(given), n, D), rng)
        return given[:, None] + noise @ self.root.T

    def log_prob(self, x, given):
        return -self(x, given)


class Encoded(Smooth):
    """The same with a code for contexts."""

    def encode(self, given):
        return 2 * given

    def score(self, x, code, t=None):
        return self(x, code / 2)


def run_of(energy: nn.Module, coordinates: Coordinates | None = None) -> Run:
    players = {"energy": energy, "proposal": Smooth(1.5)}
    config = {"event_shape": [D], "context_shape": [1]}
    method = ms.methods.RankingNCE()
    run = Run(energy, "ranking-nce", [], None, None, config=config, players=players, trained_with=method)
    return run.outward(coordinates)


def conditional(p: int, frozen: torch.Tensor, c: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of the other numbers, given the first p."""
    gain = COVARIANCE[p:, :p] @ torch.linalg.inv(COVARIANCE[:p, :p])
    return c + gain @ (frozen - c), COVARIANCE[p:, p:] - gain @ COVARIANCE[:p, p:]


def test_covariance_within_contexts_forgets_their_means():
    rng = torch.Generator().manual_seed(0)
    found = pooled_covariance(Smooth().sample(20_000, rng, torch.tensor([[0.0], [50.0]])))
    torch.testing.assert_close(found, COVARIANCE, atol=0.03, rtol=0)


def test_roots_of_what_is_free():
    for p in (0, 2):
        _, C = conditional(p, torch.zeros(p, dtype=torch.float64), 0.0)
        root = free_root(COVARIANCE, p)
        torch.testing.assert_close(root @ root.T, C)


def test_joined_draws_are_those_of_the_conditional():
    rng, frozen = torch.Generator().manual_seed(0), torch.tensor([[0.5, 0.8]])
    x = joined(Smooth().sample(40_000, rng, torch.ones(1, 1)), frozen, COVARIANCE)[0]
    mean, C = conditional(2, frozen[0].double(), 1.0)
    assert torch.equal(x[:, :2], frozen.expand(len(x), 2))
    torch.testing.assert_close(x[:, 2:].mean(0).double(), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(x[:, 2:].T.cov().double(), C, atol=0.02, rtol=0)


def test_draws_that_begin_near_the_frozen_prefix_are_those_of_the_conditional_too():
    rng, frozen = torch.Generator().manual_seed(0), torch.tensor([[0.5, 0.8]])
    x = Smooth().sample(16 * 4_000, rng, torch.ones(1, 1)).view(4_000, 16, D)
    near = nearest(x, frozen.expand(4_000, 2), 2)
    off = (x[..., :2] - frozen).square().sum(-1).sort(1).values
    torch.testing.assert_close((near[..., :2] - frozen).square().sum(-1).sort(1).values, off[:, :2])
    made = joined(near, frozen.expand(4_000, 2), COVARIANCE).flatten(0, 1)
    mean, C = conditional(2, frozen[0].double(), 1.0)
    torch.testing.assert_close(made[:, 2:].mean(0).double(), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(made[:, 2:].T.cov().double(), C, atol=0.05, rtol=0)


@pytest.mark.parametrize("kind", [Smooth, Encoded])
@pytest.mark.parametrize("p", [0, 2])
def test_chains_reach_the_energy_from_a_wider_proposal(kind, p):
    model = RunActions(run_of(kind())).settle(CONTEXTS)
    frozen = torch.tensor([[0.3, 0.6], [2.5, 2.1]])[:, :p]
    x = model.move(model.draw(CONTEXTS, 1500, 0), CONTEXTS, 25, 0, frozen if p else None)
    for i, c in enumerate((0.0, 2.0)):
        mean, C = conditional(p, frozen[i].double(), c)
        free = x[i, :, p:].double()
        error = C.diagonal().sqrt() / 1500**0.5
        assert ((free.mean(0) - mean).abs() < 6 * error).all()
        # generalised variance: 1 of the energy, 1.5 ** 2 of the proposal, along every direction alike
        ratio = torch.linalg.eigvalsh(torch.linalg.solve(torch.linalg.cholesky(C), (free - mean).T).cov())
        assert ratio.min() > 0.8
        assert ratio.max() < 1.25


def test_one_step_size_without_the_covariance_hardly_moves():
    run = run_of(Smooth())
    plain = RunActions(run, covariance=torch.eye(D, dtype=torch.float64))
    settled = RunActions(run).settle(CONTEXTS)
    start = settled.draw(CONTEXTS, 200, 0)
    plain.step_size = 1e-4  # about the narrowest variance: more is rejected
    moved = {name: m.move(start, CONTEXTS, 25, 0) for name, m in (("plain", plain), ("settled", settled))}

    def wide(x):
        return (x.mean(-1) - CONTEXTS).std().item()

    assert wide(moved["plain"]) > 0.95 * wide(start)
    assert wide(moved["settled"]) < 0.85 * wide(start)


def test_units_of_training_change_nothing():
    units = Units(
        "scale",
        (D,),
        torch.full((D,), 3.0).double(),
        torch.full((D,), 0.25).double(),
        torch.full((D,), 4.0).double(),
    )
    there = RunActions(run_of(Smooth(), Coordinates(units)))
    here = RunActions(run_of(Smooth()))
    u = here.draw(CONTEXTS, 5, 0)
    x = there.draw(CONTEXTS, 5, 0)
    torch.testing.assert_close(x, 4 * u + 3)
    torch.testing.assert_close(there.energy(x, CONTEXTS), here.energy(u, CONTEXTS), atol=1e-3, rtol=1e-4)
    moved = there.settle(CONTEXTS).move(x, CONTEXTS, 3, 0)
    torch.testing.assert_close(
        (moved - 3) / 4, here.settle(CONTEXTS).move(u, CONTEXTS, 3, 0), atol=1e-2, rtol=0
    )


# --- bookkeeping --------------------------------------------------------------------------------------


class Scripted:
    """Chunks that count: candidate k of call c is 100·c + 10·k + step, and the last candidate is the likeliest."""

    has_chains = True

    def __init__(self):
        self.seen, self.moved = [], []

    def draw(self, contexts, n, seed):
        self.seen.append(contexts)
        k, step = torch.arange(n)[:, None], torch.arange(4)
        return (100.0 * len(self.seen) + 10 * k + step).expand(len(contexts), n, 4)

    def energy(self, x, contexts):
        return -x[..., -1]

    def move(self, x, contexts, steps, seed, frozen=None):
        self.moved.append((x, frozen))
        return x


SCALING = Scaling(
    {"state": torch.zeros(1), "action": torch.zeros(1)},
    {"state": torch.ones(1), "action": torch.ones(1)},
    {},
    (),
)


def acting(steps: int, **settings) -> tuple[list[list[float]], Scripted]:
    model = Scripted()
    policy = Policy(
        model,
        SCALING,
        PolicyConfig(**{"context": 2, "prediction": 4, "execute": 2, "candidates": 3, **settings}),
    )
    taken = [policy.select_action(torch.tensor([[float(i)], [-float(i)]])) for i in range(steps)]
    return [a.flatten().tolist() for a in taken], model


def test_the_likeliest_candidate_is_carried_out_up_to_the_next_chunk():
    taken, model = acting(4, warm=0)
    assert taken == [[120.0] * 2, [121.0] * 2, [220.0] * 2, [221.0] * 2]
    assert [c.tolist() for c in model.seen] == [[[0, 0], [0, 0]], [[1, 2], [-1, -2]]]


def test_one_candidate_is_taken_as_it_is():
    assert acting(1, candidates=1, warm=0)[0] == [[100.0] * 2]


def test_chains_start_where_the_last_chunk_goes_on():
    _, model = acting(3, warm=1, freeze=2)
    first, second = model.moved
    assert first[1] is None, "nothing to join yet"
    assert second[0][0].tolist() == [[122, 123, 123, 123], [210, 211, 212, 213], [220, 221, 222, 223]]
    assert second[1].tolist() == [[122, 123]] * 2


def test_reset_forgets_and_reseeds():
    model = RunActions(run_of(Smooth())).settle(CONTEXTS)
    policy = Policy(model, SCALING, PolicyConfig(1, D, 2, candidates=2, steps=2))
    see = torch.zeros(3, 1)
    first = [policy.select_action(see) for _ in range(3)]
    policy.reset()
    again = [policy.select_action(see) for _ in range(3)]
    policy.reset(seed=1)
    other = [policy.select_action(see) for _ in range(3)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(torch.stack(first), torch.stack(other))
    with pytest.raises(ConfigError, match="seed: must be an integer"):
        policy.reset(seed=0.5)
    with pytest.raises(InputError, match="of the 3 environments since reset, got 2"):
        policy.select_action(see[:2])


def test_every_observation_is_of_as_many_environments():
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(2, 4, 2, 1, 0, 0), steps=1)
    with pytest.raises(InputError, match=r"observation\.goal: must be of the 3 environments, got 1"):
        policy.select_action({"place": np.zeros((3, 1)), "goal": np.zeros((1, 1))})
    with pytest.raises(InputError, match=r"observation\.place: must be of the .* got a number"):
        policy.select_action({"goal": np.zeros((3, 1)), "place": 0.5})
    with pytest.raises(InputError, match=r"observation\.goal: must be finite, got 1 NaN"):
        policy.select_action({"place": np.zeros((1, 1)), "goal": np.full((1, 1), np.nan)})
    with pytest.raises(InputError, match=r"place: must be windows of policy.context = 2 steps, .* got 3"):
        policy.predict_action_chunk({"place": np.zeros((1, 3, 1)), "goal": np.zeros((1, 3, 1))})
    with pytest.raises(InputError, match=r"observation\.place: must be of at least one, got 0"):
        policy.select_action({"place": np.zeros((0, 1)), "goal": np.zeros((0, 1))})
    with pytest.raises(InputError, match=r"observation\.place: must hold numbers: .*str"):
        policy.select_action({"place": ["here"], "goal": np.zeros((1, 1))})
    lost = np.ma.masked_array(np.full((1, 1), 1e9), [[True]])  # of a sensor that saw nothing
    with pytest.raises(InputError, match=r"observation\.goal: must have no masked values"):
        policy.select_action({"place": np.zeros((1, 1)), "goal": lost})
    assert not policy.seen  # what was refused is forgotten
    one = policy.select_action({"place": np.zeros(1), "goal": np.zeros(1)})
    assert one.shape == (1, 1)


def test_what_was_seen_holds_no_graph():
    """Of a learned encoder it would grow, and the policy could be copied no more."""
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(2, 4, 2, 1, 0, 0), steps=1)
    place, goal = torch.zeros(3, 1, requires_grad=True), torch.ones(3, 1)
    chosen = policy.select_action({"place": 2 * place, "goal": goal.to_sparse()})
    again = copy.deepcopy(policy)
    policy.reset()
    assert torch.equal(policy.select_action({"place": place.detach(), "goal": goal}), chosen)
    assert torch.equal(*(each.select_action({"place": place, "goal": goal}) for each in (again, policy)))


def test_one_environment_is_told_how_to_be_one_of_several():
    rows = {"far": np.random.default_rng(0).normal(size=(8, 3)), "near": np.arange(8.0)}
    policy = Policy(RunActions(run_of(Smooth())), Scaling.fit(Demonstrations.of(rows, np.arange(8.0), [8])))
    with pytest.raises(InputError, match=r"observation\.far: must be of B environments, \(B, 3\); one is"):
        policy.select_action({"near": np.zeros(1), "far": np.zeros(3)})


def test_what_the_demonstrations_had_not_is_left_alone():
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(2, 4, 2, 1, 0, 0), steps=1)
    known = {"place": np.zeros((3, 1)), "goal": np.ones((3, 1))}
    first = policy.select_action(known)
    policy.reset()
    more = known | {"time": 0.5, "task": ["push"] * 3, "pixels": np.zeros((3, 2, 2), np.uint8)}
    assert torch.equal(policy.select_action(more), first)


def test_names_of_lerobot_will_do():
    """`load_lerobot` took their prefix off."""
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(2, 4, 2, 1, 0, 0), steps=1)
    place, goal = np.zeros((3, 1)), np.ones((3, 1))
    first = policy.select_action({"place": place, "goal": goal})
    theirs = {"observation.place": place, "observation.goal": goal, "task": ["push"] * 3}
    for seen in (theirs, {"place": place, "observation.place": goal, "observation.goal": goal}):
        policy.reset()
        assert torch.equal(policy.select_action(seen), first)
    windows = {key: np.repeat(x[:, None], 2, 1) for key, x in list(theirs.items())[:2]}
    policy.reset()
    assert torch.equal(policy.predict_action_chunk(windows)[:, 0], first)
    both = Scaling.fit(Demonstrations.of({"a": goal, "observation.a": goal}, goal))
    with pytest.raises(InputError, match=r"must have a, observation\.a, .* got observation\.a$"):
        both.known({"observation.a": goal})  # which is another


def test_a_policy_is_fitted_with_tables_and_one_noise_and_refuses_bare_arrays():
    table = {"context": 2, "prediction": 4, "execute": 2, "candidates": 1}
    one = fit_policy(shown(), FLOW, "density", table, noise=0.01, steps=1)
    assert one.config == PolicyConfig(**table).settled(False)
    assert one.model.run.config["trainer"]["data_noise_final"] == 0.01
    with pytest.raises(ConfigError, match=r"policy\.contxt: unknown setting"):
        fit_policy(shown(), FLOW, "density", {"contxt": 2}, steps=1)
    with pytest.raises(InputError, match=r"demonstrations: must be Demonstrations, which .* got 'tuple'"):
        fit_policy((np.zeros(8), np.zeros(8)), FLOW, "density", steps=1)  # pyright: ignore
    with pytest.raises(InputError, match=r"goal: must be windows of .* \(B, 2, 1\), got 1"):
        one.predict_action_chunk({"place": np.zeros((3, 2, 1)), "goal": np.zeros((3, 1))})


def test_the_only_observation_may_come_without_its_name():
    model, x = Scripted(), torch.tensor([[3.0]])
    scaling = Scaling.fit(Demonstrations.of({"obs": np.arange(8.0)}, np.arange(8.0)))
    policy = Policy(model, scaling, PolicyConfig(1, 4, 2, 1))
    for seen in (x, {"state": x}, {"obs": x}):  # environments of one array call it `state`
        policy.reset()
        policy.select_action(seen)
    assert torch.equal(torch.cat(model.seen), model.seen[0].expand(3, -1))
    with pytest.raises(InputError, match="must have obs, as the demonstrations had; got pose"):
        policy.select_action({"pose": x})


def test_a_frozen_prefix_is_kept_to_the_bit():
    model = RunActions(run_of(Encoded())).settle(CONTEXTS)
    policy = Policy(model, SCALING, PolicyConfig(1, D, 2, candidates=4, steps=3, freeze=3))
    first = policy.predict_action_chunk(torch.zeros(5, 1, 1))
    second = policy.predict_action_chunk(torch.zeros(5, 1, 1))
    assert torch.equal(second[:, :3], first[:, 2:5])
    assert not torch.equal(second[:, 3:], first[:, 5:].expand(-1, 3, -1))


class Ways(Scripted):
    """Three ways, −1 to −1, 0 to 2 and 1 to −1: for a Gaussian the beginning says nothing of the end."""

    has_chains = False

    def draw(self, contexts, n, seed):
        b = torch.randint(-1, 2, (len(contexts), n, 1), generator=generator(seed)).float()
        return torch.cat([b, 2 - 3 * b.abs()] * 2, -1)

    def move(self, x, contexts, steps, seed, frozen=None):
        return x if frozen is None else joined(x, frozen, pooled_covariance(self.draw(contexts, 500, 0)))


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_chunk_goes_on_along_the_way_that_was_begun(candidates):
    """A draw of another way was moved onto this one, and went on as that."""
    policy = Policy(Ways(), SCALING, PolicyConfig(1, 4, 2, candidates, 0, 0, freeze=1))
    first = policy.predict_action_chunk(torch.zeros(300, 1, 1))
    second = policy.predict_action_chunk(torch.zeros(300, 1, 1))
    assert torch.equal(second[:, 0], first[:, 2])
    assert torch.isclose(second[:, 1], first[:, 1], atol=0.1).float().mean() > 0.97


def test_chains_take_no_step_that_nobody_found():
    """Where draws alone were frozen, nothing was moved, and the covariance says nothing of a step."""
    model = RunActions(run_of(Smooth())).settle(CONTEXTS, chains=False)
    policy = Policy(model, SCALING, PolicyConfig(1, D, 2, candidates=2, steps=0, freeze=1))
    assert policy.predict_action_chunk(torch.zeros(5, 1, 1)).shape == (5, D, 1)
    with pytest.raises(InputError, match=r"policy: chains need a step size, which .* steps=0 has not"):
        policy.acting(steps=3).predict_action_chunk(torch.zeros(5, 1, 1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"execute": 17}, "policy.execute: must be at most prediction − freeze = 16, got 17"),
        ({"freeze": 9}, "prediction − freeze = 7"),
        ({"warm": 9}, "policy.warm"),
        ({"candidates": 0}, "policy.candidates"),
        ({"rank": "entropy"}, "policy.rank: unknown value 'entropy'"),
        ({"algorithm": 3}, "policy.algorithm: must be 2 or 4, got 3"),
        ({"kernel": {"name": "nuts"}}, "policy.kernel.name: unknown value 'nuts'"),
        ({"freeze": 2, "kernel": {"name": "ula"}}, "policy.freeze: must be 0 with a kernel, .* got 2"),
    ],
)
def test_settings_that_do_not_fit(settings, words):
    with pytest.raises(ConfigError, match=words):
        PolicyConfig(**settings)


# --- trained ------------------------------------------------------------------------------------------


def shown() -> Demonstrations:
    rng = np.random.default_rng(0)
    goal = rng.choice([-1.0, 1.0], (12, 1))
    steps = np.linspace(0, 1, 10)
    place = (goal * steps).reshape(-1, 1)
    return Demonstrations.of(
        {"place": place, "goal": np.repeat(goal, 10, 0)}, place + 0.05, np.arange(10, 121, 10)
    )


@pytest.mark.parametrize(
    ("energy", "method"),
    [("flow", "density"), (None, {"name": "ranking-nce", "proposal": "flow"}), (None, {"name": "ibc"})],
)
def test_a_policy_comes_back_from_its_folder(tmp_path, energy, method):
    config = PolicyConfig(2, 4, 2, candidates=3, steps=2, freeze=1)
    policy = fit_policy(
        shown(), energy, method, config, steps=4, batch_size=32, out=tmp_path / "run", held_out=0.2
    )
    kept = json.loads((tmp_path / "run" / "policy.json").read_text())
    assert kept["policy"]["execute"] == 2
    again = load_policy(tmp_path / "run")
    seen = {"place": torch.zeros(2, 1), "goal": torch.ones(2, 1)}
    for _ in range(3):
        assert torch.equal(policy.select_action(seen), again.select_action(seen))
    assert load_policy(tmp_path / "run", candidates=1, warm=0).config.candidates == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("covariance", "x", "covariance: must be rows of as many numbers, got 'x'"),
        ("covariance", [[1.0, 2.0]], "covariance: must be rows"),
        ("step_size", "a", "step_size: must be a number above 0, got 'a'"),
        ("sampler_step", 0, "sampler_step: must be a number above 0, got 0"),
        ("seed", "a", "seed: must be an integer, got 'a'"),
        ("scaling", {}, "is damaged"),
        ("scaling", {"middle": {"place": "x"}, "half": {}, "pictures": {}, "noisy": []}, "is damaged"),
        ("scaling", {"middle": {"action": [0.0]}, "half": {}, "pictures": {}, "noisy": []}, "scaling.half"),
    ],
)
def test_a_damaged_policy_is_named(tmp_path, key, value, words):
    path = tmp_path / "policy.json"
    kept = {"policy": {}, "covariance": None, "step_size": None, "scaling": {}, "seed": 0}
    path.write_text(json.dumps({**kept, key: value}))
    with pytest.raises(InputError, match=f"policy.json: .*{words}"):
        load_policy(tmp_path)


@pytest.mark.parametrize("noise", [(0.1,), "ab", (0.1, "b"), (1, 2, 3)])
def test_a_noise_that_is_neither_one_nor_two_numbers_is_refused(noise):
    with pytest.raises(ConfigError, match="noise: must be a number, two of them"):
        fit_policy(shown(), "flow", config=PolicyConfig(1, 2, 1), steps=1, noise=noise)


@pytest.mark.parametrize(
    ("settings", "settled"),
    [
        ({"steps": 0}, False),
        ({"steps": 2, "kernel": {"name": "ula", "step_size": 1e-3}}, False),
        ({"steps": 0, "freeze": 1}, True),
        ({"steps": 2}, True),
    ],
)
def test_only_what_moves_or_freezes_actions_is_settled(settings, settled):
    config = {"context": 1, "prediction": 2, "execute": 1, "candidates": 2, **settings}
    method = {"name": "ranking-nce", "proposal": "gaussian"}
    policy = fit_policy(shown(), None, method, config, steps=1, batch_size=8)
    assert (policy.model.covariance is not None) == settled
    assert (policy.model.step_size is not None) == (settled and config["steps"] > 0)
    policy.predict_action_chunk({"place": torch.zeros(1, 1, 1), "goal": torch.ones(1, 1, 1)})


@pytest.mark.parametrize("freeze", [0, 1])
def test_a_density_is_settled_where_actions_are_frozen_alone(freeze):
    flow = {"name": "interpolant", "width": 8, "layers": 2, "steps": 4, "scored": 3}
    config = {"context": 1, "prediction": 2, "execute": 1, "freeze": freeze}
    policy = fit_policy(shown(), flow, "density", config, steps=1, batch_size=8)
    assert (policy.model.covariance is not None) == bool(freeze)
    if not freeze:
        with pytest.raises(
            ConfigError, match=r"policy\.freeze: must be 0 without .* fit it with freeze, .* got 1"
        ):
            policy.acting(freeze=1)


def test_algorithm_4_acts_alike_whatever_it_did_before(tmp_path):
    flow = {"name": "interpolant", "width": 8, "layers": 2, "steps": 4, "scored": 3}
    method = {"name": "interpolating-nce", "negatives_per_datum": 2, "times": 1, "proposal": flow}
    config = PolicyConfig(1, 2, 1, candidates=2, steps=0, warm=0, algorithm=4, sampling={"evaluations": 20})
    energy = {"name": "conditional", "width": 8, "depth": 2, "time": True}
    policy = fit_policy(shown(), energy, method, config, steps=2, batch_size=8, out=tmp_path / "run")
    seen, other = ({"place": torch.full((1, 1, 1), x), "goal": torch.ones(1, 1, 1)} for x in (0.0, 3.0))

    def act(policy: Policy, first: bool) -> torch.Tensor:
        forget_tuning(policy.model.model.energy)
        policy.reset(5)
        if first:
            policy.predict_action_chunk(other)
        policy.reset(0)
        return policy.predict_action_chunk(seen)

    assert policy.model.sampler_step > 0
    expected = act(policy, False)
    assert torch.equal(act(policy, True), expected)
    again = load_policy(tmp_path / "run")
    assert torch.equal(act(again, True), expected)


class Own(nn.Module):
    """An energy of one's own, of two numbers given two."""

    def __init__(self):
        super().__init__()
        self.event_shape, self.context_shape, self.pull = (2,), (2,), nn.Linear(2, 2)

    def forward(self, x, given):
        goal = self.pull(given)
        return (x - (goal[:, None] if x.dim() == 3 else goal)).square().sum(-1)


def test_a_policy_of_ones_own_energy_is_read_back_with_it(tmp_path):
    config = {"context": 1, "prediction": 2, "execute": 1, "candidates": 4, "steps": 2}
    method, folder = {"name": "ranking-nce", "proposal": "flow", "negatives_per_datum": 2}, tmp_path / "run"
    policy = fit_policy(shown(), Own(), method, config, steps=2, batch_size=8, out=folder)
    seen = {"place": torch.zeros(1, 1, 1), "goal": torch.ones(1, 1, 1)}
    expected = policy.predict_action_chunk(seen)
    for kept in (folder, policy.export(tmp_path / "lean")):
        assert torch.equal(load_policy(kept, energy=Own()).predict_action_chunk(seen), expected)
        with pytest.raises(InputError, match="trained your own Own; pass an instance"):
            load_policy(kept)


def test_a_folder_without_a_policy(tmp_path):
    ms.fit(
        "flow",
        torch.randn(20, 2),
        "density",
        steps=1,
        given=torch.randn(20, 1),
        out=tmp_path / "run",
        evaluate=False,
    )
    with pytest.raises(InputError, match=r"holds no policy.json; .* resume=True where its training was cut"):
        load_policy(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"device: must be one of .* got 'tpu'"):
        ms.load_run(tmp_path / "run", device="tpu")


def test_a_policy_whose_training_went_wrong_says_so(tmp_path):
    """Its run has ended, and what its log says is told at once and kept: negatives in a box teach nothing here."""
    steps = np.linspace(0, 1, 40)
    shown = Demonstrations.of(np.stack([steps, -steps], 1), np.stack([steps, steps], 1), [20, 40])
    energy, settings = {"name": "conditional", "width": 32, "depth": 2}, {"learning_rate": 0.01}
    with pytest.warns(RuntimeWarning, match="policy: A datum is told from its negatives .* Use a proposal"):
        fit_policy(shown, energy, "ibc", PolicyConfig(steps=0), steps=300, **settings, out=tmp_path / "run")
    run = ms.load_run(tmp_path / "run")
    assert run.status == "finished"
    assert [found.name for found in run.diagnosis if found.severity != "note"] == ["posterior-collapse"]
    assert "was killed" not in run.report().read_text()


def test_a_run_without_contexts_is_no_policy():
    run = ms.fit("flow", torch.randn(20, 2), "density", steps=1, evaluate=False)
    with pytest.raises(InputError, match="chunks given contexts"):
        RunActions(run)


def test_an_energy_on_its_proposal_ranks_by_either():
    method = {"name": "ranking-nce", "proposal": "flow", "pretrain": 2, "train_proposal": False}
    settings = {"steps": 4, "batch_size": 32}
    policy = fit_policy(shown(), "on-proposal", method, PolicyConfig(2, 4, 2, rank="network"), **settings)
    run, given = policy.model.run, torch.randn(3, 4)
    whole, part = RunActions(run), RunActions(run, rank="network")
    x = whole.draw(given, 5, 0)
    log_prob = run.players["proposal"].inner.log_prob(*inside(run, x, given))
    torch.testing.assert_close(whole.energy(x, given), part.energy(x, given) - log_prob)
    assert policy.model.rank == "network", "also after it was settled"
    with pytest.raises(ConfigError, match="'network' for an energy on its proposal"):
        RunActions(run_of(Smooth()), rank="network")


def test_candidates_are_drawn_by_their_weights():
    class Weighted(Scripted):
        def energy(self, x, contexts):
            return torch.tensor([1.0, 0.0, 2.0]).expand(x.shape[:2])

    B, settings = 20_000, {"context": 1, "prediction": 4, "execute": 2, "candidates": 3}
    policies = [
        Policy(Weighted(), SCALING, PolicyConfig(**settings, rank="weights"), seed=s) for s in (0, 0, 1)
    ]
    first, same, other = (policy.select_action(torch.zeros(B, 1))[:, 0] for policy in policies)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    share = torch.stack([(first == 100 + 10 * k).double().mean() for k in range(3)])
    p = torch.softmax(torch.tensor([-1.0, 0.0, -2.0], dtype=torch.float64), 0)
    z = (share - p) / (p * (1 - p) / B).sqrt()
    assert z.abs().max() < 4, z


def test_weights_are_those_of_the_proposals_draws_which_nothing_moves():
    class Tilted(Scripted):
        """N(0, 1) as the proposal and −x as the network: an energy of N(1, 1), where `move` brings draws."""

        def draw(self, contexts, n, seed):
            return torch.randn((len(contexts), n, 4), generator=torch.Generator().manual_seed(seed % 2**32))

        def energy(self, x, contexts):
            return -x[..., 0]

        def move(self, x, contexts, steps, seed, frozen=None):
            return x + torch.tensor([1.0, 0, 0, 0]) if steps else x

    settings = {"context": 1, "prediction": 4, "execute": 1, "candidates": 64, "steps": 50, "warm": 32}
    policy = Policy(Tilted(), SCALING, PolicyConfig(**settings, rank="weights"))
    for _ in range(2):
        first = policy.select_action(torch.zeros(4000, 1))[:, 0]
        assert float(first.mean()) == pytest.approx(1, abs=0.1)  # 64 draws know it to a hundredth or so
        assert float(first.var()) == pytest.approx(1, abs=0.15)


def inside(run, x, given):
    """Events and contexts in the units of training."""
    return run.coordinates.events.forward(x).float(), run.model.as_contexts(given)


FLOW = {"name": "interpolant", "field": "residual", "width": 8, "layers": 3, "steps": 4, "scored": 3}
RANKED = {"name": "ranking-nce", "negatives_per_datum": 2, "reuse": 4, "pool": 16}


def test_an_energy_stands_on_a_flow_that_was_trained_before_and_is_read_back_with_it(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, config = Demonstrations.of(x, x[:, :1], [20, 40]), PolicyConfig(1, 2, 1, 3, 0, 0)
    options = {"steps": 3, "batch_size": 8, "units": "none", "ema": 0.5}
    flow = fit_policy(shown, FLOW, "density", config, out=tmp_path / "flow", **options)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    policy = fit_policy(shown, energy, RANKED, config, on=flow, out=tmp_path / "energy", **options)
    noises = [p.model.run.config["trainer"]["data_noise"] for p in (flow, policy)]
    assert noises == [0.01, 0.005], "the flow's draws have its last noise, and data beside them the same"
    weights = flow.model.model.energy.proposal.state_dict()  # those of the average, by which the flow acts
    stands = policy.model.run.players["proposal"].state_dict()
    assert weights.keys() == stands.keys()
    assert all(torch.equal(stands[key], value) for key, value in weights.items())
    again, seen = load_policy(tmp_path / "energy"), torch.zeros(2, 1, 2)
    assert torch.equal(again.predict_action_chunk(seen), policy.predict_action_chunk(seen))
    with pytest.raises(InputError, match="on: must be the policy of a run of flow or interpolant"):
        fit_policy(shown, energy, RANKED, config, on=policy, **options)
    scaled = fit_policy(shown, FLOW, "density", config, **{**options, "units": "scale"})
    with pytest.raises(InputError, match="on: must be trained in the demonstrations' own units"):
        fit_policy(shown, energy, RANKED, config, on=scaled, **options)
    with pytest.raises(ConfigError, match=r"units: must be 'none' with on=…, .*got 'scale'"):
        fit_policy(shown, energy, RANKED, config, on=flow, **{**options, "units": "scale"})
    wider = Demonstrations.of(2 * x, x[:, :1], [20, 40])
    with pytest.raises(InputError, match="on: must be trained on demonstrations of the same ranges"):
        fit_policy(wider, energy, RANKED, config, on=flow, **options)
    with pytest.raises(ConfigError, match="method: must be one that ranks, with on=…, got 'density'"):
        fit_policy(shown, energy, "density", config, on=flow, **options)


def test_an_energy_with_a_time_stands_on_a_flow_and_acts_by_its_sde(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, options = Demonstrations.of(x, x[:, :1], [20, 40]), {"steps": 3, "batch_size": 8, "units": "none"}
    flow = fit_policy(shown, FLOW, "density", PolicyConfig(1, 2, 1, 3, 0, 0), **options)
    energy = {"name": "on-proposal", "width": 8, "depth": 2, "time": True}
    method = {"name": "interpolating-nce", "negatives_per_datum": 2, "times": 2, "reuse": 2, "pool": 16}
    acts = PolicyConfig(1, 2, 1, 3, 0, 0, rank="network", algorithm=4, sampling={"evaluations": 5})
    policy = fit_policy(shown, energy, method, acts, on=flow, out=tmp_path / "run", **options)
    seen = torch.zeros(2, 1, 2)
    chunk = policy.predict_action_chunk(seen)
    assert torch.equal(load_policy(tmp_path / "run").predict_action_chunk(seen), chunk)
    assert chunk.isfinite().all()
    more = load_policy(tmp_path / "run", sampling={"evaluations": 50, "t_low": 0.2})
    assert not torch.equal(more.predict_action_chunk(seen), chunk)


def test_draws_below_an_energy_are_solved_in_fewer_steps_in_training_alone(tmp_path, monkeypatch):
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, config = Demonstrations.of(x, x[:, :1], [20, 40]), PolicyConfig(1, 2, 1, 3, 0, 0, rank="network")
    options, solved = {"steps": 2, "batch_size": 8, "units": "none"}, []
    flow = fit_policy(shown, FLOW, "density", config=PolicyConfig(1, 2, 1, 3, 0, 0), **options)
    draw = InterpolantFlow._draw
    monkeypatch.setattr(
        InterpolantFlow, "_draw", lambda self, *a, **k: solved.append(self.steps) or draw(self, *a, **k)
    )
    method, energy = {**RANKED, "proposal": {**FLOW, "steps": 2}}, {"name": "on-proposal", "width": 8}
    policy = fit_policy(shown, energy, method, config, on=flow, out=tmp_path / "run", **options)
    assert set(solved) == {2}
    solved.clear()
    chunk = policy.predict_action_chunk(torch.zeros(2, 1, 2))
    assert set(solved) == {4}, "as the flow does"
    assert torch.equal(load_policy(tmp_path / "run").predict_action_chunk(torch.zeros(2, 1, 2)), chunk)


@pytest.mark.parametrize("method", ["ranking-nce", ms.methods.RankingNCE(negatives_per_datum=2)])
def test_a_method_on_a_flow_is_given_as_fit_takes_it(tmp_path, method):
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, config = Demonstrations.of(x, x[:, :1], [20, 40]), PolicyConfig(1, 2, 1, 3, 0, 0)
    options = {"steps": 2, "batch_size": 8}
    flow = fit_policy(shown, FLOW, "density", config, units="none", **options)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    policy = fit_policy(shown, energy, method, config, on=flow, out=tmp_path / "run", **options)
    stands = policy.model.run.players["proposal"].state_dict()
    for key, value in flow.model.model.energy.proposal.state_dict().items():
        assert torch.equal(stands[key], value)
    again, seen = load_policy(tmp_path / "run"), torch.zeros(2, 1, 2)
    assert torch.equal(again.predict_action_chunk(seen), policy.predict_action_chunk(seen))


def test_a_file_from_before_there_were_averages_acts_by_the_weights(tmp_path):
    config = PolicyConfig(2, 4, 2, candidates=1, warm=0)
    policy = fit_policy(
        shown(), FLOW, "density", config, steps=4, batch_size=32, ema=0.99, out=tmp_path / "run"
    )
    path = tmp_path / "run" / "policy.json"
    kept = json.loads(path.read_text())
    del kept["policy"]["averaged"]
    path.write_text(json.dumps(kept))
    seen = {"place": torch.zeros(2, 1), "goal": torch.ones(2, 1)}
    last = load_policy(tmp_path / "run", averaged=False).select_action(seen)
    assert torch.equal(load_policy(tmp_path / "run").select_action(seen), last)
    assert not torch.equal(policy.select_action(seen), last)


def test_noise_leaves_out_numbers_of_a_context_that_never_change():
    steps = np.linspace(0, 1, 40)
    states = np.stack([steps, np.full(40, 3.0), -steps], 1)
    shown = Demonstrations.of({"moves": states, "still": states[:, 1:]}, steps, [20, 40], noisy=("moves",))
    policy = fit_policy(shown, "flow", "density", PolicyConfig(2, 4, 2), steps=1, noise=(0.1, 0.1))
    assert policy.model.run.config["trainer"]["given_noise"] == [1, 0, 1, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", [Smooth, Encoded])
def test_chains_follow_a_model_that_changes(kind):
    """Its precision, the mode that it was first asked in, or the energy as a whole."""
    energies = [kind(), kind(9.0)]
    for energy in energies:
        energy.shift = nn.Parameter(torch.zeros(()))
    model = RunActions(run_of(energies[0])).settle(CONTEXTS)
    x, held = torch.zeros(2, 3, D), torch.zeros(2, 1)
    with torch.inference_mode():
        model.move(x, CONTEXTS, 2, 0, held)
    first = model.move(x, CONTEXTS, 2, 0, held)
    energies[0].double()
    assert model.move(x, CONTEXTS, 2, 0, held).dtype == torch.float64 != first.dtype
    model.model = replace(model.model, energy=energies[1])
    fresh = RunActions(run_of(energies[1]), 2, model.covariance, model.step_size)
    assert torch.equal(model.move(x, CONTEXTS, 2, 0, held), fresh.move(x, CONTEXTS, 2, 0, held))


def test_a_chunk_that_is_not_finite_leaves_no_trace():
    shown = Demonstrations.of(np.zeros((20, 1)), np.linspace(0, 1, 20), [20])
    policy = Policy(RunActions(run_of(Smooth())), Scaling.fit(shown), PolicyConfig(1, D, 1, 1, 0, 0))
    seen = torch.zeros(2, 1, 1)
    first = policy.predict_action_chunk(seen)
    policy.reset()
    with pytest.raises(InputError, match="finite"):
        policy.predict_action_chunk(torch.full_like(seen, torch.nan))
    assert policy.last is None
    assert torch.equal(policy.predict_action_chunk(seen), first)


@torch.no_grad()
def off_from(fine: ms.proposals.InterpolantFlow, flow: ms.proposals.InterpolantFlow) -> tuple[float, float]:
    """How far draws are off, in their standard deviations, and log-densities, in nats."""
    given = torch.randn(10, *flow.context_shape, generator=torch.Generator().manual_seed(1))
    x, exact = (one.sample(8, torch.Generator().manual_seed(0), given) for one in (flow, fine))
    nats = flow.log_prob(exact, given) - fine.log_prob(exact, given)
    return float((x - exact).square().mean().sqrt() / exact.std()), float(nats.square().mean().sqrt())


def test_the_flow_of_a_policy_is_solved_in_as_many_steps_as_actions_need():
    config = PolicyConfig(2, 4, 2, 1, 0, 0)
    policy = fit_policy(shown(), config=config, steps=150, learning_rate=3e-3, batch_size=64)
    parts = policy.model.run.model.energy.modules()
    flow = next(m for m in parts if isinstance(m, ms.proposals.InterpolantFlow))
    fine = flow.with_steps(400, 401)
    assert 3 * flow.steps < ms.proposals.InterpolantFlow(1).steps
    draws, nats = off_from(fine, flow)
    assert draws < 1e-3
    assert nats < 0.1
    assert off_from(fine, flow.with_steps(8, 9))[0] > 1e-3  # the field is no straight line


def test_what_was_seen_stays_as_it_was_where_an_array_is_used_again():
    model = Scripted()
    policy = Policy(model, SCALING, PolicyConfig(2, 4, 1, 3, warm=0))
    buffer = np.zeros((1, 1), np.float32)
    for value in (1.0, 2.0, 3.0):
        buffer[:] = value
        policy.select_action(buffer)
    assert [c.tolist() for c in model.seen] == [[[1, 1]], [[1, 2]], [[2, 3]]]


def test_windows_are_of_as_many_environments_each_time_until_reset():
    policy = fit_policy(shown(), FLOW, "density", PolicyConfig(2, 4, 2, 1, 0, 0), steps=1)
    seen = {"place": np.zeros((3, 2, 1)), "goal": np.zeros((3, 2, 1))}
    policy.predict_action_chunk(seen)
    with pytest.raises(
        InputError, match=r"observation\.place: must be of the 3 environments since reset, got 2"
    ):
        policy.predict_action_chunk({key: value[:2] for key, value in seen.items()})
    policy.reset()
    for n in (2, 0):
        with pytest.raises(InputError, match=rf"observation\.goal: must be of the 3 environments, got {n}"):
            policy.predict_action_chunk(seen | {"goal": seen["goal"][:n]})
    with pytest.raises(InputError, match="must hold numbers"):
        policy.select_action({"place": None, "goal": None})
    policy.config = replace(policy.config, prediction=3)
    with pytest.raises(InputError, match=r"policy.prediction: must be those of the run .*, 4 numbers, got 3"):
        policy.predict_action_chunk(seen)


def test_an_energy_does_not_stand_on_a_flow_of_contexts_in_another_order():
    x = np.random.default_rng(0).normal(size=(40, 2))
    seen = {"z": x[:, 0], "a": x[:, 1]}
    first = Demonstrations.of(seen, x[:, :1], [20, 40], noisy=["z"])
    second = Demonstrations.of(dict(reversed(seen.items())), x[:, :1], [20, 40], noisy=["z"])
    config, options = PolicyConfig(1, 2, 1, 3, 0, 0), {"steps": 1, "batch_size": 8, "units": "none"}
    flow = fit_policy(first, FLOW, "density", config, **options)
    with pytest.raises(InputError, match="observations in the same order, z, a; give the same"):
        fit_policy(second, {"name": "on-proposal"}, RANKED, config, on=flow, **options)


# ---- chunks that are counted from where one is


def walks(unit: float = 1.0, **options) -> Demonstrations:
    """Episodes of a pen that goes on from wherever it is: action and observation are places."""
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(6, 20, 2)).cumsum(1)
    place = unit * (50 * rng.normal(size=(6, 1, 2)) + np.concatenate([0 * steps[:, :1], steps[:, :-1]], 1))
    action = unit * rng.normal(size=(6, 20, 2)) + place
    seen = {"pen": place.reshape(-1, 2), "other": rng.normal(size=120)}
    return Demonstrations.of(seen, action.reshape(-1, 2), 20 * np.arange(1, 7), **options)


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
def test_relative_chunks_are_the_differences_and_come_back(unit):
    shown = walks(unit, relative="pen")
    scaling, windows = Scaling.fit(shown, 4), shown.windows(2, 4)
    contexts, chunks = windows.contexts(), windows.chunks()
    scaled = scaling.scale_actions(chunks, contexts)
    assert float(scaled.abs().amax()) == pytest.approx(1, abs=1e-5)  # over all chunks, whatever their origin
    by_hand = (chunks - contexts["pen"][:, -1:] - scaling.middle["action"]) / scaling.half["action"]
    torch.testing.assert_close(scaled, by_hand)
    torch.testing.assert_close(scaling.to_actions(scaled, contexts), chunks, rtol=1e-4, atol=1e-4 * unit)
    torch.testing.assert_close(windows.dataset().x, scaled.flatten(1))
    assert Scaling.from_json(json.loads(json.dumps(scaling.as_json()))).relative == "pen"
    assert float(scaling.half["action"].max()) < float(Scaling.fit(walks(unit)).half["action"].max()) / 5
    with pytest.raises(ConfigError, match="contexts: must be given, as actions are relative to pen"):
        scaling.to_actions(scaled)


def test_a_relative_chunk_begins_where_one_is_and_its_rest_stays_where_it_was():
    scaling, model = (
        replace(SCALING, half={"state": torch.ones(1), "action": torch.tensor([2.0])}),
        Scripted(),
    )
    policy = Policy(model, replace(scaling, relative="state"), PolicyConfig(1, 4, 2, 3, 1, warm=1, freeze=1))
    first = policy.predict_action_chunk(torch.tensor([[[5.0]]]))
    assert first.flatten().tolist() == [245.0, 247.0, 249.0, 251.0], "5 + 2·(120 + step)"
    second = policy.predict_action_chunk(torch.tensor([[[8.0]]]))
    assert second[0, 0].item() == 8 + 2 * 220
    start, frozen = model.moved[1]
    assert frozen.tolist() == [[120.5]], "8 + 2·120.5 is the 249 that was planned"
    assert start[0, 0].tolist() == [120.5, 121.5, 121.5, 121.5]


def test_a_relative_policy_is_the_same_one_elsewhere_in_any_unit_and_when_it_is_read_back(tmp_path):
    found = []
    for unit in (1.0, 1000.0):
        shown = walks(unit, relative="pen")
        out = tmp_path / f"{unit:g}"
        policy = fit_policy(shown, "flow", "density", PolicyConfig(1, 4, 2, 1), steps=3, out=out)
        seen = {"pen": torch.full((2, 1, 2), 9.0 * unit), "other": torch.zeros(2, 1, 1)}
        chunk = policy.predict_action_chunk(seen)
        found.append(chunk / unit)
        again = load_policy(out)
        assert again.scaling.relative == "pen"
        torch.testing.assert_close(again.predict_action_chunk(seen), chunk)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("relative", "said"),
    [
        ("pan", "relative: unknown value .pan. .did you mean .pen."),
        ("other", r"as many numbers as an action has, 2, got \(1,\)"),
    ],
)
def test_actions_are_relative_to_a_place_that_is_seen(relative, said):
    with pytest.raises(ConfigError, match=said):
        walks(relative=relative)


def frozen_after(
    scaling: Scaling, first: np.ndarray, second: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """What was planned for the action after the next, and what the next chunk is made to begin with, as actions."""
    model = Scripted()
    policy = Policy(model, replace(scaling, relative="state"), PolicyConfig(1, 4, 2, 3, 1, warm=1, freeze=1))
    planned = policy.predict_action_chunk({"state": first})[0, 2]
    policy.predict_action_chunk({"state": second})
    frozen = model.moved[1][1].view(1, 1, 1)
    return planned, policy.scaling.to_actions(frozen, {"state": second})[0, 0]


def test_what_is_frozen_stays_though_positions_are_far_from_zero_or_their_array_is_used_again():
    shown = Demonstrations.of(1e7 + np.arange(4.0), 1e7 + np.arange(4.0) + [1, 2, 1, 3], relative="state")
    scaling = Scaling.fit(shown, 2)
    assert shown.actions.dtype == torch.float64
    planned, kept = frozen_after(scaling, np.array([[[1e7]]]), np.array([[[1e7 + 0.37]]]))
    assert planned.item() == pytest.approx(kept.item(), abs=1e-4, rel=0)
    joining = PolicyConfig(1, 4, 2, 3, 1, warm=1, freeze=1)
    policy = Policy(Scripted(), replace(SCALING, relative="state"), joining)
    buffer = np.array([[[5.0]]], dtype=np.float32)
    policy.predict_action_chunk(buffer)
    buffer += 1
    policy.predict_action_chunk(buffer)
    assert policy.model.moved[1][1].tolist() == [[121.0]]


def test_a_number_that_no_action_moves_is_not_recounted():
    place = np.stack([np.arange(20.0), np.full(20, 5.0)], 1)
    action = place + np.stack([np.sin(np.arange(20.0)), np.zeros(20)], 1)
    scaling = Scaling.fit(Demonstrations.of({"pen": place}, action, relative="pen"), 4)
    u = torch.zeros(1, 4, 2)
    moved = scaling.recounted(u, torch.tensor([[1.0, 5.0]]).double(), {"pen": torch.tensor([[[1.5, 5.01]]])})
    assert moved[0, 0, 1] == 0
    assert moved[0, 0, 0] == pytest.approx(-0.5 / float(scaling.half["action"][0]), rel=1e-5)


def test_differences_are_kept_as_fine_as_they_were_shown():
    rng = np.random.default_rng(0)
    place = np.repeat(np.arange(6) * 2e5, 20)[:, None] + 0.01 * rng.normal(size=(120, 1)).cumsum(0)
    step = 0.01 * rng.normal(size=(120, 1))
    windows = Demonstrations.of({"pen": place}, place + step, relative="pen").windows(1, 1)
    got = (windows.chunks()[:, 0] - windows.contexts()["pen"][:, 0]).double()
    torch.testing.assert_close(got, torch.from_numpy(step), atol=1e-9, rtol=0)


@pytest.mark.parametrize("relative", ["nope", "wide"])
def test_a_policys_file_is_relative_to_what_it_has(relative):
    kept = Scaling.fit(Demonstrations.of({"wide": np.random.rand(9, 3)}, np.arange(9.0))).as_json()
    with pytest.raises(ConfigError, match=r"scaling\.relative: must be an observation of as many numbers"):
        Scaling.from_json(kept | {"relative": relative})


def test_gradients_that_are_too_few_for_a_move_are_refused_before_a_training():
    chain = {"name": "hmc", "step_size": 1e-3, "leapfrog": 50}
    sampling = {"evaluations": 40, "t_low": 0.5}
    with pytest.raises(ConfigError, match="of 40 only 20 are the chain's, and one move of 'hmc' needs 50"):
        PolicyConfig(algorithm=4, kernel=chain, sampling=sampling)
    assert PolicyConfig(algorithm=4, kernel=chain, sampling=sampling | {"evaluations": 100}).algorithm == 4


@pytest.mark.parametrize(
    ("energy", "method"),
    [
        ({"name": "interpolant", "width": 8, "layers": 2, "steps": 16, "scored": 5}, "density"),
        ({"name": "diffusion", "width": 8, "layers": 2, "steps": 16, "scored": 5}, "density"),
        (
            "conditional",
            {"name": "ranking-nce", "proposal": {"name": "interpolant", "steps": 16, "scored": 5}},
        ),
    ],
)
def test_a_policy_solves_its_ode_in_as_many_steps_as_it_is_told(tmp_path, energy, method, monkeypatch):
    config = {"context": 2, "prediction": 4, "execute": 2, "candidates": 2, "steps": 0}
    fit_policy(shown(), energy, method, config, out=tmp_path / "run", steps=4, batch_size=16, seed=0)
    seen, counted = {"place": torch.zeros(3, 2, 1), "goal": torch.ones(3, 2, 1)}, []
    own = ms.proposals.ode.heun_step
    monkeypatch.setattr(ms.proposals.ode, "heun_step", lambda *args: counted.append(1) or own(*args))
    chunks = {}
    for ode in (None, 16, 64, 3):
        counted.clear()
        policy = load_policy(tmp_path / "run", ode=ode, candidates=1, warm=0)
        chunks[ode] = policy.predict_action_chunk(seen)
        assert len(counted) == (16 if ode is None else ode)
    assert torch.equal(chunks[None], chunks[16])
    off = {ode: float((chunks[ode] - chunks[64]).abs().max()) for ode in (16, 3)}
    assert 0 < off[16] < off[3], "Heun's error falls with the step"


def test_an_energy_stands_on_a_flow_as_it_was_trained_however_that_acts(tmp_path):
    flow = {"name": "interpolant", "width": 8, "layers": 2, "steps": 16, "scored": 5}
    how = {"steps": 2, "batch_size": 16, "units": "none", "seed": 0}
    fit_policy(shown(), flow, "density", PolicyConfig(2, 4, 2, 2, 0), out=tmp_path / "flow", **how)
    below = load_policy(tmp_path / "flow", ode=2)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    acting = PolicyConfig(2, 4, 2, 2, 0, rank="network")
    made = fit_policy(shown(), energy, "ranking-nce", acting, on=below, out=tmp_path / "energy", **how)
    for policy in (made, load_policy(tmp_path / "energy")):
        assert policy.model.model.players["proposal"].steps == 16


def test_a_model_without_an_ode_has_no_steps_of_one(tmp_path):
    config = {"context": 2, "prediction": 4, "execute": 2, "candidates": 1, "steps": 0}
    fit_policy(shown(), "regression", "density", config, out=tmp_path / "run", steps=2, batch_size=16, seed=0)
    with pytest.raises(ConfigError, match=r"policy\.ode"):
        load_policy(tmp_path / "run", ode=4)
    with pytest.raises(ConfigError, match=r"policy\.ode"):
        PolicyConfig(ode=0)


def test_windows_are_not_changed_when_a_policy_is_read(tmp_path):
    steps = np.linspace(0, 1, 40)
    shown = Demonstrations.of(np.stack([steps, -steps], 1), steps, [20, 40])
    fit_policy(shown, "flow", "density", PolicyConfig(2, 4, 2), steps=2, out=tmp_path / "run")
    for name, value in (("context", 5), ("prediction", 6)):
        with pytest.raises(InputError, match=rf"policy\.{name}: must be \d, as trained, got {value}"):
            load_policy(tmp_path / "run", **{name: value})
    assert load_policy(tmp_path / "run", context=2).config.context == 2


def test_the_first_windows_repeat_the_first_observation():
    _, model = acting(3, context=3, execute=1, warm=0)
    assert [c[0].tolist() for c in model.seen] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]


def test_every_chunk_has_random_numbers_of_its_own():
    class Seeded(Scripted):
        def draw(self, contexts, n, seed):
            seeds.append(seed)
            return super().draw(contexts, n, seed)

    seeds = []
    policy = Policy(Seeded(), SCALING, PolicyConfig(1, 4, 1, 1))
    for _ in range(2):
        for _ in range(3):
            policy.select_action(torch.zeros(2, 1))
        policy.reset()
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == seeds[:3], "those of the same seed, once all is forgotten"


def test_chunks_of_a_scene_are_all_draws_in_the_units_of_the_actions():
    scaling = replace(SCALING, half={"state": torch.ones(1), "action": torch.tensor([2.0])}, relative="state")
    policy, model = Policy(Scripted(), scaling, PolicyConfig(2, 4, 2, 1)), Scripted()
    policy.model = model
    chunks = first_chunks(policy, {"state": torch.tensor([[5.0], [6.0]])}, n=3)
    drawn = 100 + 10 * np.arange(3)[:, None] + np.arange(4)
    assert np.array_equal(chunks[..., 0], np.array([5, 6])[:, None, None] + 2 * drawn)
    assert [c.tolist() for c in model.seen] == [[[5, 5], [6, 6]]], "a window of where they stand"


def test_covariance_is_that_of_draws_about_their_own_means():
    x = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    each = torch.stack([draws.double().T.cov() for draws in x])
    torch.testing.assert_close(pooled_covariance(x), each.mean(0), rtol=1e-5, atol=1e-5)


def test_a_kernel_of_ones_own_moves_chunks_in_the_units_of_training():
    per = [torch.full((D,), value).double() for value in (3.0, 0.25, 4.0)]
    there = RunActions(run_of(Smooth(), Coordinates(Units("scale", (D,), *per))), kernel=ULA(1e-5))
    here = RunActions(run_of(Smooth()), kernel=ULA(1e-5))
    u = here.draw(CONTEXTS, 5, 0)
    moved = here.move(u, CONTEXTS, 4, 0)
    assert (moved - u).abs().max() > 1e-3
    torch.testing.assert_close(there.move(4 * u + 3, CONTEXTS, 4, 0), 4 * moved + 3, atol=1e-4, rtol=1e-5)


def test_an_energy_with_a_time_is_asked_where_the_data_are():
    class Timed(Smooth):
        time = True

        def forward(self, x, given, t=None):
            times.append(t)
            return super().forward(x, given)

    times, run = [], run_of(Timed())
    model = RunActions(run).settle(CONTEXTS)
    x = model.draw(CONTEXTS, 2, 0)
    model.energy(x, CONTEXTS)
    model.move(x, CONTEXTS, 2, 0, torch.zeros(2, 1))
    RunActions(run, kernel=ULA(1e-5)).move(x, CONTEXTS, 2, 0)
    known = [torch.as_tensor(t) for t in times if t is not None]
    assert known
    assert all(bool((t == 1).all()) for t in known)


def test_one_candidate_at_least_is_a_new_draw():
    _, model = acting(3, warm=3)
    assert model.moved[1][0][0].tolist() == [[122, 123, 123, 123]] * 2 + [[220, 221, 222, 223]]


def test_steps_of_acting_leave_densities_as_they_were():
    config = PolicyConfig(2, 4, 2, 1, 0, 0)
    policy = fit_policy(shown(), {**FLOW, "scored": 3}, "density", config, steps=1, batch_size=8)
    flows = [made.model.model.energy.proposal for made in (policy, policy.acting(ode=7))]
    assert [(flow.steps, flow.scored) for flow in flows] == [(4, 3), (7, 3)]


def test_noise_falls_until_half_of_a_training_and_is_the_last_beside_a_flow_that_stays():
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, config = Demonstrations.of(x, x[:, :1], [20, 40]), PolicyConfig(1, 2, 1, 3, 0, 0)
    options = {"steps": 1, "batch_size": 8, "units": "none", "noise": (0.2, 0.1)}
    flow = fit_policy(shown, FLOW, "density", config, **options)
    energy = {"name": "on-proposal", "width": 8, "depth": 2}
    above = fit_policy(shown, energy, RANKED, config, on=flow, **options)
    for policy, first in ((flow, 0.2), (above, 0.1)):
        trainer = policy.model.run.config["trainer"]
        noise = [trainer[name] for name in ("data_noise", "data_noise_final", "data_noise_over")]
        assert noise == [first, 0.1, 0.5]


def test_the_step_of_chains_is_the_middle_of_those_of_all_contexts(monkeypatch):
    found = SimpleNamespace(step_size=torch.tensor([0.1, 0.3, 9.0]))
    monkeypatch.setattr(actions, "warm_up_each", lambda *_: found)
    assert RunActions(run_of(Smooth())).settle(torch.zeros(3, 1)).step_size == pytest.approx(0.3)


def test_what_differs_from_the_flow_beneath_is_named():
    """Windows of other lengths were told as events of the proposal, of shapes that nobody had given."""
    x = np.random.default_rng(0).normal(size=(40, 2))
    shown, options = Demonstrations.of({"at": x}, x, [20, 40]), {"steps": 1, "batch_size": 8, "units": "none"}
    flow = fit_policy(shown, FLOW, "density", PolicyConfig(1, 4, 2, 1), **options)
    for config, said in (
        ({"prediction": 2}, r"policy\.prediction: must be 4, as of the flow, got 2"),
        (PolicyConfig(2, 4, 2), r"policy\.context: must be 1, as of the flow, got 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            fit_policy(shown, on=flow, config=config, **options)
    for seen, done, got in (
        ({"there": x}, x, r"\{'there': \(2,\), 'action': \(2,\)\}"),
        ({"at": x, "goal": x[:, :1]}, x, r"\{'at': \(2,\), 'goal': \(1,\), 'action': \(2,\)\}"),
        ({"at": x}, x[:, :1], r"\{'at': \(2,\), 'action': \(1,\)\}"),
    ):
        rule = (
            r"demonstrations: must be of the shapes of the flow's, \{'at': \(2,\), 'action': \(2,\)\}, got "
        )
        with pytest.raises(ConfigError, match=rule + got):
            fit_policy(Demonstrations.of(seen, done, [20, 40]), on=flow, **options)


def test_what_was_left_out_does_not_stand_against_lerobots_names():
    policy = Policy(Scripted(), SCALING, PolicyConfig(1, 4, 2, 3, 0, 0))
    shown = Seen({"observation.state": torch.zeros(2, 1), "task": "not an array of numbers"})
    assert policy.select_action(shown).shape == (2, 1)
    with pytest.raises(InputError, match=r"must have state, .* got nothing; left out: task \(not an array"):
        policy.select_action(Seen({"task": "not an array of numbers"}))
