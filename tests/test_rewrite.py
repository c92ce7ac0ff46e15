from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from test_sharing import snapshot
from zoo import TOKENS, build, share

from paramshare import ShareError, SharingPlan
from paramshare.pool import readers
from paramshare.rewrite import apply_plan, prepare_all


def plan_of(name: str, **options) -> SharingPlan:
    return share(build(name), **options).plan


def with_group(plan: SharingPlan, **change) -> SharingPlan:
    return replace(plan, groups=(replace(plan.groups[0], **change), *plan.groups[1:]))


NARROW = plan_of("Narrow")
WEIGHT = NARROW.groups[0].slots


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("Narrow", replace(NARROW, table="blocks"), "blocks is a ModuleList without a 2-D weight"),
        ("Narrow", replace(NARROW, table="blocks.0.norm"), "a LayerNorm without a 2-D weight"),
        ("Narrow", replace(NARROW, table="ghost"), "the table ghost is not in the module"),
        ("Narrow", replace(NARROW, table="lift"), "lift is 16 x 3, the plan's is 60 x 3"),
        ("Narrow", with_group(NARROW, slots=("ghost.weight",)), "there is no such module"),
        ("Narrow", with_group(NARROW, slots=("lift.ghost",)), "is no Parameter of this Narrow"),
        ("Narrow", with_group(NARROW, slots=("blocks.0",)), "is no Parameter of this Narrow"),
        (
            "Narrow",
            with_group(NARROW, slots=("blocks.0.query.bias",), cols=1),
            "blocks.0.query.bias is no matrix",
        ),
        (
            "Narrow",
            with_group(NARROW, slots=("blocks.0.up.weight",)),
            "blocks.0.up.weight is 24 x 16, the plan's is 16 x 16",
        ),
        (
            "Narrow",
            with_group(NARROW, slots=("embedding.weight",), rows=TOKENS, cols=3),
            "embedding.weight is the table itself",
        ),
        ("Narrow", with_group(NARROW, slots=WEIGHT[:1] * 2), "or stands in one twice"),
        (
            "Encoder",
            with_group(plan_of("Encoder"), execution="factored"),
            "in_proj_weight cannot run factored: no nn.Linear applies it",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(name: str, plan: SharingPlan, message: str) -> None:
    module = build(name)
    before = snapshot(module)
    with pytest.raises(ShareError, match=message):
        apply_plan(module, plan)
    assert snapshot(module) == before
    assert readers(module.embedding.weight) == []


def test_columns_that_cannot_be_allocated() -> None:
    module = build("Narrow")
    before = snapshot(module)
    with pytest.raises(ShareError, match=r"a projection of 3 x 10{17} cannot be allocated"):
        apply_plan(module, replace(NARROW, columns=10**17))
    assert snapshot(module) == before


@pytest.mark.parametrize("options", [{}, {"virtual": False, "depth": "all"}, {"embedding_dim": 6}])
def test_one_plan_twice(options: dict) -> None:
    module = build("Chain")
    before = snapshot(module)
    plan = plan_of("Chain", **options)
    with pytest.raises(ShareError, match="is shared by two plans") as raised:
        prepare_all(module, [("", plan), ("", plan)])
    assert snapshot(module) == before
    # Though the error, and with it all that was prepared, is still at hand.
    gc.collect()
    assert readers(module.embedding.weight) == []
    del raised


def test_two_plans_cannot_narrow_one_table() -> None:
    plan = plan_of("Narrow", embedding_dim=2)
    module = build("Narrow")
    parts = [
        replace(plan, groups=tuple(g for g in plan.groups if ending in g.name))
        for ending in ("up", "down")
    ]
    before = snapshot(module)
    with pytest.raises(ShareError, match="embedding has a 'table' already"):
        prepare_all(module, [("", part) for part in parts])
    assert snapshot(module) == before
