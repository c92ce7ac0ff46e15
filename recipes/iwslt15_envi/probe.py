"""Chooses table_gradient and the learning rate: short trainings, perplexity on the dev set.

    python recipes/iwslt15_envi/probe.py small base

Appends one JSON line a run to probes.jsonl beside this file and skips what stands there; prints
the table (README.md holds a copy).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import train
from records import NUMBER
from results import read_rows, write_rows
from stages import UserError

RESULTS = Path(__file__).with_name("probes.jsonl")
KINDS = {
    **{"size": str, "model": str, "table_gradient": NUMBER | None, "lr": NUMBER},
    **{"stored": int, "dev_perplexity": NUMBER},
}
UPDATES = 436  # two epochs of the corpus at 3,000 tokens a batch
# (model, table_gradient, learning rate)
GRID = {
    "small": [
        ("veps", 0.1, 6e-3),
        ("veps", 1.0, 6e-3),
        ("veps", 0.3, 6e-3),
        ("veps", 0.03, 6e-3),
        ("baseline", None, 3e-3),
        ("baseline", None, 6e-3),
        ("veps", 0.1, 3e-3),
        ("veps", 1.0, 3e-3),
        ("eps", 0.1, 6e-3),
    ],
    "base": [
        ("veps", 0.1, 3e-3),
        ("veps", 1.0, 3e-3),
        ("baseline", None, 3e-3),
    ],
}


def run(size: str, model: str, table_gradient: float | None, lr: float, data: Path) -> dict:
    """One training; returns its settings with the dev perplexity and the parameters stored."""
    extra = ("--no-save",)
    if table_gradient is not None:
        extra += ("--share-table-gradient", str(table_gradient))
    with tempfile.TemporaryDirectory() as out:
        command = train.command(
            "transformer",
            model,
            size,
            data,
            Path(out),
            lr=lr,
            warmup=200,
            updates=UPDATES,
            extra=extra,
        )
        done = subprocess.run(command, capture_output=True, text=True)
    perplexities = re.findall(
        r"valid on 'valid' subset .*? ppl ([\d.]+)", done.stderr + done.stdout
    )
    stored = re.search(r"num\. shared model params: ([\d,]+)", done.stderr + done.stdout)
    if done.returncode or not perplexities or stored is None:
        raise SystemExit(f"the training failed:\n{done.stderr[-3000:]}")
    return {
        "size": size,
        "model": model,
        "table_gradient": table_gradient,
        "lr": lr,
        "updates": UPDATES,
        "stored": int(stored[1].replace(",", "")),
        "dev_perplexity": float(perplexities[-1]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sizes", nargs="*", default=list(GRID), help=f"of {', '.join(GRID)}")
    parser.add_argument("--data", type=Path, default=Path("data/iwslt15_envi/bin"))
    args = parser.parse_args()
    try:
        rows = read_rows(RESULTS, KINDS, [*KINDS])
    except UserError as error:
        parser.error(str(error))
    for size in args.sizes:
        for model, table_gradient, lr in GRID[size]:
            settings = {"size": size, "model": model, "table_gradient": table_gradient, "lr": lr}
            if any(settings.items() <= row.items() for row in rows):
                continue
            row = run(size, model, table_gradient, lr, args.data)
            rows.append(row)
            write_rows(RESULTS, rows)
            print(json.dumps(row), flush=True)
    print("| size | model | table_gradient | lr | stored | dev perplexity |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        gradient = "-" if row["table_gradient"] is None else row["table_gradient"]
        print(
            f"| {row['size']} | {row['model']} | {gradient} | {row['lr']} | {row['stored']:,} | "
            f"{row['dev_perplexity']} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
