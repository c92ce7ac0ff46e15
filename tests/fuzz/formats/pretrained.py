"""Folders of transformers: of a model that was shared, and of ShareBERT, which shares itself."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM
from zoo import batch

import paramshare.models.pretrained  # noqa: F401
from fuzz.damage import SHALLOW, damaged_json, damaged_safetensors, json_text
from fuzz.formats import Format
from paramshare import ShareError, share_from_embedding
from paramshare.models import sharebert
from paramshare.models.sharebert_pretrained import ShareBertConfig, ShareBertForMaskedLM

_FILE = "model.safetensors"


def _bert_config() -> Any:
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return BertConfig(vocab_size=60, num_attention_heads=2, max_position_embeddings=16, **sizes)


def _make_bert(folder: Path) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(_bert_config()).double().eval()
    share_from_embedding(model, model.get_input_embeddings())
    model.save_pretrained(folder)


def _damage_bert(draw: random.Random, folder: Path) -> tuple[str, bool]:
    if draw.random() < 0.5:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        entry = config["quantization_config"]
        entry["sharings"], what = damaged_json(draw, entry["sharings"], SHALLOW)
        path.write_text(json_text(config))
        return f"plans: {what}", True
    return _damage_weights(draw, folder / _FILE)


# Numbers of another kind transformers takes as they are; these it must not.
_READ_FROM = r".*(projection|word_embeddings.weight|tokens.weight)"


def _damage_weights(draw: random.Random, path: Path) -> tuple[str, bool]:
    """Of a file of safetensors without a digest."""
    made, what = damaged_safetensors(draw, path.read_bytes(), "", _READ_FROM)
    path.write_bytes(made)
    return what, False


def _load_bert(folder: Path, draw: random.Random) -> Tensor:
    model = BertForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model(batch()[0]).logits


def _make_sharebert(folder: Path) -> None:
    torch.manual_seed(0)
    ShareBertForMaskedLM(small_sharebert()).double().eval().save_pretrained(folder)


def small_sharebert() -> Any:
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return ShareBertConfig(
        **{"vocab_size": 60, "embedding_size": 6, "num_attention_heads": 2, **sizes},
        max_position_embeddings=16,
    )


def _damage_sharebert(draw: random.Random, folder: Path) -> tuple[str, bool]:
    if draw.random() < 0.5:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        own = {
            f.name: config[f.name] for f in fields(sharebert.ShareBertConfig) if f.name in config
        }
        made, what = damaged_json(draw, own, SHALLOW)
        kept = {name: value for name, value in config.items() if name not in own}
        path.write_text(json_text({**kept, **made}))
        return f"config: {what}", False
    return _damage_weights(draw, folder / _FILE)


def _load_sharebert(folder: Path, draw: random.Random) -> Tensor:
    model = ShareBertForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model(batch()[0]).logits


_ERRORS = (ShareError, SafetensorError)
_SAID = "`ignore_mismatched_sizes`"  # where tensors have other shapes: a RuntimeError
FORMATS = {
    "shared BERT": Format(_make_bert, _damage_bert, _load_bert, _ERRORS, _SAID),
    "ShareBERT": Format(_make_sharebert, _damage_sharebert, _load_sharebert, _ERRORS, _SAID),
}
