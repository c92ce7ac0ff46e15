"""Captions of pictures in COCO's annotation format, checked when they are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paramshare import ShareError
from paramshare.models.colours import colours

logger = logging.getLogger(__name__)
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
    try:
        content = json.loads(path.read_text("utf-8"))
        images = [(int(x["id"]), str(x["file_name"])) for x in content["images"]]
        annotations = [
            (int(x["id"]), int(x["image_id"]), x["caption"]) for x in content["annotations"]
        ]
        folder = content.get("info", {}).get("pictures")
    except FileNotFoundError:
        raise ShareError(f"{path} is not there") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShareError(
            f"{path} is no COCO annotation file, with images (id, file_name) and annotations (id, "
            f"image_id, caption): {type(error).__name__} {error}"
        ) from None
    found = Captions(path, Path(folder) if folder else None, {}, {})
    defects = found.defects
    for picture, name in images:
        if picture in found.files:
            defects.setdefault("picture id twice", []).append(f"{picture} ({name})")
        else:
            found.files[picture], found.of[picture] = name, []
    seen = set()
    for number, picture, caption in annotations:
        if number in seen:
            kind = "caption id twice"
        elif picture not in found.files:
            kind = "caption without picture"
        elif not isinstance(caption, str) or not split(caption):
            kind = "empty caption"
        else:
            found.of[picture].append(caption)
            seen.add(number)
            continue
        seen.add(number)
        defects.setdefault(kind, []).append(f"{number} (picture {picture})")
    for picture in [picture for picture, captions in found.of.items() if not captions]:
        found.drop(picture, "picture without caption")
    return found


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
