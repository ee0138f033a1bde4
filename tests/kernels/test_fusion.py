"""The pass over compiled graphs changes how products are written, and no value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order as by_rows
from torch.fx.experimental.proxy_tensor import make_fx

from metastable.kernels import fusion
from metastable.kernels.fusion import share_sigmoids, split_products

over = pytest.mark.parametrize
aten = torch.ops.aten


def graph_of(f, *inputs: Tensor):
    """`f` as a graph of aten operations, with the values each of them gave."""
    return make_fx(f, tracing_mode="fake")(*inputs)


def operations(traced) -> list:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def inputs(dtype: torch.dtype, columns: int = 6, to: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((to,), (5, columns), (columns, to))
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
    assert [o for o in operations(traced) if o is not aten.slice.Tensor] == [aten.mul.Tensor]
    assert torch.equal(traced(x, weight), x @ weight)


@over(("columns", "to"), [(2, 7), (4, 7), (6, 1), (6, 3), (2, 2)])
@over("turned", [False, True])
def test_products_over_and_to_few_columns_are_sums(columns, to, turned, monkeypatch):
    monkeypatch.setattr(fusion, "ARM", True)
    _, x, weight = inputs(torch.float64, columns, to)
    product = (lambda x, w: x @ w.permute(1, 0) + x @ w.permute(1, 0)) if turned else torch.mm
    weight = weight.t().contiguous() if turned else weight
    traced = graph_of(product, x, weight)
    split_products(traced.graph)
    traced.recompile()
    assert aten.mm.default not in operations(traced)
    assert operations(traced).count(by_rows) == (turned if columns <= 4 else not turned)
    torch.testing.assert_close(traced(x, weight), product(x, weight), rtol=1e-14, atol=1e-14)


def test_precision_in_the_newer_words_of_torch_is_no_obstacle(monkeypatch):
    def mixed() -> str:  # as torch raises once `torch.backends.cuda.matmul.fp32_precision` was set
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    bias, x, weight = inputs(torch.float32)
    traced = graph_of(torch.addmm, bias, x, weight)
    split_products(traced.graph)
    assert operations(traced) == [aten.mm.default, aten.add.Tensor]


@over(("columns", "to"), [(2, 7), (4, 7), (6, 1), (6, 3), (2, 2), (1, 7)])
@over("bias", [False, True])
def test_on_a_gpu_products_over_and_to_few_columns_are_one_sum(columns, to, bias, monkeypatch):
    monkeypatch.setattr(fusion, "_on_gpu", lambda node: True)
    b, x, weight = inputs(torch.float64, columns, to)
    product = torch.addmm if bias else lambda b, x, w: x @ w
    traced = graph_of(product, b, x, weight)
    split_products(traced.graph)
    traced.recompile()
    assert not {aten.mm.default, aten.addmm.default} & set(operations(traced))
    assert operations(traced).count(aten.sum.dim_IntList) == (columns > 4)
    torch.testing.assert_close(traced(b, x, weight), product(b, x, weight), rtol=1e-14, atol=1e-14)


@over(("columns", "to"), [(6, 7), (0, 7), (6, 0)])
def test_on_a_gpu_other_products_keep_their_bias(columns, to, monkeypatch):
    monkeypatch.setattr(fusion, "_on_gpu", lambda node: True)
    traced = graph_of(torch.addmm, *inputs(torch.float64, columns, to))
    split_products(traced.graph)
    assert operations(traced) == [aten.addmm.default]


@over("rounded", [False, True])
def test_products_on_a_gpu_stay_as_they_are_where_they_are_rounded(rounded, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high" if rounded else "highest")
    node = SimpleNamespace(
        kwargs={}, meta={"val": SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)}
    )
    graph = SimpleNamespace(find_nodes=lambda **given: [node])
    assert fusion._found(graph, aten.mm.default, gpu=True) == ([] if rounded else [node])  # pyright: ignore


def test_a_transposed_weight_is_copied_once_where_that_is_faster(monkeypatch):
    monkeypatch.setattr(fusion, "ARM", True)
    _, x, weight = inputs(torch.float64, 6, 6)
    both = lambda x, w: x @ w.permute(1, 0) @ w @ w.permute(1, 0)  # noqa: E731
    traced = graph_of(both, x, weight)
    split_products(traced.graph)
    traced.recompile()
    traced.graph.eliminate_dead_code()
    assert operations(traced).count(by_rows) == 1
    torch.testing.assert_close(traced(x, weight), both(x, weight), rtol=1e-13, atol=1e-13)


@over("order", [(0, 1), (1, 0), (-1, -2), (-2, -1)])
@over("to", [2, 6])
def test_only_what_is_transposed_is_turned(order, to, monkeypatch):
    monkeypatch.setattr(fusion, "ARM", True)
    _, x, weight = inputs(torch.float64, 6, to)
    weight = weight if order[0] % 2 == 0 else weight.t().contiguous()
    product = lambda x, w: x @ aten.permute.default(w, list(order))  # noqa: E731
    traced = graph_of(product, x, weight)
    split_products(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(x, weight), product(x, weight), rtol=1e-14, atol=1e-14)


@over(("columns", "to"), [(0, 7), (0, 2), (6, 0), (2, 0)])
def test_products_over_and_to_no_columns_are_empty_or_zero(columns, to, monkeypatch):
    monkeypatch.setattr(fusion, "ARM", True)
    _, x, weight = inputs(torch.float64, columns, to)
    traced = graph_of(torch.mm, x, weight)
    split_products(traced.graph)
    traced.recompile()
    assert torch.equal(traced(x, weight), torch.zeros(5, to, dtype=torch.float64))


def test_other_products_are_left_alone(monkeypatch):
    monkeypatch.setattr(fusion, "ARM", False)
    bias, x, weight = inputs(torch.float64)
    for f, arguments in (
        (torch.mm, (x, weight)),
        (lambda x, w: x @ w.permute(1, 0), inputs(torch.float64, 2, 2)[1:]),
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
