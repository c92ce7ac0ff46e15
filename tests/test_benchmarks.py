"""The benchmarks measure; here they only have to run, and to show what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import python

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_a_trial_of_int8() -> None:
    sizes = ["--preset", "light-small", "--shapes", "1x2", "--rounds", "1"]
    done = python(FOLDER / "int8.py", *sizes)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [6] * 6
    stored = [float(row[1]) for row in rows[2:]]
    assert stored[1] < stored[2] < 0.26 * stored[0] == 0.26 * stored[3]
    assert all(float(row[3]) > 0.999 for row in rows[3:])


def test_a_trial_of_all(tmp_path: Path) -> None:
    for needed in ("matplotlib", "transformers"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    (tmp_path / "README.md").write_text("<!-- results -->\n<!-- end -->\n")
    done = python(FOLDER / "bench.py", "--quick", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    kinds = {row["kind"] for row in rows}
    assert kinds == {"machine", "inference", "training", "memory", "files", "curve"}
    for row in rows:
        if row["kind"] == "curve":
            for execution, peak in row["peaks"].items():
                assert row["predicted"][execution] == pytest.approx(peak, rel=0.15)
    text = (tmp_path / "README.md").read_text()
    for heading in ("Inference, Small", "Training step, Small", "Memory", "Files"):
        assert f"### {heading}" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "results.part.jsonl").exists()
