"""Training step of a BERT-base-sized shared encoder against one ordinary layer reused.

    python benchmarks/encoder.py

Both run the same products at 12 depths; the shared one generates its weights first. Rivals take
turns in one process, so that a busy machine slows both: trust the ratio, not the seconds.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn

from paramshare import share_from_embedding
from paramshare.plan import SharingPlan

TOKENS, WIDTH, FEED_FORWARD, DEPTH = 30522, 768, 3072, 12


class Encoder(nn.Module):
    """Embedding and `depth` encoder layers; with `reused`, one layer used at every depth."""

    def __init__(self, reused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 12, FEED_FORWARD, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1 if reused else DEPTH)
        self.times = DEPTH if reused else 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.times):
            x = self.encoder(x)
        return x


def generation_share(plan: SharingPlan, tokens: int) -> float:
    """Multiply-adds of generating the weights over those of the dense products, forward."""
    generation = plan.tokens * plan.features * sum(group.columns for group in plan.groups)
    dense = sum(len(g.slots) * g.rows * g.cols for g in plan.groups) * tokens
    return generation / dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    shared, reused = Encoder(reused=False), Encoder(reused=True)
    start = time.perf_counter()
    sharing = share_from_embedding(shared, shared.embedding)
    call = time.perf_counter() - start
    print(sharing)
    print(f"\nthe call took {call:.2f} s")

    tokens = torch.randint(0, TOKENS, (args.batch, args.length))

    def step(model: nn.Module) -> float:
        model.zero_grad()
        start = time.perf_counter()
        model(tokens).square().mean().backward()
        return time.perf_counter() - start

    for model in (shared, reused):
        step(model)  # warm-up
    pairs = []
    for n in range(args.rounds):
        order = (shared, reused) if n % 2 == 0 else (reused, shared)
        seconds = {id(model): step(model) for model in order}
        pairs.append((seconds[id(shared)], seconds[id(reused)]))
        print(f"round {n + 1}: shared / reused = {pairs[-1][0] / pairs[-1][1]:.3f}", flush=True)
    share = generation_share(sharing.plan, args.batch * args.length)
    print(f"\nforward + backward at {args.batch} x {args.length} tokens")
    print(f"floor of the ratio, from the operations: {1 + share:.3f}")
    print(f"measured ratio: median {median(a / b for a, b in pairs):.3f}, ", end="")
    print(f"of the fastest rounds {min(a for a, _ in pairs) / min(b for _, b in pairs):.3f}")


if __name__ == "__main__":
    main()
