from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import build

from paramshare import ShareError, SharingPlan, share_from_embedding
from paramshare.plan import factored_operations


class Bag(nn.Module):
    """Linears of any shapes beside a table."""

    def __init__(self, tokens: int, features: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, features)
        for index, (rows, cols) in enumerate(shapes):
            self.add_module(f"linear{index}", nn.Linear(cols, rows))


def every_linear(path: str, owner: nn.Module) -> bool:
    return isinstance(owner, nn.Linear)


def plan_of(name: str = "Encoder", **options) -> SharingPlan:
    module = build(name)
    return share_from_embedding(module, module.embedding, **options).plan


SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.integers(2, 40), st.sampled_from(["aligned", "column", "token"]))
def test_ranges_are_disjoint_and_fill_the_virtual_table(shapes, tokens, layout) -> None:
    module = Bag(tokens, 3, shapes)
    sharing = share_from_embedding(
        module, module.embedding, select=every_linear, depth="none", layout=layout
    )
    used = sorted(
        column
        for group in sharing.plan.groups
        for column in range(group.start, group.start + group.columns)
    )
    assert used == list(range(sharing.plan.columns))
    assert module.paramshare.projection.shape == (3, sharing.plan.columns)
    for group, (rows, cols) in zip(sharing.plan.groups, shapes, strict=True):
        assert (group.rows, group.cols) == (rows, cols)
        assert group.columns * tokens >= rows * cols


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(2, 40), st.integers(1, 30))
def test_eps_fits_or_says_how_many_columns_are_missing(shapes, tokens, features) -> None:
    needed = sum(-(-rows * cols // tokens) for rows, cols in shapes)
    module = Bag(tokens, features, shapes)
    options = {"virtual": False, "select": every_linear, "depth": "none", "layout": "column"}
    if needed <= features:
        share_from_embedding(module, module.embedding, **options)
        assert not list(module.paramshare.parameters())
    else:
        message = f"needs {needed} columns, the table has {features}: {needed - features} are miss"
        with pytest.raises(ShareError, match=message):
            share_from_embedding(module, module.embedding, **options)


def test_token_layout_hands_out_columns_from_the_last_backwards() -> None:
    """The released order: each block ends where the one before it begins (paper.md 1.2)."""
    plan = plan_of("Narrow", layout="token", virtual_dim=100)
    assert plan.columns == 100
    end = 100
    for group in plan.groups:
        assert group.start + group.columns == end
        end = group.start
    assert end > 0  # the first columns are never read


def test_plan_survives_json() -> None:
    for options in ({}, {"layout": "token", "projection_bias": True}, {"depth": "none"}):
        plan = plan_of(**options)
        again = SharingPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan
        assert again.to_dict() == plan.to_dict()


def test_plans_of_version_1_are_not_whitened() -> None:
    data = plan_of().to_dict()
    assert data["version"] == 2
    assert not data.pop("whiten")
    found = SharingPlan.from_dict({**data, "version": 1})
    assert not found.whiten
    assert found.difference(plan_of()) is None
    assert found.difference(plan_of(whiten=True)) == "whiten False against True"


def test_unreadable_plans() -> None:
    data = plan_of().to_dict()
    with pytest.raises(ShareError, match="version 3 cannot be read, only of 1 and 2"):
        SharingPlan.from_dict({**data, "version": 3})
    with pytest.raises(ShareError, match="'whiten' belongs to version 2, and this is of 1"):
        SharingPlan.from_dict({**data, "version": 1})
    with pytest.raises(ShareError, match="no sharing plan"):
        SharingPlan.from_dict({**data, "surprise": 1})
    del data["whiten"]
    with pytest.raises(ShareError, match="'whiten' belongs to version 2, and this is of 2"):
        SharingPlan.from_dict(data)


def numbers_and_words(data, where=()):
    """Where everything in the data of a plan stands."""
    for key in data if isinstance(data, dict) else range(len(data)):
        place = (*where, key)
        yield place
        if isinstance(data[key], dict | list):
            yield from numbers_and_words(data[key], place)


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth):
        inner = [inner]
    return inner


def test_nothing_of_another_type_is_read() -> None:
    """What takes the place of something else in a plan either is of its type, or an error."""
    module = build("Encoder")
    data = share_from_embedding(module, module.embedding, embedding_dim=6).plan.to_dict()
    wrong = [None, True, 1.0, 0.5, math.nan, math.inf, 10**400, -1, "", "x", [], {}, [1], {"a": 1}]
    for place in numbers_and_words(data):
        for value in [*wrong, nested(5000)]:
            changed = copy.deepcopy(data)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            there, parent[place[-1]] = parent[place[-1]], value
            try:
                plan = SharingPlan.from_dict(changed)
            except ShareError:
                continue
            # True where a truth was, a number where a number was, and so on: never True for 1.
            kinds = (int, float) if place[-1] in ("spread", "table_gradient") else type(there)
            absent = value is None and place[-1] in ("spread", "width")
            assert absent or isinstance(value, kinds)
            assert not isinstance(value, bool) or isinstance(there, bool)
            assert not isinstance(value, float) or math.isfinite(value)
            json.dumps(plan.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1.5}, "group 1: start is 1.5, not of type int"),
        ({"start": True}, "group 1: start is True, not of type int"),
        ({"start": math.nan}, "group 1: start is nan, not of type int"),
        ({"start": -1}, "does not fit its columns"),
        ({"rows": -48, "cols": -16}, "sizes that are not above zero"),
        ({"blocks": -1, "columns": -48}, "sizes that are not above zero"),
        ({"spread": -1.0}, "a spread below zero"),
        ({"spread": math.inf}, "spread is inf, not of type float"),
        ({"slots": "abc"}, "its slots are a str, not a list"),
        ({"slots": []}, "no paths of weights"),
        ({"slots": ["a", "a"]}, "one of its weights stands there twice"),
        ({"out_last": 0}, "out_last is 0, not of type bool"),
    ],
)
def test_groups_that_cannot_be(change: dict, message: str) -> None:
    data = plan_of().to_dict()
    data["groups"][0].update(change)
    with pytest.raises(ShareError, match=message):
        SharingPlan.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": True}, "version True cannot be read"),
        ({"table": ""}, "its table no path"),
        ({"groups": {}}, "its groups are a dict, not a list"),
        ({"groups": [3]}, "no sharing plan"),
        ({"groups": []}, "not positive whole numbers"),
        ({"columns": 38.0}, "columns is 38.0, not of type int"),
        ({"tokens": 2**63}, "tokens is 9223372036854775808, not of type int"),
        ({"width": 16}, "its table of 16 features is no narrow one"),
        ({"table_gradient": 1.5}, "out of range"),
        ({"virtual": False}, "columns are out of range"),
    ],
)
def test_plans_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ShareError, match=message):
        SharingPlan.from_dict({**plan_of().to_dict(), **change})


def test_difference_names_the_first() -> None:
    plan = plan_of()
    assert plan.difference(plan) is None
    harmless = replace(plan, table_gradient=0.5)
    assert plan.difference(harmless) is None
    assert plan.difference(replace(plan, columns=99)) == f"columns {plan.columns} against 99"
    moved = replace(plan.groups[1], start=1)
    other = replace(plan, groups=(plan.groups[0], moved, *plan.groups[2:]))
    name = plan.groups[1].name
    assert plan.difference(other) == f"group {name}: start {plan.groups[1].start} against 1"
    assert plan.difference(replace(plan, groups=())) == f"{len(plan.groups)} groups against 0"


def test_auto_execution_follows_the_operation_count() -> None:
    plan = plan_of("Narrow")
    assert {group.execution for group in plan.groups} == {"factored"}
    for group in plan.groups:
        count = factored_operations(group.cols, group.columns, group.blocks, plan.features)
        assert count == 3 * group.blocks * (group.cols + group.columns)
        assert count < group.rows * group.cols
    wide = build("Recurring")
    plan = share_from_embedding(wide, wide.embedding).plan
    assert {group.execution for group in plan.groups} == {"materialized"}


def test_sharebert_ratios_of_operations() -> None:
    """The README's and the design's figures: Small needs 0.71 of the dense operations by weight."""
    tokens, hidden, inner = 30528, 2048, 4096
    ratio = {}
    for name, features in (("small", 128), ("base", 384)):
        total = 0
        for rows, cols in [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]:
            blocks = tokens // cols
            columns = -(-rows // blocks)
            blocks = -(-rows // columns)
            total += factored_operations(cols, columns, blocks, features)
        ratio[name] = total / 33554432
    assert ratio["small"] == pytest.approx(23.86 / 33.55, abs=0.002)
    assert ratio["base"] > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "diagonal"}, "layout='diagonal' is unknown"),
        ({"init": "zeros"}, "init='zeros' is unknown"),
        ({"execution": "fast"}, "execution='fast' is unknown"),
        ({"depth": "some"}, "depth='some' is unknown"),
        ({"table_gradient": 1.5}, "table_gradient=1.5 is out of range"),
        ({"table_gradient": -0.1}, "table_gradient=-0.1 is out of range"),
        ({"virtual_dim": 3}, "needs 38 columns, virtual_dim=3 is 35 too few"),
        ({"blocks": 0}, "blocks=0 is out of range"),
        ({"blocks": 4}, "between 1 and 3 whole rows"),
        ({"blocks": 2, "layout": "column"}, "belongs to layout='aligned'"),
        ({"virtual": False, "virtual_dim": 3}, "virtual_dim=3 needs virtual=True"),
        ({"virtual": False, "projection_bias": True}, "needs virtual=True"),
        ({"virtual": False, "table_gradient": 0.0}, "nothing would train"),
        ({"virtual": False}, "needs 38 columns, the table has 16: 22 are missing; use virtual"),
        ({"execution": "factored"}, "fits none of the weights"),
        ({"embedding_dim": 0}, "embedding_dim=0 is out of range: the table is"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ShareError, match=message):
        plan_of(**options)
