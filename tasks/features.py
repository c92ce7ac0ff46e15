"""Features of pictures, one folder a split: features.npy with all rows, pictures.json with whose
they are.

A picture has the rows of its grid, or a row for each of its regions. The rows are float16, memory
mapped: workers share them, and what is not asked for is not read.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paramshare import ShareError

ROWS, PICTURES, FORMAT = "features.npy", "pictures.json", 1
_HEADER = 128  # bytes of a .npy before its rows, however many they are
Identity = dict[str, str] | None  # of the network that made them: models.backbones.Backbone


class Features:
    """Features of a split, by the id of a picture.

    ids: in the order of the rows. width: of a row. grid: its rows and columns, None where pictures
    have regions. backbone: what made them, None where that is not known.

    Raises ShareError where the folder is not there, or its files do not agree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(folder)
        try:
            about = json.loads((folder / PICTURES).read_text("utf-8"))
            self.ids: list[int] = about["ids"]
            self.width: int = about["width"]
            self.grid: tuple[int, int] | None = tuple(about["grid"]) if about["grid"] else None
            self.backbone: Identity = about["backbone"]
            self._offsets = np.array(about["offsets"], np.int64)
            known = about["format"] == FORMAT
        except FileNotFoundError:
            raise ShareError(
                f"{folder} holds no {PICTURES}: make features by "
                "recipes/coco_captioning/features.py"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ShareError(
                f"{folder / PICTURES} is damaged ({type(error).__name__} {error}): make it again"
            ) from None
        if not known:
            raise ShareError(f"{folder / PICTURES} has format {about['format']}, known is {FORMAT}")
        self._place = {picture: n for n, picture in enumerate(self.ids)}
        if len(self._place) != len(self.ids) or len(self._offsets) != len(self.ids) + 1:
            raise ShareError(
                f"{folder / PICTURES} has {len(self.ids):,} ids, {len(self._place):,} of them "
                f"different, and {len(self._offsets):,} offsets, not one more than ids"
            )
        if self._offsets[0] != 0 or (np.diff(self._offsets) < 1).any():
            raise ShareError(f"{folder / PICTURES} is damaged (offsets): make it again")
        self._open()

    def _open(self) -> None:
        path, expected = self.folder / ROWS, (int(self._offsets[-1]), self.width)
        try:
            self._rows = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise ShareError(f"{path} cannot be read: {error}") from None
        if (self._rows.shape, self._rows.dtype) != (expected, np.float16):
            raise ShareError(
                f"{path} has the shape {self._rows.shape} of {self._rows.dtype}, but {PICTURES} "
                f"says {expected} of float16"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, picture: int) -> bool:
        return picture in self._place

    def __getitem__(self, picture: int) -> np.ndarray:
        """`(rows, width)`, float16, read-only."""
        try:
            place = self._place[picture]
        except KeyError:
            raise ShareError(f"{self.folder} has no features of picture {picture}") from None
        return self._rows[self._offsets[place] : self._offsets[place + 1]]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_rows"]  # a worker maps the file itself
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def write_features(
    folder: Path,
    ids: Sequence[int],
    make: Callable[[Sequence[int]], Iterable[np.ndarray]],
    *,
    width: int,
    grid: tuple[int, int] | None,
    backbone: Identity,
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Makes `folder`, in batches; how many pictures had been made before.

    make: of ids, their rows `(rows, width)` each. progress: is told how many pictures there are.
    Until it is finished all is in FOLDER.partial. A run that was killed is continued and loses a
    batch at most. Raises ShareError where the partial folder is of other pictures or another
    network, or where `make` gives something else than was said.
    """
    about = {"ids": list(ids), "width": width, "grid": grid and list(grid), "backbone": backbone}
    partial = folder.with_name(f"{folder.name}.partial")
    wanted, counted = partial / "wanted.json", partial / "counts.txt"
    if wanted.exists() and json.loads(wanted.read_text("utf-8")) != about:
        raise ShareError(
            f"{partial} was begun for other pictures or another network: delete it and start again"
        )
    partial.mkdir(parents=True, exist_ok=True)
    _write(wanted, json.dumps(about))
    # The last line may have been cut off.
    lines = counted.read_text().split("\n")[:-1] if counted.exists() else []
    counts, before = [int(line) for line in lines], len(lines)
    _write(counted, "".join(f"{count}\n" for count in counts))
    (partial / ROWS).touch()
    with (partial / ROWS).open("r+b") as file, counted.open("a") as record:
        # Counts are written after their rows: rows beyond them are of a batch that was cut off.
        file.truncate(_HEADER + 2 * width * sum(counts))
        file.seek(0, os.SEEK_END)
        for start in range(before, len(ids), batch):
            part = list(ids[start : start + batch])
            made = [np.asarray(x, "<f2") for x in make(part)]
            _check(made, part, width, grid)
            file.write(np.concatenate(made).tobytes())
            file.flush()
            record.write("".join(f"{len(x)}\n" for x in made))
            record.flush()
            counts += [len(x) for x in made]
            progress(len(counts))
        file.seek(0)
        file.write(_header(sum(counts), width))
    offsets = [0, *itertools.accumulate(counts)]
    _write(partial / PICTURES, json.dumps({"format": FORMAT, **about, "offsets": offsets}))
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    for left in (wanted, counted):
        (folder / left.name).unlink()
    return before


def _check(
    made: list[np.ndarray], ids: list[int], width: int, grid: tuple[int, int] | None
) -> None:
    if len(made) != len(ids):
        raise ShareError(f"{len(ids)} pictures were to be made, {len(made)} were")
    for picture, rows in zip(ids, made, strict=True):
        cells = grid[0] * grid[1] if grid else len(rows)
        if rows.shape != (cells, width) or not cells:
            raise ShareError(f"features of picture {picture}: {rows.shape}, not {(cells, width)}")
        if not np.isfinite(rows).all():
            raise ShareError(f"features of picture {picture} are not finite in float16")


def _header(rows: int, width: int) -> bytes:
    """What stands before the rows of a .npy file."""
    file = io.BytesIO()
    about = {"descr": "<f2", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
