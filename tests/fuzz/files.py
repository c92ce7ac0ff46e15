"""Runs cases of damaged files: `check_seed` is one of them."""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from warned import filtered

from fuzz.formats import PACKAGES, format_of
from fuzz.found import Found
from fuzz.watchdog import TooSlow, bounded

NAMES = list(PACKAGES)


def check_seed(seed: int, tally: Counter[str]) -> None:
    """Runs the case of a seed: formats come in turns. Raises Found."""
    name = NAMES[seed % len(NAMES)]
    if importlib.util.find_spec(PACKAGES[name]) is None:
        tally[f"{name}: {PACKAGES[name]} is not installed"] += 1
        return
    draw, what = random.Random(seed), "nothing yet"
    try:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            form, (valid, expected) = format_of(name), _valid(name)
            shutil.copytree(valid.name, folder, dirs_exist_ok=True)
            what, judged = form.damage(draw, Path(folder))
            try:
                with bounded():
                    given = form.load(Path(folder), draw)
            except Exception as error:
                if not form.allows(error):
                    raise
                tally[f"{name}: refused"] += 1
                return
        tally[f"{name}: loaded"] += 1
        same = given.shape == expected.shape and torch.equal(given, expected)
        assert same or not judged, "it gives something else, without a word"
    except (Exception, TooSlow) as error:
        raise Found(f"{name}: {type(error).__name__}", f"{what}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, logs of what is shared or missing, and progress bars."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with filtered("ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@functools.cache
def _valid(name: str) -> tuple[tempfile.TemporaryDirectory[str], torch.Tensor]:
    """A folder with the valid files of a format, and what they give; made once."""
    folder = tempfile.TemporaryDirectory()
    format_of(name).make(Path(folder.name))
    with tempfile.TemporaryDirectory() as copied:
        shutil.copytree(folder.name, copied, dirs_exist_ok=True)
        return folder, format_of(name).load(Path(copied), random.Random(0))
