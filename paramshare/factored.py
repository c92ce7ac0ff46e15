"""Applying a weight without ever building it: `(x @ table blocks) @ projection`."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from paramshare.gradients import in_forward_mode
from paramshare.int8 import Int8Blocks

# On a CPU. All blocks of the table pass over so many tokens while these are in the cache, and what
# is made of them is completed there: of 4,096 at once, a layer took a sixth more time.
TOKENS_AT_ONCE = 512


def reduce(input: Tensor, table_blocks: Tensor | Int8Blocks) -> Tensor:
    """What the table makes of the input, `(tokens, blocks, features)`: the same for all weights
    with so many columns that read this input.

    input `(..., cols)`, table_blocks `(blocks, cols, features)`; `blocks * cols * features`
    multiply-adds a token.
    """
    flat = input.reshape(-1, table_blocks.shape[1])
    if isinstance(table_blocks, Int8Blocks):
        return table_blocks.reduce(flat)
    return (_reduce if in_forward_mode() else _Reduce.apply)(flat, table_blocks)


def _are_many(tokens: Tensor) -> bool:
    many = not torch.compiler.is_compiling() and len(tokens) > TOKENS_AT_ONCE
    return many and tokens.device.type == "cpu"


def _in_parts(make: Callable[[slice], Tensor], tokens: int) -> Tensor:
    """What `make` gives for some tokens, of all of them."""
    output = None
    for first in range(0, tokens, TOKENS_AT_ONCE):
        some = slice(first, first + TOKENS_AT_ONCE)
        found = make(some)
        if output is None:
            output = found.new_empty(tokens, *found.shape[1:])
        output[some] = found
        del found  # before the next one is made
    assert output is not None
    return output


def _reduce(input: Tensor, table_blocks: Tensor) -> Tensor:
    # bmm and not matmul, which would copy the table to fold its blocks into one product. The copy
    # is of the smallest tensor that there is; a product for each block, written to where the next
    # one wants it, copies nothing but takes twice the time for one token.
    reduced = torch.bmm(input.expand(len(table_blocks), -1, -1), table_blocks)
    return reduced.transpose(0, 1).contiguous()


class _Reduce(torch.autograd.Function):
    """Its gradient is summed up block by block: autograd by itself would make it of all blocks,
    `blocks` times as large as the input, and add these then."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, table_blocks: Tensor) -> Tensor:
        if not _are_many(input):
            return _reduce(input, table_blocks)
        return _in_parts(lambda some: _reduce(input[some], table_blocks), len(input))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        input, table_blocks = ctx.saved_tensors
        to_input = to_blocks = None
        # Narrower than these where the product was made under autocast, which is over by now.
        dtype = gradient.dtype
        if ctx.needs_input_grad[0]:
            parts = zip(gradient.unbind(1), table_blocks.to(dtype).mT.unbind(), strict=True)
            to_input = torch.mm(*next(parts))
            for rows, block in parts:
                to_input.addmm_(rows, block)
            to_input = to_input.to(input.dtype)
        if ctx.needs_input_grad[1]:
            transposed = input.to(dtype).t().expand(len(table_blocks), -1, -1)
            to_blocks = torch.bmm(transposed, gradient.transpose(0, 1)).to(table_blocks.dtype)
        return to_input, to_blocks


def expand(
    reduced: Tensor,
    input: Tensor,
    projection: Tensor,
    projection_bias: Tensor | None,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    """`linear(input, W, bias)` of an aligned weight W of `rows` rows, contiguous `(..., rows)`.

    reduced: of the input; input `(..., cols)`, projection `(features, columns)`, projection_bias
    `(columns,)`, bias `(rows,)`. `W[q * columns + g, i] = table_blocks[q, i] . projection[:, g] +
    projection_bias[g]`; `blocks * features * columns` multiply-adds a token.
    """
    if torch.is_grad_enabled() or not _are_many(reduced):
        return _expand(reduced, input, projection, projection_bias, rows, bias)
    flat = input.reshape(len(reduced), -1)
    output = _in_parts(
        lambda some: _expand(reduced[some], flat[some], projection, projection_bias, rows, bias),
        len(reduced),
    )
    return output.view(*input.shape[:-1], rows)


def _expand(
    reduced: Tensor,
    input: Tensor,
    projection: Tensor,
    projection_bias: Tensor | None,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    tokens, blocks, features = reduced.shape
    columns = projection.shape[1]
    output = (reduced.reshape(-1, features) @ projection).view(tokens, blocks * columns)
    return complete(output, input, projection_bias, rows, bias)


def complete(
    output: Tensor,
    input: Tensor,
    projection_bias: Tensor | None,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    """What a linear layer returns, contiguous `(..., rows)`, of its products `(tokens, blocks *
    columns)`, of which it may write into the memory; the rest as in `expand`."""
    whole = rows == output.shape[1]
    output = output if whole else output[:, :rows]
    if projection_bias is not None:
        sums = input.reshape(len(output), -1).sum(-1, keepdim=True)
        blocks = ceil(rows / len(projection_bias))
        shift = sums * projection_bias.repeat(blocks)[:rows]
        output = output + shift.to(output.dtype)  # under autocast the products are narrower
    if bias is not None:
        bias = bias.to(output.dtype)
        output = output + bias if torch.is_grad_enabled() or not whole else output.add_(bias)
    return output.contiguous().view(*input.shape[:-1], rows)
