"""What is kept for inference is dropped when the table or the projection is written through .data,
which leaves no mark in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import batch, build

from paramshare import materialize, prepare_for_inference, quantize, share_from_embedding
from paramshare.models.transformer_lm import TransformerLM
from paramshare.samples import Samples


def _set(tensor: Tensor) -> None:
    tensor.data = tensor.data * 2


WRITES: dict[str, Callable[[Tensor], object]] = {
    "averaged": lambda t: t.data.mul_(0.5).add_(torch.ones_like(t), alpha=0.5),
    "copied": lambda t: t.data.copy_(torch.randn_like(t)),
    "set": _set,
    "a row": lambda t: t.data[3].fill_(0.25),
    "a column": lambda t: t.data[:, 2].fill_(0.25),
    "one number": lambda t: t.data[4, 1].add_(1),
    "through numpy": lambda t: t.detach().numpy().__setitem__(5, 0.25),
}


@pytest.mark.parametrize(
    ("virtual", "what", "way"),
    [
        *((True, what, way) for what in ("table", "projection") for way in WRITES),
        *((False, "table", way) for way in WRITES),
        *((False, "scale", way) for way in ("averaged", "copied", "set")),
    ],
)
def test_a_teacher_that_never_trains_follows(virtual: bool, what: str, way: str) -> None:
    module = build("Recurring")
    few = {} if virtual else {"select": lambda path, owner: path.endswith("up.weight")}
    sharing = share_from_embedding(module, module.embedding, virtual=virtual, **few)
    module.eval()
    tensors = {
        "table": module.embedding.weight,
        "projection": sharing.pool.projection,
        "scale": sharing.pool.scale,
    }
    tensor = tensors[what]
    with torch.no_grad():
        module(*batch())
        layer, x = module.layers[0].up, torch.randn(2, 16, dtype=torch.float64)
        layer(x)
        WRITES[way](tensor)
        plain = materialize(copy.deepcopy(module))
        torch.testing.assert_close(layer(x), plain.layers[0].up(x))  # by itself
        WRITES[way](tensor)
        plain = materialize(copy.deepcopy(module))
        torch.testing.assert_close(module(*batch()), plain(*batch()))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.data())
def test_no_row_and_no_column_is_replaced_unseen(rows, cols, transposed, data) -> None:
    """Of matrices too large to be compared whole."""
    rows, cols = rows * 100, cols * 10
    matrix = torch.randn(cols, rows).t() if transposed else torch.randn(rows, cols)
    samples = Samples(matrix)
    assert not samples.differ(thorough=True)
    if data.draw(st.booleans()):
        part = matrix[data.draw(st.integers(0, rows - 1))]
    else:
        part = matrix[:, data.draw(st.integers(0, cols - 1))]
    before = part.clone()
    part.data.add_(1)
    assert samples.differ(thorough=True)
    part.data.copy_(before)
    assert not samples.differ(thorough=True)
    matrix.data.mul_(0.999)
    assert samples.differ(thorough=False)


def test_averages_of_a_large_table() -> None:
    """As a teacher's: whole module and parts, whose few samples change with all the numbers."""
    torch.manual_seed(0)
    teacher, student = (TransformerLM(3000, 64, 2, dropout=0.0).eval() for _ in range(2))
    for model in (teacher, student):
        share_from_embedding(model, model.embedding)
    tokens = torch.randint(3000, (1, 5))
    with torch.no_grad():
        for _ in range(3):
            teacher(tokens)
            teacher.encoder.layers[0].linear1(torch.zeros(1, 64))
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
            plain = materialize(copy.deepcopy(teacher))
            x = torch.randn(1, 64)
            layers = (model.encoder.layers[0].linear1 for model in (teacher, plain))
            torch.testing.assert_close(*(layer(x) for layer in layers))
            torch.testing.assert_close(teacher(tokens), plain(tokens))


@pytest.mark.parametrize("how", ["prepared", "quantised", "threads"])
def test_other_ways_to_keep_weights(how: str) -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding, execution="materialized")
    module.eval()
    inputs = batch()
    if how == "prepared":
        prepare_for_inference(module, tokens=inputs)
    elif how == "quantised":
        quantize(module)
    with torch.no_grad():
        before = module(*inputs)
        source = (
            module.paramshare.projection_int8
            if how == "quantised"
            else module.paramshare.projection
        )
        source.data.copy_(source.flip(0))
        after = module(*inputs)
    assert not torch.equal(before, after)
    again = copy.deepcopy(module)  # which keeps nothing
    with torch.no_grad():
        torch.testing.assert_close(after, again(*inputs))


def test_weights_are_kept_as_long_as_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    module.eval()
    made = []
    derive = type(sharing.pool)._derive
    monkeypatch.setattr(
        type(sharing.pool), "_derive", lambda *a: made.append(len(a[1])) or derive(*a)
    )
    with torch.no_grad():
        for _ in range(3):
            module(batch()[0])
        assert sum(made) == len(sharing.plan.groups)
        nn.init.normal_(module.embedding.weight.data)
        module(batch()[0])
    assert sum(made) == 2 * len(sharing.plan.groups)
