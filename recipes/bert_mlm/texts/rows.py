"""Rows of a file: .jsonl, .csv with a header, .tsv without quotes, .parquet.

A row that can be read in two ways is refused: a column or key that is there twice, more or fewer
cells than columns, quotes that do not end.
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from records import keys_once, twice
from script import check_installed
from stages import UserError


class Row(NamedTuple):
    """`place` names its file and its line there, in Parquet its number; `cells` are by column."""

    place: str
    cells: dict[str, Any]


def read_rows(
    path: Path, header: Sequence[str] | None = None, *, cut_off: bool = False
) -> list[Row]:
    """All rows. UserError if the file cannot be read or has none.

    header: names of the columns of a .csv or .tsv whose first line is a row already. cut_off: its
    rows may end early, and then have no cells in the last columns.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: rows are read from {', '.join(SUFFIXES)} files")
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    rows = list(_READERS[suffix](path, header, cut_off))
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _json_lines(path: Path, header: Sequence[str] | None, cut_off: bool) -> Iterator[Row]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                cells = json.loads(line, object_pairs_hook=keys_once)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place} is not JSON: {error}") from None
            if not isinstance(cells, dict):
                raise UserError(f"{place} is not a JSON object")
            yield Row(place, cells)


def _csv(path: Path, header: Sequence[str] | None, cut_off: bool) -> Iterator[Row]:
    cure = "a comma or a line end in a text needs quotes around the text"
    for row in _table(path, header, cut_off, cure, strict=True):
        if any(
            cell.lstrip(" ").startswith('"') and cell.startswith(" ") for cell in row.cells.values()
        ):
            raise UserError(f"{row.place} has a space before a quote, which would be read as text")
        yield row


def _tsv(path: Path, header: Sequence[str] | None, cut_off: bool) -> Iterator[Row]:
    cure = "a text cannot have tabs or line ends here, but it can in a .csv"
    return _table(path, header, cut_off, cure, delimiter="\t", quoting=csv.QUOTE_NONE)


def _table(
    path: Path, header: Sequence[str] | None, cut_off: bool, cure: str, **form: Any
) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_text(path), newline=""), **form)
    names = list(header or ())
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{place} is not CSV: {error}") from None
        stripped = [cell.strip().removeprefix("\ufeff") for cell in cells]
        if not cells:
            continue
        if not names:
            names = stripped
            if name := twice(filter(None, names)):
                raise UserError(f"{path} has the column {name!r} twice")
        elif stripped == names:  # two files, one after the other
            raise UserError(f"{place} is the header again")
        elif len(cells) > len(names) or (len(cells) < len(names) and not cut_off):
            raise UserError(f"{place} has {len(cells)} cell(s) for {len(names)} columns: {cure}")
        else:
            yield Row(place, dict(zip(names, cells, strict=False)))


def _parquet(path: Path, header: Sequence[str] | None, cut_off: bool) -> Iterator[Row]:
    check_installed({"pyarrow": "pyarrow"})
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            table = file.read().combine_chunks()
        if name := twice(table.column_names):
            raise UserError(f"{path} has the column {name!r} twice")
        table.validate(full=True)  # names rows that are not UTF-8
        rows = table.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is not a Parquet file that can be read: {reason}") from None
    for number, cells in enumerate(rows, 1):
        yield Row(f"{path}, row {number}", cells)


def _text(path: Path) -> str:
    """As a whole, for a decoder of parts does not know which line it is in."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8 text") from None


_READERS: dict[str, Callable[[Path, Sequence[str] | None, bool], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
SUFFIXES = tuple(_READERS)
