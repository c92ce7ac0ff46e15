"""What brings VEPS nearer to its twin: one setting changed at a time.

    python recipes/iwslt15_envi/tries.py --results recipes/iwslt15_envi --archs transformer

after compare.py, with the same options. Each change is a probe, at the rate that compare.py has
chosen; the one with the best perplexity on the dev set is trained to the end and scored, if it is
better than no change. Every finished training is a line of RESULTS/tries.jsonl and is not repeated;
the table goes between the marks of RESULTS/README.md.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from compare import NEEDED, parse
from comparison import Comparison, Diverged, Model
from quiet import import_tasks
from results import Row, markdown, put_table
from scoreboard import ARCHS
from script import check_installed, run_script
from stages import UserError

TRIES = "tries.jsonl"
CHANGES = (
    "--share-depth none",
    "--share-depth none --share-blocks 8",
    "--share-blocks 2",
    "--share-table-gradient 0.01",
    "--share-table-gradient 1",
    "--share-init paper",
    "--dropout 0",
)


class Tries:
    """Those of the architectures that `comparison` compares."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        comparison.read(TRIES)

    def try_all(self) -> None:
        plans = self.comparison.plans
        for arch in plans:
            if self.comparison.rate(self.model(arch)) is None:
                raise UserError(f"{arch}: run compare.py first, which chooses the learning rate")
        probes = [(arch, change, plan.probe) for arch, plan in plans.items() for change in CHANGES]
        self.comparison.at_once((self.train, *probe) for probe in probes)
        wholes = [(arch, self.best(arch), plan.updates) for arch, plan in plans.items()]
        self.comparison.at_once((self.train, *whole) for whole in wholes if whole[1])

    def train(self, arch: str, change: str, updates: int) -> None:
        """Unless there is a line of it."""
        if self.found(arch, change, updates) is not None:
            return
        changed, model = self.changed(change), self.model(arch)
        lr = self.comparison.rate(model)
        row = {**changed.identity(model), "change": change, "updates": updates, "lr": lr}
        try:
            row.update(changed.train(model, lr, 1, updates)._asdict())
        except Diverged:
            row["dev_perplexity"] = None
        else:
            if updates == self.comparison.plans[arch].updates:
                row.update(changed.score(model, changed.out(model, lr, 1)))
        self.comparison.keep(TRIES, row)

    # ------------------------------------------------------------------ lines

    def model(self, arch: str) -> Model:
        return Model(arch, "veps", self.comparison.args.size)

    def changed(self, change: str) -> Comparison:
        args = copy.copy(self.comparison.args)
        args.extra = [*args.extra, *change.split()]
        changed = Comparison(args)
        changed.locks = self.comparison.locks
        return changed

    def found(self, arch: str, change: str, updates: int) -> Row | None:
        wanted = {**self.changed(change).identity(self.model(arch)), "updates": updates}
        lines = self.comparison.lines[TRIES]
        return next((row for row in lines if wanted.items() <= row.items()), None)

    def probes(self, arch: str) -> dict[str, Row]:
        """By the change; "" is what compare.py has trained."""
        model, updates = self.model(arch), self.comparison.plans[arch].probe
        unchanged = self.comparison.probed(model, self.comparison.rate(model))
        found = {change: self.found(arch, change, updates) for change in CHANGES}
        return {"": unchanged, **{change: row for change, row in found.items() if row}}

    def best(self, arch: str) -> str:
        """The change with the best probe; "" where no change is better."""
        probes = self.probes(arch)
        return min(probes, key=lambda change: probes[change]["dev_perplexity"] or float("inf"))

    def table(self) -> str:
        """In Markdown; BLEU is of whole trainings, seed 1."""
        head = ["model", "change", "stored", "updates", "dev perplexity", "BLEU", "chrF"]
        lines = []
        for arch, plan in self.comparison.plans.items():
            model = self.model(arch)
            twin = self.comparison.row(model._replace(model="baseline"), 1)
            whole = {"": self.comparison.row(model, 1)}
            whole |= {change: self.found(arch, change, plan.updates) for change in CHANGES}
            rows = [("plain", "", twin)]
            rows += [("VEPS", change, row) for change, row in whole.items()]
            rows += [("VEPS", change, row) for change, row in self.probes(arch).items()]
            for name, change, row in rows:
                if row is not None:
                    lines.append(_line(f"{ARCHS[arch]}, {name}", change, row))
        return markdown(head, lines)


def _line(name: str, change: str, row: Row) -> list[str]:
    stored = f"{row['stored']:,}" if "stored" in row else ""
    scores = [f"{row[score]:.1f}" if score in row else "" for score in ("bleu", "chrf")]
    perplexity = f"{row['dev_perplexity']:.2f}" if row["dev_perplexity"] else "diverged"
    return [
        name,
        f"`{change}`" if change else "",
        stored,
        f"{row['updates']:,}",
        perplexity,
        *scores,
    ]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments, __doc__)

    def body() -> None:
        check_installed(NEEDED)
        tries = Tries(Comparison(args))
        if not args.show:
            import_tasks()
            with tries.comparison.alone():
                tries.try_all()
        table = tries.table()
        print(table)
        put_table(tries.comparison.results / "README.md", table, "tries")

    return run_script("tries.py", body)


if __name__ == "__main__":
    sys.exit(main())
