"""Training step of a BERT-base-sized shared encoder against one ordinary layer reused.

    python benchmarks/encoder.py

Both run the same products at 12 depths; the shared one generates its weights first.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn
from turns import floor, take_turns, training_step

from paramshare import share_from_embedding

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
    rivals = {"shared": training_step(shared, tokens), "reused": training_step(reused, tokens)}
    measured = median(take_turns(rivals, "reused", args.rounds)["shared"])
    print(f"\nforward + backward at {args.batch} x {args.length} tokens, shared / reused")
    print(f"floor from the operations {floor(sharing.plan, tokens.numel()):.3f}, ", end="")
    print(f"median {measured:.3f}")


if __name__ == "__main__":
    main()
