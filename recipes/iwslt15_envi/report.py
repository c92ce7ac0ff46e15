"""What prepare.py shows: a line for each step, and the tables at the end."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def corpus_tables(console: Console, raw: dict[str, Any]) -> None:
    """Pairs by source, and what was dropped and why; `raw` is the figures of the stage."""
    if "sources" in raw:
        columns = {"found": "found", "sentences": "sentence pairs", "kept": "kept"}
        table = Table("source", title="Pairs by source")
        for heading in columns.values():
            table.add_column(heading, justify="right")
        for name, source in raw["sources"].items():
            table.add_row(name, *(f"{source[key]:,}" for key in columns))
        totals = (sum(source[key] for source in raw["sources"].values()) for key in columns)
        table.add_section()
        table.add_row("all", *(f"{total:,}" for total in totals))
        console.print(table)
    table = Table("dropped because", title="Dropped pairs")
    table.add_column("pairs", justify="right")
    for reason, count in raw["dropped"].items():
        table.add_row(reason, f"{count:,}")
    console.print(table)


def split_table(console: Console, raw: dict[str, Any], pieces: dict[str, Any]) -> None:
    table = Table("split", title="Splits")
    columns = ("pairs", "English words", "Vietnamese words", "pieces", "unknown pieces")
    for column in columns:
        table.add_column(column, justify="right")
    for split, words in raw["pairs"].items():
        counts = pieces[split]
        numbers = (
            counts["pairs"],
            words["en_words"],
            words["vi_words"],
            counts["pieces"],
            counts["unknown"],
        )
        table.add_row(split, *(f"{n:,}" for n in numbers))
    console.print(table)


def places(console: Console, out: Path) -> None:
    for folder, content in (
        ("raw", "plain text; references for BLEU"),
        ("spm", "the SentencePiece model"),
        ("pieces", "the text in pieces, and dict.txt"),
        ("bin", "what fairseq-train takes"),
    ):
        console.print(f"{out / folder}: {content}", soft_wrap=True, highlight=False)
