"""Models that people have, each as a case of the same checks (tests/test_catalogue.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import seeds
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One model: how to build it, run it and share it.

    kinds: which kinds of layers it makes shared, for the table.
    build: a small plain model, freshly initialised from torch's global generator.
    embedding: its embedding module, from which it is shared.
    run: `(model)` -> logits with a graph, always of the same batch.
    loss: `(model)` -> a loss of the same batch, to be trained.
    generate: `(model)` -> tokens of each sequence, of a fixed prompt; None where the model
    generates nothing, and `no_generation` says why.
    select: what to share, where the default is not meant.
    no_compile: "" where torch.compile makes one graph of it, else what keeps torch from that with
    the plain model; the case is then compiled with graph breaks.
    rate: learning rate of Adam with which the loss falls in a few steps.
    """

    name: str
    kinds: str
    build: Callable[[], nn.Module]
    embedding: Callable[[nn.Module], nn.Module]
    run: Callable[[nn.Module], Tensor]
    loss: Callable[[nn.Module], Tensor]
    generate: Callable[[nn.Module], list[list[int]]] | None = None
    no_generation: str = ""
    select: Any = None
    no_compile: str = ""
    rate: float = 1e-2


def batch(tokens: int, length: int = 7, rows: int = 3, first: int = 4) -> Tensor:
    """The fixed batch `(rows, length)` of tokens from `first` on."""
    generator = seeds.generator(0)
    return torch.randint(first, tokens, (rows, length), generator=generator)


@torch.no_grad()
def greedy(logits: Callable[[Tensor], Tensor], prompt: Tensor, steps: int = 8) -> list[list[int]]:
    """Greedy decoding: `logits` of `(rows, length)` tokens are `(rows, length, tokens)`."""
    tokens = prompt
    for _ in range(steps):
        tokens = torch.cat([tokens, logits(tokens)[:, -1:].argmax(-1)], 1)
    return tokens.tolist()
