"""The models that are compared as policies, by name, at like numbers of parameters and of evaluations.

S. Singh, S. Tu, V. Sindhwani, *Revisiting energy based models as policies: ranking noise contrastive estimation and
interpolating energy models*, TMLR 2024, Section 7.1, Appendices B.3 and B.4, Tables 10 to 13.

| name | paper | learns | acts by |
|---|---|---|---|
| `r-nce` | R-NCE, Algorithm 1 | energy and proposal | Algorithm 2: the proposal's draws, then Langevin or HMC |
| `i-r-nce` | I-R-NCE, Algorithm 3 | energy with a time, and proposal | Algorithm 4, in three stages |
| `i-r-nce-2` | I-R-NCE (Alg. 2) | the same | Algorithm 2 at t = 1 |
| `ibc` | IBC | energy and proposal, which it leaves out of account | Algorithm 2 |
| `flow` | NF | field | its ODE |
| `diffusion` | Diffusion-EDM | denoiser | its ODE |
| `diffusion-phi` | Diffusion-EDM-φ | an energy whose gradient is the denoiser | its ODE, ranked by the energy |
| `cloning` | – | the mean action, by mean-squared error | that |
| `on-flow` | – | an energy that starts as a flow that stays | best of the flow's draws |
| `i-on-flow` | – | the same with a time | Algorithm 4 without its chain |
| `proposal` | – | the field beside an interpolating energy, alone | its ODE |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from metastable.core.batch import Rows
from metastable.core.configure import build_tagged
from metastable.core.errors import require, require_choice
from metastable.data.demonstrations import Scaling
from metastable.energies.build import ENERGIES
from metastable.methods import METHODS
from metastable.training.config import Adam, Schedule


@dataclass(frozen=True)
class Layout:
    """How a packed context is cut into tokens, and how many numbers an action has; see `Tokenizer`."""

    step: int
    past: tuple[tuple[int, int, int], ...] = ()
    tokens: tuple[tuple[int, int, int], ...] = ()
    pictures: tuple[int, int, int, int, int] | None = None
    near: tuple[int, int, int] | None = None


def layout_of(
    scaling: Scaling, context: int, sets: Mapping[str, int] | None = None, near: str = ""
) -> Layout:
    """The layout of contexts that `Scaling.pack` makes of `context` steps.

    Args:
        scaling: whose observations they are: each a token a step, a picture too.
        context: N_ctx.
        sets: observations that stay the same in an episode, with the numbers of one thing: they are one token for
            each thing, taken from the first step.
        near: the one of them whose things lie where actions are places, in their `space`; see `Nearness`.
    """
    for name in sets or {}:
        require_choice("sets", name, scaling.names)
    if near:
        require_choice("near", near, sets or {})
        apart = {
            *scaling.half[near].tolist(),
            *scaling.half["action"].tolist(),
            *scaling.middle[near].tolist(),
        }
        rule = "in the space of the actions (Demonstrations.of(…, space=…)), which are not relative"
        require(len(apart - {0.0}) == 1 and not scaling.relative, "near", rule, near)
    at, past, things, among = 0, [], [], None
    for name in scaling.names:
        if name in scaling.pictures:
            continue
        size = scaling.middle[name].numel()
        if sets and name in sets:
            one = sets[name]
            require(one > 0 and size % one == 0, f"sets.{name}", f"a number that divides its {size}", one)
            things.append((at, size // sets[name], sets[name]))
            among = things[-1] if name == near else among
        else:
            past.append((at, context, size))
        at += context * size
    actions = scaling.middle["action"].numel()
    seen = scaling.pictures_at(context) or None
    return Layout(actions, tuple(past), tuple(things), seen, among)  # pyright: ignore


@dataclass(frozen=True)
class Sizes:
    """How large the models of a task are, and how they are trained and sampled.

    Attributes:
        width: d_emb of transformer energies.
        layers: N_b of these.
        field_width: d_emb of the transformer fields that stand alone.
        field_layers: N_b of these.
        heads: of self-attention.
        reads: what the last layers see, see `TokenBody`.
        proposal: the field beside an energy: `concatsquash` or `film`.
        proposal_width: of its layers.
        proposal_layers: of them.
        encoder_owner: who trains the tokens that both share; empty where they share none.
        inherits: whether energies on a flow begin with those of its layers that fit: same width and heads, as many
            layers or fewer.
        negatives: K.
        times: m.
        interpolant: between noise and data, of all flows.
        alpha: α of the flow alone.
        proposal_alpha: α of the flow beside an energy.
        ode: Heun steps of models that stand alone, and times with a divergence.
        training_ode: the same of the proposal while it trains.
        turns: steps of the proposal and of the energy in an outer iteration.
        reuse: updates of an energy for each batch whose negatives are drawn, `pool`, rows that are kept, and
            `draw_rows`, those drawn at once, see `Ranked`; not in the paper, where each solves the proposal's ODE.
        chain: kernel of Algorithm 2 and of the last stage of Algorithm 4, in units of the scaled actions. A step of
            Langevin's has to lie below 2σ² where a density is σ wide, and σ_pert makes chunks no narrower than
            0.005: the paper's 10⁻⁴, whose units are not said, would be 4σ², and chains would leave.
        evaluations: gradients of an energy that an action may cost.
        t_low: t̲ of Algorithm 4.
        eta: η of its SDE.
        anneal: what η is multiplied with at the end of its last stage.
        rates: learning rates of energies, of proposals beside them, and of models that stand alone.
        weight_decay: of all of them.
        warmup: updates in which rates rise, each player's own: of energies, of proposals beside them, and of models
            that stand alone; one number is that of all three.
        batch_size: rows of an update.
        energy_rows: of which an energy beside a proposal learns from so many.
    """

    width: int = 64
    layers: int = 5
    field_width: int = 80
    field_layers: int = 4
    heads: int = 4
    reads: str = "path"
    proposal: str = "concatsquash"
    proposal_width: int = 128
    proposal_layers: int = 5
    encoder_owner: str = ""
    inherits: bool = False
    negatives: int = 63
    times: int = 5
    interpolant: str = "trigonometric"
    alpha: float = 2.0
    proposal_alpha: float = 2.0
    ode: tuple[int, int] = (375, 64)
    training_ode: tuple[int, int] = (48, 17)
    turns: tuple[int, int] = (2, 2)
    reuse: int = 50
    pool: int = 4096
    draw_rows: int | None = None
    chain: Mapping[str, Any] = field(default_factory=lambda: {"name": "ula", "step_size": 1e-5})
    evaluations: int = 750
    t_low: float = 0.5
    eta: float = 1e-3
    anneal: float = 1.0
    rates: tuple[float, float, float] = (5e-4, 1e-3, 1e-3)
    weight_decay: float = 1e-4
    warmup: int | tuple[int, int, int] = (5000, 0, 5000)
    batch_size: int = 128
    energy_rows: int | None = None


PATHS = Sizes()
"""Path planning, Tables 10 and 11: at most about 500,000 parameters."""
PUSH_T = Sizes(
    width=128,
    layers=8,
    field_width=128,
    field_layers=8,
    reads="future",
    proposal="film",
    proposal_width=64,
    proposal_layers=4,
    encoder_owner="proposal",
    negatives=31,
    reuse=4,
    pool=8192,
    draw_rows=128,
    proposal_alpha=2.5,
    ode=(512, 48),
    turns=(4, 2),
    chain={"name": "hmc", "step_size": 1e-3, "leapfrog": 50},
    evaluations=1000,
    rates=(2e-4, 1e-3, 2e-4),
    weight_decay=1e-6,
    warmup=(2 * 1500, 4 * 1500, 5000),
    energy_rows=64,
)
"""Push-T, Tables 12 and 13: at most about 3.3 million parameters; I-R-NCE's warm-up is 1,500 main loops."""


@dataclass(frozen=True)
class PolicyModel:
    """What `fit_policy` needs of a model.

    Attributes:
        energy: a table, as `fit` takes it.
        method: likewise.
        acting: settings of `PolicyConfig` by which it acts as in the paper.
        options: of the trainer.
    """

    energy: dict[str, Any]
    method: dict[str, Any]
    acting: dict[str, Any]
    options: dict[str, Any]


def _tokens(layout: Layout, width: int, layers: int, sizes: Sizes) -> dict[str, Any]:
    return {**asdict(layout), "width": width, "layers": layers, "heads": sizes.heads, "reads": sizes.reads}


def _field(layout: Layout, sizes: Sizes) -> dict[str, Any]:
    """The transformer of a model that stands alone."""
    return {"name": "transformer", **_tokens(layout, sizes.field_width, sizes.field_layers, sizes)}


def _proposal(layout: Layout, sizes: Sizes, timed: bool) -> dict[str, Any]:
    size = {"width": sizes.proposal_width, "layers": sizes.proposal_layers}
    named = {"name": sizes.proposal, "log_time": timed, **size}
    if sizes.proposal == "film":
        named |= {"step": layout.step}
        if not sizes.encoder_owner:
            named |= {"past": layout.past, "tokens": layout.tokens, "pictures": layout.pictures}
    steps, scored = sizes.training_ode
    return {
        "name": "interpolant",
        "field": named,
        "interpolant": sizes.interpolant,
        "alpha": sizes.proposal_alpha,
        "steps": steps,
        "scored": scored,
    }


def _ranked(method: str, algorithm: int, layout: Layout, sizes: Sizes) -> PolicyModel:
    timed = method == "interpolating-nce"
    samp, rnce = sizes.turns
    energy = {"name": "transformer", "time": timed, **_tokens(layout, sizes.width, sizes.layers, sizes)}
    learned: dict[str, Any] = {
        "name": method,
        "negatives_per_datum": sizes.negatives,
        "proposal": _proposal(layout, sizes, timed),
        "proposal_steps": samp,
        "energy_steps": rnce,
        "encoder_owner": sizes.encoder_owner,
        "energy_rows": sizes.energy_rows,
        "reuse": sizes.reuse,
        "pool": sizes.pool,
        "draw_rows": sizes.draw_rows if sizes.reuse > 1 else None,
    }
    if timed:
        learned |= {"times": sizes.times, "alpha": sizes.proposal_alpha}
    moves = sizes.evaluations // sizes.chain.get("leapfrog", 1)
    acting: dict[str, Any] = {"algorithm": 2, "kernel": dict(sizes.chain), "steps": moves, "warm": 0}
    if algorithm == 4:
        stages = {name: vars(sizes)[name] for name in ("t_low", "eta", "evaluations", "anneal")}
        acting |= {"algorithm": 4, "steps": 0, "sampling": stages}
    rates = {"optimiser": Adam(sizes.rates[0], weight_decay=sizes.weight_decay)}
    own: dict[str, Any] = {
        "optimisers": {"proposal": Adam(sizes.rates[1], weight_decay=sizes.weight_decay)},
        "schedules": {"proposal": _schedule(sizes, 1)},
    }
    return PolicyModel(energy, learned, acting, rates | own | _common(sizes, 0))


def _alone(energy: dict[str, Any], sizes: Sizes, candidates: int | None = None) -> PolicyModel:
    own = {} if candidates is None else {"candidates": candidates}
    acting: dict[str, Any] = {"steps": 0, "warm": 0} | own
    rates = {"optimiser": Adam(sizes.rates[2], weight_decay=sizes.weight_decay)}
    return PolicyModel(energy, {"name": "density"}, acting, rates | _common(sizes, 2))


def _common(sizes: Sizes, player: int) -> dict[str, Any]:
    return {"schedule": _schedule(sizes, player), "batch_size": sizes.batch_size, "units": "none"}


def _schedule(sizes: Sizes, player: int) -> Schedule:
    early = sizes.warmup
    return Schedule("cosine", warmup=early if isinstance(early, int) else early[player])


def _flow(layout: Layout, sizes: Sizes) -> PolicyModel:
    steps, scored = sizes.ode
    own = {"field": _field(layout, sizes), "interpolant": sizes.interpolant, "alpha": sizes.alpha}
    own |= {"steps": steps, "scored": scored}
    return _alone({"name": "interpolant", **own}, sizes)


def _proposal_alone(layout: Layout, sizes: Sizes) -> PolicyModel:
    """What is smaller than `flow`, for an energy to stand on."""
    table = _proposal(layout, replace(sizes, encoder_owner="", training_ode=sizes.ode), True)
    made = _alone(table, sizes)
    rates = {"optimiser": Adam(sizes.rates[1], weight_decay=sizes.weight_decay)}
    return replace(made, options={**made.options, **rates})


def _diffusion(name: str, layout: Layout, sizes: Sizes) -> PolicyModel:
    steps, scored = sizes.ode
    return _alone({"name": name, "network": _field(layout, sizes), "steps": steps, "scored": scored}, sizes)


def _cloning(layout: Layout, sizes: Sizes) -> PolicyModel:
    return _alone({"name": "regression", "network": _field(layout, sizes)}, sizes, candidates=1)


def _on_flow(method: str, layout: Layout, sizes: Sizes) -> PolicyModel:
    """A proposal that is learned first and stays, whose draws then serve many updates."""
    timed = method == "interpolating-nce"
    made = _ranked(method, 4 if timed else 2, layout, replace(sizes, encoder_owner=""))
    energy = {**made.energy, "on_proposal": True, "inherits": sizes.inherits}
    own = {**made.method, "train_proposal": False, "pretrain": 10_000}
    acting: dict[str, Any] = {"steps": 0, "warm": 0, "rank": "network"}
    if timed:
        stages = {name: made.acting["sampling"][name] for name in ("t_low", "evaluations")}
        acting |= {"algorithm": 4, "sampling": stages}
    return PolicyModel(energy, own, acting, made.options)


MODELS: dict[str, Callable[[Layout, Sizes], PolicyModel]] = {
    "r-nce": lambda layout, sizes: _ranked("ranking-nce", 2, layout, sizes),
    "i-r-nce": lambda layout, sizes: _ranked("interpolating-nce", 4, layout, sizes),
    "i-r-nce-2": lambda layout, sizes: _ranked("interpolating-nce", 2, layout, sizes),
    "ibc": lambda layout, sizes: _ranked("ibc", 2, layout, sizes),
    "flow": _flow,
    "diffusion": lambda layout, sizes: _diffusion("diffusion", layout, sizes),
    "diffusion-phi": lambda layout, sizes: _diffusion("diffusion-phi", layout, sizes),
    "cloning": _cloning,
    "on-flow": lambda layout, sizes: _on_flow("ranking-nce", layout, sizes),
    "i-on-flow": lambda layout, sizes: _on_flow("interpolating-nce", layout, sizes),
    "proposal": _proposal_alone,
}


def policy_model(name: str, layout: Layout, sizes: Sizes = PATHS) -> PolicyModel:
    """The model of this name: energy, method, how it acts, and how it is trained.

    >>> made = policy_model("r-nce", Layout(2, past=((0, 3, 2),), tokens=((6, 1, 2), (12, 10, 3))))
    >>> made.method["name"], made.energy["tokens"], made.acting["steps"]
    ('ranking-nce', ((6, 1, 2), (12, 10, 3)), 750)
    """
    require_choice("model", name, MODELS)
    return MODELS[name](layout, sizes)


def players_of(model: PolicyModel, data: Rows, seed: int = 0) -> dict[str, nn.Module]:
    """The modules that a model trains on data like these."""
    energy = build_tagged(ENERGIES, model.energy, "energy").build(data, seed)
    method = build_tagged(METHODS, model.method, "method")
    return {"energy": energy, **method.companions(energy, data, None, seed)}


def count_parameters(players: Mapping[str, nn.Module]) -> int:
    """Numbers that training moves, each once: what players share is counted with its owner."""
    return sum(p.numel() for player in players.values() for p in player.parameters() if p.requires_grad)
