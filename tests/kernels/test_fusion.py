"""The pass over compiled graphs changes how products are written, and no value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from metastable.kernels.fusion import share_sigmoids, split_products

over = pytest.mark.parametrize
aten = torch.ops.aten


def graph_of(f, *inputs: Tensor):
    """`f` as a graph of aten operations, with the values each of them gave."""
    return make_fx(f, tracing_mode="fake")(*inputs)


def operations(traced) -> list:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def inputs(dtype: torch.dtype, columns: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((4,), (5, columns), (columns, 4))
    return tuple(torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes)  # pyright: ignore


@over("dtype", [torch.float32, torch.float64])
def test_a_bias_is_added_after_the_product(dtype):
    bias, x, weight = inputs(dtype)
    traced = graph_of(torch.addmm, bias, x, weight)
    split_products(traced.graph)
    traced.recompile()
    assert operations(traced) == [aten.mm.default, aten.add.Tensor]
    assert torch.allclose(traced(bias, x, weight), torch.addmm(bias, x, weight))


def test_an_outer_product_is_an_elementwise_one():
    _, x, weight = inputs(torch.float64, columns=1)
    traced = graph_of(torch.mm, x, weight)
    split_products(traced.graph)
    traced.recompile()
    assert operations(traced) == [aten.mul.Tensor]
    assert torch.equal(traced(x, weight), x @ weight)


def test_other_products_are_left_alone():
    bias, x, weight = inputs(torch.float64)
    for f, arguments in (
        (torch.mm, (x, weight)),
        (lambda b, x, w: torch.addmm(b, x, w, beta=0.5), (bias, x, weight)),
        (torch.addmm, inputs(torch.bfloat16)),
    ):
        traced = graph_of(f, *arguments)
        before = operations(traced)
        split_products(traced.graph)
        assert operations(traced) == before


def silu(x: Tensor) -> Tensor:
    """As the compiler writes it."""
    return x / (1 + torch.exp(-x))


def test_a_sigmoid_is_made_once_for_a_layer_and_its_gradient():
    _, x, _ = inputs(torch.float64)
    both = lambda x: (silu(x), 2 * torch.sigmoid(x))  # noqa: E731
    traced = graph_of(both, x)
    share_sigmoids(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert operations(traced) == [aten.sigmoid.default, aten.mul.Tensor, aten.mul.Tensor]
    for own, other in zip(traced(x), both(x), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-14, atol=0)


NO_PAIR = [
    silu,
    torch.sigmoid,
    lambda x: (x / (2 + torch.exp(-x)), torch.sigmoid(x)),
    lambda x: (1 / (1 + torch.exp(-x)), torch.sigmoid(x)),
]


@over("f", NO_PAIR)
def test_what_is_no_silu_beside_its_sigmoid_is_left_alone(f):
    traced = graph_of(f, inputs(torch.float64)[1])
    before = operations(traced)
    share_sigmoids(traced.graph)
    assert operations(traced) == before
