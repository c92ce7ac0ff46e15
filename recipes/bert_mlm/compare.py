"""Trains all models of the comparison on the same text and judges them, in one command.

    python recipes/bert_mlm/compare.py            # the whole; two to three hours on two cores
    python recipes/bert_mlm/compare.py --show     # only the table and the plot of what there is

First short probes choose the learning rates, and ShareBERT's table gradient; then all models are
pretrained, with the same steps and tokens, finetuned with two seeds, and measured. Of those of one
stored size the best ShareBERT and the best rival get a second seed. Every finished run is a line
of probes.jsonl or results.jsonl in RESULTS and is not repeated: the same command goes on from
there. The table and the plot are written there, too (README.md, between its marks, and
results.png).
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import lineup
import report
import training
from evaluate import QUESTIONS, SIMILARITIES
from folders import load_tokenizer
from masking import data_digest, load_blocks
from pretrain import DATA
from records import NUMBER, Kinds, read_record
from results import Row, read_rows, write_rows
from script import check_installed, parser, run_script
from stages import UserError, only_one

STEPS, PROBE_STEPS = 6000, 1000
RATES = (5e-4, 1e-3, 2e-3)  # and further, while the best is the first or the last
LOWEST, HIGHEST = 1.25e-4, 1.6e-2
GRADIENTS = (0.3, 1.0)  # beside the default, 0.1
# The others are variants of "share" and take its settings.
PROBED = ("bert", "share-eps", "share", "bert-narrow", "albert", "low-rank")
# Models of one stored size; the best one of each gets a second seed.
OURS = ("share", "share-each-depth")
RIVALS = ("bert-narrow", "albert", "low-rank")
SPLITS = ("train", "dev", "test")
# Of a line, of the probes as well.
NEEDED = ("model", "config", "data", "steps")
KINDS: Kinds = {
    **dict.fromkeys(("model", "config", "data", "command"), str),
    **dict.fromkeys(("steps", "seed", "stored", "operations"), int),
    **dict.fromkeys(("lr", "mlm_loss", "mlm_accuracy", *SIMILARITIES, "speed"), NUMBER),
    **dict.fromkeys(("table_gradient", "analogies"), NUMBER | None),
    "finetuned": list[NUMBER],
}
FINETUNING_SEEDS = (1, 2)
FINETUNING = ("--epochs", "2", "--lr", "2e-4", "--batch", "32", "--precision", "bf16")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="of the models (default: DATA/models)"
    )
    options.add_argument(
        "--results", type=Path, metavar="DIR", help="of lines and table (default: DATA/results)"
    )
    options.add_argument("--steps", type=int, metavar="N", default=STEPS, help="%(default)s")
    options.add_argument(
        "--probe-steps", type=int, metavar="N", default=PROBE_STEPS, help="%(default)s"
    )
    options.add_argument("--models", nargs="+", metavar="NAME", default=list(lineup.LINEUP))
    options.add_argument("--show", action="store_true", help="train nothing, show what there is")
    return options.parse_args(arguments)


class Comparison:
    """The runs, each of which is made once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.models = (args.out or args.data / "models").resolve()
        self.results = args.results or args.data / "results"
        self.data = data_digest(args.data)
        self.vocabulary = len(load_tokenizer(args.data / "tokenizer"))
        self.length = load_blocks(args.data / "blocks", "dev")[0].shape[1]
        self.probes = read_rows(self.results / "probes.jsonl", KINDS, NEEDED)
        self.rows = read_rows(self.results / "results.jsonl", KINDS, NEEDED)

    def identity(self, name: str, steps: int) -> Row:
        """What a line must agree in: the model to its last option, the data, the steps."""
        config = lineup.configuration(name, self.vocabulary, self.length).to_dict()
        del config["transformers_version"]
        return {
            "model": name,
            "config": training.digest_of(config),
            "data": self.data,
            "steps": steps,
        }

    def shown(self) -> list[Row]:
        """The rows of these steps, this data, and models as they are now."""
        steps = self.args.steps
        return [
            row
            for row in self.rows
            if row["model"] in lineup.LINEUP
            and self.identity(row["model"], steps).items() <= row.items()
        ]

    # ------------------------------------------------------------------ probes

    def settings(self, name: str) -> Row:
        """Learning rate and table gradient of a model, from the probes with the lowest loss."""
        probed = name if name in PROBED else "share"
        rates = list(RATES)
        while True:
            best = min((self.probe(probed, lr=lr, table_gradient=None) for lr in rates), key=_loss)
            if best["lr"] == rates[0] > LOWEST:
                rates.insert(0, rates[0] / 2)
            elif best["lr"] == rates[-1] < HIGHEST:
                rates.append(2 * rates[-1])
            else:
                break
        if probed.startswith("share"):
            trials = [{"lr": best["lr"], "table_gradient": x} for x in GRADIENTS]
            best = min([best, *(self.probe(probed, **trial) for trial in trials)], key=_loss)
        return {name: best[name] for name in ("lr", "table_gradient")}

    def probe(self, name: str, **settings: Any) -> Row:
        row = {**self.identity(name, self.args.probe_steps), **settings}
        for done in self.probes:
            if row.items() <= done.items():
                return done
        folder = self.models / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        self.pretrain(name, folder, row)
        row["mlm_loss"] = self.measure(folder, "mlm")["mlm"]["loss"]
        shutil.rmtree(folder)
        self.keep(self.probes, row, "probes.jsonl")
        return row

    # ------------------------------------------------------------------ rows

    def row(self, name: str, seed: int) -> Row:
        wanted = {**self.identity(name, self.args.steps), "seed": seed}
        for done in self.rows:
            if wanted.items() <= done.items():
                return done
        row: Row = {**wanted, **self.settings(name)}
        folder = self.folder(name, seed)
        row["command"] = self.pretrain(name, folder, row)
        row.update(report.sizes(folder))
        found = self.measure(folder, "mlm,words,analogies")
        row["mlm_loss"], row["mlm_accuracy"] = (found["mlm"][x] for x in ("loss", "accuracy"))
        for measure in ("WordSim-353", "SimLex-999"):
            row[measure] = found[measure]["table"]
        row["analogies"] = found["analogies"]["accuracy"]
        row["finetuned"] = [self.finetune(folder, number) for number in FINETUNING_SEEDS]
        self.keep(self.rows, row, "results.jsonl")
        return row

    def folder(self, name: str, seed: int) -> Path:
        return self.models / f"{name}-{seed}-{self.args.steps}"

    def pretrain(self, name: str, folder: Path, row: Row) -> str:
        options = ["--steps", row["steps"], "--lr", row["lr"], "--seed", row.get("seed", 1)]
        if row["table_gradient"] is not None:
            options += ["--table-gradient", row["table_gradient"]]
        run("pretrain", name, "--out", folder, "--data", self.args.data, *options)
        return shlex.join(["pretrain.py", name, *map(str, options)])

    def measure(self, folder: Path, only: str) -> Row:
        figures = self.models / "figures.json"
        run("evaluate", folder, "--data", self.args.data, "--only", only, "--json", figures)
        return read_record(figures)[str(folder)]

    def finetune(self, folder: Path, seed: int) -> float:
        """Accuracy on the test snippets, %."""
        out = self.models / "finetuned" / f"{folder.name}-{seed}"
        data = self.args.data / "labelled"
        files = [part for split in SPLITS for part in (f"--{split}", data / f"{split}.jsonl")]
        run("finetune", folder, "--out", out, *files, "--seed", seed, *FINETUNING)
        return read_record(out / "results.json", {"accuracy": NUMBER})["test"]["accuracy"]

    def time(self) -> None:
        """Gives the rows the training speed of their models, all measured in one run, as a share
        of the dense one's. Of what was trained elsewhere there is nothing to measure."""
        rows = [row for row in self.shown() if self.folder(row["model"], 1).is_dir()]
        if all("speed" in row for row in rows) or not any(r["model"] == "bert" for r in rows):
            return
        speeds = report.speeds({row["model"]: self.folder(row["model"], 1) for row in rows})
        for row in rows:
            row["speed"] = speeds[row["model"]] / speeds["bert"]
        write_rows(self.results / "results.jsonl", self.rows)

    def keep(self, rows: list[Row], row: Row, name: str) -> None:
        rows.append(row)
        write_rows(self.results / name, rows)
        print(json.dumps(row), flush=True)


def run(script: str, *arguments: object) -> None:
    """A script of this folder, in this process, which has imported what it needs. UserError where
    it fails; it has said why."""
    command = [str(argument) for argument in arguments]
    print("+", shlex.join([f"{script}.py", *command]), flush=True)
    if import_module(script).main(command):
        raise UserError(f"{script}.py failed, see above; the same command goes on from here")


def _loss(row: Row) -> float:
    return row["mlm_loss"]


def check(args: argparse.Namespace) -> None:
    """What is needed at the end of hours must be there at their beginning."""
    for name in args.models:
        if name not in lineup.LINEUP:
            raise UserError(f"--models {name} is unknown: use some of {', '.join(lineup.LINEUP)}")
    needed = [args.data / "labelled" / f"{split}.jsonl" for split in SPLITS]
    needed += [args.data / "words" / name for name in (*SIMILARITIES.values(), QUESTIONS)]
    for path in needed:
        if not path.is_file():
            raise UserError(f"{path} is not there: run prepare.py again; it says what is MISSING")


def compare(args: argparse.Namespace) -> None:
    check_installed({"matplotlib": "matplotlib"})
    check(args)
    comparison = Comparison(args)
    if not args.show:
        comparison.results.mkdir(parents=True, exist_ok=True)
        with only_one(comparison.models):
            train_all(comparison, args.models)
    rows = comparison.shown()
    if not rows:
        raise UserError(f"{comparison.results} has no lines of this yet: leave --show out")
    report.show(rows, comparison.results)


def train_all(comparison: Comparison, names: list[str]) -> None:
    for name in names:
        comparison.settings(name)
    rows = {name: comparison.row(name, 1) for name in names}
    ours, rivals = ([rows[name] for name in names if name in kind] for kind in (OURS, RIVALS))
    if ours and rivals:
        for family in (ours, rivals):
            comparison.row(min(family, key=_loss)["model"], 2)
    comparison.time()


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_script("compare.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
