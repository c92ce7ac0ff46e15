"""Inference of ShareBERT Small's encoder: weights never built, against weights kept in memory.

    python benchmarks/inference.py --shapes 1x1 1x16 1x128 8x128

The rivals are one model, whose weights are applied factored, are built once and kept (one layer's,
read at every depth), or are built again at each use, which is what the released code does. The
outputs must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from rivals import take_turns
from torch import Tensor, nn

from paramshare import share_from_embedding
from paramshare.marks import sources
from paramshare.report import Sharing

TOKENS, FEATURES, WIDTH, FEED_FORWARD, HEADS, DEPTH = 30528, 128, 2048, 4096, 16, 12


class Layer(nn.Module):
    """Attention and feed-forward of separate linear layers, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.merge = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, FEED_FORWARD), nn.Linear(FEED_FORWARD, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.merge(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, FEATURES)
        self.lift = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lift(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return x


def operations(sharing: Sharing, length: int, factored: bool) -> int:
    """Multiply-adds a token: products with weights, and attention. After a factored run, for which
    weights are given the same input is seen then."""
    groups = sharing.plan.groups
    attention = DEPTH * 2 * length * WIDTH
    if not factored:
        return attention + sum(len(g.slots) * g.rows * g.cols for g in groups)
    reduced_before = {other for _, other in sharing.pool.same_input}
    return attention + sum(
        len(g.slots) * FEATURES * g.blocks * (g.columns + (index not in reduced_before) * g.cols)
        for index, g in enumerate(groups)
    )


def rebuild(model: Encoder) -> Encoder:
    """A copy that builds each weight when it is used."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        source = sources(self)["weight"]
        weight = source.pool._generate([source.group], {})[0]
        return nn.functional.linear(x, weight.contiguous(), self.bias)

    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.Linear) and "weight" in sources(module):
            module.forward = forward.__get__(module)
    return copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["1x1", "1x16", "1x128", "8x128"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    models = {}
    for execution in ("materialized", "factored"):
        torch.manual_seed(0)
        models[execution] = Encoder().eval()
        sharing = share_from_embedding(
            models[execution], models[execution].embedding, execution=execution
        )
    models["rebuilt"] = rebuild(models["materialized"])
    lines = []
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        tokens = torch.randint(0, TOKENS, (batch, length))
        with torch.no_grad():
            outputs = {name: model(tokens) for name, model in models.items()}
            expected = outputs.pop("materialized")
            for name, output in outputs.items():
                error = float((output - expected).norm() / expected.norm())
                assert error < 1e-5, f"{name} is off by {error}"
            runs = {name: partial(model, tokens) for name, model in models.items()}
            found = take_turns(runs, "materialized", args.rounds)
        floor = operations(sharing, length, True) / operations(sharing, length, False)
        lines.append(
            f"| {shape} | {found['factored']:.2f} | {floor:.2f} | "
            f"{found['factored'] / found['rebuilt']:.2f} |"
        )
    print(sharing)
    print("| batch x tokens | factored / kept | of the operations | factored / rebuilt |")
    print("| --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
