"""Checkpoints of the authors' released code, as our `released=True` model for transformers.

The names are those of https://github.com/jchenghu/sharebert (pretraining/modeling.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from paramshare.errors import ShareError
from paramshare.models import sharebert_files as files
from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertModel,
    ShareBertPreTrainedModel,
    check_new,
    save_whole,
)

from transformers import BertTokenizer  # isort: skip  after what says that it is missing

WEIGHTS = "pytorch_model.bin"

_NAMES = (
    (r"bert\.embeddings\.word_embeddings\.weight", "bert.embeddings.tokens.weight"),
    (r"bert\.embeddings\.position_embeddings\.weight", "bert.embeddings.positions.weight"),
    (r"bert\.embeddings\.token_type_embeddings\.weight", "bert.embeddings.types.weight"),
    (r"bert\.embeddings\.pre_factor_norm\.(.+)", r"bert.embeddings.before_lift.\1"),
    (r"bert\.embeddings\.pos_factor_norm\.(.+)", r"bert.embeddings.after_lift.\1"),
    (r"bert\.embeddings\.factor_linear\.(.+)", r"bert.embeddings.lift.\1"),
    # W_F1, of which the virtual table is made: with us the pool's.
    (r"bert\.embeddings\.factor_linear_all\.weight", "bert.paramshare.projection"),
    (r"bert\.embeddings\.factor_linear_all\.bias", "bert.paramshare.bias"),
    (r"bert\.encoder\.FinalLayerNorm\.(.+)", r"bert.norm.\1"),
    (
        r"bert\.encoder\.layer\.(\d+)\.block\.self\.(query|key|value)_bias",
        r"bert.layers.\1.\2.bias",
    ),
    (r"bert\.encoder\.layer\.(\d+)\.block\.output\.bias", r"bert.layers.\1.attention_output.bias"),
    (
        r"bert\.encoder\.layer\.(\d+)\.PreAttentionLayerNorm\.(.+)",
        r"bert.layers.\1.attention_norm.\2",
    ),
    (
        r"bert\.encoder\.layer\.(\d+)\.PostAttentionLayerNorm\.(.+)",
        r"bert.layers.\1.output_norm.\2",
    ),
    (r"bert\.encoder\.layer\.(\d+)\.(intermediate|output)\.bias", r"bert.layers.\1.\2.bias"),
    (r"bert\.pooler\.bias", "bert.pooler.bias"),
    (r"cls\.predictions\.bias", "head.bias"),
    (r"cls\.predictions\.transform\.dense_act\.(.+)", r"head.transform.\1"),
    (r"cls\.predictions\.transform\.LayerNorm\.(.+)", r"head.norm.\1"),
    (r"cls\.predictions\.decoder\.weight", "head.output.weight"),
    (r"classifier\.(weight|bias)", r"classifier.\1"),
)


def convert_state(state: Mapping[str, Tensor], pre_norm: bool = True) -> dict[str, Tensor]:
    """A released state_dict under the names of our transformers classes.

    Post-LN models have a final norm that they never use; it is left out. Raises ShareError for a
    name that the released model does not have.
    """
    converted = {}
    for name, tensor in state.items():
        if not pre_norm and ".FinalLayerNorm." in name:
            continue
        ours = _our_name(name)
        turned = ours.endswith("projection") and tensor.dim() == 2
        converted[ours] = tensor.mT.contiguous() if turned else tensor
    return converted


def _our_name(name: str) -> str:
    for theirs, ours in _NAMES:
        found = re.fullmatch(theirs, name)
        if found:
            return found.expand(ours)
    raise ShareError(f"{name} is no tensor of the released ShareBERT")


def import_sharebert(folder: Path, out: Path) -> ShareBertPreTrainedModel:
    """Converts a checkpoint folder of the released code (config.json, pytorch_model.bin, and the
    tokenizer's vocab.txt if it is there) to one of transformers, `out`, and returns the model.

    Pretrained models and fine-tuned classifiers. Nothing of the file is run (`weights_only`).
    Raises ShareError where the folder is not such a checkpoint, or `out` is there already.
    """
    check_new(out)
    released = files.read_json(folder / "config.json")
    options = _options(released, folder / "config.json")
    tensors = files.read_pickle(folder / WEIGHTS)
    files.check_tensors(tensors, folder / WEIGHTS)
    tensors = convert_state(tensors, options["pre_norm"])
    labels: dict[str, Any] = {}
    if "classifier.bias" in tensors:
        kind: type[ShareBertPreTrainedModel] = ShareBertForSequenceClassification
        labels["num_labels"] = tensors["classifier.bias"].numel()
        labels |= _labels(released, labels["num_labels"], folder / "config.json")
    else:
        kind = ShareBertForMaskedLM if "head.transform.weight" in tensors else ShareBertModel
    tokenizer = _tokenizer(folder, options)
    config = ShareBertConfig(**options, **labels)
    model = files.load(
        partial(kind, config), config, tensors, folder / WEIGHTS, names=" (by our names)"
    )
    save_whole(model, out, tokenizer)
    return model


# What a released config.json has under our names.
_OPTIONS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "type_vocab_size"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
)
_NORMS = {"pre-ln": True, "post-ln": False}


def _options(released: dict[str, Any], path: Path) -> dict[str, Any]:
    """Our options for a released config.json."""
    for name in ("factor_size", *_OPTIONS, "encoder_ln_mode"):
        if name not in released:
            raise ShareError(f"{path} has no {name}: it is not of the released ShareBERT")
    for name, known in (
        ("encoder_ln_mode", tuple(_NORMS)),
        ("layernorm_embedding", (False,)),
        ("hidden_act", ("gelu",)),
    ):
        if released.get(name, known[0]) not in known:
            raise ShareError(
                f"{path}: {name}={released[name]!r} cannot be converted, only "
                f"{' or '.join(map(repr, known))}"
            )
    options = {
        "embedding_size": released["factor_size"],
        **{name: released[name] for name in _OPTIONS},
        "pre_norm": _NORMS[released["encoder_ln_mode"]],
        "released": True,
    }
    files.check_options(options, path)
    return options


def _labels(released: dict[str, Any], count: int, path: Path) -> dict[str, Any]:
    """The names of a classifier's labels, if they are there."""
    names = released.get("id2label")
    if names is None:
        return {}
    if (
        not isinstance(names, dict)
        or set(names) != {str(i) for i in range(count)}
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise ShareError(f"{path}: id2label does not name the {count} labels of the classifier")
    by_number = {int(number): name for number, name in names.items()}
    return {"id2label": by_number, "label2id": {name: i for i, name in by_number.items()}}


def _tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    """That of vocab.txt, if it is there."""
    path, rows = folder / "vocab.txt", options["vocab_size"]
    if not os.path.lexists(path):
        return None
    with files.reading(path):
        tokens = path.read_text("utf8").removesuffix("\n").split("\n")
    if not rows - 8 < len(tokens) <= rows:
        raise ShareError(
            f"{path} has {len(tokens)} tokens, the table {rows}: of these the released code adds "
            "at most 7"
        )
    if len(set(tokens)) < len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise ShareError(f"{path} has {twice!r} twice: a token has one row of the table")
    with files.reading(path):
        tokenizer = BertTokenizer.from_pretrained(
            folder, model_max_length=options["max_position_embeddings"]
        )
    if len(tokenizer) > rows:  # transformers adds what a tokenizer of BERT must have
        raise ShareError(
            f"{path} has no {tokenizer.convert_ids_to_tokens(rows)!r}, nor has the table"
        )
    return tokenizer
