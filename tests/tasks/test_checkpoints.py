"""Checkpoints that fairseq reads, when they are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

import paramshare.tasks  # noqa: F401
from paramshare import ShareError


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "model.pt"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """As fairseq-train and fairseq-generate read it."""
    whole, path = tmp_path / "checkpoint_best.pt", tmp_path / name
    torch.save({"model": {}}, whole)
    path.write_bytes(whole.read_bytes()[:-30])
    message = f"{path} is no whole checkpoint: it breaks off.* beside it is {whole}"
    with pytest.raises(ShareError, match=message):
        checkpoint_utils.load_model_ensemble([str(path)])
    with pytest.raises(ShareError, match=message):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize("content", [{"weight": torch.zeros(2)}, [1, 2], torch.zeros(3)])
def test_what_is_none_of_fairseqs_is_named(tmp_path: Path, content: object) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(ShareError, match=f"{path} is no whole checkpoint: fairseq cannot read it"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_the_old_format_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"model": torch.zeros(300)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ShareError, match=f"{path} is no whole checkpoint: fairseq cannot read it"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_file_that_is_not_there_is_fairseqs_own_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Model file not found"):
        checkpoint_utils.load_model_ensemble([str(tmp_path / "none.pt")])
