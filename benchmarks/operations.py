"""Floating-point operations, counted without running anything: on the meta device."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import training_step

from paramshare import flops
from paramshare.operations import operation_counter


def inference_operations(model: nn.Module, tokens: Tensor) -> int:
    """Of a forward pass; what is kept between passes is there already."""
    return flops(copy.deepcopy(model).to("meta"), tokens.to("meta")).total


def training_operations(model: nn.Module, tokens: Tensor) -> int:
    """Of forward and backward, the generation of weights among them."""
    step = training_step(copy.deepcopy(model).to("meta").train(), tokens.to("meta"))
    # The backward pass of fused attention would count as nothing.
    with sdpa_kernel(SDPBackend.MATH), operation_counter() as counter:
        step()
    return counter.get_total_flops()
