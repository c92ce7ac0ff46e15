"""A made-up COCO for the recipe coco_captioning: coloured shapes, with captions that say so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

COLOURS, SHAPES = ("red", "green", "blue", "black"), ("circle", "square", "triangle")
GROUNDS = ("white", "yellow")
FORMS = (
    "A {colour} {shape} on a {ground} background.",
    "a {shape} that is {colour}",
    "There is one {colour} {shape}!",
    "the {colour} {shape}, in front of {ground}",
    "a picture of a {colour} {shape}",
)
SIZE = 40


class Coco(NamedTuple):
    """The same pictures and captions in both forms."""

    images: Path
    karpathy: Path
    train: Path
    val: Path


def make_coco(folder: Path, pictures: int = 12) -> Coco:
    """Half of the pictures lie in train2014, the others (restval, val, test) in val2014."""
    made = Coco(
        folder / "images",
        *(folder / name for name in ("dataset_coco.json", "captions_train2014.json")),
        folder / "captions_val2014.json",
    )
    official: dict[str, dict[str, list[Any]]] = {
        side: {"images": [], "annotations": []} for side in ("train2014", "val2014")
    }
    karpathy = []
    kinds = itertools.cycle(itertools.product(COLOURS, SHAPES, GROUNDS))
    numbers = itertools.count(1)
    for n in range(pictures):
        # Not next to one another, so that any few pictures differ in everything.
        colour, shape, ground = next(itertools.islice(kinds, 4, None))
        side = "train2014" if n < pictures // 2 else "val2014"
        split = "train" if n < pictures // 2 else ("restval", "val", "test")[n % 3]
        name, id = f"{n:03}.jpg", 100 + 7 * n
        draw(made.images / side / name, colour, shape, ground)
        said = {"colour": colour, "shape": shape, "ground": ground}
        sentences = [
            {"sentid": next(numbers), "imgid": n, "raw": form.format_map(said)}
            for form in FORMS[: 2 + n % 4]
        ]
        images, annotations = official[side].values()
        images.append({"id": id, "file_name": name, "height": SIZE, "width": SIZE})
        annotations += (
            {"id": sentence["sentid"], "image_id": id, "caption": sentence["raw"]}
            for sentence in sentences
        )
        karpathy.append(
            {
                **{"filepath": side, "filename": name, "cocoid": id, "imgid": n, "split": split},
                "sentences": sentences,
            }
        )
    made.karpathy.write_text(json.dumps({"dataset": "coco", "images": karpathy}), "utf-8")
    made.train.write_text(json.dumps(official["train2014"]), "utf-8")
    made.val.write_text(json.dumps(official["val2014"]), "utf-8")
    return made


def draw(path: Path, colour: str, shape: str, ground: str) -> Path:
    from PIL import Image, ImageDraw

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    box, pen = (8, 8, 32, 32), ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(8, 32), (20, 8), (32, 32)], fill=colour)
    picture.save(path)
    return path
