from __future__ import annotations

import torch
from torch import nn

from paramshare.trace import Allocations


def test_counts_what_is_alive_and_no_views() -> None:
    x = torch.zeros(1000)
    with Allocations() as trace:
        y = x + 1
        view = y.view(10, 100).t()
        x.add_(1)
        assert trace.live == 4000
        del y
        assert trace.live == 4000
        del view
        assert (trace.live, trace.peak, trace.largest) == (0, 4000, 4000)
        z = [x * 2, x[:500] * 2]
        assert (trace.live, trace.peak) == (6000, 6000)
        assert trace.peak_since_last() == 6000
        del z
        assert trace.peak_since_last() == 6000
        assert trace.peak_since_last() == 0


def test_a_chain_of_layers_keeps_two_activations() -> None:
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(5)))
    with torch.no_grad(), Allocations() as trace:
        layers(torch.ones(7, 100))
    assert trace.peak == 3 * 7 * 100 * 4  # and the input, which was made under the trace
    assert trace.live == 0
