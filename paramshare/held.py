"""For how long what was derived is held, and when it is stale.

A frame holds what was derived from one state of the table and the projection. While a shared
module's forward runs, its thread has one; in eval mode without gradients one is kept between calls,
so that decoding step by step does not generate at every step; everything else is derived anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paramshare.errors import ShareError

# (what, gradients on?, autocast dtype) -> tensors. The modes are in the key, since a tensor made in
# one is wrong in another: a weight first read under no_grad would silently not train.
Frame = dict[tuple[Any, ...], Any]

# The tensors that everything is derived from: each, an alias of it, its version and its like.
State = list[tuple[Tensor, Tensor, Any]]
_STATE = ("state",)  # its key in a frame

# Not in torch 2.6, where torch.export of a part goes unnoticed.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


class _Running(threading.local):
    """The frame of the forward pass that runs in this thread, if one does."""

    def __init__(self) -> None:
        self.frame: Frame | None = None


class Holder:
    """The frames of one pool."""

    def __init__(self) -> None:
        self._running = _Running()
        self.kept: Frame | None = None

    @property
    def running(self) -> Frame | None:
        """The frame of the forward that runs in this thread."""
        return self._running.frame

    @running.setter
    def running(self, frame: Frame | None) -> None:
        self._running.frame = frame

    def frame(self, tensors: Iterable[Tensor], training: bool, whole: bool = False) -> Frame:
        """Where to look for what was derived from `tensors`, and where to put it.

        whole: asked for by a forward of the whole shared module. Raises ShareError where
        torch.export looks at a part of it.
        """
        running = self.running
        if torch.compiler.is_compiling():
            if running is not None:
                # Compiled code reads what is held and does not add to it: a tensor that leaves
                # its graph is a copy without the gradient that we give it.
                return dict(running)
            if _is_exporting() and not whole:
                raise ShareError(
                    "torch.export of a part of a shared module would bake its weights in as "
                    "constants; export the module that share_from_embedding was called on"
                )
            return {}
        state = _state(tensors)
        if running is not None:
            if not _same(running.get(_STATE), state):
                # Table or projection were changed by the forward that runs.
                running = self.running = {_STATE: state}
            return running
        if training or torch.is_grad_enabled() or state is None or torch.jit.is_tracing():
            self.kept = None
            return {_STATE: state}
        kept = self.kept  # once: another thread may drop it meanwhile
        if kept is None or not _same(kept[_STATE], state):
            kept = self.kept = {_STATE: state}
        return kept


def put(frame: Frame, what: tuple[Any, ...], device: str, value: Any) -> Any:
    """Puts a value into the frame for the modes of now, and returns it."""
    frame[(what, torch.is_grad_enabled(), _autocast(device))] = value
    return value


def look_up(frame: Frame, what: tuple[Any, ...], device: str) -> Any:
    """The value for the modes of now, None where there is none."""
    autocast = _autocast(device)
    found = frame.get((what, torch.is_grad_enabled(), autocast))
    if found is None and not torch.is_grad_enabled():
        found = frame.get((what, True, autocast))  # one with a graph serves without, too
    return found


def put_weight(frame: Frame, index: int, device: str, weight: Tensor) -> None:
    """Puts a generated weight into the frame."""
    version = 0 if torch.compiler.is_compiling() else _version(weight)
    put(frame, ("weight", index), device, (weight, version))


def look_up_weight(frame: Frame, index: int, device: str) -> Tensor | None:
    """The weight if it is there, and nobody has written into it."""
    found = look_up(frame, ("weight", index), device)
    if found is None:
        return None
    weight, version = found
    if not torch.compiler.is_compiling() and version != _version(weight):
        return None
    return weight


def _autocast(device: str) -> torch.dtype | None:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state(tensors: Iterable[Tensor]) -> State | None:
    """None for tensors without such marks: inference tensors, and those of torch.func. The alias
    keeps the memory, so that its address cannot come back as another's."""
    inference = torch.is_inference_mode_enabled()
    state: State = []
    for tensor in tensors:
        try:
            mark = (tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device, inference)
        except RuntimeError:
            return None
        state.append((tensor, tensor.detach(), mark))
    return state


def _same(a: State | None, b: State | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        x is y and mark == other for (x, _, mark), (y, _, other) in zip(a, b, strict=True)
    )
