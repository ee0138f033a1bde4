"""What one chunk of actions costs: every model of `policies.models` at Push-T's sizes, for one robot and for many.

Eight executed steps at ten a second leave 800 ms for a chunk. Times do not depend on what the weights have learned:
every model is new, a single update makes it a run, and its policy then acts on random observations. On a GPU the
networks and settings are the paper's; on a CPU they are smaller, which the rows' names say, and the ratios between
models are what can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metastable.api import fit
from metastable.core.errors import require_choice
from metastable.core.random import generator
from metastable.data.demonstrations import Demonstrations, Scaling
from metastable.experiments.base import Row
from metastable.experiments.policy_arms import hurried, median_ms
from metastable.policies.actions import RunActions
from metastable.policies.models import PUSH_T, Sizes, layout_of, policy_model
from metastable.policies.policy import Policy, PolicyConfig

from .policy_training import training_rows
from .timing import machine, on_cores

SMALL = Sizes(
    width=32,
    layers=2,
    field_width=32,
    field_layers=2,
    reads="future",
    proposal="film",
    proposal_width=16,
    proposal_layers=2,
    encoder_owner="proposal",
    negatives=3,
    ode=(16, 5),
    training_ode=(4, 3),
    chain={"name": "hmc", "step_size": 1e-3, "leapfrog": 10},
    evaluations=40,
)
"""For a CPU: about a hundredth of the paper's work for a chunk."""
BAR = 400.0
"""Milliseconds that a chunk of I-R-NCE may cost on a GPU, at the paper's settings."""
TRAINING, COMPILED = "training", "compiled"
NAMES = ("i-r-nce", "i-r-nce-2", "r-nce", "flow", "diffusion", "diffusion-phi", "cloning", TRAINING, COMPILED)
"""Models of `policies.models`; `training_rows`; I-R-NCE with compiled gradients, on a GPU, which takes longest."""
BATCHES, EVALUATIONS = (1, 64), (1000, 750, 500, 250, 100, 50, 25, 10, 5)


def run(
    *,
    only: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    evaluations: Sequence[int] = EVALUATIONS,
    rounds: int = 3,
    cores: int | None = 2,
    sizes: Sizes | None = None,
    seed: int = 0,
) -> list[Row]:
    """Milliseconds of a chunk, by model and number of environments, and of I-R-NCE by gradients; updates a second.

    Args:
        only: of `NAMES`, all of them by default.
        batches: environments at once.
        evaluations: gradients of the energy that I-R-NCE may take; not on a CPU.
        rounds: timings of each, after one that is not counted; the median is taken.
        cores: CPUs to use.
        sizes: of the networks, with how they are sampled; by default the paper's on a GPU, smaller ones on a CPU.
        seed: of weights, observations and draws.
    """
    gpu = torch.cuda.is_available()
    sizes = sizes or (PUSH_T if gpu else SMALL)
    kind, rows = "paper" if sizes == PUSH_T else "small", []
    known = NAMES if gpu else tuple(name for name in NAMES if name != COMPILED)
    for name in only:
        require_choice("only", name, known)
    with on_cores(None if gpu else cores):
        for name in only or known:
            if name == TRAINING:
                rows += training_rows("cuda" if gpu else "cpu", rounds, seed)
                continue
            if name == COMPILED:
                rows.append(compiled(sizes, kind, rounds, seed))
                continue
            policy = new_policy(name, sizes, "cuda" if gpu else "cpu", seed)
            for B in batches:
                asked = ("<=", BAR) if (gpu, kind, name, B) == (True, "paper", "i-r-nce", 1) else (None, None)
                rows.append(
                    Row(f"ms_a_chunk/{name}/{kind}/batch={B}", milliseconds(policy, B, rounds, seed), *asked)
                )
            if name == "i-r-nce" and gpu:
                rows += [shorter(policy, count, rounds, seed) for count in evaluations]
    return [*rows, *machine()]


def shorter(policy: Policy, evaluations: int, rounds: int, seed: int) -> Row:
    """The same policy with fewer gradients for a chunk, and no more steps of the proposal's ODE than these."""
    made = policy.acting(**hurried(policy, evaluations))
    return Row(f"ms_a_chunk/i-r-nce/evaluations={evaluations}", milliseconds(made, 1, rounds, seed))


def compiled(sizes: Sizes, kind: str, rounds: int, seed: int) -> Row:
    """I-R-NCE on a GPU whose gradients a compiler makes."""
    policy = new_policy("i-r-nce", sizes, "cuda", seed)
    made = policy.acting(sampling={**policy.config.sampling, "engine": "compile"})
    return Row(f"ms_a_chunk/i-r-nce/{kind}/compiled", milliseconds(made, 1, rounds, seed))


def observed(B: int, seed: int) -> dict[str, torch.Tensor]:
    """Random observations of Push-T's shapes, `(B, 2, …)`."""
    rng = generator(seed)
    return {"agent": torch.rand(B, 2, 2, generator=rng), "block": torch.rand(B, 2, 16, generator=rng)}


def new_policy(name: str, sizes: Sizes, device: str, seed: int) -> Policy:
    """A policy of a model after one update on random numbers."""
    seen = {key: value[:, 0] for key, value in observed(64, seed).items()}
    shown = Demonstrations.of(
        seen, torch.rand(64, 2, generator=generator(seed + 1)), [32, 64], noisy=("agent",)
    )
    scaling, config = Scaling.fit(shown), PolicyConfig()
    model = policy_model(name, layout_of(scaling, config.context), sizes)
    options = {"steps": 1, "batch_size": 4, "units": "none", "engine": "eager", "device": device}
    run = fit(
        model.energy, shown.windows().dataset(scaling), model.method, seed=seed, evaluate=False, **options
    )
    return Policy(RunActions(run), scaling, config, seed).acting(**model.acting)


def milliseconds(policy: Policy, B: int, rounds: int, seed: int) -> float:
    """Of one chunk for each of B environments: the median of `rounds`, after some that prepare what is kept."""
    seen = observed(B, seed)
    policy.reset(seed)  # it may have seen another number of them
    # a chunk comes back to the CPU, so it is done
    return median_ms(lambda _: policy.predict_action_chunk(seen), rounds)
