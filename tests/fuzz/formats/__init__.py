"""The files that the library reads: how valid ones are made, damaged, and loaded.

Loading must end in one of the format's errors, and then nothing has changed; or it gives what the
valid files give. Where a format has no digest, a change of the numbers in it cannot be noticed:
such damage is not judged by what it gives.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fuzz.sharing import assert_unchanged, snapshot
from paramshare import ShareError


@dataclass(frozen=True)
class Format:
    """make: writes valid files into a folder. damage: changes one of them, says what it did and
    whether the result can be judged. load: of the folder, which may be damaged; returns numbers.
    errors: that loading may end with; said: part of the message of a RuntimeError that it may."""

    make: Callable[[Path], None]
    damage: Callable[[random.Random, Path], tuple[str, bool]]
    load: Callable[[Path, random.Random], Tensor]
    errors: tuple[type[Exception], ...] = (ShareError,)
    said: str | None = None

    def allows(self, error: Exception) -> bool:
        if isinstance(error, RuntimeError) and self.said is not None and self.said in str(error):
            return True
        return isinstance(error, self.errors)


# The module here that has them, what must be installed for it, and their names.
_MODULES = {
    "saved": ("torch", ["plain", "virtual", "own columns", "lifted", "int8"]),
    "pretrained": ("transformers", ["shared BERT", "ShareBERT"]),
    "checkpoints": ("transformers", ["exported ShareBERT", "released ShareBERT"]),
    "translators": ("fairseq", ["shared translator"]),
    "captions": ("fairseq", ["features", "captions", "Karpathy's split", "references"]),
}
MODULES = {name: module for module, (_, names) in _MODULES.items() for name in names}
PACKAGES = {name: package for package, names in _MODULES.values() for name in names}


@functools.cache
def format_of(name: str) -> Format:
    return importlib.import_module(f"fuzz.formats.{MODULES[name]}").FORMATS[name]


def unchanged_or_loaded(module: nn.Module, load: Callable[[], None]) -> None:
    """Loads; where that raises, sees to it that the module is what it was."""
    before = snapshot(module)
    try:
        load()
    except Exception as error:
        assert_unchanged(before, snapshot(module), str(error)[:100])
        raise
