"""`--checkpoint-activations` of layers that read the same table.

fairseq's own way runs a backward pass of its own inside each layer's. The table then gets gradients
from each of them, and DistributedDataParallel, which sends a gradient as soon as it is there, takes
only one a pass ("mark a variable ready only once"). torch's newer way has a single backward pass.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_one_pass(model: nn.Module) -> None:
    """Of each layer that fairseq's `checkpoint_wrapper` has wrapped: it is recomputed as before,
    and with --offload-activations its inputs wait in the CPU's memory as before."""
    for layer in model.modules():
        if hasattr(layer, "precheckpoint_forward"):
            _, offload = layer.forward.args
            layer.forward = functools.partial(_recomputed, layer.precheckpoint_forward, offload)


def _recomputed(forward: Callable[..., Any], offload: bool, *args: Any, **named: Any) -> Any:
    with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
        return checkpoint(forward, *args, use_reentrant=False, **named)
