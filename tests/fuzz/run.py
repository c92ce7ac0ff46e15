"""Runs random cases for as long as it is told: of shared models, and of damaged files.

Ends with an error after `--findings` broken promises, each of them with the command that runs its
case again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

WHAT = ("models", "files")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*WHAT, "both"])
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--findings", type=int, default=10, help="to stop after")
    return parser.parse_args()


def both(args: argparse.Namespace) -> int:
    """Each in a process of its own."""
    options = ("seed", "cases", "minutes", "findings")
    given = [text for name in options for text in (f"--{name}", str(getattr(args, name)))]
    running = [subprocess.Popen([sys.executable, __file__, what, *given]) for what in WHAT]
    return max(process.wait() for process in running)


def run(args: argparse.Namespace) -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import torch

    from fuzz import files, models
    from fuzz.found import Found, command

    check = {"models": models, "files": files}[args.what].check_seed
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    found: Counter[str] = Counter()
    begin = said = time.monotonic()
    seed = args.seed
    while seed < args.seed + args.cases and found.total() < args.findings:
        now = time.monotonic()
        if now - begin > 60 * args.minutes:
            break
        if now - said > 30:
            said = now
            print(f"{args.what}: {seed - args.seed:,} cases, {found.total()} findings", flush=True)
        try:
            check(seed, tally)
        except Found as error:
            found[error.kind] += 1
            print(f"\n{error}\n    {command(args.what, seed)}", flush=True)
        seed += 1
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{args.what}: {seed - args.seed:,} cases in {minutes:.1f} minutes")
    for name, count in sorted(tally.items()):
        print(f"{count:8,} {name}")
    for kind, count in found.most_common():
        print(f"{count:8,} FOUND {kind}")
    return 1 if found else 0


if __name__ == "__main__":
    chosen = arguments()
    sys.exit(both(chosen) if chosen.what == "both" else run(chosen))
