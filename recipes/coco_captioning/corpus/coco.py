"""COCO's captions as people have them: the two official files, or the file of Karpathy's split.

What is wrong in them is counted by the rules by which the task reads, and is no error yet.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import split
from stages import UserError

from paramshare.tasks.caption_text import words
from paramshare.tasks.captions import (
    Captions,
    each,
    number,
    read_captions,
    read_json,
    said,
    text,
)

# restval: what is in the official validation set, and is nobody's validation.
KARPATHY = {"train": "train", "restval": "train", "val": "valid", "test": "test"}
Sides = dict[int, str]  # of each picture: train, valid or test


def official(train: Path, val: Path) -> tuple[list[Captions], Sides]:
    """There are no captions of the official test pictures: those of `val` become valid and test."""
    both = [read_captions(path, words) for path in (train, val)]
    for found in both:
        folder = found.path.stem.partition("_")[2]  # captions_train2017.json
        found.files = {id: f"{folder}/{name}" for id, name in found.files.items()}
    first, second = both
    for id in first.files.keys() & second.files.keys():
        second.drop(id, f"picture that is in {train.name}, too")
    return both, {**dict.fromkeys(first.files, "train"), **split.halves(second.files)}


def karpathy(path: Path) -> tuple[list[Captions], Sides]:
    """`{"images": [{"filepath", "filename", "cocoid", "split", "sentences": [...]}]}`, where a
    sentence is `{"raw", "sentid"}`.

    filepath and cocoid are missing where the pictures are not of COCO.
    """
    sides: Sides = {}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []

    def read(image: dict[str, Any]) -> None:
        id = number(image.get("cocoid", image.get("imgid")))
        name = f"{text(image.get('filepath', ''))}/{text(image['filename'])}".lstrip("/")
        if (side := text(image["split"])) not in KARPATHY:
            raise ValueError(f"split {side!r} is none of {', '.join(KARPATHY)}")
        sides.setdefault(id, KARPATHY[side])
        images.append({"id": id, "file_name": name})
        annotations.extend(
            each(
                image,
                "sentences",
                lambda x: {"id": number(x["sentid"]), "image_id": id, "caption": x["raw"]},
            )
        )

    content = read_json(path)
    try:
        each(content, "images", read)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no file of Karpathy's split, with images (filename, filepath, cocoid, "
            f"split, sentences with raw and sentid): {said(error)}"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        plain.write_text(json.dumps({"images": images, "annotations": annotations}), "utf-8")
        found = read_captions(plain, words)
    found.path = path
    return [found], sides


def locate(found: Captions, pictures: Path) -> None:
    """Names pictures as they lie: in a folder of their own below `pictures`, or just there."""
    for id, name in found.files.items():
        if not (pictures / name).is_file() and (pictures / Path(name).name).is_file():
            found.files[id] = Path(name).name


def official_form(
    pictures: Path, images: list[tuple[int, str, list[str]]], first: Iterator[int]
) -> dict[str, Any]:
    """COCO's annotation format, of ids, file names and captions; `first` gives captions ids."""
    return {
        "info": {"pictures": str(pictures)},
        "images": [{"id": id, "file_name": name} for id, name, _ in images],
        "annotations": [
            {"id": next(first), "image_id": id, "caption": caption}
            for id, _, captions in images
            for caption in captions
        ],
    }
