"""Runs cases of damaged files: `check_seed` is one of them."""

from __future__ import annotations

import functools
import importlib
import logging
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from warned import filtered

from fuzz import formats
from fuzz.formats import Format
from fuzz.found import Found
from fuzz.watchdog import TooSlow, bounded


@functools.cache
def all_formats() -> list[Format]:
    """Those of which the packages are installed."""
    found = formats.of_the_library()
    if importlib.util.find_spec("transformers"):
        import transformers

        import paramshare.models.pretrained  # noqa: F401

        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        transformers.logging.disable_progress_bar()
        found += formats.of_transformers()
    if importlib.util.find_spec("fairseq"):
        found += formats.of_fairseq() + formats.of_captions()
    return found


@functools.cache
def _valid(name: str) -> tuple[tempfile.TemporaryDirectory[str], torch.Tensor]:
    """A folder with the valid files of a format, and what they give; made once."""
    folder = tempfile.TemporaryDirectory()
    form = next(form for form in all_formats() if form.name == name)
    form.make(Path(folder.name))
    with tempfile.TemporaryDirectory() as copied:
        shutil.copytree(folder.name, copied, dirs_exist_ok=True)
        return folder, form.load(Path(copied), random.Random(0))


def check_seed(seed: int, tally: Counter[str]) -> None:
    """Runs the case of a seed. Raises Found."""
    draw = random.Random(seed)
    form = draw.choice(all_formats())
    logging.disable()  # fairseq's plugins log what they share
    with filtered("ignore"):
        valid, expected = _valid(form.name)
    what = "nothing yet"
    try:
        with filtered("ignore"), tempfile.TemporaryDirectory() as folder:
            shutil.copytree(valid.name, folder, dirs_exist_ok=True)
            what, judged = form.damage(draw, Path(folder))
            with bounded():
                try:
                    given = form.load(Path(folder), draw)
                except (*form.errors, RuntimeError) as error:
                    known = isinstance(error, form.errors) or form.said and form.said in str(error)
                    if not known:
                        raise
                    tally[f"{form.name}: refused"] += 1
                    return
            tally[f"{form.name}: loaded"] += 1
            if judged and not torch.equal(given, expected):
                off = float((given - expected).abs().max()) if given.shape == expected.shape else ""
                raise AssertionError(f"it gives something else, without a word ({off})")
    except (Exception, TooSlow) as error:
        raise Found(f"{form.name}: {type(error).__name__}", f"{what}: {error}") from error
