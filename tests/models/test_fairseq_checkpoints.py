"""Which file is damaged, and what the error says to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest
import torch

from paramshare import ShareError
from paramshare.models.fairseq_checkpoints import check_whole, damage


def save(path: Path, updates: int, time: float) -> Path:
    torch.save({"model": {"weight": torch.arange(300.0)}, "updates": updates}, path)
    os.utime(path, (time, time))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A name that a shell must be given in quotes. An average is newer than what was saved."""
    folder = tmp_path / "a training"
    folder.mkdir()
    names = ("checkpoint3", "checkpoint_best", "checkpoint_2_700", "checkpoint_average")
    for time, name in enumerate((*names, "checkpoint_last")):
        save(folder / f"{name}.pt", 100 * time, 1e9 + time)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_numpy(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, weight=np.zeros(3))


def weight(path: Path) -> int:
    """Where its numbers begin."""
    return path.read_bytes().index(torch.arange(300.0).numpy().tobytes())


DAMAGES = {
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "a byte": (lambda path: path.write_bytes(b"P"), "it is no file of torch.save"),
    "begins": (lambda path: os.truncate(path, 40), "it breaks off"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "it breaks off"),
    "a byte less": (lambda path: os.truncate(path, path.stat().st_size - 1), "it breaks off"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "it is no file of torch"),
    "a bit": (lambda path: flip(path, weight(path) + 40), "its part checkpoint_last/data/0 is"),
    "a text": (lambda path: path.write_text("<html>"), "it is no file of torch.save"),
    "of numpy": (of_numpy, "it is no file of torch.save"),
    "a folder": (a_folder, "it is a folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_and_the_newest_whole_one(folder: Path, name: str) -> None:
    do, reason = DAMAGES[name]
    last = folder / "checkpoint_last.pt"
    do(last)
    (folder / "checkpoint_2_700.pt").write_bytes(b"PK\x03\x04")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(ShareError) as error:
        check_whole(last)
    said = str(error.value)
    assert said.startswith(f"{last} is no whole checkpoint: {reason}")
    best = folder / "checkpoint_best.pt"
    assert f"the newest whole one beside it is {best}. To go on: mv " in said
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    # The commands that it names do it, and lose nothing.
    cure = said.partition("To go on: ")[2].removesuffix("; the same command then goes on")
    subprocess.run(cure, shell=True, check=True)
    check_whole(last)
    assert torch.load(last, weights_only=True)["updates"] == 100
    assert len(list(folder.iterdir())) == len(before) + 1


def test_nothing_else_is_whole(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"")
    last, best = folder / "checkpoint_last.pt", folder / "checkpoint_best.pt"
    with pytest.raises(ShareError) as error:
        check_whole(last)
    assert str(error.value) == (
        f"{last} is no whole checkpoint: it is empty; nor is any other in {folder}. To go on: mv "
        f"'{last}' '{last}'.damaged; the same command then starts from the beginning"
    )
    with pytest.raises(ShareError, match=rf"{best} is no whole .* nor is any other in {folder}$"):
        check_whole(best)


def test_what_is_whole_or_not_there(folder: Path) -> None:
    for path in (*folder.iterdir(), folder / "checkpoint9.pt"):
        check_whole(path)
    old = folder / "old.pt"
    torch.save({}, old, _use_new_zipfile_serialization=False)
    check_whole(old)  # only reading it would tell


def test_no_byte_changes_a_number_unseen(tmp_path: Path) -> None:
    """Whichever is flipped: the damage is seen, or torch says so, or it is in a gap."""
    path = save(tmp_path / "x.pt", 5, 0)
    whole, seen = path.read_bytes(), 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole)
        flip(path, place)
        if damage(path) is not None:
            seen += 1
            continue
        try:
            state = torch.load(path, weights_only=True)
        except (RuntimeError, ValueError, UnpicklingError):
            continue
        assert state["updates"] == 5, place
        assert torch.equal(state["model"]["weight"], torch.arange(300.0)), place
    assert seen > 0.5 * len(whole) / 7
