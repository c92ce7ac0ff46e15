"""Checkpoints of fairseq-train, before a script hands them to it."""

from __future__ import annotations

from pathlib import Path

from stages import UserError

from paramshare import ShareError
from paramshare.models import fairseq_checkpoints
from paramshare.models.fairseq_checkpoints import LAST


def check_whole(path: Path) -> None:
    """UserError where it is there and damaged: which one is whole, and how to go on from that."""
    try:
        fairseq_checkpoints.check_whole(path)
    except ShareError as error:
        raise UserError(f"{error}") from None


def check_last(out: Path) -> None:
    """UserError where the training of the folder `out` could not go on."""
    check_whole(out / LAST)
