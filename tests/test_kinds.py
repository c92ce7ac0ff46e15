"""Every kind of layer, at drawn sizes, against the plain layer with independently derived weights:
outputs and gradients of all that is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from close import assert_passes_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from warned import filtered

from paramshare import ShareError, register_kind, share_from_embedding
from paramshare.kinds import KINDS, kind_of
from paramshare.slots import find_slots

TIME, BATCH = 4, 2
small = st.integers(1, 5)


class Around(nn.Module):
    """A table beside a layer, which `call` runs."""

    def __init__(
        self, layer: nn.Module, call: Callable[..., Tensor], size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(*size)
        self.layer = layer
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.layer, *inputs)


# Each draws (makes the layer, calls it, shapes of its inputs).
Drawn = tuple[Callable[[], nn.Module], Callable[..., Tensor], list[tuple[int, ...]]]


def linear(draw: Any) -> Drawn:
    i, o, bias = draw(small), draw(small), draw(st.booleans())
    return lambda: nn.Linear(i, o, bias), lambda layer, x: layer(x), [(BATCH, TIME, i)]


def attention(draw: Any) -> Drawn:
    heads, head = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    k, v = draw(st.sampled_from([(None, None), (2, 5), (heads * head, 3)]))
    width = heads * head
    options = {"kdim": k, "vdim": v, "bias": draw(st.booleans()), "batch_first": True}
    shapes = [(BATCH, TIME, width), (BATCH, TIME, k or width), (BATCH, TIME, v or width)]
    return (
        lambda: nn.MultiheadAttention(width, heads, **options),
        lambda layer, q, k, v: layer(q, k, v)[0],
        shapes,
    )


def recurrent(draw: Any) -> Drawn:
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    i, hidden = draw(small), draw(st.integers(2, 5))
    options = {
        "num_layers": draw(st.integers(1, 3)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
    }
    if kind is nn.LSTM and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, hidden - 1))
    packed = draw(st.booleans())

    def call(layer: nn.RNNBase, x: Tensor) -> Tensor:
        if packed:
            lengths = torch.tensor([TIME, TIME - 2])
            x = pack_padded_sequence(x, lengths, batch_first=layer.batch_first)
            output, state = layer(x)
            output, _ = pad_packed_sequence(output, batch_first=layer.batch_first)
        else:
            output, state = layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([output.flatten(), *(s.flatten() for s in states)])

    shape = (BATCH, TIME, i) if options["batch_first"] else (TIME, BATCH, i)
    return lambda: kind(i, hidden, **options), call, [shape]


def cell(draw: Any) -> Drawn:
    kind = draw(st.sampled_from([nn.LSTMCell, nn.GRUCell, nn.RNNCell]))
    i, hidden, bias = draw(small), draw(small), draw(st.booleans())

    def call(layer: nn.RNNCellBase, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = layer(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)

    return lambda: kind(i, hidden, bias), call, [(BATCH, TIME, i)]


def convolution(draw: Any) -> Drawn:
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    options = {
        "kernel_size": draw(st.integers(1, 3)),
        "dilation": draw(st.integers(1, 2)),
        "stride": draw(st.integers(1, 2)),
        "padding": draw(st.integers(2, 3)),
        "bias": draw(st.booleans()),
        "groups": groups,
    }
    return lambda: nn.Conv1d(i, o, **options), lambda layer, x: layer(x), [(BATCH, i, TIME)]


class Raw(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.matrix, 1)


def raw(draw: Any) -> Drawn:
    shape = draw(st.lists(small, min_size=2, max_size=3))
    return lambda: Raw(*shape), lambda layer, x: layer(x), [(BATCH, shape[0])]


def by_hook(layer: nn.Module, name: str) -> nn.Module:
    with filtered("ignore", FutureWarning):
        return nn.utils.weight_norm(layer, name)


NORMS = {"plain": None, "hook": by_hook, "parametrized": parametrizations.weight_norm}


def transposed(draw: Any) -> Drawn:
    from transformers.pytorch_utils import Conv1D

    i, o = draw(small), draw(small)
    return lambda: Conv1D(o, i), lambda layer, x: layer(x), [(BATCH, TIME, i)]


# Attention and RNNs read Parameters; weight norm is for layers that are called.
NORMABLE = (linear, cell, convolution, transposed)
KIND_AND_NORM = [
    *((kind, "plain") for kind in (attention, recurrent, raw, *NORMABLE)),
    *((kind, norm) for kind in NORMABLE for norm in ("hook", "parametrized")),
]


@pytest.mark.parametrize(("kind", "norm"), KIND_AND_NORM)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_parity_with_independently_derived_weights(kind, norm: str, data) -> None:
    if kind is transposed:
        pytest.importorskip("transformers")
    make, call, shapes = kind(data.draw)
    tokens = data.draw(st.integers(3, 40), label="tokens")
    virtual = data.draw(st.booleans(), label="virtual")
    layout = data.draw(st.sampled_from(["aligned", "column", "token"]), label="layout")
    features = data.draw(st.integers(1, 6), label="features") if virtual else 400

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = make()
        if NORMS[norm] is not None:
            name = "weight_hh" if isinstance(layer, nn.RNNCellBase) else "weight"
            layer = NORMS[norm](layer, name)
        return Around(layer, call, (tokens, features)).double()

    plain, shared = build(), build()
    sharing = share_from_embedding(
        shared,
        shared.table,
        virtual,
        select=lambda path, owner: path.startswith("layer."),
        layout=layout,
        table_gradient=0.5,
    )
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    output = shared(*inputs)
    output.square().sum().backward()
    expected, gradients = reference.run(plain, shared, sharing.pool, *inputs)
    assert_passes_close(output, expected)
    found = {n: p.grad for n, p in shared.named_parameters() if p.grad is not None}
    nothing = {n: torch.zeros_like(g) for n, g in gradients.items() if n not in found}
    assert_passes_close(found | nothing, gradients)
    # Every matrix of the layer is read from the table: nothing of two dimensions is left but gains.
    left = [n for n, p in shared.layer.named_parameters() if p.dim() > 1]
    assert all(name.endswith(("_g", "original0")) for name in left)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.LSTM(4, 5, 2), ["ih_l*", "hh_l*"] * 2),
        (lambda: nn.LSTM(4, 5, 1, proj_size=2), ["ih_l0", "hh_l0", "hr_l0"]),
        (lambda: nn.GRU(4, 5, 1, bidirectional=True), ["ih_l0", "hh_l0", "ih_l0_r", "hh_l0_r"]),
        (lambda: nn.RNNCell(4, 5), ["ih", "hh"]),
    ],
)
def test_recurrent_modules_are_shared_by_default_wherever_they_stand(make, expected) -> None:
    module = Around(make(), lambda layer, x: layer(x)[0], (50, 4))
    found = [slot.pattern for slot in find_slots(module, module.table, None)]
    assert found == [f"layer.weight_{e.replace('_r', '_reverse')}" for e in expected]


def test_other_layers_outside_of_stacks_are_not() -> None:
    for layer in (nn.Linear(4, 4), nn.Conv1d(4, 4, 3), nn.MultiheadAttention(4, 2)):
        module = Around(layer, lambda layer, x: layer(x), (50, 4))
        with pytest.raises(ShareError, match="no ModuleList or Sequential of equal layers"):
            share_from_embedding(module, module.table)


def test_a_stack_of_recurrent_modules_is_a_stack() -> None:
    rnns = nn.ModuleList(nn.LSTM(4, 4, 2) for _ in range(3))
    module = Around(rnns, lambda layer, x: x, (50, 4))
    slots = find_slots(module, module.table, None)
    assert {slot.pattern for slot in slots} == {
        f"layer.*.weight_{what}_l{n}" for what in ("ih", "hh") for n in (0, 1)
    }
    assert {(slot.index, slot.depth) for slot in slots} == {(0, 3), (1, 3), (2, 3)}
    one = Around(nn.ModuleList([nn.LSTM(4, 4, 2)]), lambda layer, x: x, (50, 4))
    slots = find_slots(one, one.table, None)
    assert {slot.pattern for slot in slots} == {"layer.0.weight_ih_l*", "layer.0.weight_hh_l*"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(30, 50),
        lambda: nn.LSTM(30, 40),
        lambda: nn.GRUCell(30, 40),
        lambda: nn.Conv1d(30, 40, 3, groups=2),
        lambda: nn.MultiheadAttention(30, 3),
        lambda: by_hook(nn.Linear(30, 50), "weight"),
        lambda: parametrizations.weight_norm(nn.Conv1d(30, 40, 3)),
    ],
)
def test_documented_spreads_are_those_of_the_values(make) -> None:
    """They stand in for values on the meta device."""
    torch.manual_seed(0)
    module = Around(make(), lambda layer, x: x, (50, 4))
    everything = lambda path, owner: path.startswith("layer.")  # noqa: E731
    for slot in find_slots(module, module.table, everything):
        assert slot.documented_spread() == pytest.approx(slot.spread(), rel=0.05), slot.path


def test_a_kind_of_ones_own() -> None:
    class InOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(3, 8))
            self.bias = nn.Parameter(torch.zeros(8))

    stack = nn.ModuleList(InOut() for _ in range(2))
    module = Around(stack, lambda layers, x: x @ layers[1].first, (50, 4)).double()
    with pytest.raises(ShareError, match="no weight that is shared by default"):
        share_from_embedding(module, module.table)
    register_kind(InOut, weights=("first",), out_last=True)
    try:
        (group,) = share_from_embedding(module, module.table).plan.groups
        assert (group.rows, group.cols, group.out_last) == (8, 3, True)
        assert module.layer[0].first.shape == (3, 8)
        with torch.device("meta"):
            other = Around(nn.ModuleList(InOut() for _ in range(2)), lambda layer, x: x, (50, 4))
        with pytest.raises(ShareError, match="initial spread of a InOut is not known"):
            share_from_embedding(other, other.table)
    finally:
        del KINDS[InOut]


def test_kinds_by_name() -> None:
    name = f"{Raw.__module__}.{Raw.__qualname__}"
    register_kind(name, weights=("matrix",))
    try:
        assert kind_of(Raw(2, 2)).weights == ("matrix",)
        assert kind_of(type("Sub", (Raw,), {})(2, 2)).weights == ("matrix",)
    finally:
        del KINDS[name]
    assert kind_of(Raw(2, 2)).weights == ()


def test_a_kind_keeps_what_is_known_of_its_base() -> None:
    class Own(nn.LSTM):
        pass

    register_kind(Own, spread=lambda layer, shape: 7.0)
    try:
        module = Around(Own(4, 5, 2), lambda layer, x: layer(x)[0], (50, 4))
        sharing = share_from_embedding(module, module.table)
        assert len(sharing.plan.groups) == 3
        assert "_flat_weights" not in module.layer.__dict__
        assert kind_of(module.layer).spread(module.layer, (1,)) == 7
    finally:
        del KINDS[Own]


def test_names_must_be_tuples() -> None:
    for options in ({"weights": "kernel"}, {"reads": "a.weight"}):
        with pytest.raises(ShareError, match=r"must be a tuple of names: \('"):
            register_kind(Raw, **options)
    assert Raw not in KINDS


class Attention(nn.Module):
    """Keeps its four projections in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_projections_of_an_only_layer_are_no_stack(depth: int) -> None:
    layers = nn.ModuleList(Layer() for _ in range(depth))
    module = Around(layers, lambda layer, x: x, (50, 4))
    groups = share_from_embedding(module, module.table).plan.groups
    names = [f"attention.linears.{n}" for n in range(4)] + ["up", "down"]
    assert [group.name for group in groups] == [f"layer.*.{name}.weight" for name in names]
    assert {len(group.slots) for group in groups} == {depth}


def test_the_norms_of_an_only_layer_are_no_stack() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    module = nn.ModuleDict({"embedding": nn.Embedding(40, 8), "layers": nn.ModuleList([Layer()])})
    sharing = share_from_embedding(module, module["embedding"])
    assert [group.name for group in sharing.plan.groups] == ["layers.*.up.weight"]


def test_layers_that_are_parametrized_in_any_order_are_a_stack() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    module = Around(layers, lambda layers, x: layers[1](layers[0](x)), (50, 4))
    share_from_embedding(module, module.table, select=lambda path, owner: "layer.0" in path)
    for layer in layers:
        nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())
    (slot,) = find_slots(module, module.table, lambda path, owner: path == "layer.1.weight")
    assert (slot.pattern, slot.depth) == ("layer.*.weight", 2)
