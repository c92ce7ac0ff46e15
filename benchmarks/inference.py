"""Inference of one encoder: weights never built, built a tile at a time, and kept in memory.

    python benchmarks/inference.py --shape Small --work 1x1 1x16 1x128 8x128

The outputs must agree before anything is timed. All rivals and sizes: bench.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "common"))
import speed
from encoders import SHAPES
from results import markdown
from rivals import OURS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="Small")
    parser.add_argument("--work", nargs="+", default=["1x1", "1x16", "1x128", "8x128"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    lines = []
    for work in args.work:
        batch, length = map(int, work.split("x"))
        shape = SHAPES[args.shape]
        found = speed.inference(shape, list(OURS), batch, length, args.rounds)
        cells = [
            f"{median(found['ratios'][name]):.2f} ({found['operations'][name]:.2f})"
            for name in OURS
        ]
        lines.append([work, *cells])
    print("time / that of one ordinary layer at every depth (operations)")
    print(markdown(("batch x tokens", *OURS), lines))


if __name__ == "__main__":
    main()
