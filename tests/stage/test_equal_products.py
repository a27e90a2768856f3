"""Weight gradients of equal layers in a graph: one batched product, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.stage.equal_products import batch_equal_products, pack_outputs, unpack

Pairs = list[tuple[Tensor, Tensor]]


def pairs(count: int, rows: int, inputs: int, outputs: int) -> Pairs:
    """With one row there is nothing to add up: on every processor a batched product has the bits of single ones."""
    torch.manual_seed(count)
    return [(torch.randn(rows, outputs), torch.randn(rows, inputs)) for _ in range(count)]


def weight_pass(given: Pairs) -> list[Tensor]:
    """As autograd's backward of linear layers."""
    return [value for grad, rows in given for value in (grad.t().mm(rows), grad.sum([0], True).view(-1))]


def traced(given: Pairs) -> fx.GraphModule:
    graph = make_fx(weight_pass, tracing_mode="fake")(given)
    batch_equal_products(graph)
    return graph


def calls(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_equal_layers_are_done_at_once_and_others_alone() -> None:
    given = [*pairs(5, 1, 8, 8), *pairs(1, 1, 8, 6)]
    graph = traced(given)
    found = calls(graph)
    assert found.count("aten.bmm.default") == 1
    assert found.count("aten.mm.default") == 1
    assert found.count("aten.sum.dim_IntList") == 2
    assert all(map(torch.equal, graph(given), weight_pass(given)))


@pytest.mark.parametrize(("count", "rows", "inputs", "outputs"), [(3, 1, 1, 1), (2, 7, 5, 3), (40, 2, 128, 128)])
def test_the_bits_are_those_of_single_products(count: int, rows: int, inputs: int, outputs: int) -> None:
    given = pairs(count, rows, inputs, outputs)
    assert all(map(torch.equal, traced(given)(given), weight_pass(given)))


def test_products_are_done_after_all_that_they_are_made_of() -> None:
    def weight_pass_of_sines(given: Pairs) -> list[Tensor]:
        return [grad.sin().t().mm(rows.cos()) for grad, rows in given]

    given = pairs(3, 1, 8, 8)
    graph = make_fx(weight_pass_of_sines, tracing_mode="fake")(given)
    batch_equal_products(graph)
    assert calls(graph).count("aten.bmm.default") == 1
    assert all(map(torch.equal, graph(given), weight_pass_of_sines(given)))


def test_large_products_are_left_as_they_are() -> None:
    given = pairs(2, 64, 128, 128)
    assert calls(traced(given)).count("aten.mm.default") == 2


def test_a_product_that_needs_another_one_is_not_done_with_it() -> None:
    """The second multiplies what the first gave."""

    def chain(grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = grad.t().mm(rows)
        return first, first.t().mm(rows), grad.t().mm(first)

    given = (torch.randn(4, 4), torch.randn(4, 4))
    graph = make_fx(chain, tracing_mode="fake")(*given)
    batch_equal_products(graph)
    assert all(map(torch.equal, graph(*given), chain(*given)))


def test_a_batch_that_is_returned_as_a_whole_is_returned_as_it_is() -> None:
    given = [*pairs(5, 1, 8, 8), *pairs(1, 1, 8, 6)]
    graph = traced(given)
    packing = pack_outputs(graph)
    assert [batch.places for batch in packing] == [(10,), (11,), (0, 2, 4, 6, 8), (1, 3, 5, 7, 9)]
    values = fx.Interpreter(graph).run(*(tensor for pair in given for tensor in pair), enable_io_processing=False)
    assert len(values) == 4
    assert all(map(torch.equal, unpack(packing, values), weight_pass(given)))


def test_a_batch_of_which_something_is_not_returned_is_taken_apart() -> None:
    def all_but_one(given: Pairs) -> list[Tensor]:
        first, *others = [grad.t().mm(rows) for grad, rows in given]
        return [first.sin(), *others]

    given = pairs(3, 1, 8, 8)
    graph = make_fx(all_but_one, tracing_mode="fake")(given)
    batch_equal_products(graph)
    assert [batch.places for batch in pack_outputs(graph)] == [(0,), (1,), (2,)]
    assert all(map(torch.equal, graph(given), all_but_one(given)))
