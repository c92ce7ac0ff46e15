"""Models of transformers, built small from their configs. Without transformers their tests are
skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalogue import Case, batch

TOKENS, PADDING, END = 100, 0, 2
TOKEN_IDS = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": END}

INPUT = batch(TOKENS)
MASK = (torch.arange(7) < torch.tensor([7, 6, 4])[:, None]).long()
LEFT_MASK = MASK.flip(1)  # where the end of the prompt is continued


def build(model: str, **config: Any) -> nn.Module:
    """The model of that class, from a config with the fewest changes that make it small."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    cls = getattr(transformers, model)
    built = cls(cls.config_class(vocab_size=TOKENS, **TOKEN_IDS, **config))
    # T5 does not scale its attention's scores, in which rounding errors of float32 grow.
    return built.double() if model.startswith("T5") else built


def fill(model: nn.Module, **labels: Tensor) -> Any:
    """Runs an encoder."""
    return model(input_ids=INPUT, attention_mask=MASK, **labels)


def continue_text(model: nn.Module, **labels: Tensor) -> Any:
    """Runs a decoder."""
    return model(input_ids=INPUT, attention_mask=LEFT_MASK, **labels)


def translate(model: nn.Module, labels: Tensor | None = None) -> Any:
    """Runs an encoder-decoder."""
    return model(
        input_ids=INPUT,
        attention_mask=MASK,
        decoder_input_ids=INPUT[:, :-1] if labels is None else None,
        labels=labels,
    )


def generate(model: nn.Module, mask: Tensor) -> list[list[int]]:
    """Greedy search's tokens and beam search's, one after the other."""
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    found = [model.generate(INPUT, num_beams=beams, **options) for beams in (1, 3)]
    return [greedy + beam for greedy, beam in zip(*(f.tolist() for f in found), strict=True)]


def _case(
    model: str,
    config: dict[str, Any],
    run: Callable[..., Any] = translate,
    kinds: str = "Linear",
    name: str = "",
    **more: Any,
) -> Case:
    mask = LEFT_MASK if run is continue_text else MASK
    return Case(
        f"transformers {name or model}",
        kinds,
        partial(build, model, **config),
        embedding=lambda model: model.get_input_embeddings(),
        run=lambda model: run(model).logits,
        loss=lambda model: run(model, labels=INPUT).loss,
        **{"generate": lambda model: generate(model, mask), **more},
    )


# An untrained model of the usual small spread says the same of every sentence.
SPREAD = 0.2
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 30,
    "initializer_range": SPREAD,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_layers": 2,
    "decoder_start_token_id": PADDING,
    "initializer_factor": 1.5,
}
BART = {
    "d_model": 16,
    **{
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
    },
    "max_position_embeddings": 30,
    "decoder_start_token_id": END,
    "forced_eos_token_id": None,
    "init_std": SPREAD,
}
LLAMA = {**ENCODER, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 30}
DISTILBERT = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 30,
    "initializer_range": SPREAD,
}

NO_GENERATION = {"generate": None, "no_generation": "it is an encoder"}

CASES = [
    _case("BertForMaskedLM", ENCODER, fill, **NO_GENERATION),
    _case("RobertaForMaskedLM", ENCODER, fill, **NO_GENERATION),
    _case("DistilBertForMaskedLM", DISTILBERT, fill, **NO_GENERATION),
    _case("AlbertForMaskedLM", {**ENCODER, "embedding_size": 8}, fill, **NO_GENERATION),
    _case("GPT2LMHeadModel", {**GPT2, "initializer_range": SPREAD}, continue_text, "Conv1D"),
    _case("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, continue_text),
    _case("LlamaForCausalLM", LLAMA, continue_text, name="LlamaForCausalLM (untied)"),
    _case("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "relu"}),
    _case(
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu"},
        name="T5ForConditionalGeneration (gated)",
    ),
    _case("MarianMTModel", BART),
    _case("BartForConditionalGeneration", BART),
]
