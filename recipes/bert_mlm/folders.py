"""Models and tokenizers out of folders, those of this project included."""

import os
from pathlib import Path
from typing import Any

import rivals  # noqa: F401  registers its models
import torch
from stages import UserError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, logging

import paramshare.models.pretrained  # noqa: F401  registers ShareBERT, loads shared models
from paramshare import ShareError

# What was new in a model that is finetuned is no news.
logging.set_verbosity_error()
logging.disable_progress_bar()


def device() -> torch.device:
    """This process's own; torchrun starts one a device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def load_model(auto: Any, folder: Path, **options: Any) -> Any:
    """The model of `folder` by a class such as AutoModel. UserError."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not the folder of a model: it has no config.json")
    try:
        return auto.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, ShareError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"the model of {folder} cannot be loaded: {reason}") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """UserError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder} holds no tokenizer of transformers") from None


def longest_input(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    return min(tokenizer.model_max_length, model.config.max_position_embeddings)
