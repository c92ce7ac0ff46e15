"""Some cases as one test of pytest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from fuzz.found import Found, command


def check_chunk(
    what: str, check: Callable[[int, Counter[str]], None], seeds: Iterable[int]
) -> Counter[str]:
    """Runs the cases of the seeds; fails with all that was found, and how to run each again."""
    tally: Counter[str] = Counter()
    found = []
    for seed in seeds:
        try:
            check(seed, tally)
        except Found as error:
            found.append(f"{error}\n    {command(what, seed)}")
    if found:
        pytest.fail("\n".join(found), pytrace=False)
    return tally
