"""Fills the folder `fairseq`: dict.txt and the binary data, of the same blocks with the same ids.

A line is what is inside of a block; fairseq adds the two ends again (--sample-break-mode eos).
"""

import shlex
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
from corpus.wordpiece import FIRST
from stages import UserError, scratch, write_lines


def fill(folder: Path, blocks: Path, names: list[str]) -> dict[str, int]:
    """`names` are the tokens in the order of their ids."""
    with scratch(folder.parent, "fairseq.lines") as lines:
        # <mask> too is appended by the task. The counts decide nothing: ids go by the order.
        write_lines(lines / "dict.txt", [f"{name} 1" for name in names[len(FIRST) : -1]])
        _write_lines(sorted(blocks.glob("train-*.npy")), names, lines / "train")
        _write_lines([blocks / "dev.npy"], names, lines / "valid")
        command = [
            *(sys.executable, "-m", "fairseq_cli.preprocess", "--only-source"),
            *("--srcdict", str(lines / "dict.txt"), "--destdir", str(folder), "--workers", "2"),
            *("--trainpref", str(lines / "train"), "--validpref", str(lines / "valid")),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise UserError(
            f"fairseq-preprocess failed:\n{shlex.join(command)}\n{run.stderr.strip()[-2000:]}"
        )
    return {
        "train": _check(folder / "train.bin", sorted(blocks.glob("train-*.npy"))),
        "valid": _check(folder / "valid.bin", [blocks / "dev.npy"]),
    }


def _write_lines(shards: list[Path], names: list[str], path: Path) -> None:
    tokens = np.array(names, dtype=object)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for shard in shards:
            for row in np.load(shard, mmap_mode="r"):
                file.write(" ".join(tokens[row[1:-1]]) + "\n")


def _check(binary: Path, shards: list[Path]) -> int:
    """UserError unless fairseq wrote the rows of the blocks with the same ids; how many rows.

    A .bin file is the ids of all rows one after another, each without the <s> that the task adds.
    """
    arrays = [np.load(shard, mmap_mode="r") for shard in shards]
    rows, length = sum(map(len, arrays)), arrays[0].shape[1]
    size, left = divmod(binary.stat().st_size, rows * (length - 1))
    same = not left and size in (2, 4)
    if same:
        ids = np.memmap(binary, np.uint16 if size == 2 else np.int32, "r").reshape(rows, length - 1)
        starts = accumulate(map(len, arrays), initial=0)
        same = all(
            np.array_equal(ids[start : start + len(array)], array[:, 1:])
            for start, array in zip(starts, arrays, strict=False)
        )
    if not same:
        raise UserError(
            f"{binary} has other ids than the blocks; this fairseq is not the one that the recipe"
            " was written for"
        )
    return rows
