"""Checkpoints that become folders of transformers: ShareBERT of fairseq, and as released."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path

import torch
from test_sharebert_released import folder_of, inputs
from torch import Tensor
from zoo import batch

from fuzz.damage import HARMLESS, damaged_bytes, damaged_json, damaged_pickle, json_text
from fuzz.formats import Format
from fuzz.formats.pretrained import small_sharebert
from paramshare.models import sharebert
from paramshare.models.sharebert_fairseq import export_sharebert
from paramshare.models.sharebert_pretrained import ShareBertForMaskedLM
from paramshare.models.sharebert_released import import_sharebert


def _damage_checkpoint(draw: random.Random, path: Path) -> tuple[str, bool]:
    if draw.random() < 0.3:
        data, what = damaged_bytes(draw, path.read_bytes())
        path.write_bytes(data)
        return what, False
    tree = torch.load(path, weights_only=False)
    made, what = damaged_pickle(draw, tree)
    torch.save(made, path)
    return what, any(f"make {how} " in what for how in HARMLESS)


def _make_exported(folder: Path) -> None:
    torch.manual_seed(0)
    config = small_sharebert()
    options = {f.name: getattr(config, f.name) for f in fields(sharebert.ShareBertConfig)}
    state = ShareBertForMaskedLM(config).double().state_dict()
    checkpoint = {
        "task_state": {"sharebert": options},
        "model": dict(state),
        "cfg": {"task": {"data": "nowhere"}},
    }
    torch.save(checkpoint, folder / "checkpoint.pt")


def _load_exported(folder: Path, draw: random.Random) -> Tensor:
    model = export_sharebert(folder / "checkpoint.pt", folder / "out")
    with torch.no_grad():
        return model(batch()[0]).logits


def _make_released(folder: Path) -> None:
    folder_of("A", folder / "theirs")


def _damage_released(draw: random.Random, folder: Path) -> tuple[str, bool]:
    path = folder / "theirs" / "config.json"
    kind = draw.choice(["json", "json", "bytes", "weights", "weights", "vocabulary"])
    if kind == "json":
        made, what = damaged_json(draw, json.loads(path.read_text()))
        path.write_text(json_text(made))
    elif kind == "weights":
        return _damage_checkpoint(draw, folder / "theirs" / "pytorch_model.bin")
    else:
        path = path if kind == "bytes" else folder / "theirs" / "vocab.txt"
        made, what = damaged_bytes(draw, path.read_bytes())
        path.write_bytes(made)
    return f"{path.name}: {what}", False


def _load_released(folder: Path, draw: random.Random) -> Tensor:
    model = import_sharebert(folder / "theirs", folder / "out")
    with torch.no_grad():
        return model(**inputs("A")).logits


FORMATS = {
    "exported ShareBERT": Format(
        _make_exported,
        lambda draw, folder: _damage_checkpoint(draw, folder / "checkpoint.pt"),
        _load_exported,
    ),
    "released ShareBERT": Format(_make_released, _damage_released, _load_released),
}
