"""For how long what was derived is held, and when it is stale.

A frame holds what was derived from one state of the table and the projection. While a shared
module's forward runs, its thread has one; in eval mode without gradients one is kept between calls,
so that decoding step by step does not generate at every step; everything else is derived anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paramshare.checks import is_sharded
from paramshare.errors import ShareError
from paramshare.samples import Samples

# (what, gradients on?, autocast dtype) -> tensors. The modes are in the key, since a tensor made in
# one is wrong in another: a weight first read under no_grad would silently not train.
Frame = dict[tuple[Any, ...], Any]

# The tensors that everything in a frame is derived from: each, an alias of it, and its marks. None
# for tensors that have no marks.
State = list[tuple[Tensor, Tensor, Any]] | None
_STATE = (("state",),)  # its key in a frame
_SAMPLES = (("samples",),)  # key of what shows writes without marks, in a frame that is kept

# Key of the set of groups that were written into, in a frame under which somebody looks for that.
WATCHED = (("watched",),)

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

    def frame(self, tensors: list[Tensor], training: bool, whole: bool = False) -> Frame:
        """Where to look for what was derived from `tensors`, and where to put it.

        whole: asked for by a forward of the whole shared module. Raises ShareError where
        torch.export looks at a part of it.
        """
        running = self.running
        if torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export():
            raise ShareError(
                "torch.jit.trace does not know that weights are read from the embedding; use "
                "torch.export.export, which does, or call paramshare.materialize first"
            )
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
        if running is not None:
            if not _is_of(running, tensors):
                # Table or projection were changed by the forward that runs.
                running = self.running = new_frame(tensors)
            return running
        if training or torch.is_grad_enabled() or torch.jit.is_tracing():
            self.kept = None
            return new_frame(tensors)
        kept = self.kept  # once: another thread may drop it meanwhile
        if kept is None or not _is_of(kept, tensors) or _is_written(kept, whole):
            kept = new_frame(tensors)
            if kept[_STATE] is None:
                self.kept = None
            else:
                kept[_SAMPLES] = [Samples(tensor) for tensor in tensors if not tensor.is_meta]
                self.kept = kept
        return kept


def new_frame(tensors: list[Tensor]) -> Frame:
    """An empty one, for what is derived from these tensors as they are now. Raises ShareError where
    this process has only a part of them."""
    if any(map(is_sharded, tensors)):
        raise ShareError(
            "the table or the projection is sharded where a weight is read from it: both must be "
            "whole while the shared module runs, so apply fully_shard to its layers and to itself, "
            "not to its embedding or its pool (paramshare), and call it, not a part of it"
        )
    return {_STATE: _state(tensors)}


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


def drop(frame: Frame, what: tuple[Any, ...], device: str) -> None:
    """Removes the value for the modes of now, if there is one. Threads may share the frame."""
    frame.pop((what, torch.is_grad_enabled(), _autocast(device)), None)


def put_weight(frame: Frame, index: int, device: str, weight: Tensor) -> None:
    """Puts a generated weight into the frame."""
    version = 0 if torch.compiler.is_compiling() else _version(weight)
    put(frame, ("weight", index), device, (weight, version))


def look_up_weight(frame: Frame, index: int, device: str) -> tuple[Tensor | None, bool]:
    """The weight if it is there and nobody has written into it, and whether somebody has."""
    found = look_up(frame, ("weight", index), device)
    if found is None:
        return None, False
    weight, version = found
    written = not torch.compiler.is_compiling() and version != _version(weight)
    return (None if written else weight), written


def weights_in(frame: Frame) -> Iterator[tuple[int, Tensor, bool]]:
    """(group, weight, whether its version shows that somebody has written into it)."""
    for key, value in frame.items():
        if key[0][0] == "weight":
            weight, version = value
            yield key[0][1], weight, version != _version(weight)


def _autocast(device: str) -> torch.dtype | None:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _mark(tensor: Tensor) -> Any:
    """What shows that a tensor has changed. Inference tensors, and those of torch.func, have no
    such marks: RuntimeError."""
    inference = torch.is_inference_mode_enabled()
    return tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device, inference


def _state(tensors: list[Tensor]) -> State:
    """The alias keeps the memory, so that its address cannot come back as another's."""
    try:
        return [(tensor, tensor.detach(), _mark(tensor)) for tensor in tensors]
    except RuntimeError:
        return None


def _is_written(frame: Frame, whole: bool) -> bool:
    """Whether what a kept frame was derived from was written to without a mark."""
    derived = ("weight", "reduced", "whitening")
    if not any(key[0][0] in derived for key in list(frame)):  # other threads add
        return False  # views of what is stored are right whatever is written
    # A comparison makes a GPU wait: once a call of the whole module, not for each weight of a part.
    return any(s.differ(whole) for s in frame[_SAMPLES] if whole or s.device.type == "cpu")


def _is_of(frame: Frame, tensors: list[Tensor]) -> bool:
    """Whether the frame was derived from these tensors as they are now."""
    state: State = frame.get(_STATE)
    if state is None:
        return True  # a running forward's, of tensors without marks, or begun in compiled code
    try:
        return len(state) == len(tensors) and all(
            known is tensor and mark == _mark(tensor)
            for (known, _, mark), tensor in zip(state, tensors, strict=True)
        )
    except RuntimeError:
        return False
