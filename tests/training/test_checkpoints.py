"""A checkpoint comes back bit for bit, or is refused by name."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import each
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from metastable.core import CheckpointError, InputError
from metastable.training import checkpoints
from metastable.training.checkpoints import CheckpointStore, pack, unpack

FILES = ("weights.safetensors", "state.safetensors", "manifest.json")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
]


def raw(tensor: Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a, b) -> bool:
    """Equal in structure, in the type of every node and in every bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and raw(a) == raw(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        keys = len(a) == len(b) and all(same(k, m) for k, m in zip(a, b, strict=True))
        return keys and all(same(v, w) for v, w in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return a == b


def through_json(tree):
    """What a reader in another process would see."""
    tensors, skeleton = pack(tree)
    return unpack(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))


# --- codec --------------------------------------------------------------------------------------------


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], layout: str, content: bytes) -> Tensor:
    """A tensor whose bytes come from `content`, NaN payloads and all."""
    size = torch.empty((), dtype=dtype).element_size()
    count = math.prod(shape)
    data = bytearray((content * (count * size // max(len(content), 1) + 1))[: count * size])
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    x = flat.reshape(shape)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1)
    return x.expand(2, *x.shape) if layout == "expanded" else x


tensors = st.builds(
    tensor_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["plain", "transposed", "expanded"]),
    st.binary(min_size=1, max_size=40),
)
keys = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.floats(allow_nan=False),
    st.none(),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_any_tree_comes_back_bit_for_bit(tree):
    assert same(through_json(tree), tree)


@settings(max_examples=40, deadline=None)
@given(trees)
def test_any_tree_survives_the_disk(tmp_path_factory, tree):
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    store.save(1, {}, tree)
    assert same(store.load(1).state, tree)


def test_the_comparison_can_fail():
    x = torch.tensor([0.0, 1.0])
    assert not same(x, torch.tensor([-0.0, 1.0]))
    assert not same(x, x.double())
    assert not same({0: x}, {"0": x})
    assert not same([1], (1,))
    assert not same(1, True)
    assert not same(math.nan, -math.nan)


@pytest.mark.parametrize("dtype", DTYPES)
@each("shape", [(), (3,), (0,), (2, 0, 3), (2, 3)])
def test_every_dtype_and_shape(dtype, shape):
    x = tensor_of(dtype, shape, "plain", b"\x01\x80\xff\x7f\x00\xc0")
    assert same(through_json({"x": x}), {"x": x})


def test_views_that_share_memory():
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "base": base,
        "same": base,
        "row": base[1],
        "column": base[:, 1],
        "t": base.t(),
        "part": base[1:, ::2],
    }
    packed, skeleton = pack(tree)
    base.zero_()  # the copy is a snapshot
    assert unpack(packed, skeleton)["same"].sum() == 66
    assert len({x.data_ptr() for x in packed.values()}) == len(tree)
    assert all(x.is_contiguous() for x in packed.values())


def test_lazy_conjugates_and_negatives():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert through_json(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert through_json(z.conj().imag).tolist() == [-2.0, 4.0]


def test_names_that_read_the_same_stay_apart():
    tree = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4)}
    tree |= {
        "__metadata__": torch.tensor(5),
        "": torch.tensor(6),
        "é": torch.tensor(7),
        "\\xe9": torch.tensor(8),
    }
    assert same(through_json(tree), tree)


def test_optimiser_state_resumes_exactly():
    def optimiser(model):
        return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.999))

    def step(model, opt):
        opt.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        opt.step()

    model = torch.nn.Linear(3, 2)
    opt = optimiser(model)
    step(model, opt)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(through_json(model.state_dict()))
    twin_opt = optimiser(twin)
    twin_opt.load_state_dict(through_json(opt.state_dict()))
    step(model, opt)
    step(twin, twin_opt)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


def test_random_state_goes_on():
    rng = torch.Generator().manual_seed(5)
    torch.rand(3, generator=rng)
    twin = torch.Generator()
    twin.set_state(through_json(rng.get_state()))
    assert torch.equal(torch.rand(5, generator=rng), torch.rand(5, generator=twin))


def test_ordered_dicts_become_dicts():
    assert same(through_json(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


class Pair(NamedTuple):
    x: int


@each(
    "bad, kind",
    [({1, 2}, "set"), (np.zeros(2), "ndarray"), (Pair(1), "Pair"), (b"x", "bytes"), (object(), "object")],
)
def test_other_types_are_refused_by_place(bad, kind):
    with pytest.raises(CheckpointError, match=rf"walkers/0: cannot store a {kind}"):
        pack({"walkers": [bad]})


def test_sparse_tensors_and_odd_keys_are_refused():
    with pytest.raises(CheckpointError, match="a/b: cannot store a tensor that is not dense"):
        pack({"a": {"b": torch.eye(2).to_sparse()}})
    with pytest.raises(CheckpointError, match="cannot store a Tensor as a key"):
        pack({torch.ones(1): 1})


@each(
    "skeleton",
    [
        {"tensor": "gone"},
        {"object": "os.system"},
        {"float": "zz"},
        {"tensor": "x", "dtype": "load", "shape": [1]},
        {"tensor": "x", "dtype": "float64", "shape": [7]},
    ],
)
def test_a_skeleton_that_does_not_fit_is_refused(skeleton):
    with pytest.raises(CheckpointError, match="does not fit its tensors"):
        unpack({"x": torch.zeros(8, dtype=torch.uint8)}, [skeleton])


# --- store --------------------------------------------------------------------------------------------


def example(step: int):
    """Weights and state that differ from step to step."""
    rng = torch.Generator().manual_seed(step)
    weights = {
        "energy": {
            "layer.weight": torch.randn(3, 2, generator=rng),
            "layer.bias": torch.full((3,), float(step)),
        },
        "noise": {},
    }
    state = {"optimisers": {"energy": {"state": {0: {"step": torch.tensor(step)}}}}, "rng": rng.get_state()}
    return weights, {**state, "loss": math.inf, "betas": (0.0, 0.999)}


def store_with(folder: Path, *steps: int, **settings) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", **settings)
    for step in steps:
        store.save(step, *example(step))
    return store


def assert_holds(checkpoint, step: int) -> None:
    weights, state = example(step)
    assert checkpoint.step == step
    assert same(checkpoint.weights, weights)
    assert same(checkpoint.state, state)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def positions(path: Path, count: int = 9) -> list[int]:
    """First, last and evenly spread bytes of a file."""
    last = path.stat().st_size - 1
    return sorted({round(i * last / (count - 1)) for i in range(count)})


def test_round_trip_and_layout(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    path = store.save(42, *example(42))
    assert path == tmp_path / "run" / "checkpoints" / "step-00000042"
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    assert_holds(store.load(), 42)
    assert_holds(store.load(42), 42)
    assert store.load(42).path == path
    assert sorted(load_file(path / FILES[0])) == ["energy/layer.bias", "energy/layer.weight"]
    manifest = json.loads((path / FILES[2]).read_text())
    assert (manifest["format"], manifest["step"]) == (1, 42)
    assert manifest["files"][FILES[0]]["bytes"] == (path / FILES[0]).stat().st_size
    assert store.refused == []


def test_an_empty_folder_holds_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert (store.load(), store.steps(), store.latest_step()) == (None, [], None)
    assert not store.folder.exists()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; steps saved: none"):
        store.load(3)


def test_history_keeps_the_newest(tmp_path):
    store = store_with(tmp_path, 0, 10, 20, 100_000_000, keep=2)
    assert store.steps() == [20, 100_000_000]
    assert names(store) == ["step-00000020", "step-100000000"]
    assert store.latest_step() == 100_000_000
    assert_holds(store.load(20), 20)
    with pytest.raises(CheckpointError, match="no checkpoint of step 10; steps saved: 20, 100000000"):
        store.load(10)


def test_old_ones_go_only_after_the_new_one_is_in_place(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1, keep=1)
    seen = []
    monkeypatch.setattr(store, "_prune", lambda step: seen.append(store.steps()))
    store.save(2, *example(2))
    assert seen == [[1, 2]]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncation_falls_back_to_the_one_before(tmp_path, name, share):
    store = store_with(tmp_path, 1, 2)
    path = store.folder / "step-00000002" / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.warns(RuntimeWarning, match="checkpoint refused: .*step-00000002"):
        assert_holds(store.load(), 1)
    assert len(store.refused) == 1
    assert name in store.refused[0]
    with pytest.raises(CheckpointError, match=f"step-00000002: {name}"):
        store.load(2)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_refused(tmp_path, name):
    store = store_with(tmp_path, 1, 2)
    path = store.folder / "step-00000002"
    for at in positions(path / name):
        damage(path / name, at)
        with pytest.raises(CheckpointError, match=rf"step-00000002: {name} .*sha256 .*expected"):
            store.load(2)
        damage(path / name, at)
        store.verify(path)


def test_bytes_after_the_end_are_refused(tmp_path):
    for name in FILES:
        store = store_with(tmp_path / name, 1)
        with (store.folder / "step-00000001" / name).open("ab") as file:
            file.write(b"\n")
        with pytest.raises(CheckpointError, match=name):
            store.load(1)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(tmp_path, name):
    store = store_with(tmp_path, 1, 2)
    (store.folder / "step-00000002" / name).unlink()
    with pytest.warns(RuntimeWarning, match=f"{name} cannot be read: No such file"):
        assert_holds(store.load(), 1)


def test_messages_carry_what_was_expected_and_found(tmp_path):
    store = store_with(tmp_path, 1)
    path = store.folder / "step-00000001"
    manifest = json.loads((path / FILES[2]).read_text())
    expected = manifest["files"][FILES[0]]
    damage(path / FILES[0], -1)
    with pytest.raises(CheckpointError, match=f"has sha256 [0-9a-f]{{64}}, expected {expected['sha256']}"):
        store.load(1)
    (path / FILES[0]).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"has 5 bytes, expected {expected['bytes']}"):
        store.verify(path)


def test_all_damaged_is_an_error_that_names_each(tmp_path):
    heard = []
    store = store_with(tmp_path, 1, 2, on_refused=heard.append)
    for step in (1, 2):
        damage(store.folder / f"step-0000000{step}" / FILES[step - 1], 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=r"none of 2 checkpoints is whole") as caught:
            store.load()
    assert all(f"step-0000000{step}" in str(caught.value) for step in (1, 2))
    assert len(heard) == len(store.refused) == 2


def test_a_renamed_checkpoint_is_refused(tmp_path):
    store = store_with(tmp_path, 1)
    (store.folder / "step-00000001").rename(store.folder / "step-00000009")
    with pytest.raises(CheckpointError, match="step-00000009: holds step 1"):
        store.load(9)


def test_another_format_is_refused(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="has format 1, this version reads format 2"):
        store.load(1)


def test_a_full_disk_leaves_the_previous_one(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1)
    write = checkpoints.write_file

    def full(path, content):
        if path.name == FILES[1]:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(checkpoints, "write_file", full)
    with pytest.raises(CheckpointError) as caught:
        store.save(2, *example(2))
    message = str(caught.value)
    for part in ("disk is full", str(store.folder), "previous checkpoint step-00000001 is intact"):
        assert part in message
    assert names(store) == ["step-00000001"]
    assert_holds(store.load(), 1)
    monkeypatch.undo()
    store.save(2, *example(2))
    assert_holds(store.load(), 2)


def test_a_full_disk_at_the_first_save(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checkpoints, "write_file", full)
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
        store.save(1, *example(1))
    assert names(store) == []


def test_a_full_disk_does_not_call_a_damaged_one_intact(tmp_path, monkeypatch):
    store = store_with(tmp_path, 1, 2)
    damage(store.folder / "step-00000002" / FILES[0], 20)

    def full(path, content):
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(checkpoints, "write_file", full)
    with pytest.raises(CheckpointError, match="previous checkpoint step-00000001 is intact"):
        store.save(3, *example(3))


def test_other_errors_of_the_system_are_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not save step-00000001"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, *example(1))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_save_changes_nothing(tmp_path, monkeypatch, interruption, again):
    store = store_with(tmp_path, 1, 2)
    replace = os.replace

    def stop(source, target):
        if Path(source).name.startswith(".saving"):
            raise interruption
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        store.save(2 if again else 3, *example(7))
    assert names(store) == ["step-00000001", "step-00000002"]
    assert_holds(store.load(), 2)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from metastable.training import checkpoints

store = checkpoints.CheckpointStore(sys.argv[1])
store.save(1, {}, {"value": 1})
store.save(2, {}, {"value": 2})
replace, sync = os.replace, os.fsync

def die_when(source, target):
    if Path(source).name.startswith(".saving"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = die_when
store.save(int(sys.argv[2]), {}, {"value": 3})
"""


@pytest.mark.parametrize(
    ("killed_at", "leftover"), [(3, ".saving-step-00000003"), (2, ".replaced-step-00000002")]
)
def test_a_killed_process_loses_nothing(tmp_path, killed_at, leftover):
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(killed_at)]
    done = subprocess.run(script, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    assert leftover in names(store)
    assert store.steps() == [1, 2]
    assert store.load().state == {"value": 2}
    store.save(4, {}, {"value": 4})
    assert names(store) == ["step-00000001", "step-00000002", "step-00000004"]
    assert store.load(2).state == {"value": 2}


def test_saving_a_step_again_replaces_it(tmp_path):
    store = store_with(tmp_path, 1, 2)
    store.save(2, {}, {"again": True})
    assert store.load().state == {"again": True}
    assert names(store) == ["step-00000001", "step-00000002"]


def test_a_later_course_of_training_is_not_mixed_in(tmp_path):
    store = store_with(tmp_path, 1, 2, 3)
    with pytest.raises(
        CheckpointError, match=r"cannot save step 2 beside the later step-00000003.*rewind\(2\)"
    ):
        store.save(2, *example(2))
    store.rewind(1)
    assert names(store) == ["step-00000001"]
    store.save(2, *example(2))
    assert_holds(store.load(), 2)


def test_going_on_past_a_damaged_one(tmp_path):
    heard = []
    store = store_with(tmp_path, 1, 2, 3, keep=2, on_refused=heard.append)
    damage(store.folder / "step-00000003" / FILES[0], 20)
    assert store.load().step == 2
    store.save(4, *example(4))
    assert store.steps() == [2, 3, 4]  # the damaged one does not push out a good one
    store.save(5, *example(5))
    assert store.steps() == [4, 5]


def test_a_damaged_later_one_does_not_stop_training(tmp_path):
    store = store_with(tmp_path, 1, 5, keep=1, on_refused=lambda message: None)
    damage(store.folder / "step-00000005" / FILES[0], 20)
    fresh = CheckpointStore(store.folder, keep=1, on_refused=lambda message: None)
    fresh.save(3, *example(3))
    assert_holds(fresh.load(), 3)
    fresh.save(5, *example(5))
    assert_holds(fresh.load(), 5)
    assert fresh.steps() == [5]


def test_files_are_on_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b))[1])
    CheckpointStore(tmp_path).save(1, *example(1))
    assert events == ["sync"] * 4 + ["rename", "sync"]  # three files and their folder; then the parent


@pytest.mark.parametrize(
    ("step", "weights", "message"),
    [
        (-1, {}, "step: must be an integer of at least 0"),
        (1.5, {}, "step: must be an integer"),
        (1, {"a/b": {}}, "player name: must be a name without '/'"),
        (1, {"a": {"extra": 3}}, "weights of a: must be tensors only"),
    ],
)
def test_bad_arguments_are_named(tmp_path, step, weights, message):
    with pytest.raises(InputError, match=message):
        CheckpointStore(tmp_path).save(step, weights, {})
    with pytest.raises(InputError, match="keep: must be"):
        CheckpointStore(tmp_path, keep=0)
