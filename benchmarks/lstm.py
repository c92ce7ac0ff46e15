"""Training step of an LSTM whose matrices are read from a table, against the plain LSTM.

    python benchmarks/lstm.py

Both run the same recurrence; the shared ones generate their weights first.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from torch import Tensor, nn
from turns import floor, take_turns, training_step

from paramshare import share_from_embedding

TOKENS, WIDTH, LAYERS = 16000, 512, 2


class Tagger(nn.Module):
    """Embedding and an LSTM of `LAYERS` layers; without the output layer, which is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lstm(self.embedding(tokens))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (args.batch, args.length))
    rivals = {"plain": training_step(Tagger(), tokens)}
    floors = {}
    for depth in ("all", "none"):
        model = Tagger()
        sharing = share_from_embedding(model, model.embedding, depth=depth)
        print(f"depth {depth!r}\n{sharing}\n")
        rivals[depth] = training_step(model, tokens)
        floors[depth] = floor(sharing.plan, tokens.numel())
    measured = take_turns(rivals, "plain", args.rounds)
    print(f"\nforward + backward at {args.batch} x {args.length} tokens, shared / plain")
    for depth, ratios in measured.items():
        print(f"depth {depth!r}: floor from the operations {floors[depth]:.3f}, ", end="")
        print(f"median {median(ratios):.3f}")


if __name__ == "__main__":
    main()
