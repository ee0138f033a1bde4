"""Trees of tensors and plain values as a flat dictionary of tensors and a skeleton of JSON, and back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError

Tree = Any
"""Nested dict, list, tuple, None, bool, int, float, str and Tensor."""
PLAIN_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def pack(tree: Tree) -> tuple[dict[str, Tensor], Any]:
    """Part a tree into tensors by name and a skeleton that JSON can hold.

    Tensors are copied to contiguous CPU memory and named by their place in the tree, `a/b/0`. The copies
    share nothing, with each other or with the originals: later updates in place do not reach them.

    Args:
        tree: nested dict (any subclass becomes a dict), list, tuple, None, bool, int, float, str and Tensor;
            dict keys may be str, int, float, bool, None or tuples of these.

    Returns:
        The tensors, and the skeleton: scalars and lists as themselves, everything else tagged by type.

    Raises:
        CheckpointError: something in the tree is of another type; its place is named.

    Example:
        >>> tensors, skeleton = pack({"walkers": {0: torch.zeros(3)}, "lr": 0.1})
        >>> list(tensors), unpack(tensors, skeleton)["lr"]
        (['walkers/0'], 0.1)
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, "", tensors)


def unpack(tensors: Mapping[str, Tensor], skeleton: Any) -> Tree:
    """The tree that `pack` parted, with its tensors on the CPU."""
    try:
        return _decode(skeleton, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"the skeleton of a checkpoint does not fit its tensors: {error!r}") from error


def _encode(node: Tree, place: str, tensors: dict[str, Tensor]) -> Any:
    match node:
        case None | bool() | int() | str():
            return node
        case float():
            return _encode_float(node)
        case Tensor():
            return _encode_tensor(node, place, tensors)
        case Mapping():
            return {"dict": [_encode_item(key, value, place, tensors) for key, value in node.items()]}
        case list():
            return _encode_rows(node, place, tensors)
        case tuple() if not hasattr(node, "_fields"):
            return {"tuple": _encode_rows(node, place, tensors)}
    raise CheckpointError(
        f"{place or 'tree'}: cannot store a {type(node).__name__}; use dict, list, tuple, None, bool, int, "
        "float, str or Tensor (._asdict() makes a NamedTuple plain, .tolist() a NumPy value)"
    )


def _encode_rows(nodes: list | tuple, place: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [_encode(node, _join(place, i), tensors) for i, node in enumerate(nodes)]


def _encode_item(key: Any, value: Tree, place: str, tensors: dict[str, Tensor]) -> list[Any]:
    inside = _join(place, key)
    if isinstance(key, (Tensor, list, Mapping)):
        raise CheckpointError(f"{inside}: cannot store a {type(key).__name__} as a key of a dict")
    return [_encode(key, inside, tensors), _encode(value, inside, tensors)]


def _encode_float(value: float) -> Any:
    """JSON has no NaN and no infinity, and NaNs differ in their bits: those go as eight bytes."""
    number = float(value)
    return number if abs(number) < float("inf") else {"float": struct.pack(">d", number).hex()}


def _encode_tensor(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{place or 'tree'}: cannot store a tensor that is not dense ({tensor.layout})")
    name = _free_name(place, tensors)
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    if dense.dtype in PLAIN_DTYPES:
        tensors[name] = dense
        return {"tensor": name}
    tensors[name] = dense.reshape(-1).view(torch.uint8)
    return {"tensor": name, "dtype": str(dense.dtype).removeprefix("torch."), "shape": list(dense.shape)}


def _free_name(place: str, taken: Mapping[str, Tensor]) -> str:
    """`place`, or that with a mark when keys such as "a/b" or 0 and "0" made two places read the same."""
    name = place or "tensor"
    while name in taken or name == "__metadata__":
        name += "~"
    return name


def _join(place: str, key: Any) -> str:
    text = str(key).encode("ascii", "backslashreplace").decode()
    return f"{place}/{text}" if place else text


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"dict": items}:
            return {_decode(key, tensors): _decode(value, tensors) for key, value in items}
        case {"tuple": values}:
            return tuple(_decode(value, tensors) for value in values)
        case {"float": bits}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"tensor": name, "dtype": dtype, "shape": shape}:
            return tensors[name].view(_dtype(dtype)).reshape(shape)
        case {"tensor": name}:
            return tensors[name]
    raise ValueError(f"unknown tag {sorted(node)}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
