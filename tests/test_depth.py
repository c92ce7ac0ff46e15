"""Depth maps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import build, share

from paramshare import ShareError, share_from_embedding
from paramshare.depth import check_depth, group_slots
from paramshare.slots import find_slots


class Deep(nn.Module):
    """`widths[n] -> widths[n + 1]`, one nn.Linear after another."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, widths[0])
        self.layers = nn.ModuleList(
            nn.Linear(i, o) for i, o in zip(widths, widths[1:], strict=False)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def pattern(module: nn.Module, depth: object) -> str:
    """Which layers read the same, as the papers write it: "112233"."""
    slots = find_slots(module, module.embedding, None)
    groups = list(group_slots(slots, depth).values())
    number = {slot.path: n for n, group in enumerate(groups, 1) for slot in group}
    return "".join(str(number[slot.path]) for slot in slots)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        # Takase and Kiyono 2021, Figure 1, six layers of three.
        ("sequence:3", "112233"),
        ("cycle:3", "123123"),
        ("cycle-rev:3", "123321"),
        ("sequence:2", "111222"),
        ("cycle:2", "121212"),
        ("cycle-rev:2", "121221"),
        ("sequence:1", "111111"),
        ("cycle:1", "111111"),
        ("cycle-rev:1", "111111"),
        ("sequence:6", "123456"),
        ("cycle:6", "123456"),
        ("cycle-rev:6", "123456"),
        ("sandwich", "122223"),  # Subformer
        ("all", "111111"),
        ("none", "123456"),
        (lambda path: path.split(".")[1] in "05", "122221"),
    ],
)
def test_six_layers(depth, expected: str) -> None:
    assert pattern(Deep(*[4] * 7), depth) == expected


def test_sandwich_of_few_layers() -> None:
    assert [pattern(Deep(*[4] * n), "sandwich") for n in (2, 3, 4)] == ["1", "12", "123"]


@given(st.sampled_from(["sequence", "cycle", "cycle-rev"]), st.integers(1, 6), st.integers(1, 5))
def test_every_distinct_layer_is_used_equally_often(name: str, m: int, times: int) -> None:
    found = pattern(Deep(*[3] * (m * times + 1)), f"{name}:{m}")
    assert sorted(found) == sorted("".join(str(n) * times for n in range(1, m + 1)))


@pytest.mark.parametrize("name", ["sequence", "cycle", "cycle-rev"])
def test_divisibility_is_checked(name: str) -> None:
    module = Deep(*[4] * 7)
    before = [id(p) for p in module.parameters()]
    for m in (4, 5, 7, 12):
        with pytest.raises(
            ShareError,
            match=rf"depth='{name}:{m}' does not fit layers\.\*\.weight: {m} distinct layers do "
            "not divide 6 layers; use one of 1, 2, 3, 6",
        ):
            share_from_embedding(module, module.embedding, depth=f"{name}:{m}")
    assert [id(p) for p in module.parameters()] == before


@pytest.mark.parametrize(
    "wrong",
    ["", "every", "sequence", "sequence:", "sequence:0", "cycle:-1", "cycle:2.0", "cycle:two",
     "cycle-rev: 2", "sandwich:2", "all:1", None, 3, ("all",)],
)  # fmt: skip
def test_unknown_maps(wrong) -> None:
    module = Deep(4, 4, 4)
    with pytest.raises(ShareError, match=r"is unknown: use one of 'all', 'none', 'sandwich', 'seq"):
        share_from_embedding(module, module.embedding, depth=wrong)
    with pytest.raises(ShareError, match="is unknown"):
        check_depth(wrong)


def test_unequal_layers_read_with_their_equals() -> None:
    # In one container, but 4 -> 4, 4 -> 6, 6 -> 6, 6 -> 6.
    module = Deep(4, 4, 6, 6, 6)
    assert pattern(module, "all") == "1233"
    assert pattern(module, "sequence:2") == "1233"
    assert pattern(module, "cycle:2") == "1234"
    assert pattern(module, "sandwich") == "1234"
    names = [g.name for g in share_from_embedding(module, module.embedding).plan.groups]
    assert names == ["layers.*.weight [4x4]", "layers.*.weight [6x4]", "layers.*.weight [6x6]"]


def test_layers_of_an_rnn_have_a_depth() -> None:
    module = nn.Module()
    module.embedding = nn.Embedding(40, 4)
    module.rnn = nn.LSTM(4, 4, 4, bidirectional=False)
    groups = group_slots(find_slots(module, module.embedding, None), "sequence:2")
    assert {name: len(slots) for name, slots in groups.items()} == {
        "rnn.weight_ih_l0,1": 2,
        "rnn.weight_hh_l0,1": 2,
        "rnn.weight_ih_l2,3": 2,
        "rnn.weight_hh_l2,3": 2,
    }
    both = nn.Module()
    both.embedding = nn.Embedding(40, 4)
    both.rnn = nn.GRU(4, 4, 3, bidirectional=True)
    groups = group_slots(find_slots(both, both.embedding, None), "all")
    for name, slots in groups.items():  # directions apart
        assert len({"reverse" in slot.path for slot in slots}) == 1, name


def test_encoder_and_decoder_have_depths_of_their_own() -> None:
    module = nn.Module()
    module.embedding = nn.Embedding(40, 4)
    module.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    module.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    with pytest.raises(ShareError, match=r"does not fit decoder\.\*\.weight.* divide 3 layers"):
        share_from_embedding(module, module.embedding, depth="cycle:2")
    assert pattern(module, "cycle:1") == "1111222"
    assert pattern(module, "sandwich") == "1223456"


def test_weights_outside_of_stacks_are_by_themselves() -> None:
    module = build("Raw")
    for depth in ("all", "none", "sandwich", "cycle:5"):
        assert len(share(build("Raw"), depth=depth).plan.groups) == 3
    assert module.child.weight.shape == (12, 16)
