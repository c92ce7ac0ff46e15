"""Trains all translators of the comparison on the same data and scores them, in one command.

    python recipes/iwslt15_envi/compare.py                       # two hours on two cores
    python recipes/iwslt15_envi/compare.py --archs lstm --test DIR
    python recipes/iwslt15_envi/compare.py --show                # only shows what there is

Of each architecture: plain, VEPS and EPS, with the same batches in the same order and as many
updates. Where EPS lacks columns, it says how many, and trains EPS and a plain twin at the size
"compare". Of the Transformer also VEPS with a feed-forward four times as wide, and the plain model
by fairseq's own task. The learning rate of each is the best of three on the dev set: a probe is the
beginning of a training, and the best one goes on. Plain and VEPS have two seeds. --test DIR scores
tst2013 of the IWSLT15 files as well, also of what was trained before. As many models are trained at
once as there are cores, or one where there is a GPU.

Every finished run is a line of RESULTS (results.jsonl, rates.jsonl) and is not repeated: the same
command goes on from there. Table and plot (README.md, between its marks, and results.png) are
written there, too. Options that this script does not know go to fairseq-train as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import scoreboard
import train
from comparison import PLANS, Comparison
from quiet import import_tasks
from script import check_installed, parser, run_script
from stages import UserError

DATA = Path(__file__).resolve().parents[2] / "data" / "iwslt15_envi"
NEEDED = {"fairseq": "fairseq-fixed", "matplotlib": "matplotlib"}


def parse(arguments: list[str] | None = None, doc: str | None = __doc__) -> argparse.Namespace:
    options = parser(doc)
    options.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="of the models (default: DATA/models/compare)"
    )
    options.add_argument(
        "--results", type=Path, metavar="DIR", help="of lines and table (default: DATA/results)"
    )
    options.add_argument(
        "--archs", nargs="+", choices=train.SIZES, default=list(train.SIZES), metavar="ARCH"
    )
    options.add_argument("--size", choices=PLANS, default="compare", help="%(default)s")
    options.add_argument("--updates", type=int, metavar="N", help="default: the size's")
    options.add_argument("--test", type=Path, metavar="DIR", help="with tst2013.en and tst2013.vi")
    options.add_argument("--jobs", type=int, metavar="N", help="trainings at once")
    options.add_argument("--show", action="store_true", help="train nothing, show what there is")
    args, args.extra = options.parse_known_args(arguments)
    return args


def compare(args: argparse.Namespace) -> None:
    comparison = Comparison(args)
    if not args.show:
        import_tasks()
        with comparison.alone():
            comparison.train_all()
    rows = comparison.shown()
    if not rows:
        raise UserError(f"{comparison.results} has no lines of this data: leave --show out")
    scoreboard.show(rows, comparison.results)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        compare(args)

    return run_script("compare.py", body)


if __name__ == "__main__":
    sys.exit(main())
