"""One reduction of an input for all weights that read it."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import seeds
import torch
from close import assert_passes_close
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramshare
from paramshare import reduced, trace

TOKENS, FEATURES, WIDTH = 60, 3, 12
MODES = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


class Attention(nn.Module):
    """Three layers on one input, the last of other rows; `between` may write into the input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, 3, bias=False)
        self.between = lambda x: None

    def forward(self, x):
        q = self.query(x)
        self.between(x)
        return q * self.key(x), self.value(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, FEATURES)
        self.lift = nn.Linear(FEATURES, WIDTH)
        self.attention = Attention()
        self.run = lambda f, x: f(x)

    def forward(self, tokens):
        return self.run(self.attention, self.lift(self.embedding(tokens)).sin())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch):
    """(model, its Sharing, how often an input was reduced)"""
    torch.manual_seed(0)
    model = Model().double()
    sharing = paramshare.share_from_embedding(
        model,
        model.embedding,
        execution="factored",
        table_gradient=1.0,
        select=lambda path, owner: path.startswith("attention."),
    )
    calls = []
    plain = reduced.reduce
    monkeypatch.setattr(reduced, "reduce", lambda *a: (calls.append(1), plain(*a))[1])
    return model, sharing, calls


def twin(model: Model) -> Model:
    """The same weights, each a Parameter."""
    import copy

    plain = copy.deepcopy(model)
    paramshare.materialize(plain)
    return plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", [False, True])
def test_once(shared, mode: str, part: bool) -> None:
    """Of the whole module and, without gradients, of a part that is called by itself."""
    model, sharing, calls = shared
    pool = sharing.pool
    once = not part or mode != "gradients"
    plain = twin(model).eval()
    model.eval()
    tokens = torch.randint(TOKENS, (2, 5))
    with MODES[mode]():
        if part:
            x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
            assert_passes_close(model.attention(x), plain.attention(x))
        else:
            assert_passes_close(model(tokens), plain(tokens))
    # value has other blocks than the others: those of the larger weight hold its own.
    assert len({group.blocks for group in pool.plan.groups}) == 2
    assert len(calls) == (1 if once else 3)
    names = [group.name for group in pool.plan.groups]
    others = {"attention.key.weight", "attention.value.weight"} if once else set()
    found = {(names[a], names[b]) for a, b in pool.same_input}
    assert ("which is reduced once: " + ", ".join(names) in str(sharing)) == once
    assert found == {("attention.query.weight", other) for other in others}


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_is_written_to(shared, mode: str) -> None:
    model, _, calls = shared
    plain = twin(model)
    for each in (model, plain):
        # The mask has zeros, so that some products stay as they were.
        each.attention.between = lambda x: x.mul_(torch.arange(WIDTH) % 2)
    tokens = torch.randint(TOKENS, (2, 5))
    with MODES[mode]():
        assert_passes_close(model(tokens), plain(tokens))
    assert len(calls) == 2


def test_gradients(shared) -> None:
    model, _, _ = shared
    tokens = torch.randint(TOKENS, (2, 5))

    def gradients():
        model.zero_grad()
        sum(part.square().sum() for part in model(tokens)).backward()
        return [p.grad.clone() for p in model.parameters()]

    together = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced, "_can_be_kept", lambda input: False)
        apart = gradients()
    assert_passes_close(together, apart)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(shared, reentrant: bool) -> None:
    """What is recomputed saves what was saved at first."""
    model, _, _ = shared
    tokens = torch.randint(TOKENS, (2, 5))
    found = []
    for run in (
        lambda f, x: f(x),
        lambda f, x: checkpoint(f, x, use_reentrant=reentrant),
    ):
        model.run = run
        model.zero_grad()
        sum(part.square().sum() for part in model(tokens)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_passes_close(*found)


def test_another_table(shared) -> None:
    """The same input, after the table was changed."""
    model, _, _ = shared
    model.eval()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        before = model.attention(x)
        model.embedding.weight[::2].neg_()
        assert_passes_close(twin(model).attention(x), model.attention(x))
        assert not torch.equal(before[1], model.attention(x)[1])


def test_nothing_is_kept(shared) -> None:
    """Neither after the whole module's forward nor when the input is gone."""
    model, sharing, _ = shared
    pool = sharing.pool
    model.eval()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)

    def kept():
        frame = pool.holder.kept or {}
        return [v.reduced for k, v in frame.items() if k[0] == ("reduced",)]

    with torch.no_grad():
        model(torch.randint(TOKENS, (2, 5)))
        assert kept() == []
        model.attention(x)
        assert len(kept()) == 1
        del x
        gc.collect()
        assert kept() == [None]


def test_threads(shared) -> None:
    """Each gets what its own input makes, though what is kept is kept for all."""
    from concurrent.futures import ThreadPoolExecutor

    model, _, _ = shared
    plain = twin(model).eval()
    model.eval()

    def run(seed: int) -> None:
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=seeds.generator(seed))
        with torch.no_grad():
            for _ in range(20):
                assert_passes_close(model.attention(x), plain.attention(x))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(16)))


def test_compiled_code_reduces_once(shared) -> None:
    model, _, _ = shared
    plain = twin(model)
    tokens = torch.randint(TOKENS, (2, 5))
    graphs = []

    def backend(graph, inputs):
        from functorch.compile import aot_module_simplified, make_boxed_func
        from torch._functorch.compile_utils import fx_graph_cse

        def keep(graph, inputs):
            graphs.append(fx_graph_cse(graph.graph))
            return make_boxed_func(graph.forward)

        return aot_module_simplified(graph, inputs, fw_compiler=keep)

    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(tokens)
        assert_passes_close(found, plain(tokens))
    (graph,) = graphs
    products = [n for n in graph.nodes if n.target is torch.ops.aten.bmm.default]
    # query and key; value takes fewer blocks.
    assert len(products) == 2


def test_the_last_is_gone_before_the_next_is_made(shared) -> None:
    """Though its input is alive."""
    model, sharing, _ = shared
    model.eval()
    layer, group = model.attention.query, sharing.plan.groups[0]
    first, second = (torch.randn(1, 50, WIDTH, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        layer(torch.zeros(1, WIDTH, dtype=torch.float64))  # samples of the table are kept as well
    with torch.no_grad(), trace.Allocations() as allocations:
        layer(first)
        one = allocations.peak_since_last()
        held = allocations.live
        layer(second)
        assert allocations.peak_since_last() == one
    assert held == 50 * group.blocks * FEATURES * 8
