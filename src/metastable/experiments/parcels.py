"""A training in a few small files, so that it can go on where nothing of it is left.

A checkpoint of pictures is large: ten thousand chains of 3 × 32 × 32 numbers are 123 MB. A parcel holds the newest
one with its log in files of at most `MOST` bytes. Two things in it are not as they were. Chains without weights
come back with 256 values each between their own least and greatest, a quarter of the bytes, which moves a pixel by
less than the noise of one Langevin step. Adam's first moment is left out where its decay is 0: the next gradient
is all of it. Everything else is exact. Walkers that carry weights are kept as they are, all 123 MB, unless they may
be `rounded`: what weights refer to are the energies where the walkers stood, and after a move of a 510th of their
range weights of a sharp density would be wrong.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from metastable.core.errors import InputError
from metastable.core.seals import SEALS
from metastable.runs.folder import read_config
from metastable.training.checkpoints import CheckpointStore
from metastable.training.packing import pack, unpack

MOST = 15 * 2**20
"""Bytes of one file."""
LARGE = 2**20
"""Chains of more numbers than this are kept as bytes, unless they carry weights."""
BESIDE = ("config.json", "metrics.jsonl", SEALS)
"""Files of a run that go with its checkpoint."""
FILE, ABOUT = "file/", "parcel.json"


def coded(x: Tensor) -> dict[str, Tensor]:
    """Rows as bytes between the least and the greatest value of each, `(N, …)`, and those, `(N, 1)`."""
    flat = x.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    codes = ((flat - low) * (255 / (high - low).clamp(min=1e-12))).round().byte()
    return {"codes": codes.view(x.shape), "low": low, "high": high}


def decoded(parts: dict[str, Tensor]) -> Tensor:
    """The rows, off by at most a 510th of their range.

    >>> x = torch.tensor([[-1.0, 0.0, 1.0], [3.0, 3.0, 3.0]])
    >>> (decoded(coded(x)) - x).abs().max() <= 2 / 510 + 1e-6
    tensor(True)
    """
    codes, low, high = parts["codes"], parts["low"], parts["high"]
    return torch.lerp(low, high, codes.flatten(1).float() / 255).view(codes.shape)


def parcels_of(folder: Path, name: str) -> dict[int, list[Path]]:
    """Files of each parcel in order, by its number, the newest first; one without a number is the oldest."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{name}.parcel-*")):
        *number, _ = path.name.removeprefix(f"{name}.parcel-").split("-")
        found.setdefault(int(number[0]) if number else 0, []).append(path)
    return dict(sorted(found.items(), reverse=True))


def park(training: Path, folder: Path, name: str, rounded: bool = False) -> list[Path]:
    """Put the newest checkpoint of the run in `training` into files in `folder`, where there is one.

    Walkers that carry weights are `rounded`, too, where that is asked for.

    Older parcels go once the new one is whole, so that a command that is killed here leaves one of them.
    """
    checkpoint = CheckpointStore(training / "checkpoints").load()
    if checkpoint is None:
        return []
    tensors, skeleton = pack({"weights": checkpoint.weights, "state": checkpoint.state})
    kept: dict[str, Tensor] = {}
    weighted = {parent(key) for key in tensors if key.endswith("/log_weight") and not rounded}
    for key, value in tensors.items():
        chains = key.startswith("state/method/") and parent(key) not in weighted
        if chains and value.dtype == torch.float32 and value.numel() > LARGE:
            kept |= {f"{key}|{part}": made for part, made in coded(value).items()}
        elif not (key.endswith("/exp_avg") and first_decay(checkpoint.state) == 0):
            kept[key] = value
    about = {"step": checkpoint.step, "log": checkpoint.log, "tree": skeleton, "names": list(tensors)}
    texts = {ABOUT: json.dumps(about).encode()}
    texts |= {one: (training / one).read_bytes() for one in BESIDE if (training / one).is_file()}
    kept |= {
        f"{FILE}{one}": torch.frombuffer(bytearray(text), dtype=torch.uint8) for one, text in texts.items()
    }
    content = tensors_to_bytes(kept)
    folder.mkdir(parents=True, exist_ok=True)
    older = parcels_of(folder, name)
    for place, start in enumerate(range(0, len(content), MOST)):
        path = folder / f"{name}.parcel-{max(older, default=0) + 1:04d}-{place:02d}"
        path.write_bytes(content[start : start + MOST])
    for old in chain.from_iterable(older.values()):
        old.unlink()
    return next(iter(parcels_of(folder, name).values()))


def parent(key: str) -> str:
    """Where in the tree a tensor's part lies."""
    return key.rpartition("/")[0]


def first_decay(state: Any) -> float:
    """β₁ of the optimisers of a checkpoint, the largest; 1 where one is no Adam."""
    groups = [group for one in state["optimisers"].values() for group in one["param_groups"]]
    return max(float(group.get("betas", (1.0, 0.0))[0]) for group in groups)


def unpark(training: Path, folder: Path, name: str) -> bool:
    """Make the run's folder from a parcel, where there is one and no checkpoint is there; whether it was made."""
    parcels = parcels_of(folder, name)
    if not parcels or CheckpointStore(training / "checkpoints").steps():
        return False
    kept, texts, about = opened(list(parcels.values()))
    tensors = {key: restored(kept, key) for key in about["names"]}
    tree = unpack(tensors, about["tree"])
    training.mkdir(parents=True, exist_ok=True)
    for one, text in texts.items():
        (training / one).write_bytes(text.numpy().tobytes())
    store = CheckpointStore(training / "checkpoints", run=str(read_config(training)["run"]))
    store.save(about["step"], tree["weights"], tree["state"], about["log"])
    return True


def restored(kept: dict[str, Tensor], key: str) -> Tensor:
    """A tensor of the checkpoint: as it was, from its bytes, or the zeros of a moment that was left out."""
    if key in kept:
        return kept[key]
    if f"{key}|codes" in kept:
        return decoded({part: kept[f"{key}|{part}"] for part in ("codes", "low", "high")})
    return torch.zeros_like(kept[f"{key}_sq"])


def opened(parcels: list[list[Path]]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Tensors, files and what is said about them, of the first parcel that is whole."""
    files, *others = parcels
    try:
        kept = tensors_from_bytes(b"".join(path.read_bytes() for path in files))
        texts = {key.removeprefix(FILE): kept.pop(key) for key in list(kept) if key.startswith(FILE)}
        return kept, texts, json.loads(texts.pop(ABOUT).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        if others:
            return opened(others)
        raise InputError(f"out: {files[0]} and those after it are no whole parcel ({error})") from error
