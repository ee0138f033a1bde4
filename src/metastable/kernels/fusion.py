"""A pass over compiled chains, where torch leaves work that need not be done.

A linear layer is compiled to `addmm`, which first writes the bias into the whole output; and the gradient of a
last layer with one output is an outer product, made by a matrix product. As plain additions and products both
become part of the pointwise work around them: an eighth of the time of a Langevin step on a small network. SiLU is
compiled to x/(1 + exp(−x)) and its gradient to one with a sigmoid, so that a layer's exponentials, which cost most
after the products, are made twice; as x·σ(x) it shares those of the gradient: another tenth. On ARM products with
points of few coordinates are sums, too, and weights are turned once for all steps of a call, since a product with a
transposed one goes to a library that packs it anew in every step: another tenth.

On a GPU a step on a small network is its launches. There, too, products over and to few columns are sums, which
become part of the kernels beside them; the other products stay as they are, with their bias.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import fx

from metastable.core.precision import products_said

F = TypeVar("F", bound=Callable[..., Any])
PRECISE = (torch.float32, torch.float64)
"""Below these, adding the bias after the product instead of within it would round twice."""
ARM = platform.machine() in ("aarch64", "arm64")
"""Where products with few columns, and with transposed weights, were found to be slow."""
NARROW = 4
"""Columns up to which products are sums there, and on GPUs."""


def fused(function: F) -> F:
    """`function`, with the pass in force while it compiles; as it is where this torch has no such hook."""
    try:
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    except ImportError:
        return function

    class SplitProducts(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            split_products(graph)
            share_sigmoids(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return config.patch(post_grad_custom_post_pass=SplitProducts())(function)


def split_products(graph: fx.Graph) -> None:
    """In place: `addmm` becomes `mm` and `add`, and an `mm` over or to few columns becomes sums."""
    aten, copies = torch.ops.aten, Copies(graph)
    for node in _found(graph, aten.addmm.default, gpu=True):
        bias, x, weight = node.args
        if not _on_gpu(node) or _is_narrow(x, weight):
            with graph.inserting_before(node):
                product = _call(graph, aten.mm.default, x, weight, like=node)
                _replace(node, _call(graph, aten.add.Tensor, product, bias, like=node))
    for node in _found(graph, aten.mm.default, gpu=True):
        left, right = node.args
        over, to = _value(right).shape
        with graph.inserting_before(node):
            if _on_gpu(node):
                if 0 < over <= NARROW:
                    _replace(node, _outer(graph, left, right, over))
                elif _is_narrow(left, right):
                    _replace(node, _rows(graph, left, right))
            elif over == 1 or (ARM and 0 < over <= NARROW):
                _replace(node, _outer(graph, left, copies.of(right), over))
            elif ARM and 0 < to <= NARROW and _value(left).is_contiguous():
                _replace(node, _sums(graph, left, copies.of(right, turned=True), to))
            elif ARM:
                node.args = (left, copies.of(right))


def _on_gpu(node: fx.Node) -> bool:
    return _value(node).device.type == "cuda"


def _is_narrow(left: Any, right: Any) -> bool:
    """Whether the product of `left` and `right` is one over or to few columns."""
    over, to = _value(right).shape
    return 0 < over <= NARROW or (0 < to <= NARROW and _value(left).is_contiguous())


def _rows(graph: fx.Graph, left: Any, right: Any) -> fx.Node:
    """Σ_k left[:, k]·right[k, j] as one sum, which what is done with its result can join."""
    aten = torch.ops.aten
    turned = _new(graph, aten.permute.default, right, [1, 0])
    each = _new(graph, aten.mul.Tensor, _new(graph, aten.unsqueeze.default, left, 1), turned)
    return _new(graph, aten.sum.dim_IntList, each, [2])


def _outer(graph: fx.Graph, left: Any, right: Any, over: int) -> fx.Node:
    """Σ_k left[:, k] ⊗ right[k]."""
    mul, add, part = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.slice.Tensor
    each = [
        _new(graph, mul, _new(graph, part, left, 1, k, k + 1), _new(graph, part, right, 0, k, k + 1))
        for k in range(over)
    ]
    return reduce(lambda total, one: _new(graph, add, total, one), each)


def _sums(graph: fx.Graph, left: Any, right: Any, to: int) -> fx.Node:
    """Σ_k left[:, k]·right[j, k], one sum for each j over what compilers make once for all."""
    aten, each = torch.ops.aten, []
    for j in range(to):
        row = _new(graph, aten.slice.Tensor, right, 0, j, j + 1)
        each.append(_new(graph, aten.sum.dim_IntList, _new(graph, aten.mul.Tensor, left, row), [1], True))
    return _new(graph, aten.cat.default, each, 1)


class Copies:
    """Matrices that are transposed in memory, laid out row by row, once for all products of a graph."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.made: dict[fx.Node, fx.Node] = {}

    def of(self, matrix: Any, turned: bool = False) -> fx.Node:
        """The matrix, or its transpose, row by row."""
        permute, by_rows = torch.ops.aten.permute.default, torch.ops.prims.inductor_force_stride_order.default
        while matrix.target is permute:
            matrix, order = matrix.args
            turned ^= order[0] % 2 == 1  # of [0, 1] nothing is turned
        if turned and matrix not in self.made:
            view = _new(self.graph, permute, matrix, [1, 0])
            self.made[matrix] = _new(self.graph, by_rows, view, (len(_value(matrix)), 1))
        return self.made[matrix] if turned else matrix


def share_sigmoids(graph: fx.Graph) -> None:
    """In place: x/(1 + exp(−x)) becomes x·σ(x) where σ(x) is there as well."""
    aten = torch.ops.aten
    for node in _found(graph, aten.sigmoid.default):
        x: Any = node.args[0]
        negatives = [n for n in x.users if n.target is aten.neg.default]
        exponentials = [n for m in negatives for n in m.users if n.target is aten.exp.default]
        sums = [n for m in exponentials for n in m.users if n.target is aten.add.Tensor and n.args[1] == 1]
        quotients = [n for m in sums for n in m.users if n.target is aten.div.Tensor and n.args[0] is x]
        for quotient in quotients:
            with graph.inserting_before(quotient):
                sigmoid = _call(graph, aten.sigmoid.default, x, like=quotient)
                _replace(quotient, _call(graph, aten.mul.Tensor, x, sigmoid, like=quotient))
            _replace(node, sigmoid)
            node = sigmoid


def _found(graph: fx.Graph, target: Any, gpu: bool = False) -> list[fx.Node]:
    """Calls on the CPU, with `gpu` on a GPU too, where products are not rounded: sums would not be."""
    devices = ("cpu", "cuda") if gpu and products_said() == "highest" else ("cpu",)
    return [
        n
        for n in graph.find_nodes(op="call_function", target=target)
        if not n.kwargs and _value(n).device.type in devices and _value(n).dtype in PRECISE
    ]


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


def _call(graph: fx.Graph, target: Any, *inputs: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(target, inputs)
    node.meta.update(like.meta)
    return node


def _new(graph: fx.Graph, target: Any, *inputs: Any) -> fx.Node:
    """A call that knows what it gives."""
    node = graph.call_function(target, inputs)
    node.meta["val"] = target(*fx.map_arg(inputs, _value))
    return node


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
