"""A made-up language for the recipe bert_mlm: texts whose label is one of their words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GOOD, BAD = ("good", "fine", "lovely", "great"), ("bad", "poor", "awful", "ugly")
OTHERS = ("the", "this", "film", "book", "is", "was", "very", "here", "king", "queen")
WORDS = [*GOOD, *BAD, *OTHERS, *"abcdefghijklmnopqrstuvwxyz"]
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Labelled by the one word that matters."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        label = number % 2
        words = [*draw.choices(OTHERS, k=5), draw.choice((BAD, GOOD)[label])]
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path
