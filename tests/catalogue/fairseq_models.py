"""fairseq's models, built small by their own classes. Without fairseq their tests are skipped."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from catalogue import Case, batch

WORDS, PADDING = 56, 1  # fairseq's dictionary has four symbols more


def dictionary() -> Any:
    """One for both languages; skips the test where fairseq is missing."""
    data = pytest.importorskip("fairseq.data", reason="fairseq is not installed")
    words = data.Dictionary()
    for n in range(WORDS):
        words.add_symbol(f"word{n}")
    return words


def build(model: str, **options: Any) -> nn.Module:
    """The model of that name (`--arch`), with fairseq's defaults but for the options."""
    words = dictionary()
    from fairseq import models

    config = models.MODEL_DATACLASS_REGISTRY.get(model, Namespace)
    args = Namespace(**{**vars(config()), **SMALL, **options})
    models.ARCH_CONFIG_REGISTRY[model](args)
    task = Namespace(source_dictionary=words, target_dictionary=words)
    return models.ARCH_MODEL_REGISTRY[model].build_model(args, task)


SMALL = {
    "dropout": 0.0,
    "input_dropout": 0.0,
    "attention_dropout": 0.0,
    "max_source_positions": 30,
    "max_target_positions": 30,
    "max_positions": 30,
    "tokens_per_sample": 30,
    "add_bos_token": False,
    "weight_softmax": True,
    "criterion": "cross_entropy",
    **{
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (
            ("embed_dim", 16),
            ("ffn_embed_dim", 24),
            ("attention_heads", 2),
            ("layers", 2),
            ("hidden_size", 16),
            ("kernel_size_list", [3, 5]),
        )
    },
    "decoder_input_dim": 16,
    "decoder_output_dim": 16,
    "decoder_out_embed_dim": 16,
}

LENGTHS = torch.tensor([7, 6, 4])
TARGET = batch(4 + WORDS)
# Padded on the left, as fairseq's translation task does it.
SOURCE = TARGET.masked_fill(torch.arange(7) < 7 - LENGTHS[:, None], PADDING)
SAMPLE = {"net_input": {"src_tokens": SOURCE, "src_lengths": LENGTHS}}


def translate(model: nn.Module) -> Tensor:
    return model(SOURCE, LENGTHS, TARGET[:, :-1])[0]


def continue_text(model: nn.Module) -> Tensor:
    return model(TARGET[:, :-1])[0]


def restore_text(model: nn.Module) -> Tensor:
    return model(TARGET[:, 1:])[0]


def generator(model: nn.Module) -> Any:
    """fairseq's beam search."""
    from fairseq.sequence_generator import SequenceGenerator

    return SequenceGenerator([model], dictionary(), beam_size=3, max_len_b=9, min_len=4)


def beam_search(model: nn.Module, prefix: Tensor | None = None) -> list[list[int]]:
    """The best hypothesis for each sentence, after the tokens `prefix`."""
    found = generator(model).generate([model], SAMPLE, prefix_tokens=prefix)
    return [hypotheses[0]["tokens"].tolist() for hypotheses in found]


def _case(
    name: str,
    kinds: str,
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Tensor] = translate,
    table: str = "encoder.embed_tokens",
    **more: Any,
) -> Case:
    return Case(
        f"fairseq {name}",
        kinds,
        build,
        embedding=lambda model: model.get_submodule(table),
        run=run,
        loss=lambda model: F.cross_entropy(run(model).flatten(0, 1), TARGET[:, 1:].flatten()),
        no_compile="fairseq's models branch on whether there is padding",
        **{"generate": beam_search, **more},
    )


def _lstm() -> nn.Module:
    model = build("lstm", share_all_embeddings=True, encoder_bidirectional=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # as they are, an untrained one says the same of every sentence
    return model


def _fconv() -> nn.Module:
    layers = "[(16, 3)] * 2 + [(24, 2)]"
    model = build(
        "fconv", encoder_layers=layers, decoder_layers=layers, share_input_output_embed=True
    )
    with torch.no_grad():
        translate(model)  # weight norm leaves tensors with a graph in it: it could not be copied
    return model


CASES = [
    _case(
        "transformer",
        "fairseq MultiheadAttention, Linear",
        lambda: build("transformer", share_all_embeddings=True),
    ),
    _case(
        "transformer_lm",
        "fairseq MultiheadAttention, Linear",
        lambda: build("transformer_lm", share_decoder_input_output_embed=True),
        continue_text,
        "decoder.embed_tokens",
        generate=lambda model: beam_search(model, TARGET[:, :2]),
    ),
    _case("lstm", "LSTM (bidirectional), LSTMCell", _lstm),
    _case(
        "fconv",
        "ConvTBC, LinearizedConvolution, Linear (weight norm by hook)",
        _fconv,
        table="decoder.embed_tokens",
    ),
    *(
        _case(
            f"lightconv ({kind})",
            "fairseq MultiheadAttention, Linear",
            partial(
                build,
                "lightconv",
                share_all_embeddings=True,
                encoder_conv_type=kind,
                decoder_conv_type=kind,
            ),
        )
        for kind in ("lightweight", "dynamic")
    ),
    _case(
        "roberta",
        "fairseq MultiheadAttention, Linear",
        lambda: build("roberta"),
        restore_text,
        "encoder.sentence_encoder.embed_tokens",
        generate=None,
        no_generation="it is an encoder",
    ),
]
