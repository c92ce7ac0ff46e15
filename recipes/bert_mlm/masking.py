"""Masks of BERT's kind, drawn when a block is read: of 15% of the tokens, 80% become `<mask>`, 10%
another token and 10% stay what they are; the model is to say what all of these were.

Every example draws from a seed of its own, so that a run that is resumed, on as many processes as
it may be, sees what it would have seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from records import read_record
from stages import UserError
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

RATE = 0.15
IGNORED = -100


class Masks:
    """Draws masks for blocks of a tokenizer's ids. whole_words: all pieces of a word or none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole_words: bool = False) -> None:
        if tokenizer.mask_token_id is None:
            raise UserError("the tokenizer has no mask token")
        self._mask: int = tokenizer.mask_token_id
        self._size = len(tokenizer)
        self._special = np.zeros(self._size, bool)
        self._special[tokenizer.all_special_ids] = True
        self._random = np.flatnonzero(~self._special)
        self._continues = np.zeros(self._size, bool)
        if whole_words:
            pieces = tokenizer.convert_ids_to_tokens(range(self._size))
            self._continues[:] = [str(piece).startswith("##") for piece in pieces]

    def draw(self, block: np.ndarray, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`(inputs, labels)` of a block; labels are `IGNORED` where nothing is to be predicted."""
        random = np.random.default_rng(seed)
        ids = block.astype(np.int64)
        words = np.cumsum(~self._continues[ids]) - 1
        chosen = (random.random(len(ids)) < RATE)[words] & ~self._special[ids]
        kind = random.random(len(ids))
        other = self._random[random.integers(len(self._random), size=len(ids))]
        inputs = np.where(chosen & (kind < 0.8), self._mask, ids)
        inputs = np.where(chosen & (kind >= 0.9), other, inputs)
        return inputs, np.where(chosen, ids, IGNORED)


class Blocks(Dataset):
    """The masked examples of a whole run, in its order: `count` of them, epoch after epoch, each
    shuffled anew. Without a `count`: every block once, as they stand."""

    def __init__(
        self, blocks: Sequence[np.ndarray], masks: Masks, seed: int, count: int | None = None
    ) -> None:
        self._blocks = blocks
        self._starts = np.cumsum([0, *map(len, blocks)])
        self._masks = masks
        self._seed = seed
        self._count = count
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._count is None else self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = index if self._count is None else self._shuffled(index)
        shard = int(np.searchsorted(self._starts, place, side="right")) - 1
        block = self._blocks[shard][place - self._starts[shard]]
        inputs, labels = self._masks.draw(block, (self._seed, index))
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def _shuffled(self, index: int) -> int:
        epoch, position = divmod(index, int(self._starts[-1]))
        if self._order[0] != epoch:
            shuffle = np.random.default_rng((self._seed, epoch)).permutation(self._starts[-1])
            self._order = epoch, shuffle
        return int(self._order[1][position])


def load_blocks(folder: Path, split: str) -> list[np.ndarray]:
    """The arrays of a split of prepare.py's blocks, mapped into memory."""
    paths = sorted(folder.glob(f"{split}*.npy"))
    if not paths:
        raise UserError(f"{folder} has no {split}*.npy: run prepare.py first, or give its --data")
    return [np.load(path, mmap_mode="r") for path in paths]


def data_digest(folder: Path) -> str:
    """Of the blocks in prepare.py's folder: its stamp says what text, tokenizer and length they
    are made from."""
    stamp = folder / "blocks" / "stamp.json"
    content = read_record(stamp, {"settings": dict})["settings"] if stamp.is_file() else {}
    content.pop("code", None)
    shapes = [
        list(block.shape)
        for split in ("train", "dev")
        for block in load_blocks(folder / "blocks", split)
    ]
    return hashlib.sha256(json.dumps([content, shapes]).encode()).hexdigest()[:16]
