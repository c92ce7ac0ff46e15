"""A teacher's outputs for many texts: computed once, part by part, and kept in files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import training

PART = 2000  # texts, of a file

Texts = Sequence[tuple[str, ...]]


class Key(NamedTuple):
    """What a teacher's outputs depend on, beside the texts."""

    kind: str  # logits or vectors
    teacher: str  # digest of the model and its tokenizer
    length: int  # tokens; of longer texts the rest is cut off


def outputs(
    texts: Texts, compute: Callable[[Texts], np.ndarray], key: Key, cache: Path
) -> np.ndarray:
    """What `compute` gives for the texts, float16. What is in the folder `cache` is not computed
    again; with the texts, `key` is all that it depends on."""
    cache.mkdir(parents=True, exist_ok=True)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), PART):
        part = texts[start : start + PART]
        path = cache / f"{training.digest_of([key, part])}.npy"
        if not path.is_file():
            unfinished = path.with_suffix(f".{os.getpid()}")
            with open(unfinished, "wb") as file:
                np.save(file, compute(part).astype(np.float16))
            unfinished.replace(path)
            training.say(f"the teacher has read {start + len(part):,} of {len(texts):,} texts")
        parts.append(np.load(path))
    return np.concatenate(parts)


def shortest_first(texts: Texts) -> np.ndarray:
    """An order in which batches have little padding."""
    return np.argsort([sum(map(len, text)) for text in texts], kind="stable")
