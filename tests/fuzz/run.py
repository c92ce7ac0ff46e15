"""Runs random cases for as long as it is told, and says how to run each that fails again."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402

from fuzz import files, models  # noqa: E402
from fuzz.found import Found  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "files"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--stop-after", type=int, default=20)
    parser.add_argument("-v", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tally, kinds = Counter(), Counter()
    begin = time.monotonic()
    for seed in range(args.seed, args.seed + args.cases):
        if time.monotonic() - begin > 60 * args.minutes:
            break
        try:
            {"models": models, "files": files}[args.what].check_seed(seed, tally)
        except Found as found:
            kinds[found.kind] += 1
            print(f"seed {seed}: {str(found)[:300]}", flush=True)
            if args.v:
                traceback.print_exc()
                if args.what == "models":
                    print(models.draw_case(seed))
            if sum(kinds.values()) >= args.stop_after:
                break
    print(tally)
    print(kinds, time.monotonic() - begin)


if __name__ == "__main__":
    main()
