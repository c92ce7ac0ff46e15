"""Fills the folder `text`: train-*.txt and dev.txt, a paragraph a line, documents set apart."""

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from corpus import corpora, few
from corpus.corpora import Document
from plain import normalise
from stages import Say, UserError

DEV_SHARE = 0.01  # of the documents
MIN_WORD_SHARE = 0.6  # of what stands between spaces
MIN_LETTER_SHARE = 0.5  # of the characters: letters beyond ASCII, and marks
SHARD_BYTES = 32 << 20

_WORD = re.compile(r"""["'“‘(\[]*[^\W\d_]+(?:['’-][^\W\d_]+)*[-.,;:!?…"'”’)\]]*""")


def is_text(line: str) -> bool:
    """By its words, of which code has few; or by its letters beyond ASCII, for not all languages
    have spaces between words."""
    if not line.isascii():
        kinds = [unicodedata.category(character) for character in line]
        letters = sum(kind[0] in "LM" and c > "\x7f" for c, kind in zip(line, kinds, strict=True))
        if letters >= MIN_LETTER_SHARE * (len(line) - line.count(" ")):
            return True
        # Not every letter with an accent is one character, and \w has no accents.
        line = "".join(c for c, kind in zip(line, kinds, strict=True) if kind != "Mn")
    tokens = line.split()
    words = sum(_WORD.fullmatch(token) is not None for token in tokens)
    return bool(tokens) and words >= MIN_WORD_SHARE * len(tokens)


def is_held_out(document: Document) -> bool:
    """By a hash, so that it depends on nothing but the document."""
    return _place(document) < DEV_SHARE


def _place(document: Document) -> float:
    """From 0 to 1."""
    return _hash("\n".join(document)) / 2**64


def from_packages(folder: Path, cache: Path, say: Say) -> dict[str, Any]:
    """Figures: `sources`, each with documents, lines and words; `missing`, a line for each; `note`
    says what is held out where it is not a share of the documents, else it is empty."""
    missing: list[str] = []
    figures, note = _write(folder, corpora.documents(cache, say, missing))
    return {"sources": figures, "missing": missing, "note": note}


def from_folder(folder: Path, text: Path) -> dict[str, Any]:
    """The same figures, of the files of the folder `text`."""
    figures, note = _write(folder, ((str(text), _documents(path)) for path in text_files(text)))
    return {"sources": figures, "missing": [], "note": note}


def text_files(text: Path) -> list[Path]:
    """UserError unless there are any."""
    if not text.is_dir():
        raise UserError(f"--text {text} is not a folder")
    files = sorted(path for path in text.rglob("*.txt") if path.is_file())
    if not files:
        raise UserError(f"--text {text}: there is no .txt file in or below this folder")
    return files


def files_digest(text: Path) -> str:
    """Of the names and contents of the text files."""
    digest = hashlib.sha256()
    for path in text_files(text):
        digest.update(f"{path.relative_to(text)}\0{path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()[:16]


def _documents(path: Path) -> Iterator[Document]:
    """The documents of a file, which empty lines separate."""
    document: Document = []
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    document.append(line.rstrip("\n"))
                elif document:
                    yield document
                    document = []
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}; convert it first") from None
    if document:
        yield document


def _write(
    folder: Path, sources: Iterable[tuple[str, Iterator[Document]]]
) -> tuple[dict[str, dict[str, int]], str]:
    """Cleans, drops lines that are there already, and splits; the figures of each source, and the
    note on what is held out."""
    figures: dict[str, Counter[str]] = {}
    seen: set[int] = set()
    first = math.inf, ""  # the smallest place of a document, and its source
    with (
        closing(_Shards(folder)) as train,
        open(folder / "dev.txt", "w", encoding="utf-8", newline="\n") as dev,
    ):
        for name, documents in sources:
            counts = figures.setdefault(
                name, Counter(documents=0, words=0, dev=0, dev_words=0, not_words=0, repeated=0)
            )
            for document in documents:
                kept = []
                for line in filter(None, map(normalise, document)):
                    key = _hash(line)
                    if not is_text(line):
                        counts["not_words"] += 1
                    elif key in seen:
                        counts["repeated"] += 1
                    else:
                        seen.add(key)
                        kept.append(line)
                if not kept:
                    continue
                words = sum(len(line.split()) for line in kept)
                counts.update(documents=1, words=words)
                first = min(first, (_place(kept), name))
                text = "\n".join(kept) + "\n\n"
                if is_held_out(kept):
                    counts.update(dev=1, dev_words=words)
                    dev.write(text)
                else:
                    train.write(text)
    note = ""
    if not sum(counts["dev"] for counts in figures.values()):
        note = _hold_out(folder, figures, *first)
    return {name: dict(counts) for name, counts in figures.items()}, note


def _hold_out(folder: Path, figures: dict[str, Counter[str]], place: float, name: str) -> str:
    """Of few documents the one at the smallest place, of a lone one its end; what that is."""
    documents = sum(counts["documents"] for counts in figures.values())
    if not documents:
        raise UserError("no line of the text has words; is it plain text?")
    if documents > 1:
        words = few.move_document(folder, lambda text: _place(text.split("\n")) == place)
        figures[name].update(dev=1, dev_words=words)
        return (
            f"held out: one document, of {words:,} words, for none of the {documents:,} fell into"
            f" the {DEV_SHARE:.0%} that is held out otherwise"
        )
    lines, words = few.cut_document(folder)
    figures[name].update(dev_words=words)
    return (
        f"held out: the end of the text, {lines:,} line(s) of {words:,} words, for it is a single"
        " document; set documents (chapters, articles) apart by empty lines to hold out whole ones"
    )


class _Shards:
    """train-00000.txt, train-00001.txt ...; documents are not cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = self._written = 0
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        if self._file is None or self._written > SHARD_BYTES:
            self.close()
            path = self._folder / f"train-{self._count:05}.txt"
            self._file = path.open("w", encoding="utf-8", newline="\n")
            self._count += 1
            self._written = 0
        self._written += len(text.encode())
        self._file.write(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
