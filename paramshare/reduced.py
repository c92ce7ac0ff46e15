"""One reduction of an input for all weights that read it: query, key and value, gates.

Which they are is seen while the module runs: they are given the same tensor, one after the other.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from paramshare.factored import reduce
from paramshare.held import Frame, drop, look_up, put

_WHAT = ("reduced",)
# Not in all versions of torch; without it nothing is kept where gradients are recorded.
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class _Last:
    """The input that was reduced last, and what became of it; nothing once that input is gone."""

    def __init__(self, input: Tensor, reduced: Tensor, group: int) -> None:
        this = weakref.ref(self)  # a method of its own would be a cycle, which lives on

        def forget(_: Any) -> None:
            last = this()
            if last is not None:
                last.reduced = last.copy = None

        self.input = weakref.ref(input, forget)
        self.mark = _mark(input)
        # Inference tensors do not say whether they were written to.
        self.copy = input.clone() if input.is_inference() else None
        self.reduced: Tensor | None = reduced
        self.group = group

    def serves(self, input: Tensor, blocks: int, cols: int) -> bool:
        return (
            self.reduced is not None
            and self.input() is input
            and input.shape[-1] == cols
            and self.reduced.shape[1] >= blocks
            and self.mark == _mark(input)
            and (self.copy is None or torch.equal(self.copy, input))
        )


def reduced_input(
    frame: Frame, input: Tensor, table_blocks: Tensor, group: int, device: str
) -> tuple[Tensor, int | None]:
    """`reduce(input, table_blocks)`, and the group for which it was made before, if it was.

    The frame must hold what the blocks are of, so that they are of the same table.
    """
    if not _can_be_kept(input):
        return reduce(input, table_blocks), None
    blocks, cols, _ = table_blocks.shape
    last = look_up(frame, _WHAT, device)
    if last is not None and last.serves(input, blocks, cols):
        return last.reduced[:, :blocks], last.group
    del last  # before the next one is made: there is never more than one
    drop_reduced(frame, device)
    reduced = reduce(input, table_blocks)
    put(frame, _WHAT, device, _Last(input, reduced, group))
    return reduced, None


def drop_reduced(frame: Frame, device: str) -> None:
    """Lets go of what is kept of the last input."""
    drop(frame, _WHAT, device)


def _can_be_kept(input: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False  # compilers see for themselves that two products are the same
    if torch.is_grad_enabled() and (_saved_tensors_hooks is None or _saved_tensors_hooks(False)):
        # Gradient checkpointing counts the tensors that a region saves, and what the first pass
        # found here would be made in the second.
        return False
    # Comparing copies would make a GPU wait.
    return _mark(input) is not None and (not input.is_inference() or input.device.type == "cpu")


def _mark(input: Tensor) -> tuple[Any, ...] | None:
    """What shows that it has changed; None where that cannot be seen."""
    try:
        version = None if input.is_inference() else input._version
        return version, None if input.is_meta else input.data_ptr(), input.shape
    except RuntimeError:  # a subclass without memory of its own
        return None
