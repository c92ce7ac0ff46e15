from __future__ import annotations

import pytest
import seeds
import torch
from close import assert_sums_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from paramshare import ShareError, int8
from paramshare.int8 import Int8Matrix, quantise

SIZE = st.integers(1, 9)
# Whether integers are multiplied, which not every machine can do.
PRODUCTS = st.sampled_from([False, True] if int8._ON_CPU else [False])


def draw(*size: int, seed: int = 0, scale: float = 1) -> torch.Tensor:
    generator = seeds.generator(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64) * scale


def rows_of(matrix: Int8Matrix) -> torch.Tensor:
    """The numbers that a quantised matrix stands for, one at a time."""
    values, scale, block = matrix.values.double(), matrix.scale.double(), matrix.block
    found = torch.empty_like(values)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            of = scale[i, 0] if block is None else scale[i // block, j]
            found[i, j] = values[i, j] * of
    return found


def assert_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, spread=None) -> None:
    """`x @ weight`, but for the rounding of x, by at most half of a 127th of a token's largest
    number; `spread` `(cols,)`: what the tokens are multiplied by before, if they are."""
    largest = x.abs() if spread is None else x.abs() * spread
    step = largest.amax(-1, keepdim=True) / 127 / 2
    steps = step.expand_as(x) if spread is None else step / spread
    assert ((found - x @ weight).abs() <= steps @ weight.abs() * 1.0001 + 1e-6).all()


def assert_exact(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias=0) -> None:
    """`x @ weight + bias`, but for the rounding of the sums: also of the scale and of the bias."""
    sizes = x.abs() @ weight.abs() + abs(bias)
    assert_sums_close(found, x @ weight + bias, sizes, len(weight) + 2)


@settings(max_examples=60, deadline=None)
@given(SIZE, SIZE, st.one_of(st.none(), SIZE), st.sampled_from([1e-9, 1e-6, 1e-4, 1, 1e5]))
def test_rounds_to_the_nearest(rows, cols, block, scale) -> None:
    weight = draw(rows, cols, scale=scale)
    weight[0, 0] = 0
    values, scales = quantise(weight, block)
    assert values.dtype == torch.int8
    assert values.shape == weight.shape
    assert scales.shape == ((rows, 1) if block is None else (-(-rows // block), cols))
    assert torch.equal(scales, scales.half().double())
    each = scales if block is None else scales[torch.arange(rows) // block]
    # float16 has 11 bits: the largest value may be cut by a 2,048th.
    assert ((rows_of(Int8Matrix(values, scales, block)) - weight).abs() <= each * 0.57).all()
    shapes = [tensor.shape for tensor in int8.empty(weight, block)]
    assert shapes == [values.shape, scales.shape]


def test_scales_that_float16_has_no_room_for() -> None:
    values, scale = quantise(torch.tensor([[0.0, 0.0], [1e-9, -1e-9]]), None)
    assert values[0].eq(0).all()
    assert (values * scale).abs().max() < 1e-7
    weight = torch.tensor([[1e-4, 3e-5]]).half()
    values, scale = quantise(weight, None)
    assert (values.double() * scale.double() - weight.double()).abs().max() < 1e-6
    values, scale = quantise(draw(3, 4, 5), None)  # of tensors one a first index
    assert scale.shape == (3, 1, 1)


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE, SIZE, st.one_of(st.none(), SIZE), st.integers(0, 2), PRODUCTS)
def test_products_and_lookups(rows, cols, tokens, block, dims, products) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "_ON_CPU", products)
        matrix = Int8Matrix(*quantise(draw(rows, cols), block), block)
        dense = rows_of(matrix)
        assert torch.equal(matrix.dense(), dense)
        lead = [tokens, 2][:dims]

        x, bias = draw(*lead, cols, seed=1), draw(rows, seed=2)
        found = F.linear(x, matrix, bias)
        assert found.shape == (*lead, rows)
        if not products:
            assert_exact(found, x, dense.t(), bias)
        elif block is None:
            assert_product(found - bias, x, dense.t())
        else:
            for first in range(0, rows, block):
                some = slice(first, first + block)
                scale = matrix.scale[first // block]
                assert_product((found - bias)[..., some], x, dense[some].t(), scale)

        x = draw(*lead, rows, seed=3)
        for found in (x @ matrix, torch.matmul(x, matrix)):
            assert found.shape == (*lead, cols)
            if products:
                assert_product(found, x, dense, matrix.scale.t() if block is None else None)
            else:
                assert_exact(found, x, dense)

        ids = torch.randint(0, rows, (*lead, 3))
        assert torch.equal(F.embedding(ids, matrix), dense[ids])
        assert torch.equal(matrix[ids], dense[ids])


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE, SIZE, SIZE, st.sampled_from(["rows", "parts", "whole", "all"]), PRODUCTS)
def test_the_products_of_blocks(count, cols, features, tokens, scales, products) -> None:
    parts = 3
    cols *= parts
    block = {"rows": None, "parts": cols // parts, "whole": cols, "all": count * cols + 1}[scales]
    matrix = Int8Matrix(*quantise(draw(count * cols + 1, features), block), block)
    blocks = matrix.blocks(cols, count)
    dense = rows_of(matrix)[: count * cols].view(count, cols, features)
    assert torch.equal(blocks.dense(), dense)
    assert blocks.shape == dense.shape
    x = draw(tokens, cols, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "_ON_CPU", products)
        found = blocks.reduce(x)
    assert found.shape == (tokens, count, features)
    for index in range(count):
        if products and block is not None:
            assert_product(found[:, index], x, dense[index])
        else:
            assert_exact(found[:, index], x, dense[index])


@pytest.mark.skipif(not int8._ON_CPU, reason="this CPU has no instructions for it")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_of_8_bits_are_multiplied_exactly(dtype) -> None:
    """Also by columns, which are no contiguous memory."""
    values = torch.randint(-127, 128, (64, 48), dtype=torch.int8)
    projection = Int8Matrix(values, torch.full((1, 48), 2.0, dtype=dtype), 64)
    x = torch.randint(-127, 128, (5, 64)).to(dtype)
    x[:, 0] = 127
    for part, columns in zip(
        projection.split([7, 0, 41], -1), (slice(7), 0, slice(7, 48)), strict=True
    ):
        if columns:
            found = x @ part
            assert found.dtype == dtype
            assert torch.equal(found, (x.double() @ values[:, columns].double() * 2).to(dtype))


def test_anything_else_is_done_with_the_tensor() -> None:
    matrix = Int8Matrix(*quantise(draw(4, 3), None), None)
    dense = rows_of(matrix)
    assert torch.equal(matrix.t(), dense.t())
    torch.testing.assert_close(
        matrix @ torch.ones(3, 2).double(), dense @ torch.ones(3, 2).double()
    )
    torch.testing.assert_close(torch.cat([matrix, matrix]), torch.cat([dense, dense]))
    assert torch.equal(matrix[1:], dense[1:])
    assert torch.equal(matrix * 2, dense * 2)
    assert torch.equal(matrix.abs(), dense.abs())
    assert torch.equal(torch.stack(matrix.split(2)), torch.stack(dense.split(2)))
    assert (len(matrix), matrix.size(1), matrix.dim()) == (4, 3, 2)
    assert matrix.detach() is matrix
    with pytest.warns(UserWarning, match="zero_.. of a quantised weight has no effect"):
        matrix.zero_()
    with pytest.raises(ShareError, match="scale of a quantised weight cannot be set"):
        matrix.scale = torch.ones(1)
    # The norms of rows that are cut are those of the rows.
    ids = torch.tensor([0, 3])
    found = F.embedding(ids, matrix, max_norm=0.5)
    torch.testing.assert_close(found, F.embedding(ids, dense.clone(), max_norm=0.5))


def test_inputs_without_tokens_of_zeros_and_with_gradients() -> None:
    matrix = Int8Matrix(*quantise(draw(4, 3), None), None)
    blocks = Int8Matrix(*quantise(draw(4, 3), 2), 2).blocks(2, 2)
    assert F.linear(torch.ones(0, 3).double(), matrix).shape == (0, 4)
    assert blocks.reduce(torch.ones(0, 2).double()).shape == (0, 2, 3)
    assert F.linear(torch.zeros(2, 3).double(), matrix).eq(0).all()
    assert F.linear(torch.full((2, 3), torch.nan).double(), matrix).isnan().all()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for call in (
        lambda: F.linear(x, matrix),
        lambda: x[:, :1].expand(-1, 4) @ matrix,
        lambda: blocks.reduce(x[:, :2]),
    ):
        with pytest.raises(ShareError, match="no gradients through a quantised module"):
            call()
    with torch.no_grad():
        F.linear(x, matrix)
