"""Applying a weight a tile at a time: each is built, used and dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paramshare.gradients import in_forward_mode
from paramshare.standin import StandIn, built


def apply_tiles(input: Tensor, table_blocks: Tensor | StandIn, projection: Tensor | None) -> Tensor:
    """`input @ W.T`, `(tokens, blocks * columns)`, of an aligned weight W.

    input `(..., cols)`, table_blocks `(blocks, cols, features)`, projection `(features, columns)`;
    without one the blocks are the tiles (EPS). All multiply-adds of the dense product, and
    `blocks * cols * features * columns` to build the tiles, once more in backward.
    """
    flat = input.reshape(-1, input.shape[-1])
    if isinstance(table_blocks, StandIn) or in_forward_mode():  # quantised, without gradients
        return _products(flat, table_blocks, projection).flatten(1)
    return _Tiles.apply(flat, table_blocks, projection).flatten(1)


def _products(input: Tensor, table_blocks: Any, projection: Any) -> Tensor:
    output = None
    for index, block in enumerate(table_blocks.unbind()):
        rows = input @ built(_tile(block, projection))
        if output is None:
            output = rows.new_empty(len(rows), len(table_blocks), rows.shape[1])
        output[:, index] = rows
        del rows  # before the next ones are made
    assert output is not None
    return output


def _tile(table_block: Tensor, projection: Tensor | None) -> Tensor:
    """`(cols, columns)`: rows of the weight that stand in one block of the table, transposed."""
    return table_block if projection is None else table_block @ projection


class _Tiles(torch.autograd.Function):
    """Saves no tile: autograd by itself would keep all of them, which is the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, table_blocks: Tensor, projection: Tensor | None) -> Tensor:
        return _products(input, table_blocks, projection)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        stored = ctx.saved_tensors
        # Narrower than these where the product was made under autocast, which is over by now.
        input, table_blocks = (tensor.to(gradient.dtype) for tensor in stored[:2])
        projection = None if stored[2] is None else stored[2].to(gradient.dtype)
        wanted = ctx.needs_input_grad
        to_input = torch.zeros_like(input)
        to_projection = None if projection is None else torch.zeros_like(projection)
        to_blocks = []
        for block, rows in zip(table_blocks.unbind(), gradient.unbind(1), strict=True):
            if wanted[0]:
                to_input = to_input + rows @ _tile(block, projection).t()
            if not any(wanted[1:]):
                continue
            to_tile = input.t() @ rows
            if to_projection is not None and wanted[2]:
                to_projection = to_projection + block.t() @ to_tile
            if wanted[1]:
                to_blocks.append(to_tile if projection is None else to_tile @ projection.t())
        found = (
            to_input if wanted[0] else None,
            torch.stack(to_blocks) if wanted[1] else None,
            to_projection if wanted[2] else None,
        )
        return tuple(g if g is None else g.to(t.dtype) for g, t in zip(found, stored, strict=True))
