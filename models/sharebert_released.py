"""Checkpoints of the authors' released code, as our `released=True` model for transformers.

The names are those of https://github.com/jchenghu/sharebert (pretraining/modeling.py).
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertTokenizer

from paramshare.errors import ShareError
from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertModel,
    ShareBertPreTrainedModel,
    check_new,
    save_whole,
)

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
        converted[ours] = tensor.mT.contiguous() if ours.endswith("projection") else tensor
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
    options = _options(folder / "config.json")
    state = convert_state(_state(folder / WEIGHTS), options["pre_norm"])
    if "classifier.bias" in state:
        kind: type[ShareBertPreTrainedModel] = ShareBertForSequenceClassification
        options["num_labels"] = state["classifier.bias"].numel()
        options |= _labels(folder / "config.json", options["num_labels"])
    else:
        kind = ShareBertForMaskedLM if "head.transform.weight" in state else ShareBertModel
    with torch.device("meta"):
        model = kind(ShareBertConfig(**options))
    _check(state, model.state_dict(), folder)
    model.load_state_dict(state, assign=True)

    save_whole(model, out, _tokenizer(folder, options))
    return model.eval()


def _options(path: Path) -> dict[str, Any]:
    """Our options for a released config.json."""
    try:
        config = json.loads(path.read_text("utf8"))
        released = {
            "embedding_size": config["factor_size"],
            **{
                name: config[name]
                for name in (
                    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
                    *("num_attention_heads", "max_position_embeddings", "type_vocab_size"),
                    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
                )
            },
            "pre_norm": {"pre-ln": True, "post-ln": False}[config["encoder_ln_mode"]],
        }
    except (OSError, ValueError, TypeError) as error:
        raise ShareError(f"{path} cannot be read: {error}") from None
    except KeyError as error:
        raise ShareError(
            f"{path} does not have a known {error.args[0]}: it is not of the released ShareBERT"
        ) from None
    for name, known in (("layernorm_embedding", False), ("hidden_act", "gelu")):
        if config.get(name, known) != known:
            raise ShareError(f"{path}: {name}={config[name]!r} cannot be converted, only {known!r}")
    return {**released, "released": True}


def _labels(path: Path, count: int) -> dict[str, Any]:
    """The names of a classifier's labels, if they are there."""
    names = json.loads(path.read_text("utf8")).get("id2label")
    if names is None:
        return {}
    if not isinstance(names, dict) or set(names) != {str(i) for i in range(count)}:
        raise ShareError(f"{path}: id2label does not name the {count} labels of the classifier")
    by_number = {int(number): str(name) for number, name in names.items()}
    return {"id2label": by_number, "label2id": {name: i for i, name in by_number.items()}}


def _tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    """That of vocab.txt, if it is there."""
    path = folder / "vocab.txt"
    if not path.is_file():
        return None
    try:
        count = len(path.read_text("utf8").removesuffix("\n").split("\n"))
    except ValueError as error:
        raise ShareError(f"{path} cannot be read: {error}") from None
    longest = options["max_position_embeddings"]
    if not options["vocab_size"] - 8 < count <= options["vocab_size"]:
        raise ShareError(
            f"{path} has {count} tokens, the table {options['vocab_size']}: of these the released "
            "code adds at most 7"
        )
    return BertTokenizer.from_pretrained(folder, model_max_length=longest)


def _state(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ShareError(f"{path} cannot be read as a file of weights: {reason}") from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(x, Tensor) and x.is_floating_point()
        for name, x in state.items()
    ):
        raise ShareError(f"{path} holds no state_dict of weights")
    return {name: tensor.clone() for name, tensor in state.items()}  # some may be one memory


def _check(state: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    for name in expected:
        if name not in state:
            raise ShareError(f"{folder / WEIGHTS} has no {name} (by our names)")
    for name, tensor in state.items():
        if name not in expected:
            raise ShareError(
                f"{folder / WEIGHTS} has {name} (by our names) beside what makes a model"
            )
        if tensor.shape != expected[name].shape:
            raise ShareError(
                f"{name} (by our names) is {tuple(tensor.shape)} in {folder / WEIGHTS}, by its "
                f"config.json it should be {tuple(expected[name].shape)}"
            )
