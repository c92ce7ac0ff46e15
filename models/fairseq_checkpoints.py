"""Checkpoints of fairseq-train that are damaged: which, how, and the one to go on from instead.

torch says of a file that breaks off neither its name nor a cure, and it reads one with other bytes
in its middle as if it were whole. Neither fairseq nor torch is needed here.
"""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path

from paramshare.errors import ShareError

LAST = "checkpoint_last.pt"
# What a training can go on from. Averages, for example, have other names and no optimizer.
_SAVED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|_last|\.best_.+)\.pt")


def check_whole(path: Path) -> None:
    """Raises ShareError, which says how to go on, where `path` is there and no whole checkpoint.
    All of the file is read."""
    reason = damage(path) if path.exists() else None
    if reason is not None:
        raise damaged(path, reason)


def damaged(path: Path, reason: str) -> ShareError:
    """The error. It names the newest whole checkpoint beside `path`, and of checkpoint_last.pt the
    commands after which a training goes on from that."""
    others = [x for x in path.parent.iterdir() if _SAVED.fullmatch(x.name) and x != path]
    whole = [x for x in others if damage(x) is None]
    newest = max(whole, key=lambda x: x.stat().st_mtime, default=None)
    text = f"{path} is no whole checkpoint: {reason}"
    if newest is None:
        text += f"; nor is any other in {path.parent}"
    else:
        text += f"; the newest whole one beside it is {newest}"
    if path.name == LAST:
        place = shlex.quote(str(path))
        cure = f"mv {place} {place}.damaged"
        if newest is None:
            cure += "; the same command then starts from the beginning"
        else:
            cure += f" && cp {shlex.quote(str(newest))} {place}; the same command then goes on"
        text += f". To go on: {cure}"
    return ShareError(text)


def damage(path: Path) -> str | None:
    """Why a file is no whole one of torch.save; None if it is, or has the format of torch before
    1.6, of which only reading tells."""
    if path.is_dir():
        return "it is a folder"
    with open(path, "rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty"
    if start.startswith(b"\x80"):
        return None
    if start != b"PK\x03\x04":
        return "it is no file of torch.save"
    try:
        with zipfile.ZipFile(path) as parts:
            if not any(name.endswith("/data.pkl") for name in parts.namelist()):
                return "it is no file of torch.save"
            part = parts.testzip()
    except Exception:  # of a dozen kinds, where the numbers by which zipfile reads are damaged
        return "it breaks off, or the list of its parts is damaged"
    return None if part is None else f"its part {part} is damaged"
