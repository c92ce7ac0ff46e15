"""Pictures as pixels, loaded by threads while the network looks at those before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from stages import UserError

from paramshare import ShareError
from paramshare.tasks.captions import Captions
from paramshare.tasks.pictures import open_picture


class Loader:
    """Called with ids of pictures, in their order: `(pictures, 3, height, width)`."""

    def __init__(self, found: Captions, transform: Callable[[Any], torch.Tensor], ahead: int):
        """ahead: how many pictures are loaded beyond those that are asked for."""
        self._found, self._transform, self._ahead = found, transform, ahead
        self._ids = list(found.files)
        self._place = {id: place for place, id in enumerate(self._ids)}
        self._waiting: dict[int, Future[torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(min(8, 2 + (os.cpu_count() or 1)))

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Raises UserError where a picture cannot be read."""
        start = self._place[ids[0]]
        for id in self._ids[start : start + len(ids) + self._ahead]:
            if id not in self._waiting:
                self._waiting[id] = self._pool.submit(self._load, id)
        try:
            return torch.stack([self._waiting.pop(id).result() for id in ids])
        except ShareError as error:
            raise UserError(
                f"{error}\nprepare.py found it whole: mend it, or delete "
                f"{self._found.path.parent} and run prepare.py with --skip-bad"
            ) from None

    def _load(self, id: int) -> torch.Tensor:
        return open_picture(Path(str(self._found.folder)) / self._found.files[id], self._transform)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
