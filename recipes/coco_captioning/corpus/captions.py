"""Fills the folder `captions`: train.json, valid.json, test.json, dict.txt, and pieces.model."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import coco, vocabulary
from corpus.split import SPLITS
from stages import UserError, read_lines

from paramshare.tasks.caption_text import CaptionText
from paramshare.tasks.captions import Captions, check_pictures


def fill(
    folder: Path,
    read: Callable[[], tuple[list[Captions], coco.Sides]],
    pictures: Path,
    min_count: int,
    pieces: int | None,
    skip_bad: bool,
) -> dict[str, Any]:
    """Figures: `vocabulary`, and of each split `pictures`, `captions`, `tokens`, `unknown`.

    Raises UserError or ShareError where something is wrong with a picture or a caption.
    """
    sources, sides = read()
    for found in sources:
        coco.locate(found, pictures)
        check_pictures(found, pictures)
    for found in sources:
        found.settle(skip_bad)
    images: dict[str, list[tuple[int, str, list[str]]]] = {split: [] for split in SPLITS}
    for found in sources:
        for id, name in found.files.items():
            images[sides[id]].append((id, name, found.of[id]))
    for split in SPLITS:
        if not images[split]:
            raise UserError(f"there is no picture for {split}: give more pictures")

    train = [caption for _, _, captions in images["train"] for caption in captions]
    text = (
        vocabulary.of_words(train, min_count, folder)
        if pieces is None
        else vocabulary.of_pieces(train, pieces, folder)
    )
    known = {line.rpartition(" ")[0] for line in read_lines(folder / "dict.txt")}
    figures: dict[str, Any] = {"vocabulary": len(known)}
    numbers = itertools.count(1)
    for split in SPLITS:
        content = coco.official_form(pictures, images[split], numbers)
        (folder / f"{split}.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        figures[split] = _counts(content, text, known)
    return figures


def _counts(content: dict[str, Any], text: CaptionText, known: set[str]) -> dict[str, int]:
    captions = [annotation["caption"] for annotation in content["annotations"]]
    tokens = [token for caption in captions for token in text.split(caption)]
    return {
        "pictures": len(content["images"]),
        "captions": len(captions),
        "tokens": len(tokens),
        "unknown": sum(token not in known for token in tokens),
    }
