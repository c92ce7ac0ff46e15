"""COCO's two JSON files, references and results, read and checked: what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import keys_once
from stages import UserError

WRONG = (KeyError, TypeError, ValueError, AttributeError)  # what reading another format raises


@dataclass
class References:
    """A split. files: names of the pictures in `folder`, which the file may not say. captions: of
    each picture, one at least. Both by the picture's id."""

    path: Path
    folder: Path | None
    files: dict[int, str]
    captions: dict[int, list[str]]


def read_references(path: Path) -> References:
    """Reads `{"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}`.

    Raises UserError where it is no such file, where an id is there twice or refers to nothing, and
    where a picture has no caption.
    """
    content = _read(path)
    try:
        images = [(_number(x["id"]), _text(x["file_name"])) for x in content["images"]]
        annotations = [
            (_number(x["id"]), _number(x["image_id"]), _text(x["caption"]))
            for x in content["annotations"]
        ]
        folder = (content.get("info") or {}).get("pictures")
        folder = None if folder is None else Path(_text(folder))
    except WRONG as error:
        raise UserError(
            f"{path} is no COCO annotation file, with images (id, file_name) and annotations (id, "
            f"image_id, caption): {_said(error)}"
        ) from None
    refuse(path, "picture id that came before", _repeated(number for number, _ in images))
    refuse(path, "annotation id that came before", _repeated(number for number, *_ in annotations))
    files = dict(images)
    captions: dict[int, list[str]] = {picture: [] for picture in files}
    strange = [picture for _, picture, _ in annotations if picture not in files]
    refuse(path, "annotation of a picture that it does not list", strange)
    for _, picture, caption in annotations:
        captions[picture].append(caption)
    refuse(path, "picture without references", [x for x, found in captions.items() if not found])
    return References(path, folder, files, captions)


def read_results(path: Path, references: References) -> dict[int, str]:
    """Reads `[{"image_id", "caption"}]`: a caption, which may be empty, for each picture.

    Raises UserError where it is no such file, and where it is not of the references' pictures.
    """
    content = _read(path)
    try:
        if not isinstance(content, list):
            raise TypeError(f"it holds a {type(content).__name__}")
        pairs = [(_number(x["image_id"]), _text(x["caption"])) for x in content]
    except WRONG as error:
        raise UserError(
            f"{path} is no COCO results file, a list of image_id and caption: {_said(error)}"
        ) from None
    if not pairs:
        raise UserError(f"{path} holds no captions")
    refuse(path, "caption of a picture that came before", _repeated(number for number, _ in pairs))
    check_pictures(references.captions, dict(pairs), references.path, path)
    return dict(pairs)


def check_pictures(
    references: Collection[int], results: Collection[int], of: object, name: object
) -> None:
    """UserError unless both have the same pictures, two at least; `of` and `name` are shown."""
    known, found = set(references), set(results)
    refuse(
        name, f"caption of a picture that is not in {of}", [x for x in results if x not in known]
    )
    refuse(name, f"picture of {of} without a caption", [x for x in references if x not in found])
    if len(known) < 2:
        raise UserError(
            f"{of} has {len(known)} picture: CIDEr weighs words by the number of pictures whose "
            "references have them, so it needs two at least"
        )


def refuse(name: object, what: str, found: Collection[object]) -> None:
    """UserError that counts and names what is wrong, where something is."""
    for first in found:
        raise UserError(f"{name}: {len(found):,} x {what}, first: {first}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"), object_pairs_hook=keys_once)
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from None


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"the id {value!r:.40} is no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()  # JSON can hold halves of characters
    return value


def _repeated(numbers: Iterable[int]) -> list[int]:
    seen: set[int] = set()
    return [number for number in numbers if number in seen or seen.add(number)]  # type: ignore[func-returns-value]


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
