"""ShareBERT between checkpoints of fairseq (task `shared_masked_lm`) and folders of transformers.

The weights are read from rows of the token table, so a token must have the same row in both: `<s>`,
`<pad>`, `</s>`, `<unk>`, the lines of dict.txt, `<mask>`. fairseq itself is not needed here.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paramshare.errors import ShareError
from paramshare.models import sharebert
from paramshare.models import sharebert_files as files
from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    check_new,
    save_whole,
)

from transformers import AutoConfig, AutoTokenizer  # isort: skip  after what says they are missing

FIRST, LAST = ("<s>", "<pad>", "</s>", "<unk>"), "<mask>"

# A model of other values here computes the same, and may go on from the weights.
_OF_TRAINING = {
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("initializer_range", "table_gradient"),
}


def export_sharebert(
    checkpoint: Path, out: Path, tokenizer: Path | None = None
) -> ShareBertForMaskedLM:
    """Makes a folder for transformers, `out`, of a checkpoint that `fairseq-train --arch sharebert`
    has written, and returns the model.

    tokenizer: a folder of transformers; the tokenizer is copied, if its ids are the checkpoint's.
    These are in the dict.txt of the data that it was trained on; where that is not found, only
    their number is compared, with a warning. Nothing of the files is run (`weights_only`).

    Raises ShareError where the checkpoint is damaged or of another model, the tokenizer does not
    fit, or `out` is there already.
    """
    check_new(out)
    config, tensors, data = _read(checkpoint)
    files.check_tensors(tensors, checkpoint)
    model = files.load(partial(ShareBertForMaskedLM, config), config, tensors, checkpoint)
    copied = None
    if tokenizer is not None:
        copied = _tokenizer(tokenizer)
        _check_tokens(copied, tokenizer, config.vocab_size, _dictionary(data))
    save_whole(model, out, copied)
    return model


def fill_from(
    folder: Path, model: nn.Module, config: sharebert.ShareBertConfig, tokens: Sequence[str]
) -> None:
    """Gives `model`, which has the parameters of our ShareBertForMaskedLM by the same names, the
    weights in a folder of transformers.

    tokens: the model's, in the order of the rows; a tokenizer in the folder must have the same.
    Raises ShareError where the folder holds no ShareBERT, or another one than `config`.
    """
    with files.reading(folder):
        theirs = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(theirs, ShareBertConfig):
        raise ShareError(f"{folder} holds a model of type {theirs.model_type}, not sharebert")
    for name in (f.name for f in fields(sharebert.ShareBertConfig)):
        mine, other = getattr(config, name), getattr(theirs, name)
        if mine != other and name not in _OF_TRAINING:
            raise ShareError(f"{folder} has {name}={other!r}, the model to be filled {mine!r}")
    if (folder / "tokenizer_config.json").is_file():
        _check_tokens(_tokenizer(folder), folder, config.vocab_size, tokens)
    with files.reading(folder):
        loaded, info = ShareBertForMaskedLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    if info["missing_keys"]:
        raise ShareError(f"{folder} has no {min(info['missing_keys'])}")
    model.load_state_dict(loaded.state_dict())


def _read(path: Path) -> tuple[ShareBertConfig, Any, str]:
    """Configuration, state and `data` option of a checkpoint."""
    # The options of fairseq's older parts are a Namespace. What was allowed stays allowed.
    allowed = {argparse.Namespace} - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(allowed)):
        checkpoint = files.read_pickle(path)
    options, data = (
        _entry(checkpoint, *names)
        for names in (("task_state", "sharebert"), ("cfg", "task", "data"))
    )
    if not isinstance(options, dict) or not options or not isinstance(data, str):
        raise ShareError(f"{path} is no checkpoint of fairseq-train --arch sharebert")
    files.check_options(options, path)
    return ShareBertConfig(**options), checkpoint.get("model"), data


def _entry(content: Any, *names: str) -> Any:
    """What stands under these names in nested dicts, None where it does not."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _dictionary(data: str) -> list[str] | None:
    """The tokens of a checkpoint in the order of their rows, None where its data is not found."""
    path = Path(data.split(":")[0]) / "dict.txt"
    if not path.is_file():
        warnings.warn(
            f"{path} is not there: only the number of the tokenizer's tokens was compared",
            stacklevel=3,
        )
        return None
    with files.reading(path):
        lines = path.read_text("utf8").splitlines()
    return [*FIRST, *(line.split(" ")[0] for line in lines), LAST]


def _tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise ShareError(f"{folder} is no folder of a tokenizer")
    with files.reading(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_tokens(tokenizer: Any, folder: Path, count: int, tokens: Sequence[str] | None) -> None:
    if len(tokenizer) != count:
        raise ShareError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, the table {count}"
        )
    for row, token in enumerate(tokens or ()):
        found = tokenizer.convert_ids_to_tokens(row)
        if found != token:
            raise ShareError(
                f"row {row} of the table is {token!r}, for the tokenizer of {folder} {found!r}: "
                "weights are read from the rows, so their order must be the same"
            )
