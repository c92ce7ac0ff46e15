"""Random models, as `make fuzz` runs them on."""

from __future__ import annotations

from collections import Counter

import pytest

from fuzz import models
from fuzz.chunks import check_chunk
from fuzz.drawing import DRAWN, draw_case
from fuzz.found import Found
from fuzz.invariants import CHECKS
from fuzz.options import SENSE
from fuzz.parts import ODDITIES, ROOTS, build
from fuzz.sharing import share_all

CHUNKS, CASES = 6, 30


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold(chunk: int) -> None:
    tally = check_chunk("models", models.check_seed, range(chunk * CASES, (chunk + 1) * CASES))
    assert tally["cases accepted"] > CASES // 3
    assert tally["cases refused"] > 0
    assert sum(tally[f"checks: {name}"] for name in CHECKS) > CASES


def test_cases_are_of_every_kind() -> None:
    """A generator that refused all of a kind would find nothing there."""
    accepted, refused, options = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(400):
        case = draw_case(seed)
        messages = share_all(build(case["model"]), case["calls"])
        for call, message in zip(case["calls"], messages, strict=True):
            options.update({f"{name} refused" if message else name: 1 for name in call["options"]})
        refused.update(filter(None, messages))
        if "" in messages:
            kinds = {stage["kind"] for stage in case["model"]["stages"]}
            homes = {stage["home"] for stage in case["model"]["stages"]}
            norms = {stage["norm"] for stage in case["model"]["stages"]}
            accepted.update([*kinds, *homes, *norms, *case["model"]["oddities"]])
            accepted.update([case["model"]["root"], case["model"]["dtype"]])
            accepted["several calls"] += messages.count("") > 1
    assert {kind: accepted[kind] for kind in DRAWN if accepted[kind] < 5} == {}
    homes = ["list", "sequential", "steps", "dict", "single", "again", "nested", "wrapped"]
    others = [*homes, *ROOTS, "encoder", "hook", "parametrized", "float32", "several calls"]
    assert {name: accepted[name] for name in others if accepted[name] < 3} == {}
    never = {"not finite", "not finite table", "gradient", "other dtype", "tie outside"}
    assert [name for name in ODDITIES if name not in never and not accepted[name]] == []
    assert [name for name in SENSE if options[name] < 5] == []
    assert len(refused) > 60


def test_a_finding_says_how_to_run_it_again() -> None:
    def check(seed: int, tally: Counter[str]) -> None:
        if seed == 8:
            raise Found("forward", "off by 1")

    with pytest.raises(
        pytest.fail.Exception, match=r"off by 1\n.*run.py models --seed 8 --cases 1"
    ):
        check_chunk("models", check, range(5, 10))
