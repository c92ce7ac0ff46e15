"""Predicted operations and bytes, against what is counted and traced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import paramshare
from paramshare.costs import cost, generation, kept_numbers, whitening
from paramshare.trace import Allocations


class Single(nn.Module):
    def __init__(self, tokens: int, features: int, rows: int, cols: int, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, features)
        self.layers = nn.ModuleList([nn.Linear(cols, rows, bias=bias)])

    def forward(self, x):
        return self.layers[0](x)


def traced(run) -> tuple[int, int, int]:
    """Multiply-adds, peak in float32 numbers, and what is left of them."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, Allocations() as trace:
        kept = run()
    live = trace.live
    del kept
    return counter.get_total_flops() // 2, trace.peak // 4, live // 4


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(2, 20),
    features=st.integers(2, 9),
    tokens=st.sampled_from([2, 3, 8, 9, 520, 1200]),
    bias=st.booleans(),
    blocks=st.sampled_from([None, 1, 2]),
)
def test_of_an_application(rows, cols, features, tokens, bias, blocks) -> None:
    x = torch.ones(tokens, cols)
    for execution in ("materialized", "blockwise", "factored"):
        module = Single(53, features, rows, cols, bias).eval()
        how = "auto" if execution == "materialized" else execution
        sharing = paramshare.share_from_embedding(
            module,
            module.embedding,
            execution=how,
            **({"layout": "column"} if how == "auto" else {"blocks": blocks}),
        )
        plan = sharing.plan
        (group,) = plan.groups
        assert group.execution == execution
        layer = module.layers[0]
        if execution == "materialized":
            with torch.no_grad():
                layer(x)  # the weight is kept
        found = cost(plan, group, execution, tokens)
        operations, peak, _ = traced(lambda: layer(x))  # noqa: B023
        assert found.operations == operations
        # A transposition of one block, or of one row, is no copy.
        trivial = execution == "factored" and group.blocks == 1
        assert found.working == pytest.approx(peak, rel=0.15) or trivial and found.working >= peak


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"blocks": 1},
        {"layout": "column"},
        {"layout": "token"},
        {"virtual": False},
        {"virtual": False, "init": "paper"},
        {"virtual": False, "layout": "column"},
        {"virtual": False, "layout": "token", "init": "paper"},
    ],
    ids=str,
)
def test_of_generation(options: dict) -> None:
    module = Single(53, 20, 13, 17, bias=False).eval()
    sharing = paramshare.share_from_embedding(module, module.embedding, **options)
    (group,) = sharing.plan.groups
    operations, peak, left = traced(lambda: sharing.pool.weight(0, False))
    making = generation(sharing.plan, group)
    kept = kept_numbers(sharing.plan, group)
    assert making.operations == operations
    assert kept == left
    assert kept + making.working == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("options", [{}, {"blocks": 1}, {"whiten": False}])
def test_of_whitening(options: dict) -> None:
    module = Single(210, 20, 60, 24, bias=False).eval()
    sharing = paramshare.share_from_embedding(
        module, module.embedding, execution="factored", **{"whiten": True, **options}
    )
    operations, peak, left = traced(lambda: sharing.pool._parts(sharing.pool._frame(False)))
    found = whitening(sharing.plan)
    assert (operations, left) == (found.operations, found.held)
    assert found.working == pytest.approx(peak, rel=0.15)


def test_an_input_that_was_reduced_already() -> None:
    module = Single(53, 3, 40, 8, bias=False).eval()
    sharing = paramshare.share_from_embedding(module, module.embedding, execution="factored")
    layer, (group,), x = module.layers[0], sharing.plan.groups, torch.ones(6, 8)
    with torch.no_grad():
        layer(x)
    operations, peak, _ = traced(lambda: layer(x))
    found = cost(sharing.plan, group, "factored", 6, reduced=True)
    assert (found.operations, found.working) == (operations, peak)
