"""What brings VEPS nearer to its twin: other settings, more updates; and what a plain model of its
size does.

    python recipes/iwslt15_envi/tries.py --results recipes/iwslt15_envi --archs fconv
    python recipes/iwslt15_envi/tries.py --results recipes/iwslt15_envi --archs transformer \
        --updates 3000

after compare.py, with the same options; of the size "compare". Each change is a training with seed
1, at the rate that compare.py has chosen unless it names another: to the update where its probes
end, or, since that is early and says little of what a model lacks at the end, to the end, with
scores. To the end go a plain model that stores about as much as VEPS, and the unchanged ones, too,
where --updates is not what compare.py has trained them for. Every finished training is a line of
RESULTS/tries.jsonl (without a change, of rates.jsonl or results.jsonl) and is not repeated; the
table of all goes between the marks of RESULTS/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from compare import NEEDED, parse
from comparison import RATES, ROWS, Comparison, Model
from quiet import import_tasks
from results import Row, markdown, put_table
from scoreboard import ARCHS, MODELS
from script import check_installed, run_script
from stages import UserError

TRIES = "tries.jsonl"
DISTINCT = "--share-depth none"
_OF_ALL = ("--share-table-gradient 0.01", "--share-table-gradient 1", "--dropout 0")
PROBED = {
    "transformer": (
        DISTINCT,
        f"{DISTINCT} --share-blocks 8",
        "--share-blocks 2",
        "--share-init paper",
        *_OF_ALL,
    ),
    "lstm": _OF_ALL,
    "fconv": _OF_ALL,
}


def _width(width: int) -> str:
    """Of the table; 128 in "compare"."""
    return f"--encoder-embed-dim {width} --decoder-embed-dim {width}"


_OUT = "--decoder-out-embed-dim"
WHOLE = {
    "transformer": (
        DISTINCT,
        "--dropout 0",
        f"{DISTINCT} --share-blocks 8 --dropout 0",
        f"{_width(192)} {DISTINCT}",
        f"{_width(256)} {DISTINCT} --lr 0.003",
    ),
    "lstm": ("--share-table-gradient 0.01", f"{_width(192)} {_OUT} 192"),
    "fconv": (DISTINCT, f"{_width(192)} {_OUT} 192"),
}
# Of the plain model, so that it stores about as much as VEPS of the size "compare".
NARROWER = {
    "transformer": f"{_width(64)} --encoder-ffn-embed-dim 128 --decoder-ffn-embed-dim 128",
    "lstm": f"{_width(96)} {_OUT} 96 --encoder-hidden-size 48 --decoder-hidden-size 96",
    "fconv": f"{_width(96)} {_OUT} 96 --encoder-layers [(96,3)]*4 --decoder-layers [(96,3)]*3",
}


class Tries:
    """Those of the architectures that `comparison` compares."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        comparison.read(TRIES)

    def model(self, arch: str, name: str, change: str = "") -> Model:
        return Model(arch, name, self.comparison.args.size, change)

    def plain(self, arch: str) -> list[Model]:
        """The twin, and a narrower one."""
        return [self.model(arch, "baseline"), self.model(arch, "baseline", NARROWER[arch])]

    def shared(self, arch: str, changes: Sequence[str]) -> list[Model]:
        """Without a change, and with each."""
        return [self.model(arch, "veps", change) for change in ("", *changes)]

    def try_all(self) -> None:
        made = self.comparison
        for arch in made.plans:
            if None in (made.rate(self.model(arch, name)) for name in ("baseline", "veps")):
                raise UserError(f"{arch}: run compare.py first, which chooses the learning rate")
        made.at_once(
            (made.probe, model, made.rate(model), TRIES)
            for arch, plan in made.plans.items()
            for model in self.shared(arch, PROBED[arch])
            if not self.found(model, plan.probe)
        )
        made.at_once(
            (made.run, model, 1, TRIES if model.change else ROWS)
            for arch, plan in made.plans.items()
            for model in (*self.plain(arch), *self.shared(arch, WHOLE[arch]))
            if not self.found(model, plan.updates)
        )

    def found(self, model: Model, updates: int | None = None) -> list[Row]:
        """The lines of seed 1 with its rate, by their updates."""
        wanted = {**self.comparison.identity(model), "lr": self.comparison.rate(model)}
        if updates is not None:
            wanted["updates"] = updates
        names = [TRIES] if model.change else [RATES, ROWS]
        lines = [row for name in names for row in self.comparison.lines[name]]
        rows = [row for row in lines if wanted.items() <= row.items() and row.get("seed", 1) == 1]
        return sorted(rows, key=lambda row: row["updates"])

    def table(self) -> str:
        """In Markdown."""
        head = ["model", "change", "stored", "updates", "dev perplexity", "BLEU", "chrF"]
        lines = []
        for arch in self.comparison.plans:
            changes = [*dict.fromkeys((*PROBED[arch], *WHOLE[arch]))]
            twins = {row["updates"]: row for row in self.found(self.model(arch, "baseline"))}
            for model in (*self.plain(arch), *self.shared(arch, changes)):
                lines += [_line(model, row, twins.get(row["updates"])) for row in self.found(model)]
        return markdown([*head, "of the twin's BLEU"], lines)


def _line(model: Model, row: Row, twin: Row | None) -> list[str]:
    compared = "bleu" in row and row != twin and twin and twin.get("bleu")
    return [
        f"{ARCHS[model.arch]}, {MODELS[model.model]}",
        f"`{model.change}`" if model.change else "",
        f"{row['stored']:,}" if "stored" in row else "",
        f"{row['updates']:,}",
        f"{row['dev_perplexity']:.2f}" if row["dev_perplexity"] else "diverged",
        *(f"{row[score]:.1f}" if score in row else "" for score in ("bleu", "chrf")),
        f"{100 * row['bleu'] / twin['bleu']:.0f}%" if compared else "",
    ]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments, __doc__)

    def body() -> None:
        check_installed(NEEDED)
        if args.size != "compare":
            raise UserError(f"--size {args.size}: what is tried here are changes of compare")
        tries = Tries(Comparison(args))
        if not args.show:
            import_tasks()
            with tries.comparison.alone():
                tries.try_all()
        # Of all architectures and updates, whichever were trained now.
        shown = {**vars(args), "archs": [*ARCHS], "updates": None, "test": None}
        table = Tries(Comparison(argparse.Namespace(**shown))).table()
        print(table)
        put_table(tries.comparison.results / "README.md", table, "tries")

    return run_script("tries.py", body)


if __name__ == "__main__":
    sys.exit(main())
