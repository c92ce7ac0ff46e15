"""Beam search of fairseq with a shared model against its plain twin, which has the same weights.

    python benchmarks/decoding.py

The plain model keeps its weights, the shared one generates each once for all steps.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from torch import nn
from turns import take_turns

from paramshare import materialize
from paramshare.report import count_parameters
from paramshare.tasks.sharing import ShareConfig, share_model

ARCHITECTURES = {
    "fconv": "fconv_iwslt_de_en",
    "lstm": "lstm_wiseman_iwslt_de_en",
    "transformer": "transformer_iwslt_de_en",
}


def build(arch: str, words: Dictionary) -> nn.Module:
    """fairseq's model of that architecture, shared as the translation task shares it."""
    torch.manual_seed(0)
    args = argparse.Namespace(
        share_input_output_embed=True,  # fconv, which has a table for each side
        share_all_embeddings=True,  # the others
        criterion="cross_entropy",
        max_source_positions=1024,
        max_target_positions=1024,
    )
    ARCH_CONFIG_REGISTRY[arch](args)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
    share_model(model, ShareConfig())
    return model


def translate(
    generator: SequenceGenerator, model: nn.Module, sample: dict[str, Any]
) -> list[list[int]]:
    """The best translation of each sentence."""
    found = generator.generate([model], sample)
    return [hypotheses[0]["tokens"].tolist() for hypotheses in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=ARCHITECTURES, default="fconv")
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=20, help="of sentences and translations")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    words = Dictionary()
    for n in range(args.words):
        words.add_symbol(f"word{n}")
    shared, plain = (build(ARCHITECTURES[args.arch], words) for _ in range(2))
    plain.load_state_dict(shared.state_dict())
    materialize(plain)
    stored, dense = count_parameters(shared), count_parameters(plain)
    print(f"{ARCHITECTURES[args.arch]}: stored {stored:,}, plain {dense:,}")

    tokens = torch.randint(words.nspecial, len(words), (args.batch, args.length))
    lengths = torch.full((args.batch,), args.length)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}

    size = {"beam_size": args.beam, "max_len_b": args.length, "min_len": args.length}
    for state in ("as it is", "after make_generation_fast_"):
        rivals = {
            name: partial(translate, SequenceGenerator([model], words, **size), model, sample)
            for name, model in (("shared", shared), ("plain", plain))
        }
        assert rivals["shared"]() == rivals["plain"]()
        print(state)
        ratio = median(take_turns(rivals, "plain", args.rounds)["shared"])
        print(f"{state}: speed of shared / plain, median {1 / ratio:.3f}\n")
        for model in (shared, plain):
            model.make_generation_fast_()


if __name__ == "__main__":
    main()
