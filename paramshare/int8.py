"""Matrices of 8-bit numbers, and products with them.

A number is `value * scale`, with values of -127 to 127. The scales stand where a product can be
made of the values alone and scaled afterwards: one a row for `linear(x, W)`, one a block of rows
and column for `x @ W`. What is multiplied is rounded to 8 bits itself, a token at a time by its
largest number, where there are instructions for the product of integers; elsewhere the values are
converted for each product. Symmetric quantisation: Jacob et al., arXiv:1712.05877; scales of tokens
found while running: Dettmers et al., arXiv:2208.07339.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paramshare.errors import ShareError
from paramshare.standin import StandIn, built

LARGEST = 127
_SUBNORMAL, _STEP = 2.0**-14, 2.0**-24  # of float16: below the first, numbers are this far apart
_LONGEST = 2**17  # so many products of two values never overflow 32 bits


def quantise(weight: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """The int8 values of `weight` `(rows, ...)`, in its shape, and their scales.

    block: None gives one scale a row, `(rows, 1, ...)`; else one for each column of every `block`
    rows of a matrix, `(ceil(rows / block), cols)`. Scales have the dtype of the weight, and values
    that float16 has as well.
    """
    exact = weight if weight.dtype == torch.float64 else weight.float()
    if block is None:
        largest = exact.abs().amax(dim=tuple(range(1, exact.dim())), keepdim=True)
    else:
        largest = torch.stack([part.abs().amax(0) for part in exact.split(block)])
    scale = largest / LARGEST
    # Where float16 is coarse, up: a value too large for its scale would be cut.
    coarse = (scale / _STEP).ceil() * _STEP
    scale = torch.where(scale < _SUBNORMAL, coarse, scale.half().to(scale.dtype)).to(weight.dtype)
    rows = _spread(scale.to(exact.dtype), block, len(exact)).clamp_min(_STEP)
    return (exact / rows).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def empty(weight: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """As `quantise`, without values."""
    rows, *others = weight.shape
    shape = (rows, *[1] * len(others)) if block is None else (-(-rows // block), *others)
    return torch.empty_like(weight, dtype=torch.int8), weight.new_empty(shape)


def _spread(scale: Tensor, block: int | None, rows: int) -> Tensor:
    """A scale for each row."""
    return scale if block is None else scale.repeat_interleave(block, 0)[:rows]


class Int8Matrix(StandIn):
    """`(rows, cols)` numbers of 8 bits in the place of a tensor. Lookups of rows and products with
    tensors use the values; anything else works as well, by converting them first.

    values, scale, block: see `quantise`. There are no gradients.
    """

    values: Tensor
    scale: Tensor
    block: int | None
    what = "a quantised weight"
    instead = "quantise the module again that it was"

    def __init__(self, values: Tensor, scale: Tensor, block: int | None) -> None:
        for name, value in (("values", values), ("scale", scale), ("block", block)):
            object.__setattr__(self, name, value)

    def dense(self) -> Tensor:
        return self.values * _spread(self.scale, self.block, len(self.values))

    def parts(self) -> tuple[Tensor, ...]:
        return self.values, self.scale

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def data(self) -> Int8Matrix:
        return self

    def detach(self) -> Int8Matrix:
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
            places = index if self.block is None else index // self.block
            return self.values[index] * self.scale[places]
        return self.dense()[index]

    def rows(self, first: int, end: int) -> Tensor:
        """Some rows, converted."""
        if self.block is None:
            return self.values[first:end] * self.scale[first:end]
        places = torch.arange(first, end, device=self.device) // self.block
        return self.values[first:end] * self.scale[places]

    def __matmul__(self, other: Any) -> Tensor:
        return self.dense() @ built(other)

    def split(self, sizes: Any, dim: int = 0) -> Any:
        """Of columns, as of a tensor: views."""
        if dim not in (-1, 1):
            return self.dense().split(sizes, dim)
        values = self.values.split(sizes, 1)
        one = self.block is None
        scales = [self.scale] * len(values) if one else self.scale.split(sizes, 1)
        return [Int8Matrix(v, s, self.block) for v, s in zip(values, scales, strict=True)]

    def blocks(self, cols: int, count: int) -> Int8Blocks:
        """The first `count * cols` rows, as `count` matrices one below another."""
        return Int8Blocks(self, cols, count)


class Int8Blocks(StandIn):
    """`(count, cols, features)`: the first rows of a matrix, as matrices one below another."""

    matrix: Int8Matrix
    cols: int
    count: int
    pieces: tuple[Tensor, ...]
    what, instead = Int8Matrix.what, Int8Matrix.instead

    def __init__(self, matrix: Int8Matrix, cols: int, count: int) -> None:
        # The largest runs of rows that have scales in common, and are of one of the matrices.
        block = min(matrix.block or cols, cols)
        pieces = matrix.values[: count * cols].split(block)
        for name, value in (
            *(("matrix", matrix), ("cols", cols), ("count", count)),
            ("pieces", pieces),
        ):
            object.__setattr__(self, name, value)

    def dense(self) -> Tensor:
        return torch.stack(list(self.unbind()))

    def parts(self) -> tuple[Tensor, ...]:
        return self.matrix.parts()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.cols, self.matrix.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def unbind(self) -> Iterator[Tensor]:
        """The matrices, as of a tensor; each is converted when it is asked for."""
        for first in range(0, self.count * self.cols, self.cols):
            yield self.matrix.rows(first, first + self.cols)

    def reduce(self, flat: Tensor) -> Tensor:
        """`(tokens, count, features)`: the product of `flat` `(tokens, cols)` with each matrix."""
        block, scale = self.matrix.block, self.matrix.scale
        if block is None or self.cols % block and len(scale) > 1:
            _check_gradients(flat)
            return torch.stack([flat @ part.to(flat.dtype) for part in self.unbind()], 1)
        tokens, each = _Tokens(flat), len(self.pieces) // self.count
        products = [
            tokens.times(piece, n % each * len(piece)) for n, piece in enumerate(self.pieces)
        ]
        found = torch.stack(products, 1).mul_(scale[: len(products)])
        found = found if each == 1 else found.unflatten(1, (self.count, each)).sum(2)
        return found.to(flat.dtype)


class _Tokens:
    """Tokens `(tokens, cols)`, times a factor `(1, cols)` if there is one, that are multiplied by
    8-bit numbers. Once for several products, they are rounded to 8 bits themselves, each by its
    largest number, if they can be multiplied as integers."""

    def __init__(self, flat: Tensor, factor: Tensor | None = None) -> None:
        _check_gradients(flat)
        exact = flat if flat.dtype == torch.float64 else flat.float()
        self.exact = exact if factor is None else exact * factor
        self.rounded: tuple[Tensor, Tensor] | None = None

    def times(self, values: Tensor, first: int = 0) -> Tensor:
        """`(tokens, outputs)`: the columns from `first` on, times `(some of cols, outputs)`."""
        some = slice(first, first + len(values))
        if not _has_products(self.exact, values):
            return self.exact[:, some] @ values.to(self.exact.dtype)
        if self.rounded is None:
            # Two passes over the tokens: torch's one function for the smallest and the largest
            # number takes seven times as long on a CPU. Tokens may be all zeros.
            largest = self.exact.abs().amax(-1, keepdim=True)
            scale = largest.clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
            self.rounded = (self.exact / scale).round_().to(torch.int8), scale
        integers, scale = self.rounded
        return torch._int_mm(integers[:, some], values) * scale


# Without these instructions sums of two products saturate at 16 bits.
_VNNI = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
_ON_CPU = _VNNI and torch.backends.mkldnn.is_available()


def _has_products(tokens: Tensor, values: Tensor) -> bool:
    """Whether tokens can be multiplied as integers by such values where they are."""
    # Of one column torch 2.14 takes some matrices for their transposes.
    fits = 1 < len(values) <= _LONGEST and len(tokens) > 0
    return _ON_CPU and fits and tokens.device.type == "cpu"


def _times(flat: Tensor, matrix: Int8Matrix) -> Tensor:
    """`flat @ matrix`, `(tokens, cols)` with `(cols, outputs)`."""
    if matrix.block is None:
        return _Tokens(flat, matrix.scale.t()).times(matrix.values).to(flat.dtype)
    tokens, output = _Tokens(flat), None
    parts = zip(matrix.values.split(matrix.block), matrix.scale, strict=True)
    for index, (part, scale) in enumerate(parts):
        product = tokens.times(part, index * matrix.block).mul_(scale)
        output = product if output is None else output.add_(product)
    assert output is not None
    return output.to(flat.dtype)


def _times_transposed(flat: Tensor, matrix: Int8Matrix) -> Tensor:
    """`flat @ matrix.T`, `(tokens, cols)` with `(outputs, cols)`."""
    if matrix.block is None:
        return _Tokens(flat).times(matrix.values.t()).mul_(matrix.scale.t()).to(flat.dtype)
    # The scales stand along what is summed: they go into copies of the tokens.
    parts = zip(matrix.values.split(matrix.block), matrix.scale, strict=True)
    products = [_Tokens(flat, scale).times(part.t()) for part, scale in parts]
    return torch.cat(products, 1).to(flat.dtype)


def _check_gradients(flat: Tensor) -> None:
    if torch.is_grad_enabled() and flat.requires_grad:
        raise ShareError(
            "there are no gradients through a quantised module, which is for inference: give it "
            "tensors that need none, or train the module that it was made of"
        )


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, Int8Matrix) or not isinstance(input, Tensor):
        return NotImplemented
    output = _times_transposed(input.reshape(-1, input.shape[-1]), weight)
    output = output.view(*input.shape[:-1], len(weight))
    return output if bias is None else output.add_(bias)


def _matmul(left: Any, right: Any) -> Any:
    if not isinstance(right, Int8Matrix) or not isinstance(left, Tensor):
        return NotImplemented
    output = _times(left.reshape(-1, left.shape[-1]), right)
    return output.view(*left.shape[:-1], right.shape[1])


def _embedding(
    input: Tensor, weight: Any, padding_idx: Any = None, max_norm: Any = None, *args: Any, **_: Any
) -> Any:
    if not isinstance(weight, Int8Matrix) or max_norm is not None:
        return NotImplemented  # the norms are those of the rows as they are used
    return weight[input]


Int8Matrix.through = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
}
