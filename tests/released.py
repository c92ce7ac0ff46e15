"""What the authors' released code computes and writes, kept in sharebert_reference.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

REFERENCE = load_file(Path(__file__).parent / "models" / "sharebert_reference.safetensors")
seen: set[str] = set()


def part(case: str, name: str) -> dict[str, Tensor]:
    prefix = f"{case}.{name}."
    found = {key.removeprefix(prefix): x for key, x in REFERENCE.items() if key.startswith(prefix)}
    seen.update(prefix + key for key in found)
    return found


def released_config(case: str) -> dict[str, Any]:
    """The config.json that the released code writes."""
    numbers = {name: x.item() for name, x in part(case, "config").items() if name != "columns"}
    mode = "pre-ln" if numbers.pop("pre_ln") else "post-ln"
    return {
        **numbers,
        "encoder_ln_mode": mode,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "layernorm_embedding": False,
        "model_type": "bert",
    }


def folder_of(case: str, path: Path, classifier: bool = False) -> Path:
    """A checkpoint folder as the released code writes it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(released_config(case)))
    theirs = part(case, "state")
    if classifier:
        theirs = {k: x for k, x in theirs.items() if k.startswith("bert.")}
        theirs |= {f"classifier.{k}": x for k, x in part(case, "classifier").items()}
    torch.save(theirs, path / "pytorch_model.bin")
    words = range(released_config(case)["vocab_size"] - 5)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in words)]
    (path / "vocab.txt").write_text("\n".join(pieces))
    return path
