"""Rows of a file as dictionaries: .jsonl, .csv with a header, .tsv without quotes, .parquet."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from script import check_installed
from stages import UserError

Row = dict[str, Any]


def read_rows(path: Path, header: Sequence[str] | None = None) -> list[Row]:
    """All rows. UserError if the file cannot be read or has none.

    header: names of the columns of a file whose first line is a row already.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: rows are read from {', '.join(SUFFIXES)} files")
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        rows = list(_READERS[suffix](path, header))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _json_lines(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}, line {number} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number} is not a JSON object")
                yield row


def _csv(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", newline="") as lines:
        reader = _named(csv.DictReader(lines, header))
        for row in reader:
            if None in row:  # a comma in a text that is not in quotes
                raise UserError(f"{path}, line {reader.line_num} has more cells than the header")
            yield row


def _tsv(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", newline="") as lines:
        yield from _named(csv.DictReader(lines, header, delimiter="\t", quoting=csv.QUOTE_NONE))


def _named(reader: csv.DictReader) -> csv.DictReader:
    """With columns that mean the same where spaces follow the commas."""
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    return reader


def _parquet(path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    check_installed({"pyarrow": "pyarrow"})
    from pyarrow import ArrowException, parquet

    try:
        yield from parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is not a Parquet file that can be read: {reason}") from None


_READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
SUFFIXES = tuple(_READERS)
