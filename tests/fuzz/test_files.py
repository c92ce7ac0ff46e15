"""Damaged files, as `make fuzz` runs them on."""

from __future__ import annotations

import pytest

from fuzz import files
from fuzz.chunks import check_chunk
from fuzz.formats import PACKAGES

CASES = 20  # of each format


@pytest.mark.parametrize("name", files.NAMES)
def test_damage_is_an_error_or_changes_nothing(name: str) -> None:
    pytest.importorskip(PACKAGES[name])
    first, step = files.NAMES.index(name), len(files.NAMES)
    tally = check_chunk("files", files.check_seed, range(first, CASES * step, step))
    assert tally.total() == CASES
    assert tally[f"{name}: refused"] >= CASES // 3
