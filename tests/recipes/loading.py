"""Modules of the recipes, imported as their scripts import them: by bare name."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def load(recipe: str, *names: str) -> list[ModuleType]:
    """From the recipe's folder or recipes/common.

    They leave sys.modules again, because other recipes have files of the same names.
    """
    folders = [RECIPES / recipe, RECIPES / "common"]
    own = {path.stem for folder in folders for path in folder.iterdir()}

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in own]

    before = {name: sys.modules.pop(name) for name in loaded()}
    path = sys.path.copy()
    sys.path[:0] = map(str, folders)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
