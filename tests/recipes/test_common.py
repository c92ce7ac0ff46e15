"""What the recipes have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import load

records, results, stages = load("iwslt15_envi", "records", "results", "stages")
KINDS = {"count": int, "loss": int | float | None, "scores": list[int | float]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2 is damaged: Expecting value"),
        ('{"name": "a", "count": 1', "line 2 is damaged: Expecting ',' delimiter"),
        ('{"name": "a"} {}', "line 2 is damaged: Extra data"),
        ("null", "line 2 is damaged: None is no object"),
        ('["name"]', r"line 2 is damaged: \['name'\] is no object"),
        ("[" * 100_000, "line 2 is damaged: maximum recursion depth"),
        ('{"a":' * 100_000, "line 2 is damaged: maximum recursion depth"),
        ('{"count": 1}', "line 2 has no 'name'"),
        ('{"name": "a", "count": 1.5}', "line 2: count is 1.5, not of type int$"),
        ('{"name": "a", "count": true}', "line 2: count is True, not of type int$"),
        ('{"name": "a", "in": [{"loss": "x"}]}', "loss is 'x', not of type int | float | None$"),
        ('{"name": "a", "scores": [1, "2"]}', r"scores is \[1, '2'\], not of type list"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    good = '{"name": "a", "count": 1, "loss": null, "scores": [1, 2.5]}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(stages.UserError, match=f"^{path}, .*{message}"):
        results.read_rows(path, KINDS, ["name"])


def test_lines_are_what_was_written(tmp_path: Path) -> None:
    """Separators of lines that JSON does not know are in texts; a value that a line lacks is missed
    when it is asked for."""
    path = tmp_path / "lines.jsonl"
    assert results.read_rows(path) == []
    rows = [{"name": "a\u2028b", "scores": {"x": 1.5}}, {"count": 2}]
    for some in ([], rows):
        results.write_rows(path, some)
        assert results.read_rows(path) == some
    path.write_text('{"name": "a\u2028b", "scores": {"x": 1.5}}\n{"count": 2}')
    found = results.read_rows(path)
    assert found == rows
    assert found[0].get("y") is None
    with pytest.raises(stages.UserError, match=f"^{path}, line 1 has no 'y'$"):
        found[0]["scores"]["y"]
    path.write_bytes(b'{"name": "\xff"}')
    with pytest.raises(stages.UserError, match=f"^{path} is damaged: no UTF-8 text at byte 10$"):
        results.read_rows(path)


@pytest.mark.parametrize("content", ["", "[]", '{"settings": {}}', "[" * 100_000])
def test_a_stage_with_a_damaged_stamp_is_left_alone(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "stage"

    def make() -> None:
        stages.run_stage(folder, {}, lambda partial: {"n": 1}, say=print, doing="filling it")

    make()
    stamp = folder / stages.STAMP
    stamp.write_text(content)
    with pytest.raises(stages.UserError, match=f"{stamp} is damaged: delete {folder}, and"):
        make()
    assert stamp.read_text() == content
