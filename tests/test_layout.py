from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramshare import ShareError
from paramshare.layout import check_blocks, fit, read
from paramshare.plan import Group

SIZES = st.integers(1, 12)


def test_worked_example_of_the_paper() -> None:
    """Figure 1: ten tokens; weights of 16 and 25 numbers take 2 and 3 columns, 4 and 5 spare."""
    for layout in ("column", "token"):
        assert fit(layout, 4, 4, 10, None) == (layout, 2, 0)
        assert fit(layout, 5, 5, 10, None) == (layout, 3, 0)
    spare = [
        Group("w", (), rows, rows, "column", 0, columns, 0).wasted(10)
        for rows, columns in ((4, 2), (5, 3))
    ]
    assert spare == [4, 5]


def test_column_layout_reads_down_the_columns() -> None:
    table = torch.tensor([[0, 3], [1, 4], [2, 5]])
    assert read(table.t(), 2, 2, "column", 0).tolist() == [[0, 1], [2, 3]]
    assert read(table.t(), 1, 5, "column", 0).tolist() == [[0, 1, 2, 3, 4]]


def test_token_layout_reads_along_the_tokens_into_the_transposed_matrix() -> None:
    table = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert read(table.t(), 2, 2, "token", 0).tolist() == [[0, 2], [1, 3]]


def test_aligned_layout_keeps_rows_in_a_column() -> None:
    table = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13], [9, 9]])
    assert read(table.t(), 3, 2, "aligned", 2).tolist() == [[0, 1], [10, 11], [2, 3]]


def test_sharebert_small_columns() -> None:
    """paper.md 3.1: g = 138 and f = 275 columns; aligned, 1174 in all instead of 1102."""
    tokens, hidden, inner = 30528, 2048, 4096
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    assert [fit("token", *shape, tokens, None)[1] for shape in shapes] == [138] * 4 + [275, 275]
    assert sum(fit("aligned", *shape, tokens, None)[1] for shape in shapes) == 1174


def test_rows_longer_than_a_column_fall_back() -> None:
    assert fit("aligned", 3, 11, 10, None) == ("column", 4, 0)
    assert fit("aligned", 3, 10, 10, None) == ("aligned", 3, 1)


def test_blocks_are_clamped_to_what_a_column_holds() -> None:
    assert fit("aligned", 12, 3, 10, 2) == ("aligned", 6, 2)
    assert fit("aligned", 12, 5, 10, 3) == ("aligned", 6, 2)


@pytest.mark.parametrize("blocks", [0, 4, -1])
def test_blocks_out_of_range(blocks: int) -> None:
    with pytest.raises(ShareError, match=f"blocks={blocks} is out of range.* 3 whole rows"):
        check_blocks(blocks, "aligned", 3)


def test_blocks_of_another_layout() -> None:
    with pytest.raises(ShareError, match="belongs to layout='aligned'"):
        check_blocks(1, "column", 3)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(1, 30), st.sampled_from(["aligned", "column", "token"]), SIZES)
def test_reads_the_numbers_that_the_formula_names(rows, cols, tokens, layout, blocks) -> None:
    blocks = blocks if layout == "aligned" else None
    used, columns, found = fit(layout, rows, cols, tokens, blocks)
    group = Group("w", (), rows, cols, used, 0, columns, found)
    virtual = torch.arange(tokens * columns).view(tokens, columns)
    expected = virtual[reference.places(group, tokens)].view(rows, cols)
    matrix = read(virtual.t(), rows, cols, used, found)
    assert torch.equal(matrix, expected)
    assert matrix.unique().numel() == rows * cols  # no number is read twice
    assert group.wasted(tokens) >= 0
    if used != "aligned":  # minimal: one column fewer would not do
        assert (columns - 1) * tokens < rows * cols


def test_the_column_layout_copies_nothing() -> None:
    part = torch.randn(3, 10)
    assert read(part, 4, 7, "column", 0).data_ptr() == part.data_ptr()
