"""What brings VEPS nearer to its twin: other settings than those of compare.py.

    python recipes/iwslt15_envi/tries.py --results recipes/iwslt15_envi

after compare.py, with the same options. Each change is a training at the rate that compare.py has
chosen: to the update where its probes end, or, since that is early and says little of what a model
lacks at the end, to the end, with scores. Every finished training is a line of RESULTS/tries.jsonl
and is not repeated; the table goes between the marks of RESULTS/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
DISTINCT = "--share-depth none"
PROBED = (
    DISTINCT,
    f"{DISTINCT} --share-blocks 8",
    "--share-blocks 2",
    "--share-table-gradient 0.01",
    "--share-table-gradient 1",
    "--share-init paper",
    "--dropout 0",
)


def _wider(width: int) -> str:
    """Of the table, and what reads it; 128 in "compare"."""
    return f"--encoder-embed-dim {width} --decoder-embed-dim {width}"


WHOLE = {
    "transformer": (
        "--dropout 0",
        f"{DISTINCT} --share-blocks 8",
        f"{DISTINCT} --share-blocks 8 --dropout 0",
        f"{_wider(192)} {DISTINCT}",
        f"{_wider(256)} {DISTINCT}",
    ),
    "lstm": (DISTINCT, f"{_wider(192)} --decoder-out-embed-dim 192"),
    "fconv": (DISTINCT, f"{_wider(192)} --decoder-out-embed-dim 192"),
}


class Tries:
    """Those of the architectures that `comparison` compares."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        comparison.read(TRIES)

    def models(self, arch: str, changes: Sequence[str]) -> list[Model]:
        return [Model(arch, "veps", self.comparison.args.size, change) for change in changes]

    def try_all(self) -> None:
        made = self.comparison
        rates = {arch: made.rate(*self.models(arch, [""])) for arch in made.plans}
        if None in rates.values():
            first = ", ".join(arch for arch, rate in rates.items() if rate is None)
            raise UserError(f"{first}: run compare.py first, which chooses the learning rate")
        made.at_once(
            (made.probe, model, lr, TRIES)
            for arch, lr in rates.items()
            for model in self.models(arch, PROBED)
            if self.probed(model) is None
        )
        made.at_once(
            (made.run, model, 1, TRIES)
            for arch in rates
            for model in self.models(arch, WHOLE[arch])
            if self.whole(model) is None
        )

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
            changes = dict.fromkeys(("", *PROBED, *WHOLE[arch]))
            unchanged, *changed = self.models(arch, [*changes])
            for model in (unchanged._replace(model="baseline"), unchanged, *changed):
                probe, whole = self.probed(model), self.whole(model)
                if probe or whole:
                    lines.append(_line(model, probe or {}, whole or {}))
        return markdown(head, lines)


def _line(model: Model, probe: Row, whole: Row) -> list[str]:
    stored = whole.get("stored") or probe.get("stored")
    return [
        f"{ARCHS[model.arch]}, {'VEPS' if model.model == 'veps' else 'plain'}",
        f"`{model.change}`" if model.change else "",
        f"{stored:,}" if stored else "",
        _perplexity(probe),
        _perplexity(whole),
        *(f"{whole[score]:.1f}" if score in whole else "" for score in ("bleu", "chrf")),
    ]


def _perplexity(row: Row) -> str:
    if not row:
        return ""
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
