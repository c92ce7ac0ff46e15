"""Files of `save_model`, loaded into plain and shared models and on the meta device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from zoo import batch, build

from fuzz.damage import damaged_bytes, damaged_safetensors
from fuzz.formats import Format, unchanged_or_loaded
from paramshare import load_model, quantize, save_model, share_from_embedding

_FILE = "model.safetensors"


def _sharing(name: str) -> Callable[[nn.Module], object]:
    def share(module: nn.Module) -> object:
        table = module.embedding
        match name:
            case "virtual":
                return share_from_embedding(module, table, projection_bias=True)
            case "own columns":
                few = lambda path, owner: path.startswith("1.")  # noqa: E731
                return share_from_embedding(module, table, virtual=False, select=few)
            case "lifted":
                return share_from_embedding(module, table, embedding_dim=5, depth="none")
            case "int8":
                share_from_embedding(module, table, execution="factored")
                return quantize(module)
        return None

    return share


_MODELS = {
    "plain": "Chain",
    "virtual": "Encoder",
    "own columns": "Chain",
    "lifted": "Recurring",
    "int8": "Narrow",
}


def _saved(name: str) -> Format:
    def make(folder: Path) -> None:
        module = build(_MODELS[name]).eval()
        _sharing(name)(module)
        save_model(module, folder / _FILE)

    def damage(draw: random.Random, folder: Path) -> tuple[str, bool]:
        path = folder / _FILE
        data = path.read_bytes()
        if draw.random() < 0.4:
            made, what = damaged_bytes(draw, data)
        else:
            made, what = damaged_safetensors(draw, data, "paramshare")
        path.write_bytes(made)
        return what, True

    def load(folder: Path, draw: random.Random) -> Tensor:
        how = draw.choice(["plain", "shared", "meta"])
        with torch.device("meta" if how == "meta" else "cpu"):
            module = build(_MODELS[name], seed=1).eval()
        if how == "shared":
            _sharing(name)(module)
        unchanged_or_loaded(module, lambda: load_model(module, folder / _FILE))
        # A copy: sums over mapped memory, which is aligned less, may be rounded otherwise.
        with torch.no_grad():
            return copy.deepcopy(module)(batch()[0])

    return Format(make, damage, load)


FORMATS = {name: _saved(name) for name in _MODELS}
