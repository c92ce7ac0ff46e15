"""How much of the weights' gradient reaches the table: `table_gradient` of the call.

The forward pass is the same for every share; only what flows back into the table is scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from paramshare.standin import StandIn, built


def in_forward_mode() -> bool:
    """Whether tangents may be on their way. Functions of our own know only backward (compilers take
    none with a `jvp`); what they compute is then left to autograd, which needs more memory."""
    return forward_ad._current_level >= 0


def scale_gradient(tensor: Tensor, share: float) -> Tensor:
    """`tensor`, through which only a share of the gradient flows back; of a stand-in without
    gradients nothing does."""
    if share == 1 or not torch.is_grad_enabled() or isinstance(tensor, StandIn):
        return tensor
    if in_forward_mode():
        return torch.lerp(tensor.detach(), tensor, share)  # has its values, exactly
    return _ScaleGradient.apply(tensor, share)


def virtual_columns(table: Tensor, projection: Tensor, bias: Tensor | None, share: float) -> Tensor:
    """Columns of the virtual table, one a row: `(table @ projection + bias)` transposed.

    table `(tokens, features)`, projection `(features, columns)`, bias `(columns,)`; returns
    `(columns, tokens)`. One product for all columns: reading the aligned layout from it copies
    the weights once, which costs less than the blockwise products whose views they could be, for
    those pad the table's gradient in backward once a product.
    """
    table = built(table)  # where it is quantised, while the columns are made
    if in_forward_mode():
        return _columns(scale_gradient(table, share), projection, bias)
    if share != 1 and torch.is_grad_enabled():
        return _VirtualColumns.apply(table, projection, bias, share)
    return _columns(table, projection, bias)


def _columns(table: Tensor, projection: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return projection.t() @ table.t()
    return torch.addmm(bias.unsqueeze(1), projection.t(), table.t())


class _ScaleGradient(torch.autograd.Function):
    """The identity; its gradient is multiplied by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, factor: float) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class _VirtualColumns(torch.autograd.Function):
    """The product of the columns. Scaling the small projection and not the table's gradient saves
    a pass over a tensor as large as the table, and a share of 0 the product that gives it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, projection: Tensor, bias: Tensor | None, share: float) -> Tensor:
        return _columns(table, projection, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        table, projection, bias, ctx.share = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(table, projection)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        table, projection = ctx.saved_tensors
        to_table = to_projection = to_bias = None
        # The gradient is narrower than these where the product was made under autocast, which is
        # over by now as a rule.
        dtype = gradient.dtype
        if ctx.needs_input_grad[0] and ctx.share != 0:
            scaled = (projection * ctx.share).to(dtype)
            to_table = (gradient.t() @ scaled.t()).to(table.dtype)
        if ctx.needs_input_grad[1]:
            to_projection = (table.to(dtype).t() @ gradient.t()).to(projection.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = gradient.sum(1).to(projection.dtype)
        return to_table, to_projection, to_bias, None
