from __future__ import annotations

import copy

import pytest
import seeds
import torch
from close import assert_passes_close
from torch import nn

import paramshare
from paramshare.costs import whitening
from paramshare.recomputed import Recomputed
from paramshare.trace import Allocations


class Made:
    """A product of two leaves that three others save; and how often it was made."""

    def __init__(self) -> None:
        generator = seeds.generator(0)
        self.x, self.table, *self.weights = (
            torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_()
            for _ in range(5)
        )
        self.leaves = [self.x, self.table, *self.weights]
        self.count = 0

    def make(self, x, table):
        self.count += 1
        return x @ table

    def run(self, again: bool):
        made = self.make(self.x, self.table)
        saving = Recomputed(self.make, (self.x, self.table), made)
        parts = []
        for weight in self.weights:
            if again:
                with saving.saved_by():
                    parts.append(made[1:] @ weight)
            else:
                parts.append(made[1:] @ weight)
        return sum(part.square().sum() for part in parts)


def test_once_for_all_that_saved_it() -> None:
    made = Made()
    expected = torch.autograd.grad(made.run(again=False), made.leaves)
    made.count = 0
    loss = made.run(again=True)
    for round in (1, 2):
        found = torch.autograd.grad(loss, made.leaves, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        if round == 1:
            assert made.count == 2  # in forward, and once in backward


def test_second_derivatives() -> None:
    made = Made()
    second = []
    for again in (False, True):
        first = torch.autograd.grad(made.run(again), made.leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), made.leaves))
    assert_passes_close(*second)


@pytest.mark.parametrize("which", ["x", "table", "weights"])
def test_what_was_written_to_meanwhile(which: str) -> None:
    made = Made()
    loss = made.run(again=True)
    with torch.no_grad():
        changed = getattr(made, which)
        (changed[0] if which == "weights" else changed).add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_under_autocast() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    table, weight = torch.randn(8, 3), torch.randn(3, 5, requires_grad=True)
    gradients = []
    for again in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            made = x @ table
            if again:
                with Recomputed(torch.matmul, (x, table), made).saved_by():
                    output = made @ weight
            else:
                output = made @ weight
        gradients.append(torch.autograd.grad(output.float().square().sum(), (x, weight)))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


class Attention(nn.Module):
    """Three weights on one input, and two more."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width * 8, 2)
        self.lift = nn.Linear(2, width)
        names = ("query", "key", "value", "up", "down")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width) for name in names}) for _ in range(3)
        )

    def forward(self, tokens):
        x = self.lift(self.embedding(tokens))
        for layer in self.layers:
            y = x.tanh()
            y = layer["query"](y) * layer["key"](y).sigmoid() + layer["value"](y)
            x = x + layer["down"](layer["up"](y).relu())
        return x


@pytest.mark.parametrize("whiten", [False, True])
def test_training_keeps_no_more_than_ordinary_weights(whiten: bool) -> None:
    torch.manual_seed(0)
    module = Attention().double()
    paramshare.share_from_embedding(module, module.embedding, table_gradient=1.0, whiten=whiten)
    assert {g.execution for p in module._paramshare_pools for g in p.plan.groups} == {"factored"}
    plain = paramshare.materialize(copy.deepcopy(module))
    tokens = torch.randint(256, (64,))
    kept, outputs, gradients = [], [], []
    for each in (module, plain):
        with Allocations() as trace:
            output = each(tokens)
            kept.append(trace.live)
        output.square().sum().backward()
        outputs.append(output)
        gradients.append(each.lift.weight.grad)
    assert_passes_close(*outputs)
    assert_passes_close(*gradients)
    # Whitened, also the projection that is read.
    assert kept[0] <= kept[1] + 8 * whitening(module.paramshare.plan).held
