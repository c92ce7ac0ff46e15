"""One reduction of an input for all weights that read it: query, key and value, gates.

Which they are is seen while the module runs: they are given the same tensor, one after the other.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paramshare.factored import reduce
from paramshare.held import Frame, drop, look_up, put
from paramshare.recomputed import Recomputed

_WHAT = ("reduced",)
# Not in all versions of torch; without it nothing is kept where gradients are recorded.
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class _Last:
    """The input that was reduced last, and what became of it; nothing once that input is gone."""

    def __init__(self, input: Tensor, table_blocks: Tensor, reduced: Tensor, group: int) -> None:
        this = weakref.ref(self)  # a method of its own would be a cycle, which lives on

        def forget(_: Any) -> None:
            last = this()
            if last is not None:
                last.reduced = last.copy = last.saving = None

        self.input = weakref.ref(input, forget)
        self.mark = _mark(input)
        # Inference tensors do not say whether they were written to.
        self.copy = input.clone() if input.is_inference() else None
        self.reduced: Tensor | None = reduced
        self.saving = (
            Recomputed(reduce, (input, table_blocks), reduced) if torch.is_grad_enabled() else None
        )
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


class Reduced(NamedTuple):
    """`reduce(input, table_blocks)`; the group for which it was made before, if it was; and a
    context in which autograd saves it by how it is made, so that training takes no more memory
    than with ordinary weights."""

    tensor: Tensor
    first: int | None
    saving: AbstractContextManager[None]


def reduced_input(
    frame: Frame, input: Tensor, table_blocks: Tensor, group: int, device: str
) -> Reduced:
    """The reduction of the input by the table's blocks, made only where it is not at hand.

    The frame must hold what the blocks are of, so that they are of the same table.
    """
    if not _can_be_kept(input):
        return Reduced(reduce(input, table_blocks), None, nullcontext())
    blocks, cols, _ = table_blocks.shape
    last = look_up(frame, _WHAT, device)
    if last is not None and last.serves(input, blocks, cols):
        return Reduced(last.reduced[:, :blocks], last.group, _saving(last))
    del last  # before the next one is made: there is never more than one
    drop_reduced(frame, device)
    reduced = reduce(input, table_blocks)
    made = put(frame, _WHAT, device, _Last(input, table_blocks, reduced, group))
    return Reduced(reduced, None, _saving(made))


def drop_reduced(frame: Frame, device: str) -> None:
    """Lets go of what is kept of the last input."""
    drop(frame, _WHAT, device)


def _saving(last: _Last) -> AbstractContextManager[None]:
    return nullcontext() if last.saving is None else last.saving.saved_by()


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
