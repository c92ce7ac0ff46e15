"""Which memory a computation allocates."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that torch's operations make, while they are alive:

        with Allocations() as trace:
            module(tokens)

    `live` now, `peak` at most at a time, `largest` of a single one. What an operation takes inside
    of itself and what was there before are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf, new=False)  # what it returns may be views of these
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, new=True)
        return result

    def peak_since_last(self) -> int:
        """`peak` since this was called last, which starts again."""
        peak, self.peak = self.peak, self.live
        return peak

    def _see(self, tensor: Tensor, new: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have several
            return
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0

        def forget(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
