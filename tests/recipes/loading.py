"""Modules of the recipes, imported as their scripts import them: by bare name."""

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

_imported: dict[str, dict[str, ModuleType]] = defaultdict(dict)  # of each recipe


def load(recipe: str, *names: str) -> list[ModuleType]:
    """From the recipe's folder or recipes/common."""
    with within(recipe):
        return [importlib.import_module(name) for name in names]


@contextmanager
def within(recipe: str) -> Iterator[None]:
    """As in the recipe's scripts, which also import when they run.

    Its modules leave sys.modules again, because other recipes have files of the same names.
    """
    folders = [RECIPES / recipe, RECIPES / "common"]
    own = {path.stem for folder in folders for path in folder.iterdir()}

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in own]

    before = {name: sys.modules.pop(name) for name in loaded()}
    sys.modules.update(_imported[recipe])
    path = sys.path.copy()
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = path
        _imported[recipe].update((name, sys.modules.pop(name)) for name in loaded())
        sys.modules.update(before)
