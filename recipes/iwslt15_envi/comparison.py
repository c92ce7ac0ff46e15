"""The trainings of compare.py, each of which is made once, and their lines."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import score
import sizes
import train
from checkpoints import check_last
from records import NUMBER, Kinds, read_record
from results import Row, read_rows, write_rows
from stages import STAMP, UserError, only_one
from trainings import at_once, usual_jobs

from paramshare.cli import user_dir

FITTING = "compare"  # the size that EPS has columns for
SEEDS = {"baseline": 2, "veps": 2}  # else one
RATES, ROWS = "rates.jsonl", "results.jsonl"
# Of a line. One that has diverged has no scores, and a probe no seed.
NEEDED = ("arch", "model", "size", "settings", "data", "updates", "lr", "dev_perplexity")
KINDS: Kinds = {
    **dict.fromkeys(("arch", "model", "size", "change", "settings", "data", "command"), str),
    **dict.fromkeys(("updates", "seed", "stored"), int),
    **dict.fromkeys(("lr", "bleu", "chrf"), NUMBER),
    **{"dev_perplexity": NUMBER | None, "signatures": list[str], "talks": dict},
}
DIVERGED = ("gradients are Nan/Inf", "Minimum loss scale reached")  # as fairseq-train says it


class Plan(NamedTuple):
    """Of a training: tokens a batch, updates of the warm-up, of a probe, in all, and the peak
    learning rates that are probed."""

    tokens: int
    warmup: int
    probe: int
    updates: int
    rates: tuple[float, ...]


_PAPER = Plan(16000, 2000, 4000, 20000, (5e-4, 1e-3, 2e-3))
PLANS = {
    "compare": {
        "transformer": Plan(2000, 200, 400, 1200, (3e-3, 6e-3, 1.2e-2)),
        # It begins to learn after hundreds of updates, however many tokens they have: more, smaller
        # ones, in about the same time.
        "lstm": Plan(1000, 400, 800, 3000, (6e-3, 1.2e-2, 2.4e-2)),
        "fconv": Plan(2000, 200, 400, 1200, (3e-3, 6e-3, 1.2e-2)),
    },
    "paper": {"transformer": _PAPER, "lstm": _PAPER, "fconv": _PAPER},
}


class Model(NamedTuple):
    """One row of a table."""

    arch: str
    model: str
    size: str
    change: str = ""  # options that it has besides those of compare.py


class Comparison:
    """What the options of compare.py ask for. Raises UserError where that cannot be made."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.plans = {arch: PLANS[args.size][arch] for arch in args.archs}
        if args.test is not None:
            score.read_test(args.data, args.test)  # at the beginning of hours, not at their end
        if args.updates is not None:
            probe = max(plan.probe for plan in self.plans.values())
            if args.updates <= probe:
                raise UserError(f"--updates {args.updates}: more than {probe}, a probe's")
            self.plans = {
                arch: plan._replace(updates=args.updates) for arch, plan in self.plans.items()
            }
        self.folder = args.out or args.data / "models" / "compare"
        self.results = args.results or args.data / "results"
        self.lines: dict[str, list[Row]] = {}
        self.read(RATES, ROWS)
        self.data = data_digest(args.data)
        self.lock, self.locks = Lock(), ()

    def read(self, *names: str) -> None:
        self.lines |= {name: read_rows(self.results / name, KINDS, NEEDED) for name in names}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process trains these models, or writes these lines."""
        with only_one(self.folder) as models, only_one(self.results) as results:
            self.locks = (models, results)
            self.read(*self.lines)
            yield

    # ------------------------------------------------------------------ what is trained

    def models(self, eps_size: Callable[[str], str | None]) -> list[Model]:
        found = []
        for arch in self.args.archs:
            size = eps_size(arch)
            found += [Model(arch, "baseline", self.args.size), Model(arch, "veps", self.args.size)]
            if size is not None:
                found += [Model(arch, "baseline", size), Model(arch, "eps", size)]
            if f"{self.args.size}-wide" in train.SIZES[arch]:
                found.append(Model(arch, "veps", f"{self.args.size}-wide"))
                found.append(Model(arch, "fairseq", self.args.size))
        return [*dict.fromkeys(found)]

    def eps_size(self, arch: str) -> str | None:
        """The size that EPS is trained at; says so where it is another one, or none."""
        for size in dict.fromkeys((self.args.size, FITTING)):
            lacks = sizes.missing(arch, size, self.args.data / "bin", tuple(self.args.extra))
            if lacks is None:
                return size
            other = f"its size is {FITTING}" if size != FITTING else "it is left out"
            print(f"{arch}, {size}: EPS {lacks}; {other}", flush=True)
        print("give EPS more columns: prepare.py --vocab-size N", flush=True)
        return None

    def identity(self, model: Model) -> Row:
        """What its lines agree in."""
        row = {**model._asdict(), "settings": self.settings(model), "data": self.data}
        if not model.change:
            del row["change"]
        return row

    def settings(self, model: Model) -> str:
        """A digest of all options but those that differ between its runs, or its machines."""
        command = self.command(model, 1.0, 1, 1, Path("."))[4:]
        return _digest([option for option in command if option != str(user_dir())])

    def command(self, model: Model, lr: float, seed: int, updates: int, out: Path) -> list[str]:
        plan = self.plans[model.arch]
        return train.command(
            *(*model[:3], self.args.data / "bin", out),
            lr=lr,
            warmup=plan.warmup,
            updates=updates,
            tokens=plan.tokens,
            seed=seed,
            extra=tuple(self.extra(model)),
        )

    def extra(self, model: Model) -> list[str]:
        return [*self.args.extra, *model.change.split()]

    # ------------------------------------------------------------------ lines

    def found(self, name: str, model: Model, **more: Any) -> Row | None:
        """A line of RATES or ROWS."""
        wanted = {**self.identity(model), **more}
        return next((row for row in self.lines[name] if wanted.items() <= row.items()), None)

    def keep(self, name: str, row: Row) -> None:
        with self.lock:
            self.lines[name].append(row)
            write_rows(self.results / name, self.lines[name])
            print(json.dumps(row), flush=True)

    def probed(self, model: Model, lr: float) -> Row | None:
        return self.found(RATES, model, updates=self.plans[model.arch].probe, lr=lr)

    def rate(self, model: Model) -> float | None:
        """What its change names, or the best of the probes', the lowest where all diverge; None
        before they are all there."""
        named = re.search(r"--lr (\S+)", model.change)
        if named:
            return float(named[1])
        model = model._replace(change="")
        if model.model == "fairseq":  # is to be the same as the baseline
            model = model._replace(model="baseline")
        probes = [self.probed(model, lr) for lr in self.plans[model.arch].rates]
        if None in probes:
            return None
        return min(probes, key=lambda probe: probe["dev_perplexity"] or float("inf"))["lr"]

    def row(self, model: Model, seed: int) -> Row | None:
        updates = self.plans[model.arch].updates
        return self.found(ROWS, model, updates=updates, lr=self.rate(model), seed=seed)

    def shown(self) -> dict[Model, list[Row]]:
        """The rows of the table, by seed."""
        sized = [self.models(lambda arch, size=size: size) for size in (self.args.size, FITTING)]
        rows = {}
        for model in dict.fromkeys([*sized[0], *sized[1]]):
            found = [self.row(model, seed) for seed in _seeds(model)]
            if any(found):
                rows[model] = [row for row in found if row is not None]
        return rows

    # ------------------------------------------------------------------ training

    def train_all(self) -> None:
        """All that there is no line of; `alone`."""
        models = self.models(self.eps_size)
        tuned = [model for model in models if model.model != "fairseq"]
        self.at_once(
            (self.probe, model, lr)
            for model in tuned
            for lr in self.plans[model.arch].rates
            if self.probed(model, lr) is None
        )
        for model in tuned:
            for lr in {*self.plans[model.arch].rates} - {self.rate(model)}:
                shutil.rmtree(self.out(model, lr, 1), ignore_errors=True)
        runs = [(model, seed) for model in models for seed in _seeds(model)]
        runs.sort(key=lambda run: run[1])  # first one seed of each
        self.at_once((self.run, *run) for run in runs if self.row(*run) is None)
        if self.args.test is not None:
            self.at_once((self.score_talks, *run) for run in runs)

    def at_once(self, calls: Iterable[tuple[Any, ...]]) -> None:
        at_once(self.jobs, calls)

    @property
    def jobs(self) -> int:
        return self.args.jobs or usual_jobs()

    @property
    def threads(self) -> int | None:
        return 1 if self.jobs > 1 else None

    def out(self, model: Model, lr: float, seed: int) -> Path:
        # No run goes on with other settings, or takes the scores of a longer one.
        of = _digest([self.identity(model), self.plans[model.arch].updates])[:6]
        return self.folder / f"{'-'.join(model[:3])}-{lr:g}-{seed}-{of}"

    def probe(self, model: Model, lr: float, lines: str = RATES) -> None:
        updates = self.plans[model.arch].probe
        row = {**self.identity(model), "updates": updates, "lr": lr}
        try:
            row.update(self.train(model, lr, 1, updates)._asdict())
        except Diverged:
            row["dev_perplexity"] = None
        self.keep(lines, row)

    def run(self, model: Model, seed: int, lines: str = ROWS) -> None:
        """To the end, with the scores."""
        lr, plan = self.rate(model), self.plans[model.arch]
        out = self.out(model, lr, seed)
        row = {**self.identity(model), "updates": plan.updates, "lr": lr, "seed": seed}
        try:
            row.update(self.train(model, lr, seed, plan.updates)._asdict())
        except Diverged:
            row["dev_perplexity"] = None
        else:
            row.update(self.score(model, out))
            if self.args.test is not None:
                row["talks"] = self.score(model, out, self.args.test)
        options = ["--size", model.size, "--lr", f"{lr:g}", "--seed", str(seed)]
        for name in ("warmup", "tokens", "updates"):
            options += [f"--{name}", str(getattr(plan, name))]
        row["command"] = shlex.join(
            ["train.py", model.arch, model.model, *options, *self.extra(model)]
        )
        self.keep(lines, row)
        # Not before there is the line: without it, the run would go on.
        (out / "checkpoint_last.pt").unlink(missing_ok=True)

    def train(self, model: Model, lr: float, seed: int, updates: int) -> Log:
        """Up to so many updates, from where an earlier training has ended."""
        out = self.out(model, lr, seed)
        log = out / "train.log"
        if read_log(log, updates) is None:
            check_last(out)
            command = self.command(model, lr, seed, updates, out)
            out.mkdir(parents=True, exist_ok=True)
            print("+", shlex.join(command), ">", log, flush=True)
            with log.open("a") as file:
                before = file.tell()
                done = subprocess.run(
                    command,
                    stdout=file,
                    stderr=file,
                    env=train.environment(model.model, self.threads),
                    # Should this process be killed, they hold the locks while the training goes on.
                    pass_fds=self.locks,
                )
            if done.returncode:
                said = log.read_bytes()[before:].decode("utf-8", "replace")
                if any(text in said for text in DIVERGED):
                    raise Diverged(f"the training has diverged, see {log}")
                raise UserError(f"fairseq-train failed, see {log}; the same command goes on")
        found = read_log(log, updates)
        if found is None:  # it was killed when it was about to end, and has gone on beyond
            raise UserError(f"{log} ends beyond update {updates}; remove {out} to train it again")
        return found

    # ------------------------------------------------------------------ scores

    def score(self, model: Model, out: Path, talks: Path | None = None) -> Row:
        found = score.score(
            out, self.args.data, talks=talks, kind=model.model, threads=self.threads
        )
        scores = {"bleu": round(found.bleu, 2), "chrf": round(found.chrf, 2)}
        return {**scores, "signatures": found.signatures}

    def score_talks(self, model: Model, seed: int) -> None:
        """Of what was trained without --test, and is still there."""
        row = self.row(model, seed)
        out = self.out(model, row["lr"], seed)
        if "bleu" in row and "talks" not in row and (out / "checkpoint_best.pt").is_file():
            talks = self.score(model, out, self.args.test)
            with self.lock:
                row["talks"] = talks
                write_rows(self.results / ROWS, self.lines[ROWS])


class Diverged(UserError):
    """fairseq-train has met a gradient or a loss that is no number."""


class Log(NamedTuple):
    """What fairseq-train says of a model."""

    stored: int
    dev_perplexity: float | None  # None: no number


def read_log(path: Path, updates: int) -> Log | None:
    """None unless it was trained for exactly so many updates, to the end."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    stored = re.search(r"parameters: stored ([\d,]+)|num\. shared model params: ([\d,]+)", text)
    valid = rf"valid on 'valid' subset .*? ppl (\S+) .*num_updates {updates}\b"
    for found in re.finditer(valid, text):
        rest, ended, _ = text[found.end() :].partition("done training")
        later = set(re.findall(r"num_updates[ =](\d+)", rest))
        if stored and ended and later <= {str(updates)}:
            number = (stored[1] or stored[2]).replace(",", "")
            perplexity = float(found[1])
            return Log(int(number), perplexity if math.isfinite(perplexity) else None)
    return None


def data_digest(data: Path) -> str:
    """Of the text, and how it is cut into pieces."""
    stamp = data / "bin" / STAMP
    if not stamp.is_file():
        raise UserError(f"{data} holds no prepared data: run prepare.py")
    return _digest(read_record(stamp)["settings"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _seeds(model: Model) -> Sequence[int]:
    wide = model.size.endswith("-wide")
    return range(1, 1 + (1 if wide else SEEDS.get(model.model, 1)))
