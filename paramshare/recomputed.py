"""Backward makes a tensor again instead of keeping it: what autograd saves of it is how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Recomputed:
    """A tensor that `make(*sources)` gave, and gives again in backward: once for all that saved it.

    sources: must not be written to meanwhile; their memory is kept, as it is by what saves them.
    """

    def __init__(self, make: Callable[..., Tensor], sources: tuple[Tensor, ...], made: Tensor):
        self._make = make
        self._sources = [(source.detach(), source._version) for source in sources]
        device = made.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        self._autocast = (device, torch.get_autocast_dtype(device)) if autocast else None
        self._storage = made.untyped_storage()._cdata
        self._waiting = 0  # how many have saved it and not got it yet
        self._again: Tensor | None = None

    @contextmanager
    def saved_by(self) -> Iterator[None]:
        """Operations inside save how it is made where they would save the tensor."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor, tensor._version
        self._waiting += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            tensor, version = packed
            _check(tensor, version)
            return tensor
        self._waiting -= 1
        made = self._again
        if made is None:
            for source, version in self._sources:
                _check(source, version)
            autocast = torch.autocast(*self._autocast) if self._autocast else nullcontext()
            with torch.no_grad(), autocast:
                made = self._make(*(source for source, _ in self._sources))
        # Only for those that wait; a backward that is run twice makes it each time.
        self._again = made if self._waiting > 0 else None
        return made.as_strided(*packed)


def _check(tensor: Tensor, version: int) -> None:
    if tensor._version != version:  # torch checks this by itself only where there are no hooks
        raise RuntimeError(
            "a tensor that backward needs was modified in place after it was used: an input of a "
            "shared weight, the table or the projection"
        )
