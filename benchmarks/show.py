"""The tables and the curves of what bench.py measured.

python benchmarks/show.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "common"))
import curves
from results import Row, markdown, put_table, read_rows
from script import run_script
from stages import UserError

HERE = Path(__file__).resolve().parent


def show(rows: list[Row], folder: Path) -> None:
    """Prints the tables, writes them into `folder`'s README.md, and draws curves.png. Of what
    belongs to the project, the main page has a summary."""
    if not rows:
        raise UserError(f"{folder} has no results.jsonl yet: run bench.py")
    text = tables(rows)
    print(text)
    put_table(folder / "README.md", text)
    if folder == HERE:
        put_table(HERE.parent / "README.md", summary(rows))
    curves.draw(_of(rows, "curve"), folder / "curves.png")


def tables(rows: list[Row]) -> str:
    """All of them, each under its heading."""
    parts = [("The machine", _machine(_of(rows, "machine")[-1]))]
    parts.append(("Weights never built", _ours(_of(rows, "inference"))))
    for kind, heading in (("inference", "Inference"), ("training", "Training step")):
        for shape in _values(_of(rows, kind), "shape"):
            found = [row for row in _of(rows, kind) if row["shape"] == shape]
            parts.append((f"{heading}, {shape}", _speed(found)))
    parts.append(("Memory of a fresh process, MB", _memory(_of(rows, "memory"))))
    parts.append(("Files", _files(_of(rows, "files"))))
    return "\n\n".join(f"### {heading}\n\n{table}" for heading, table in parts)


def summary(rows: list[Row]) -> str:
    """What is most asked for: Small's speed, and the memory that it takes."""
    small = [row for row in rows if row.get("shape") == "Small"]
    head = ("batch x tokens", "time, of kept weights", "operations", "time, of the released code")
    lines = [
        (row["work"], _between(row, "auto", "materialized"), f"{_operations(row):.2f}", slow)
        for row in _of(small, "inference")
        for slow in [_between(row, "auto", "released")]
    ]
    for row in _of(small, "training"):
        of_reused = median(row["ratios"]["auto"]), row["operations"]["auto"]
        lines.append((f"{row['work']}, training", *(f"{ratio:.2f}" for ratio in of_reused), ""))
    memory = [
        row
        for row in _of(small, "memory")
        if row["work"] == "1x128" and row["rival"] in ("auto", "materialized", "dense")
    ]
    return f"{markdown(head, lines)}\n\n{_memory(memory)}"


def _machine(row: Row) -> str:
    cells = [
        ("processor", f"{row['cpu']}, {row['cores']} cores, {row['threads']} threads used"),
        ("caches", row["caches"]),
        ("memory", f"{row['memory'] / 1e9:.1f} GB"),
        ("torch", row["torch"]),
        ("product of matrices", f"{row['matmul']:.0f} GFLOP/s"),
        ("copy, read and written", f"{row['copy']:.0f} GB/s"),
    ]
    return markdown(("", ""), cells)


def _ours(rows: list[Row]) -> str:
    """What "auto" takes of the time and of the operations of others, where it builds no weight."""
    head = ("shape", "batch x tokens", "ours / kept", "of the operations")
    head += ("ours / released", "ours / parametrize")
    lines = []
    for row in rows:
        if _operations(row) < 1:
            ratios = [_between(row, "auto", name) for name in ("materialized", *SLOW)]
            operations = f"{_operations(row):.2f}"
            lines.append((row["shape"], row["work"], ratios[0], operations, *ratios[1:]))
    return markdown(head, lines)


SLOW = ("released", "parametrize")


def _operations(row: Row) -> float:
    """Of "auto", relative to those with weights that are kept."""
    return row["operations"].get("auto", 1) / row["operations"].get("materialized", 1)


def _between(row: Row, one: str, other: str) -> str:
    """The median of the ratios of one's time to another's, of the same rounds."""
    ratios = row["ratios"]
    if one not in ratios or other not in ratios:
        return ""
    return f"{median(a / b for a, b in zip(ratios[one], ratios[other], strict=True)):.2f}"


def _speed(rows: list[Row]) -> str:
    """A line a rival, a column a size of the input: time, and operations in brackets."""
    works = _values(rows, "work")
    by_work = {row["work"]: row for row in rows}
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    lines = [[name, *(_time(by_work[work], name) for work in works)] for name in names]
    return markdown(("", *works), lines)


def _time(row: Row, name: str) -> str:
    if name not in row["ratios"]:
        return ""
    return f"{median(row['ratios'][name]):.2f} ({row['operations'][name]:.2f})"


def _memory(rows: list[Row]) -> str:
    head = ("shape", "batch x tokens", "", "stored", "resident peak", "traced peak", "largest")
    sizes = ("stored", "resident", "traced", "largest")
    lines = [
        (row["shape"], row["work"], row["rival"], *(f"{row[size] / 1e6:.1f}" for size in sizes))
        for row in rows
    ]
    return markdown(head, lines)


def _files(rows: list[Row]) -> str:
    head = ("shape", "ours, MB", "dense, MB", "dense / ours", "loading: ours / dense")
    head += ("loading and first answer: ours / dense",)
    lines = []
    for row in rows:
        ours, dense = row["processes"]["auto"], row["processes"]["dense"]
        stored = [processes[0]["stored"] for processes in (ours, dense)]
        times = [
            median(a[what] / b[what] for a, b in zip(ours, dense, strict=True))
            for what in ("load", "answer")
        ]
        sizes = (f"{stored[0] / 1e6:.1f}", f"{stored[1] / 1e6:.1f}", f"{stored[1] / stored[0]:.1f}")
        lines.append((row["shape"], *sizes, *(f"{time:.2f}" for time in times)))
    return markdown(head, lines)


def _of(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _values(rows: Iterable[Row], name: str) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(row[name] for row in rows))


if __name__ == "__main__":
    sys.exit(run_script("show.py", lambda: show(read_rows(HERE / "results.jsonl"), HERE)))
