"""What prepare.py shows at the end."""

from typing import Any

from corpus.split import SPLITS
from rich.console import Console
from rich.table import Table


def show(console: Console, figures: dict[str, Any], kind: str) -> None:
    """`figures` are those of the stage `captions`; kind: words or pieces."""
    table = Table("split", title=f"Captions, {figures['vocabulary']:,} {kind} in the vocabulary")
    for column in ("pictures", "captions", kind, f"unknown {kind}", "coverage"):
        table.add_column(column, justify="right")
    for split in SPLITS:
        row = figures[split]
        numbers = (f"{row[name]:,}" for name in ("pictures", "captions", "tokens", "unknown"))
        table.add_row(split, *numbers, f"{1 - row['unknown'] / row['tokens']:.1%}")
    console.print(table)
