"""Trains all captioners of the comparison on the same pictures and scores them, in one command.

    python recipes/coco_captioning/compare.py                     # an hour and a half on two cores
    python recipes/coco_captioning/compare.py --archs transformer --seeds 1
    python recipes/coco_captioning/compare.py --show              # only shows what there is

Of each architecture: VEPS and its plain twin, and at sizes that EPS has the columns for, EPS and
its twin. Seeds 1 and 2 are trained with three learning rates; the one with the best CIDEr of the
validation pictures, the mean of both, is taken for the other seeds. The table has the test
pictures. As many models are trained at once as there are cores, or one where there is a GPU.

Every finished run is a line of RESULTS/results.jsonl and is not repeated: the same command goes on
from there. Table and plot (README.md, between its marks, and results.png) are written there, too,
and DATA/gallery has the captions of one architecture beside the pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from threading import Lock
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import gallery
import report
from checkpoints import check_last
from quiet import import_tasks
from records import NUMBER, Kinds, read_record
from results import Row, read_rows, write_rows
from script import check_installed, parser, run_script
from stages import UserError, only_one
from train import BACKBONE, CROSS_ENTROPY, DATA, SIZES, Run
from trainings import at_once, usual_jobs

PAIRS = (("small", "baseline"), ("small", "veps"), ("wide", "baseline"), ("wide", "eps"))
RATES = (1e-3, 2e-3, 4e-3)
PROBES = 2  # seeds that choose the rate: of one, on so few pictures, the best is chance
SEEDS = 3
SPLITS = ("train", "valid", "test")
# Of a line; that of the nearest captions has less.
KINDS: Kinds = {
    **dict.fromkeys(("arch", "model", "size", "settings", "data", "tokens", "command"), str),
    **dict.fromkeys(("epochs", "seed", "stored"), int),
    **dict.fromkeys(("lr", "valid_cider", "speed", *report.SHOWN), NUMBER),
    "scores": dict,
}
NEEDED = {
    **{"fairseq": "fairseq-fixed", "pycocoevalcap": "pycocoevalcap", "PIL": "pillow"},
    **{"matplotlib": "matplotlib", "rich": "rich"},
}


class Model(NamedTuple):
    """One row of the table, trained with several seeds."""

    arch: str
    size: str
    model: str


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--results", type=Path, metavar="DIR", help="of lines and table (default: DATA/results)"
    )
    options.add_argument("--archs", nargs="+", choices=SIZES, default=list(SIZES))
    options.add_argument(
        "--seeds", type=int, metavar="N", default=SEEDS, help="of each model (%(default)s)"
    )
    options.add_argument("--epochs", type=int, metavar="N", help="default: the size's")
    options.add_argument("--show", action="store_true", help="train nothing, show what there is")
    return options.parse_args(arguments)


class Comparison:
    """The runs, each of which is made once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.captions = args.data / "captions"
        self.features = args.data / "features" / BACKBONE
        self.folder = args.data / "models" / "compare"
        self.path = (args.results or args.data / "results") / "results.jsonl"
        self.rows = read_rows(self.path, KINDS, ("model", "data"))
        self.models = [Model(arch, *pair) for arch in args.archs for pair in PAIRS]
        self.data = captions_digest(self.captions)
        self.lock = Lock()

    def identity(self, model: Model) -> Row:
        """What its lines agree in."""
        settings = [SIZES[model.arch][model.size], CROSS_ENTROPY[model.size]._asdict()]
        return {
            **model._asdict(),
            "settings": _digest(json.dumps(settings)),
            "data": self.data,
            "epochs": self.args.epochs or CROSS_ENTROPY[model.size].epochs,
        }

    def found(self, model: Model, **settings: Any) -> list[Row]:
        wanted = {**self.identity(model), **settings}
        return [row for row in self.rows if wanted.items() <= row.items()]

    @property
    def seeds(self) -> range:
        return range(1, self.args.seeds + 1)

    def rate(self, model: Model) -> float | None:
        """The best of the probes'; None before they are all there."""
        means = {}
        for lr in RATES:
            seeds = self.seeds[:PROBES]
            probes = [row for seed in seeds for row in self.found(model, lr=lr, seed=seed)]
            if len(probes) < len(seeds):
                return None
            means[lr] = mean(row["valid_cider"] for row in probes)
        return max(means, key=lambda lr: means[lr])

    def chosen(self) -> dict[Model, list[Row]]:
        """The rows of the table, by seed, of the models that have their rate."""
        rates = {model: self.rate(model) for model in self.models}
        return {
            model: [row for seed in self.seeds for row in self.found(model, lr=rate, seed=seed)]
            for model, rate in rates.items()
            if rate is not None
        }

    # ------------------------------------------------------------------ training

    def train_all(self) -> None:
        probes, others = self.seeds[:PROBES], self.seeds[PROBES:]
        self.train_some((m, lr, seed) for seed in probes for m in self.models for lr in RATES)
        rates = [(model, self.rate(model)) for model in self.models]
        self.train_some((model, rate, seed) for seed in others for model, rate in rates)

    def train_some(self, runs: Iterable[tuple[Model, float | None, int]]) -> None:
        missing = [run for run in runs if not self.found(run[0], lr=run[1], seed=run[2])]
        jobs = usual_jobs()
        at_once(jobs, ((self.train, *run, jobs > 1) for run in missing))

    def train(self, model: Model, lr: float, seed: int, alone: bool) -> None:
        """alone: on one core."""
        out = self.out(model, lr, seed)
        where = (self.captions, self.features, out)
        command = Run(
            model.arch, model.model, model.size, *where, None, seed, lr, self.args.epochs
        ).command()
        out.mkdir(parents=True, exist_ok=True)
        check_last(out)
        log = out / "train.log"
        print("+", shlex.join(command), ">", log, flush=True)
        environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if alone else {})}
        with log.open("a") as file:
            status = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
        if status:
            raise UserError(f"fairseq-train failed, see {log}; the same command goes on from here")
        with self.lock:
            row = {**self.identity(model), "lr": lr, "seed": seed, **report.measure(out, self.args)}
            options = ["--size", model.size, "--lr", f"{lr:g}", "--seed", str(seed)]
            row["command"] = shlex.join(["train.py", model.arch, model.model, *options])
            self.rows.append(row)
            write_rows(self.path, self.rows)
            print(json.dumps(row), flush=True)
        # Not before there is the line: without it, the run would start again.
        (out / "checkpoint_last.pt").unlink(missing_ok=True)

    def out(self, model: Model, lr: float, seed: int) -> Path:
        of = _digest(json.dumps(self.identity(model)))[:6]  # no run goes on with other settings
        return self.folder / f"{'-'.join(model)}-{lr:g}-{seed}-{of}"

    # ------------------------------------------------------------------ afterwards

    def checkpoints(self) -> dict[Model, Path]:
        """Of seed 1, where they are still there."""
        folders = {
            model: self.out(model, rows[0]["lr"], 1) for model, rows in self.chosen().items()
        }
        return {
            model: out for model, out in folders.items() if (out / "checkpoint_best.pt").is_file()
        }

    def time(self) -> None:
        """Gives the rows how fast their models caption, all measured in one run."""
        rows = {model: rows[0] for model, rows in self.chosen().items()}
        checkpoints = self.checkpoints()
        if len(checkpoints) < len(rows) or all("speed" in row for row in rows.values()):
            return
        for model, speed in report.speeds(checkpoints, self.args).items():
            rows[model]["speed"] = speed
        write_rows(self.path, self.rows)

    def nearest(self) -> Row | None:
        """The line that needs no training; None before it is there."""
        wanted = {"model": "nearest", "data": self.data}
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def find_nearest(self) -> None:
        if self.nearest() is None:
            row = {"model": "nearest", "data": self.data, **report.nearest(self.args)}
            self.rows.append(row)
            write_rows(self.path, self.rows)

    def show_pictures(self) -> None:
        """The gallery of the first architecture: its plain model against VEPS."""
        found = self.checkpoints()
        arch = self.models[0].arch
        pair = [Model(arch, "small", name) for name in ("baseline", "veps")]
        if not all(model in found for model in pair):
            return
        captions = [f"{model.model}={found[model] / report.CAPTIONS}" for model in pair]
        references = str(self.captions / "test.json")
        out = str(self.args.data / "gallery")
        if gallery.main(["--references", references, "--captions", *captions, "--out", out]):
            raise UserError("gallery.py failed, see above")


def captions_digest(folder: Path) -> str:
    """Of pictures and captions of all splits, wherever the pictures are."""
    splits = [read_record(folder / f"{split}.json") for split in SPLITS]
    return _digest(json.dumps([[split["images"], split["annotations"]] for split in splits]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(args: argparse.Namespace) -> None:
    for name in ("seeds", "epochs"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    for folder, script in (
        (args.data / "captions", "prepare.py"),
        (args.data / "features" / BACKBONE, "features.py"),
    ):
        if not folder.is_dir():
            raise UserError(f"{folder} is not there: run {script}")
    comparison = Comparison(args)
    results = comparison.path.parent
    if not args.show:
        results.mkdir(parents=True, exist_ok=True)
        with only_one(comparison.folder):
            comparison.train_all()
            comparison.find_nearest()
            comparison.time()
            comparison.show_pictures()
    rows = comparison.chosen()
    if not rows:
        raise UserError(f"{comparison.path} has no lines of this data: leave --show out")
    report.show(rows, comparison.nearest(), results)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        import_tasks()
        compare(args)

    return run_script("compare.py", body)


if __name__ == "__main__":
    sys.exit(main())
