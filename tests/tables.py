"""Tables in the documentation that tests make: `--write-tables` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest


def check_table(path: Path, writer: str, table: str, request: pytest.FixtureRequest) -> None:
    """Asserts that `path` has the table after its mark `<!-- written by WRITER -->`."""
    begin, end = f"<!-- written by {writer} -->\n", "<!-- end -->\n"
    head, _, rest = path.read_text("utf8").partition(begin)
    if request.config.getoption("--write-tables"):
        path.write_text(f"{head}{begin}{table}{end}{rest.partition(end)[2]}", "utf8")
    assert path.read_text("utf8").partition(begin)[2].partition(end)[0] == table
