"""Applying a weight without ever building it."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def factored_linear(
    input: Tensor,
    table_blocks: Tensor,
    projection: Tensor,
    projection_bias: Tensor | None,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    """`linear(input, W, bias)` of an aligned weight W of `rows` rows.

    input `(..., cols)`, table_blocks `(blocks, cols, features)`, projection `(features, columns)`,
    projection_bias `(columns,)`, bias `(rows,)`; returns `(..., rows)`. With
    `W[q * columns + g, i] = table_blocks[q, i] . projection[:, g] + projection_bias[g]`
    the input is reduced to `features` numbers a block first, and these give the rows:
    `features * blocks * (cols + columns)` multiply-adds a token against `rows * cols`.
    """
    blocks, cols, features = table_blocks.shape
    flat = input.reshape(-1, cols)
    # bmm and not matmul, which would copy the table to fold its blocks into one product.
    reduced = torch.bmm(flat.expand(blocks, -1, -1), table_blocks)  # (blocks, tokens, features)
    by_block = reduced.view(-1, features) @ projection
    output = rearrange(by_block, "(q t) g -> t (q g)", q=blocks)[:, :rows]
    if projection_bias is not None:
        shift = flat.sum(-1, keepdim=True) * projection_bias.repeat(blocks)[:rows]
        output = output + shift.to(output.dtype)  # under autocast the products are narrower
    if bias is not None:
        output = output + bias.to(output.dtype)
    return output.reshape(*input.shape[:-1], rows)
