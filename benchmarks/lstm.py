"""Training step of an LSTM whose matrices are read from a table, against the plain LSTM.

    python benchmarks/lstm.py

Both run the same recurrence; the shared one generates its weights first. Rivals take turns in one
process, so that a busy machine slows both: trust the ratio, not the seconds.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn

from paramshare import share_from_embedding
from paramshare.plan import SharingPlan

TOKENS, WIDTH, LAYERS = 16000, 512, 2


class Tagger(nn.Module):
    """Embedding and an LSTM of `LAYERS` layers; without the output layer, which is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lstm(self.embedding(tokens))[0]


def generation_share(plan: SharingPlan, tokens: int) -> float:
    """Multiply-adds of generating the weights over those of the recurrence, forward."""
    generation = plan.tokens * plan.features * sum(group.columns for group in plan.groups)
    dense = sum(len(g.slots) * g.rows * g.cols for g in plan.groups) * tokens
    return generation / dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(0)
    plain = Tagger()
    shared = {depth: Tagger() for depth in ("all", "none")}
    plans = {}
    for depth, model in shared.items():
        sharing = share_from_embedding(model, model.embedding, depth=depth)
        plans[depth] = sharing.plan
        print(f"depth {depth!r}\n{sharing}\n")

    tokens = torch.randint(0, TOKENS, (args.batch, args.length))

    def step(model: nn.Module) -> float:
        model.zero_grad()
        start = time.perf_counter()
        model(tokens).square().mean().backward()
        return time.perf_counter() - start

    models = {"plain": plain, **shared}
    for model in models.values():
        step(model)  # warm-up
    rounds = []
    for n in range(args.rounds):
        order = list(models) if n % 2 == 0 else list(reversed(models))
        seconds = {name: step(models[name]) for name in order}
        rounds.append({name: seconds[name] / seconds["plain"] for name in shared})
        print(f"round {n + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in rounds[-1].items()), flush=True)
    print(f"\nforward + backward at {args.batch} x {args.length} tokens, shared / plain")
    for depth in shared:
        floor = 1 + generation_share(plans[depth], args.batch * args.length)
        measured = median(ratios[depth] for ratios in rounds)
        print(f"depth {depth!r}: floor from the operations {floor:.3f}, median {measured:.3f}")


if __name__ == "__main__":
    main()
