"""Fills the folder `blocks`: rows of ids, full of text, with the marks of both ends of each.

The tokens of all documents stand one after another; what is left over at the end is dropped.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from corpus import wordpiece
from stages import UserError
from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 64 << 20
LINES_AT_ONCE = 2000


def fill(
    folder: Path, text: Path, tokenizer: PreTrainedTokenizerBase, length: int, show: Callable
) -> dict[str, Any]:
    """Writes train-*.npy, dev.npy and blocks.json, which holds the figures.

    Figures: `length`, `vocab_size`, and of each split `blocks`, `tokens`, `unknown`, `dropped`.
    """
    figures: dict[str, Any] = {"length": length, "vocab_size": len(tokenizer)}
    for split, paths in (("train", train_files(text)), ("dev", [text / "dev.txt"])):
        counts = {"blocks": 0, "tokens": 0, "unknown": 0, "dropped": 0}
        shards = _shards(paths, tokenizer, length, counts, show)
        if split == "train":
            for number, shard in enumerate(shards):
                np.save(folder / f"train-{number:05}.npy", shard)
        elif parts := list(shards):  # small, and read as a whole
            np.save(folder / "dev.npy", np.concatenate(parts))
        if not counts["blocks"]:
            raise UserError(
                f"the {split} text has {counts['dropped']} tokens, too few for one block of"
                f" --length {length}; give more text"
            )
        figures[split] = counts
    (folder / "blocks.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return figures


def train_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("train-*"))


def lines_of(paths: Iterable[Path], show: Callable[[str], None]) -> Iterator[str]:
    """The lines with text. Shows how far it is."""
    paths = list(paths)
    total = sum(path.stat().st_size for path in paths) or 1
    done = shown = 0
    for path in paths:
        with open(path, "rb") as lines:
            for line in lines:
                done += len(line)
                if (percent := 100 * done // total) != shown:
                    shown = percent
                    show(f"{path.name}: {percent}%")
                if text := line.decode().strip():
                    yield text


def _shards(
    paths: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    counts: dict[str, int],
    show: Callable[[str], None],
) -> Iterator[np.ndarray]:
    """Arrays of blocks of SHARD_BYTES, the last one smaller. Adds to `counts`."""
    kind = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.int32)
    rows = SHARD_BYTES // (length * kind.itemsize)
    inner = length - 2
    rest = np.empty(0, kind)
    ready: list[np.ndarray] = []
    for batch in _batches(lines_of(paths, show), tokenizer):
        ids = np.fromiter(batch, kind)
        counts["tokens"] += len(ids)
        counts["unknown"] += int((ids == tokenizer.unk_token_id).sum())
        rest = np.concatenate([rest, ids])
        full = len(rest) // inner
        ready.append(_framed(rest[: full * inner].reshape(full, inner), tokenizer))
        rest = rest[full * inner :]
        while sum(map(len, ready)) >= rows:
            whole = np.concatenate(ready)
            counts["blocks"] += rows
            yield whole[:rows]
            ready = [whole[rows:]]
    counts["dropped"] = len(rest)
    if blocks := sum(map(len, ready)):
        counts["blocks"] += blocks
        yield np.concatenate(ready)


def _framed(blocks: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    first, last = wordpiece.ends(tokenizer)
    return np.pad(blocks, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))


def _batches(lines: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Iterator[int]]:
    """The ids of some thousand lines at once, without special tokens: "<s>" in a text is text."""
    while batch := list(islice(lines, LINES_AT_ONCE)):
        encoded = tokenizer(
            batch,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        yield (id for line in encoded["input_ids"] for id in line)
