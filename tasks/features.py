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

    Raises ShareError where the folder is not there, a file is damaged, or they do not agree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(folder)
        about = _read_about(folder / PICTURES)
        self.ids: list[int] = about["ids"]
        self.width: int = about["width"]
        self.grid: tuple[int, int] | None = about["grid"] and tuple(about["grid"])
        self.backbone: Identity = about["backbone"]
        self._offsets: list[int] = about["offsets"]
        self._place = {picture: n for n, picture in enumerate(self.ids)}
        self._open()

    def _open(self) -> None:
        """Maps the file, when its header and its size are those that are expected."""
        path, expected = self.folder / ROWS, (self._offsets[-1], self.width)
        try:
            with path.open("rb") as file:
                if (version := np.lib.format.read_magic(file)) != (1, 0):
                    raise ValueError(f"it has version {version} of the format, known is (1, 0)")
                shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
                start, size = file.tell(), path.stat().st_size
        except Exception as error:  # a damaged header fails in many ways
            raise ShareError(f"{path} cannot be read: {error}") from None
        if (shape, by_columns, kind) != (expected, False, np.float16):
            order = "columns" if by_columns else "rows"
            raise ShareError(
                f"{path} has the shape {shape} of {kind}, by {order}, but {PICTURES} says "
                f"{expected} of float16, by rows"
            )
        if size != start + 2 * expected[0] * expected[1]:
            raise ShareError(
                f"{path} has {size:,} bytes, but {start + 2 * expected[0] * expected[1]:,} belong "
                f"to its shape {shape}: make it again"
            )
        self._rows = np.memmap(path, np.float16, "r", start, expected)

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
    network, or damaged, or where `make` gives something else than was said.
    """
    about = {"ids": list(ids), "width": width, "grid": grid and list(grid), "backbone": backbone}
    partial = folder.with_name(f"{folder.name}.partial")
    wanted, counted = partial / "wanted.json", partial / "counts.txt"
    if wanted.exists() and not _says(wanted, about):
        raise ShareError(
            f"{partial} was begun for other pictures or another network: delete it and start again"
        )
    partial.mkdir(parents=True, exist_ok=True)
    _write(wanted, json.dumps(about))
    counts = _counted(counted, partial / ROWS, width, grid, len(ids))
    before = len(counts)
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


def _read_about(path: Path) -> dict[str, Any]:
    """What is in PICTURES, all of it checked. Raises ShareError."""
    try:
        about = json.loads(path.read_text("utf-8"))
        _check_about(about)
    except FileNotFoundError:
        raise ShareError(
            f"{path.parent} holds no {path.name}: make features by "
            "recipes/coco_captioning/features.py"
        ) from None
    except KeyError as error:
        raise ShareError(f"{path} is damaged: {error} is missing: make it again") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ShareError(f"{path} is damaged: {error}: make it again") from None
    return about


def _check_about(about: Any) -> None:
    """Raises ValueError, KeyError or TypeError, before anything is made of these numbers."""
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']!r:.40}, known is {FORMAT}")
    ids, offsets, width, grid = (about[name] for name in ("ids", "offsets", "width", "grid"))
    if not isinstance(ids, list) or not ids or any(type(id) is not int for id in ids):
        raise ValueError("ids are no whole numbers")
    if not _are_numbers(offsets, 0):
        raise ValueError("offsets are no whole numbers from 0")
    if not _are_numbers([width], 1):
        raise ValueError(f"width {width!r:.40} is no number from 1")
    if grid is not None and not (_are_numbers(grid, 1) and len(grid) == 2):
        raise ValueError(f"grid {grid!r:.40} is no pair of numbers from 1")
    backbone = about["backbone"]
    if backbone is not None and not (
        isinstance(backbone, dict)
        and backbone.keys() == {"name", "weights"}
        and all(isinstance(value, str) for value in backbone.values())
    ):
        raise ValueError(f"backbone {backbone!r:.40} is no name and weights")
    if (different := len(set(ids))) != len(ids) or len(offsets) != len(ids) + 1:
        raise ValueError(
            f"it has {len(ids):,} ids, {different:,} of them different, and {len(offsets):,} "
            "offsets, not one more than ids"
        )
    if offsets[0] != 0:
        raise ValueError(f"offsets begin with {offsets[0]}, not 0")
    cells = grid[0] * grid[1] if grid else None
    for picture, (start, end) in zip(ids, itertools.pairwise(offsets), strict=True):
        if end <= start or (cells and end - start != cells):
            raise ValueError(
                f"by its offsets picture {picture} has {end - start:,} rows, not "
                f"{cells or '1 or more'}"
            )


def _are_numbers(values: Any, least: int) -> bool:
    """Whether it is a list of whole numbers that have 64 bits; bool is no number here."""
    return isinstance(values, list) and all(
        type(value) is int and least <= value < 2**63 for value in values
    )


def _says(path: Path, about: dict[str, Any]) -> bool:
    try:
        return json.loads(path.read_text("utf-8")) == about
    except (ValueError, RecursionError):
        return False


def _counted(
    path: Path, rows: Path, width: int, grid: tuple[int, int] | None, pictures: int
) -> list[int]:
    """Of each picture that has been made, its rows. Raises ShareError where they are not there."""
    # The last line may have been cut off.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    counts = [int(line) if line.isdigit() and len(line) < 10 else 0 for line in lines]
    cells = grid[0] * grid[1] if grid else None
    needed = _HEADER + 2 * width * sum(counts) if counts else 0
    size = rows.stat().st_size if rows.exists() else 0
    if len(counts) > pictures or size < needed or any(n < 1 or n != (cells or n) for n in counts):
        raise ShareError(
            f"{path.parent} is damaged: {path.name} has {len(counts):,} of {pictures:,} pictures, "
            f"of {sum(counts):,} rows, {rows.name} {size:,} bytes: delete it and start again"
        )
    return counts


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
