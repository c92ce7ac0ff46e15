"""How a budget of parameters is best split between table and projection: what the rule of
paramshare/budget.py was chosen by.

    python recipes/iwslt15_envi/splits.py --results recipes/iwslt15_envi

VEPS of the size "compare" with a quarter, a third and half of its twin's parameters; for each,
depth maps and numbers of blocks, with the widest table that there is room for. Each is trained with
seed 1 to the end of UPDATES, at the learning rate of train.py. Every finished training is a line of
RESULTS/splits.jsonl and is not repeated; the table goes between the marks of RESULTS/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from compare import NEEDED, parse
from comparison import Comparison, Model
from quiet import import_tasks
from results import Row, markdown, put_table
from scoreboard import ARCHS
from script import check_installed, run_script
from sizes import count
from stages import UserError
from train import peak

LINES = "splits.jsonl"
UPDATES = 3000  # early, what counts is how fast a model leaves the plateau
SHARES = {"a third": 1 / 3, "a quarter": 1 / 4, "a half": 1 / 2}  # in the order of the trainings
TRIED = (("none", 2), ("none", 1), ("none", 4), ("none", 8), ("all", 1))  # depth map, blocks


class Splits:
    """Those of the architectures that `comparison` compares."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.size = comparison.args.size
        self.data = comparison.args.data / "bin"
        comparison.read(LINES)
        self.twins = {
            arch: count(arch, "baseline", self.size, self.data) for arch in comparison.plans
        }

    def models(self, arch: str, share: float) -> list[Model]:
        budget = round(self.twins[arch] * share)
        rate = f"--lr {peak(arch, 'veps', self.size)}"
        return [
            Model(
                arch,
                "veps",
                self.size,
                f"{rate} --share-stored {budget} --share-depth {depth} --share-blocks {blocks}",
            )
            for depth, blocks in TRIED
        ]

    def train_all(self) -> None:
        made = self.comparison
        made.at_once(
            (made.run, model, 1, LINES)
            for share in SHARES.values()
            for arch in made.plans
            for model in self.models(arch, share)
            if self.row(model) is None
        )

    def row(self, model: Model) -> Row | None:
        made = self.comparison
        updates = made.plans[model.arch].updates
        return made.found(LINES, model, updates=updates, lr=made.rate(model), seed=1)

    def chosen(self, arch: str, share: float) -> int:
        """What the split of the rule stores."""
        budget = round(self.twins[arch] * share)
        return count(arch, "veps", self.size, self.data, ("--share-stored", f"{budget}"))

    def table(self) -> str:
        """In Markdown; the lowest perplexity of a budget is bold, the rule's split has a star."""
        head = ["model", "of the twin's parameters", "depth", "blocks", "stored", "dev perplexity"]
        lines = []
        for arch in self.comparison.plans:
            for name, share in SHARES.items():
                models = self.models(arch, share)
                rows = [self.row(model) for model in models]
                reached = [row["dev_perplexity"] for row in rows if row and row["dev_perplexity"]]
                chosen = self.chosen(arch, share)
                for (depth, blocks), row in zip(TRIED, rows, strict=True):
                    if row is not None:
                        star = "*" if row["stored"] == chosen else ""
                        cells = [ARCHS[arch], name, depth, f"{blocks}{star}", f"{row['stored']:,}"]
                        lines.append([*cells, *_scores(row, min(reached, default=None))])
        return markdown([*head, "BLEU", "chrF"], lines)


def _scores(row: Row, best: float | None) -> list[str]:
    perplexity = row["dev_perplexity"]
    text = f"{perplexity:.2f}" if perplexity else "diverged"
    scores = [f"{row[name]:.1f}" if name in row else "" for name in ("bleu", "chrf")]
    return [f"**{text}**" if perplexity == best else text, *scores]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments, __doc__)

    def body() -> None:
        check_installed(NEEDED)
        if args.size != "compare":
            raise UserError(f"--size {args.size}: what is tried here are splits of compare")
        args.updates = args.updates or UPDATES
        import_tasks()
        splits = Splits(Comparison(args))
        if not args.show:
            with splits.comparison.alone():
                splits.train_all()
        table = splits.table()
        print(table)
        put_table(splits.comparison.results / "README.md", table, "splits")

    return run_script("splits.py", body)


if __name__ == "__main__":
    sys.exit(main())
