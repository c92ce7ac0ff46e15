"""Numbers of a tensor by which a write is noticed that leaves no mark: one through `.data`.

All of a small tensor; of a large one a few at every look, and when a whole module is called one of
each row and of each column, so that no row and no column can be replaced unseen. To read all of a
table would take longer than a step of decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_SMALL = 4096  # numbers that are compared at every look
_FEW = 64  # or up to twice as many


class Samples:
    """What some of a tensor's numbers were when this was made, and whether they still are."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        # What is counted meanwhile, operations and bytes, is the module's own.
        with _disable_current_modes():
            few, others = _views(tensor.detach())
            self._few = few, few.clone()
            self._others = [(view, view.clone()) for view in others]

    def differ(self, thorough: bool) -> bool:
        """thorough: looks at each row and each column, and not only at a few numbers."""
        pairs = [self._few, *self._others] if thorough else [self._few]
        return not all(torch.equal(view, copy) for view, copy in pairs)


def _views(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A few numbers, and others that stand in all rows and columns; without copying."""
    if tensor.numel() <= _SMALL or tensor.dim() != 2:
        return tensor, []
    rows, cols = tensor.shape
    down, right = tensor.stride()
    if cols > rows:
        rows, cols, down, right = cols, rows, right, down
    # Along the diagonal, which goes on at the other side where it leaves the matrix.
    turns, rest = divmod(rows, cols)
    start = tensor.storage_offset()
    whole = tensor.as_strided((turns, cols), (cols * down, down + right), start)
    last = tensor.as_strided((rest,), (down + right,), start + turns * cols * down)
    lines = min(turns, _FEW // min(cols, 8))
    return whole[:: turns // lines, :: max(cols * lines // _FEW, 1)], [whole, last]
