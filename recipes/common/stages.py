"""Stages that are finished or absent, never half done.

A stage is one folder. It is filled under a temporary name and gets its real name in one rename,
with a stamp inside that holds the settings it was made from and the figures it reports. A folder
whose stamp has the same settings is used as it is; any other one is replaced.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAMP = "stamp.json"
Say = Callable[[str], None]


class UserError(Exception):
    """Something the user can cure; the message says what and how, and is all that is printed."""


class PackageMissing(Exception):
    """A package could not be had; the message is the reason. Who can do without it catches it."""


def code_digest(recipe: Path, *names: str) -> str:
    """A short digest of files of a recipe, so that data made by older rules is not reused."""
    digest = hashlib.sha256()
    for name in names:
        digest.update((recipe / name).read_bytes())
    return digest.hexdigest()[:16]


def run_stage(
    folder: Path,
    settings: dict[str, Any],
    fill: Callable[[Path], dict[str, Any]],
    *,
    say: Say,
    doing: str,
    later: Sequence[Path] = (),
) -> dict[str, Any]:
    """Makes `folder` with `fill(temporary folder)`, unless it is there with these settings.

    `settings` and the figures that `fill` returns must be JSON-able; the figures are returned,
    from the stamp if nothing had to be done. The folders `later` were made from this one, so they
    go when it is replaced.
    """
    stamp = folder / STAMP
    if stamp.is_file():
        try:
            done = json.loads(stamp.read_text("utf-8"))
            before, figures = done["settings"], done["figures"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise UserError(
                f"{stamp} is damaged: delete {folder}, and the same command makes it again"
            ) from None
        if before == settings:
            say(f"{folder.name}: finished before, with the same settings")
            return figures

    say(f"{folder.name}: {doing}")
    with scratch(folder.parent, f"{folder.name}.partial") as partial:
        figures = fill(partial)
        content = {"settings": settings, "figures": figures}
        write_lines(partial / STAMP, [json.dumps(content, indent=1, ensure_ascii=False)])
        for stale in (*reversed(later), folder):
            _discard(stale)
        os.rename(partial, folder)
    return figures


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder in `parent` that is gone afterwards; what killed runs left goes first.

    Its name is new each time: a program that a killed run had started may still be writing into
    the old one.
    """
    for leftover in parent.glob(f".{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = parent / f".{name}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def text_digest(folder: Path) -> str:
    """A short digest of the names and contents of a folder's text files, stamp excluded."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.name != STAMP):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def only_one(folder: Path) -> Iterator[int]:
    """Holds `folder`, made if need be, for this process; UserError if another one holds it. Yields
    the lock: a child that is given it (subprocess's pass_fds) holds the folder, too."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {folder}; wait for it to end") from None
        yield lock.fileno()


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, split at line feeds alone.

    str.splitlines would also split at U+2028 and its like, which occur inside sentences, and so
    shift one side of a corpus against the other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").split("\n") if text else []


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def _discard(folder: Path) -> None:
    """Removes a finished stage. The rename comes first, so that being killed leaves no half."""
    if folder.exists():
        with scratch(folder.parent, f"{folder.name}.replaced") as replaced:
            os.rename(folder, replaced)
