"""What prepare.py shows at the end."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLACES = {
    "text": "plain text: train-*.txt, dev.txt",
    "tokenizer": "for transformers' AutoTokenizer",
    "blocks": "rows of ids: train-*.npy, dev.npy",
    "fairseq": "the same rows for fairseq-train",
    "labelled": "sentiment: {train,dev,test}.jsonl",
    "words": "similarities and analogies of words",
    "sentences": "sentences to distil on: train.txt, dev.txt",
}


def show(console: Console, out: Path, figures: dict[str, dict[str, Any]]) -> None:
    """`figures` are those of the stages that were made."""
    _table(console, "Text", "source", figures["text"]["sources"])
    blocks = figures["blocks"]
    splits = {split: blocks[split] for split in ("train", "dev")}
    title = f"Blocks of {blocks['length']} tokens, {blocks['vocab_size']:,} in the vocabulary"
    _table(console, title, "split", splits)
    if "labelled" in figures:
        _table(console, "Labelled texts, half of them positive", "split", figures["labelled"])
    for name, content in PLACES.items():
        if name in figures:
            console.print(f"{out / name}: {content}", soft_wrap=True, highlight=False)


def _table(console: Console, title: str, first: str, rows: dict[str, dict[str, int]]) -> None:
    table = Table(first, title=title)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row.get(column, 0):,}" for column in columns))
    if len(rows) > 1:
        table.add_section()
        totals = (sum(row.get(column, 0) for row in rows.values()) for column in columns)
        table.add_row("all", *(f"{total:,}" for total in totals))
    console.print(table)
