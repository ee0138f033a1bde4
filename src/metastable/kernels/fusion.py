"""A pass over compiled chains on the CPU, where torch leaves work that need not be done.

A linear layer is compiled to `addmm`, which first writes the bias into the whole output; and the gradient of a
last layer with one output is an outer product, made by a matrix product. As plain additions and products both
become part of the pointwise work around them: an eighth of the time of a Langevin step on a small network. SiLU is
compiled to x/(1 + exp(−x)) and its gradient to one with a sigmoid, so that a layer's exponentials, which cost most
after the products, are made twice; as x·σ(x) it shares those of the gradient: another tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

F = TypeVar("F", bound=Callable[..., Any])
PRECISE = (torch.float32, torch.float64)
"""Below these, adding the bias after the product instead of within it would round twice."""


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
    """In place: `addmm` becomes `mm` and `add`, and an `mm` over one column becomes `mul`."""
    aten = torch.ops.aten
    for node in _found(graph, aten.addmm.default):
        bias, x, weight = node.args
        with graph.inserting_before(node):
            product = _call(graph, aten.mm.default, x, weight, like=node)
            _replace(node, _call(graph, aten.add.Tensor, product, bias, like=node))
    for node in _found(graph, aten.mm.default):
        column, row = node.args
        if _value(column).shape[1] == 1:
            with graph.inserting_before(node):
                _replace(node, _call(graph, aten.mul.Tensor, column, row, like=node))


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


def _found(graph: fx.Graph, target: Any) -> list[fx.Node]:
    nodes = graph.find_nodes(op="call_function", target=target)
    return [
        n for n in nodes if not n.kwargs and _value(n).device.type == "cpu" and _value(n).dtype in PRECISE
    ]


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


def _call(graph: fx.Graph, target: Any, *inputs: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(target, inputs)
    node.meta.update(like.meta)
    return node


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
