"""Fills the folder `labelled`: sentiment of short texts, as people rated them.

The snippets and their mean ratings, from -4 to 4, are those of Hutto and Gilbert (ICWSM 2014); the
sdist of vaderSentiment holds them.
"""

import collections
import hashlib
import html
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from plain import normalise
from stages import UserError, write_lines

PACKAGE, VERSION = "vaderSentiment", "3.3.2"
SOURCES = {
    "film": "movieReviewSnippets",
    "newspaper": "nytEditorialSnippets",
    "product": "amazonReviewSnippets",
    "tweet": "tweets",
}
CLEAR = 0.8  # ratings nearer to 0 are left out
SHARES = {"test": 0.1, "dev": 0.1}  # of the documents; the others are train


class Snippet(NamedTuple):
    """`document` is what it was cut from: an article, a review, or itself."""

    text: str
    label: int
    source: str
    document: str


def fill(folder: Path, package: Path) -> dict[str, dict[str, int]]:
    """Writes {train,dev,test}.jsonl; figures: how many there are of each source in each."""
    figures: dict[str, dict[str, int]] = {}
    snippets = list(unique(read(package)))
    for split in ("train", "dev", "test"):
        kept = balanced([snippet for snippet in snippets if split_of(snippet) == split])
        figures[split] = dict(collections.Counter(snippet.source for snippet in kept))
        write_lines(
            folder / f"{split}.jsonl",
            [
                json.dumps(
                    {"text": snippet.text, "label": snippet.label, "source": snippet.source},
                    ensure_ascii=False,
                )
                for snippet in kept
            ],
        )
    return figures


def read(package: Path) -> Iterator[Snippet]:
    """The clear ones. A line is: DOCUMENT_NUMBER or NUMBER, rating, text."""
    try:
        with tarfile.open(package) as outer:
            (name,) = (n for n in outer.getnames() if n.endswith("/hutto_ICWSM_2014.tar.gz"))
            inner = io.BytesIO(_read(outer, name))
        with tarfile.open(fileobj=inner) as archive:
            for source, stem in SOURCES.items():
                path = f"hutto_ICWSM_2014/{stem}_GroundTruth.txt"
                for line in _read(archive, path).decode().rstrip().split("\n"):
                    number, rating, text = line.split("\t")
                    if abs(float(rating)) >= CLEAR:
                        document = f"{source}/{number.partition('_')[0]}"
                        text = normalise(html.unescape(text))
                        yield Snippet(text, int(float(rating) > 0), source, document)
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise UserError(
            f"{package} is not as expected; delete it and run the same command again:\n{error}"
        ) from None


def unique(snippets: Iterable[Snippet]) -> Iterator[Snippet]:
    """Without texts that are there already."""
    seen: set[str] = set()
    for snippet in snippets:
        if snippet.text.lower() not in seen:
            seen.add(snippet.text.lower())
            yield snippet


def split_of(snippet: Snippet) -> str:
    """By the document, so that none is on two sides."""
    place = _hash(snippet.document)
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return "train"


def balanced(snippets: Iterable[Snippet]) -> list[Snippet]:
    """As many of both labels in every source: the source must not tell the label."""
    groups = collections.defaultdict(list)
    for snippet in sorted(snippets, key=lambda snippet: _hash(snippet.text)):
        groups[snippet.source, snippet.label].append(snippet)
    kept = []
    for source in SOURCES:
        size = min(len(groups[source, label]) for label in (0, 1))
        kept += groups[source, 0][:size] + groups[source, 1][:size]
    return sorted(kept, key=lambda snippet: _hash(snippet.text))


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    if (file := archive.extractfile(name)) is None:
        raise KeyError(f"{name} is no file")
    return file.read()


def _hash(text: str) -> float:
    """From 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
