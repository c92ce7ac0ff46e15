"""Lines of finished runs, and the table that a README shows of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from records import Kinds, parse, read_text

END = "<!-- end -->"
Row = dict[str, Any]


def read_rows(path: Path, kinds: Kinds | None = None, needed: Sequence[str] = ()) -> list[Row]:
    """None where the file is not there. UserError, which names the line, where one is damaged,
    lacks a name that is `needed`, or has a value of another type than `kinds` says."""
    if not path.exists():
        return []
    lines = read_text(path).removesuffix("\n").split("\n")
    if lines == [""]:
        return []
    return [parse(line, f"{path}, line {n}", kinds, needed) for n, line in enumerate(lines, 1)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def put_table(readme: Path, table: str, name: str = "results") -> None:
    """Replaces what is between the marks `<!-- NAME -->` and `<!-- end -->`; a file without them,
    or none, gets them at its end."""
    mark = f"<!-- {name} -->"
    text = readme.read_text("utf-8") if readme.exists() else ""
    if mark not in text:
        text = f"{text}\n{mark}\n{END}\n".lstrip("\n")
    before, _, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if end:
        write_whole(readme, f"{before}{mark}\n{table}\n{END}{after}")


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whatever ends the process."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, "utf-8")
    part.replace(path)
