"""Fills the folder `sentences`: a sample of the text's sentences, to distil encoders on."""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from corpus import blocks
from plain import split_sentences
from stages import write_lines

WORDS = (5, 40)
MOST = {"train": 200_000, "dev": 2_000}


def fill(folder: Path, text: Path, show: Callable[[str], None]) -> dict[str, int]:
    """Writes train.txt and dev.txt; figures: how many each has."""
    figures = {}
    for split, paths in (("train", blocks.train_files(text)), ("dev", [text / "dev.txt"])):
        chosen = sample(blocks.lines_of(paths, show), MOST[split])
        write_lines(folder / f"{split}.txt", chosen)
        figures[split] = len(chosen)
    return figures


def sample(lines: Iterable[str], most: int) -> list[str]:
    """Those with the smallest hashes: a random sample, in random order, always the same."""
    found = heapq.nsmallest(most, _unique(lines))
    return [sentence for _, sentence in found]


def _unique(lines: Iterable[str]) -> Iterator[tuple[bytes, str]]:
    seen: set[bytes] = set()
    for line in lines:
        for sentence in split_sentences(line):
            if WORDS[0] <= len(sentence.split()) <= WORDS[1]:
                key = hashlib.blake2b(sentence.lower().encode(), digest_size=8).digest()
                if key not in seen:
                    seen.add(key)
                    yield key, sentence
