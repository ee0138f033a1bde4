"""Reading a run back: its modules, its method and its chains, as they were at its newest good checkpoint.

`export_run` writes one for that, without what a training would go on from.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from metastable.core.batch import Batch, Beside
from metastable.core.configure import build_tagged
from metastable.core.errors import ConfigError, InputError, require
from metastable.core.protocols import Counted, provides
from metastable.core.random import derive, generator
from metastable.core.seals import identity
from metastable.core.units import Coordinates
from metastable.data import Dataset
from metastable.energies.build import ENERGIES
from metastable.methods import Context, Method
from metastable.training.checkpoints import CheckpointStore, on_device
from metastable.training.engine import Engine
from metastable.training.players import averages_in
from metastable.training.records import line_of
from metastable.walkers.space import space_of

from .averages import averaged_players
from .chains import Chains
from .folder import (
    check_folder,
    read_config,
    read_history,
    reading,
    require_run_folder,
    seal_files,
    trainer_again,
    write_json,
)
from .resolve import built, power_of, reloaded, resolve_method
from .rows import as_seen, training_rows
from .run import Run


def read_run(
    folder: str | Path, energy: nn.Module | None = None, *, method: Method | None = None, device: str = "cpu"
) -> Run:
    """A run from its folder, without what it was found to be worth."""
    folder, device = require_run_folder(folder), str(Engine(device).device)  # one that is not there says so
    config = read_config(folder)
    with reading(folder / "config.json"):
        coordinates = Coordinates.from_json(config.get("coordinates"))
    method, context, state, averages = chains_of(folder, config, energy, method, device)
    history = read_history(folder)
    run = Run(
        energy=context.energy,
        players=dict(context.players),
        method=method.name,
        trained_with=method,
        history=history,
        seconds=history[-1].get("seconds", 0.0) if history else 0.0,
        walkers=method.current_walkers(context, state),
        log_partition=method.log_partition(context, state),
        config=config,
        folder=folder,
        power=power_of(method, context.step),
        kept=context.step,
        averages=dict(averages),
        ema=averaged_players(context.players, averages)["energy"] if averages else None,
    )
    return run.outward(coordinates)


@contextmanager
def export_run(run: Run, folder: str | Path) -> Iterator[Path]:
    """Write settings, log and weights of a conditional run into a new folder, which can be read and not resumed.

    Given is where more can be put; what was cut leaves nothing by the folder's name. Settings say whether the
    weights are averages, null where there are no others. Optimisers, others and draws in a pool are left out.
    """
    whole = Path(folder).expanduser().resolve()
    empty = not whole.exists() or (whole.is_dir() and not any(whole.iterdir()))
    require(empty, "folder", "a new or an empty one", str(whole))
    averages = True if run.unaveraged is not None else False if run.averages else run.config.get("exported")
    config = {**run.config, "run": identity(run.config), "exported": averages}
    folder = whole.with_name(f"{whole.name}.{os.getpid()}.partial")
    check_folder(whole, config, resume=False)
    folder.mkdir(parents=True)
    weights = {name: player.state_dict() for name, player in (run.inside or run.players).items()}
    store = CheckpointStore(folder / "checkpoints", run=config["run"])
    store.save(run.steps if run.kept is None else run.kept, weights, {"method": {}})
    (folder / "metrics.jsonl").write_text("".join(map(line_of, run.history)))
    write_json(folder / "config.json", config)
    seal_files(folder, config, "config.json", "metrics.jsonl")
    try:
        yield folder
        folder.replace(whole)
    except BaseException:
        shutil.rmtree(folder)
        raise


def load_chains(run: Run, train: Dataset) -> Chains:
    """The chains of a run at its newest good checkpoint, as they were in training.

    Args:
        run: from its folder, by `load_run`.
        train: the rows that it was trained on.
    """
    assert run.folder is not None
    home = run._home
    device, trainer = str(home.device), trainer_again(run.config)
    own = run.config["energy"]["name"] == "custom"
    energy = run.energy if own else run.within().energy
    method, context, state, _ = chains_of(run.folder, run.config, energy, run.trained_with, device)
    units, seed = run.coordinates, run.config["seed"]
    rows = training_rows(train, method, Engine(device, trainer.precision), units, seed)
    seen = as_seen(rows, trainer.noise_at(0), units, seed, trainer.augment)
    noise = space_of(context.energy).noise_around(seen.x)
    if run.data_noise:
        rows = as_seen(rows, run.data_noise, units, seed)
    context = dataclasses.replace(context, data=rows.x, given=rows.given, noise=noise)
    return Chains(method, context, state)


def chains_of(
    folder: Path, config: dict[str, Any], energy: Any, method: Method | None, device: str
) -> Chains:
    """Method, modules and state at the newest good checkpoint, in a context without the run's data."""
    checkpoint = CheckpointStore(folder / "checkpoints", run=identity(config)).load()
    if checkpoint is None:
        raise InputError(f"run: {folder} holds no checkpoint")
    if energy is None:
        energy = _rebuilt_energy(config, folder)
    method = _rebuilt_method(config, folder) if method is None else method
    energy = cast(nn.Module, reloaded(energy, config, method))
    context = _reread(energy, method, config, checkpoint.weights, device)
    context.step = checkpoint.step
    state = method.load(on_device(checkpoint.state["method"], context.data.device))
    return Chains(method, context, state, averages_in(checkpoint.weights, context.players))


def _reread(
    energy: nn.Module, method: Method, config: dict[str, Any], weights: Mapping[str, Any], device: str
) -> Context:
    """Every module of a run with its weights, in a context whose data are not the run's, but of their shape."""
    dtype = next(iter(weights["energy"].values())).dtype
    rows = _probe(config, dtype)
    noise = space_of(energy).noise_around(rows.x)
    players = {
        "energy": energy,
        **method.companions(energy, method.takes(rows), noise, derive(config["seed"], "companions")),
    }
    for name, module in players.items():
        try:
            module.to(dtype=dtype).load_state_dict(dict(weights[name]))
        except RuntimeError as error:
            own, words = "energy=" if name == "energy" else "method=", " ".join(str(error).split())
            raise InputError(
                f"run: its {name!r} does not fit the module made for it; pass your own, load_run({own}…): {words}"
            ) from error
        module.to(device).eval()
    rng = generator(derive(config["seed"], "method"), torch.device(device))
    given = None if rows.given is None else rows.given.to(device)
    return Context(energy, players, rows.x.to(device), noise.to(device), rng, given=given)


def _method_settings(described: dict[str, Any]) -> dict[str, Any]:
    """Settings that a file can hold: without the empty ones, and without objects of the user's own (`<name>`)."""
    own = {k for k, v in described.items() if isinstance(v, str) and v.startswith("<")}
    return {k: v for k, v in described.items() if v is not None and k not in own}


def _rebuilt_method(config: dict[str, Any], folder: Path) -> Method:
    try:
        return resolve_method(_method_settings(config["method"]))
    except ConfigError as error:
        if not error.path.endswith(".name"):
            raise
        raise ConfigError(
            error.path.removesuffix(".name"),
            f"the run in {folder} was trained with one of your own; pass the method as it was, "
            f"load_run(folder, method=...): {error}",
        ) from error


def _rebuilt_energy(config: dict[str, Any], folder: Path) -> nn.Module:
    if config["energy"]["name"] == "custom":
        raise InputError(
            f"energy: the run in {folder} trained your own {config['energy']['class']}; pass an instance, "
            "load_run(folder, energy=...)"
        )
    settings = build_tagged(ENERGIES, config["energy"], "energy")
    if "classes" in config and provides(settings, Counted) and settings.classes is None:
        settings = dataclasses.replace(settings, classes=max(config["classes"], 2))
    return built(settings, _probe(config), config["seed"])


def _probe(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Batch:
    """A few rows of the shape of a run's data, with labels or contexts where the run had those."""
    rng = generator(0)
    x = torch.randn((8, *config["event_shape"]), generator=rng).to(dtype)
    if "classes" in config:
        labels = (config["classes"] - 1 - torch.arange(8)).clamp(min=0)
        return Batch(x, labels, Beside.LABELS)
    if "context_shape" in config:
        return Batch(x, torch.randn((8, *config["context_shape"]), generator=rng).to(dtype))
    return Batch(x)
