"""What brings VEPS nearer to its twin: one setting changed at a time.

    python recipes/iwslt15_envi/tries.py --results recipes/iwslt15_envi

after compare.py, with the same options. Each change is a probe, at the rate that compare.py has
chosen; of those that have a better perplexity on the dev set than no change, the best two are
trained to the end and scored. Every finished training is a line of RESULTS/tries.jsonl and is not
repeated; the table goes between the marks of RESULTS/README.md.
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
from stages import UserError

TRIES = "tries.jsonl"
WIDER = "--encoder-embed-dim 192 --decoder-embed-dim 192"  # of the table; 128 in "compare"
WHOLES = 2
_OF_ALL = (
    "--share-depth none",
    "--share-depth none --share-blocks 8",
    "--share-blocks 2",
    "--share-table-gradient 0.01",
    "--share-table-gradient 1",
    "--share-init paper",
    "--dropout 0",
)
CHANGES = {
    "transformer": (*_OF_ALL, WIDER, f"{WIDER} --share-depth none"),
    "lstm": (*_OF_ALL, f"{WIDER} --decoder-out-embed-dim 192"),
    "fconv": (*_OF_ALL, f"{WIDER} --decoder-out-embed-dim 192"),
}


class Tries:
    """Those of the architectures that `comparison` compares."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        comparison.read(TRIES)

    def models(self, arch: str) -> list[Model]:
        """The first has no change."""
        size = self.comparison.args.size
        return [Model(arch, "veps", size, change) for change in ("", *CHANGES[arch])]

    def try_all(self) -> None:
        made, probes = self.comparison, []
        for arch in made.plans:
            unchanged, *changed = self.models(arch)
            lr = made.rate(unchanged)
            if lr is None:
                raise UserError(f"{arch}: run compare.py first, which chooses the learning rate")
            probes += [(model, lr, TRIES) for model in changed if self.probed(model) is None]
        made.at_once((made.probe, *probe) for probe in probes)
        best = [model for arch in made.plans for model in self.best(arch)]
        wholes = [(model, 1, TRIES) for model in best if self.whole(model) is None]
        made.at_once((made.run, *whole) for whole in wholes)

    def best(self, arch: str) -> list[Model]:
        """The changes with the best probes, of those that are better than no change."""

        def perplexity(model: Model) -> float:
            return self.probed(model)["dev_perplexity"] or float("inf")

        unchanged, *changed = self.models(arch)
        better = [model for model in changed if perplexity(model) < perplexity(unchanged)]
        return sorted(better, key=perplexity)[:WHOLES]

    # ------------------------------------------------------------------ lines

    def probed(self, model: Model) -> Row | None:
        if not model.change:
            return self.comparison.probed(model, self.comparison.rate(model))
        return self.found(model, self.comparison.plans[model.arch].probe)

    def whole(self, model: Model) -> Row | None:
        if not model.change:
            return self.comparison.row(model, 1)
        return self.found(model, self.comparison.plans[model.arch].updates)

    def found(self, model: Model, updates: int) -> Row | None:
        return self.comparison.found(TRIES, model, updates=updates)

    def table(self) -> str:
        """In Markdown; BLEU is of whole trainings, seed 1."""
        head = ["model", "change", "stored", "dev perplexity, probe", "at the end", "BLEU", "chrF"]
        lines = []
        for arch in self.comparison.plans:
            unchanged, *changed = self.models(arch)
            for model in (unchanged._replace(model="baseline"), unchanged, *changed):
                probe, whole = self.probed(model), self.whole(model)
                if probe is not None:
                    lines.append(_line(model, probe, whole or {}))
        return markdown(head, lines)


def _line(model: Model, probe: Row, whole: Row) -> list[str]:
    stored = whole.get("stored") or probe.get("stored")
    return [
        f"{ARCHS[model.arch]}, {'VEPS' if model.model == 'veps' else 'plain'}",
        f"`{model.change}`" if model.change else "",
        f"{stored:,}" if stored else "",
        _perplexity(probe),
        _perplexity(whole) if whole else "",
        *(f"{whole[score]:.1f}" if score in whole else "" for score in ("bleu", "chrf")),
    ]


def _perplexity(row: Row) -> str:
    return f"{row['dev_perplexity']:.2f}" if row["dev_perplexity"] else "diverged"


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
