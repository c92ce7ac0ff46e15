"""Captions of pictures in COCO's annotation format, checked when they are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paramshare import ShareError
from paramshare.models.colours import colours

logger = logging.getLogger(__name__)
T = TypeVar("T")
SHOWN = 3  # of each kind of defect, by name


@dataclass
class Captions:
    """A split: what its annotation file says, without what is wrong in it.

    folder: of the pictures, where the file says it. files: their names in it, by id. of: their
    captions, by id, in the order of the file. defects: what was left out and why, named.
    """

    path: Path
    folder: Path | None
    files: dict[int, str]
    of: dict[int, list[str]]
    defects: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, picture: int, kind: str) -> None:
        """Leaves a picture out, with its captions."""
        self.defects.setdefault(kind, []).append(f"{picture} ({self.files[picture]})")
        del self.files[picture], self.of[picture]

    def settle(self, skip: bool) -> None:
        """After all checks: says what is left out, or that it must not be. Raises ShareError."""
        if not self.files:
            raise ShareError(f"{self.path} has no picture that can be used{self._said()}")
        if self.defects and not skip:
            raise ShareError(
                f"{self.path} has defects{self._said()}\nMend them, or leave them out by --skip-bad"
            )
        if self.defects:
            logger.warning(f"{self.path}: left out{self._said()}")

    def _said(self) -> str:
        lines = []
        for kind, names in self.defects.items():
            more = ", ..." if len(names) > SHOWN else ""
            lines.append(f"\n  {len(names):,} x {kind}: {', '.join(names[:SHOWN])}{more}")
        return "".join(lines)


def read_captions(path: Path, split: Callable[[str], list[str]]) -> Captions:
    """Reads `{"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}`.

    split: of a caption, into tokens; one without any is empty. Raises ShareError where the file is
    not there or no such JSON; everything else that is wrong becomes a defect.
    """
    content = read_json(path)
    try:
        images = each(content, "images", lambda x: (number(x["id"]), text(x["file_name"])))
        annotations = each(
            content,
            "annotations",
            lambda x: (number(x["id"]), number(x["image_id"]), x["caption"]),
        )
        folder = _pictures(content.get("info"))
    except (ValueError, KeyError, TypeError) as error:
        raise ShareError(
            f"{path} is no COCO annotation file, with images (id, file_name) and annotations (id, "
            f"image_id, caption): {said(error)}"
        ) from None
    found = Captions(path, Path(folder) if folder else None, {}, {})
    defects = found.defects
    for picture, name in images:
        if picture in found.files:
            defects.setdefault("picture id twice", []).append(f"{picture} ({name})")
        else:
            found.files[picture], found.of[picture] = name, []
    seen = set()
    for id, picture, caption in annotations:
        if id in seen:
            kind = "caption id twice"
        elif picture not in found.files:
            kind = "caption without picture"
        elif not _is_text(caption):
            kind = "caption that is no text"
        elif not split(caption):
            kind = "empty caption"
        else:
            found.of[picture].append(caption)
            seen.add(id)
            continue
        seen.add(id)
        defects.setdefault(kind, []).append(f"{id} (picture {picture})")
    for picture in [picture for picture, captions in found.of.items() if not captions]:
        found.drop(picture, "picture without caption")
    return found


def read_json(path: Path) -> Any:
    """Raises ShareError where that is not one JSON value, of objects that have a key once."""
    try:
        return json.loads(path.read_text("utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        raise ShareError(f"{path} is not there") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ShareError(f"{path} is no JSON that can be read: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {max(keys, key=keys.count)!r} twice")
    return made


def each(content: Any, name: str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """What `read` makes of each object in a list of `content`.

    Raises KeyError where there is no such list, TypeError where it is none, and ValueError that
    names the object of which `read` raises one of them.
    """
    if not isinstance(content, dict):
        raise TypeError(f"it holds {content!r:.40}, which is no object")
    if not isinstance(content[name], list):
        raise TypeError(f"{name} is {content[name]!r:.40}, which is no list")
    made = []
    for place, entry in enumerate(content[name]):
        try:
            if not isinstance(entry, dict):
                raise TypeError(f"{entry!r:.40} is no object")
            made.append(read(entry))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}[{place}]: {said(error)}") from None
    return made


def number(value: Any) -> int:
    """An id. Raises TypeError for others: True, 1.0 and infinities would become other ids."""
    if type(value) is not int:
        raise TypeError(f"the id {value!r:.40} is no whole number")
    return value


def text(value: Any) -> str:
    """Raises TypeError."""
    if not _is_text(value):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _is_text(value: Any) -> bool:
    """JSON can hold halves of characters, which no file can."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def _pictures(info: Any) -> str | None:
    if info is not None and not isinstance(info, dict):
        raise TypeError(f"info is {info!r:.40}, which is no object")
    folder = (info or {}).get("pictures")
    return None if folder is None else text(folder)


def check_features(found: Captions, available: Iterable[int]) -> None:
    """Drops pictures without features."""
    there = set(available)
    for picture in [picture for picture in found.files if picture not in there]:
        found.drop(picture, "picture without features")


def check_pictures(found: Captions, folder: Path) -> None:
    """Drops pictures that are not in `folder` or cannot be decoded to their end."""
    with ThreadPoolExecutor() as workers:
        verdicts = workers.map(lambda name: _defect(folder / name), list(found.files.values()))
        for count, (picture, kind) in enumerate(zip(list(found.files), verdicts, strict=True), 1):
            if kind is not None:
                found.drop(picture, kind)
            if count % 5000 == 0:
                logger.info(f"{found.path.name}: {count:,} pictures checked")


def _defect(path: Path) -> str | None:
    from PIL import Image

    try:
        if not path.is_file():
            return "missing picture"
        with Image.open(path) as picture:
            picture.draft("RGB", (64, 64))  # a JPEG is read to its end all the same, but quicker
            colours(picture)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return f"picture of over {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
    except ShareError:
        return "picture of which nothing says what is white"
    except Exception:  # a damaged file fails in many ways
        return "broken picture"
    return None
