"""ShareBERT Small in 8 bits: what is stored, how fast it is, and how far its outputs move.

    python benchmarks/int8.py --shapes 1x1 1x128 8x128

All are one model with weights of chance, biases of them included. `int8` is `paramshare.quantize`,
whose table has scales a block of rows and feature, applied to what the table makes of an input.
`int8, scales a token` has them a row of the table instead, which go into a copy of the input for
each block. `int8, generated` is the paper's variant: the weights that are generated are 8 bits
wide, each once for all depths, and what is stored stays as it is. All of them multiply integers.
Times are medians of ratios to the factored float32 model, in turns; outputs are those of the last
shape, change the largest of a token's logits, relative to their length.
"""

from __future__ import annotations

import argparse
import copy
import os
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor, nn
from turns import take_turns

from paramshare import int8, quantize, quantized, save_model
from paramshare.int8 import Int8Blocks, Int8Matrix
from paramshare.marks import sources
from paramshare.models.sharebert import MaskedLMHead, ShareBert, ShareBertConfig

FLOAT = "float32, factored"


def scales_a_token(model: nn.Module) -> nn.Module:
    """A quantised copy whose table has one scale a row."""
    with patch.object(quantized, "_block_of_table", lambda table, pools: None):
        return quantize(copy.deepcopy(model))


def reduce(self: Int8Blocks, flat: Tensor) -> Tensor:
    """`Int8Blocks.reduce`, also of a table with scales a token: as many copies of the input as
    there are blocks, each rounded by itself."""
    if self.matrix.block is not None:
        return _reduce(self, flat)
    scales = self.matrix.scale[: self.count * self.cols].view(self.count, self.cols)
    products = [
        int8._Tokens(flat, scale).times(piece)
        for scale, piece in zip(scales, self.pieces, strict=True)
    ]
    return torch.stack(products, 1)


_reduce = Int8Blocks.reduce


def generated(model: nn.Module) -> nn.Module:
    """A copy that keeps each generated weight in 8 bits, and multiplies integers with it."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, kept[sources(self)["weight"].group], self.bias)

    copied = copy.deepcopy(model)
    kept: dict[int, Int8Matrix] = {}
    for part in copied.modules():
        if isinstance(part, nn.Linear) and "weight" in sources(part):
            group = sources(part)["weight"].group
            if group not in kept:
                kept[group] = Int8Matrix(*int8.quantise(part.weight, None), None)
            part.forward = forward.__get__(part)
    copied.bytes_generated = sum(sum(t.nbytes for t in one.parts()) for one in kept.values())
    return copied


def stored(model: nn.Module) -> int:
    """Bytes of its file."""
    with TemporaryDirectory() as folder:
        save_model(model, Path(folder, "model"))
        return os.path.getsize(Path(folder, "model"))


def change(expected: Tensor, found: Tensor) -> tuple[float, float, float]:
    """Of vectors in the last dimension: mean and least cosine, and largest relative change."""
    expected, found = expected.flatten(0, -2), found.flatten(0, -2)
    cosines = nn.functional.cosine_similarity(expected, found, dim=-1)
    moved = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(cosines.mean()), float(cosines.min()), float(moved.max())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--shapes", nargs="+", default=["1x1", "1x128", "8x128"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    config = ShareBertConfig.preset(args.preset)
    model, head = ShareBert(config).eval(), MaskedLMHead(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, config.initializer_range)
    models = {
        FLOAT: model,
        "int8": quantize(copy.deepcopy(model)),
        "int8, scales a token": scales_a_token(model),
        "int8, generated": generated(model),
    }
    heads = dict.fromkeys(models, head)
    heads["int8"] = heads["int8, scales a token"] = quantize(copy.deepcopy(head))
    with patch.object(Int8Blocks, "reduce", reduce):
        times = {}
        for shape in args.shapes:
            tokens = torch.randint(0, config.vocab_size, tuple(map(int, shape.split("x"))))
            rivals = {name: partial(each, tokens) for name, each in models.items()}
            ratios = take_turns(rivals, FLOAT, args.rounds)
            times[shape] = {FLOAT: 1.0, **{name: median(found) for name, found in ratios.items()}}
        hidden = {name: each(tokens)[0] for name, each in models.items()}
        logits = {
            name: heads[name](x, models[name].embeddings.tokens.weight)
            for name, x in hidden.items()
        }
    titles = ["", "stored, MB", *args.shapes, "hidden: cosine", "logits: cosine (least)", "change"]
    print(f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|")
    for name, each in models.items():
        cells = [name, f"{stored(each) / 1e6:.2f}"]
        cells += [f"{found[name]:.2f}" for found in times.values()]
        if name == FLOAT:
            cells += ["-"] * 3
        else:
            mean, least, most = change(logits[FLOAT], logits[name])
            cells.append(f"{change(hidden[FLOAT], hidden[name])[0]:.5f}")
            cells += [f"{mean:.5f} ({least:.5f})", f"{most:.3f}"]
        print(f"| {' | '.join(cells)} |")
    most = models["int8, generated"].bytes_generated / 1e6
    print(f"`int8, generated` keeps {most:.1f} MB of generated weights beside what is stored.")


if __name__ == "__main__":
    main()
