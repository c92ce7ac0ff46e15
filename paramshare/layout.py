"""Layouts: how a block of columns is read as a matrix. Index maths only, no modules.

A weight of `rows x cols` numbers (out x in, as `nn.Linear` stores it) is read from `columns`
whole columns of a matrix with one row a token; what is left over in them is discarded.

* column: top to bottom, one column after another, poured row by row (the article's wording).
* token: token by token across the block, into the transposed matrix (the released ShareBERT).
* aligned: no matrix row crosses a column: a column holds `blocks` whole rows, one below another.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from paramshare.errors import ShareError
from paramshare.int8 import Int8Blocks, Int8Matrix

LAYOUTS = ("aligned", "column", "token")


def largest_blocks(cols: int, tokens: int) -> int:
    """How many whole matrix rows of `cols` numbers a column of `tokens` numbers holds."""
    return tokens // cols


def fit(layout: str, rows: int, cols: int, tokens: int, blocks: int | None) -> tuple[str, int, int]:
    """Returns `(layout, columns, blocks)` of a `rows x cols` weight.

    `blocks` is the most rows that a column may hold (aligned layout only; default: what fits).
    The returned blocks are those used, 0 outside of the aligned layout. A weight whose rows are
    longer than a column cannot be aligned and falls back to the column layout.
    """
    if layout == "aligned" and cols <= tokens:
        most = largest_blocks(cols, tokens)
        columns = _ceil(rows, most if blocks is None else min(blocks, most))
        return "aligned", columns, _ceil(rows, columns)
    # Eq. 3 of the paper: G = ceil(L / E).
    return ("token" if layout == "token" else "column"), _ceil(rows * cols, tokens), 0


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)  # exact, also where floats are not


def check_blocks(blocks: int | None, layout: str, largest: int) -> None:
    """Raises ShareError unless `blocks` makes sense for the layout and the longest column."""
    if blocks is None:
        return
    if layout != "aligned":
        raise ShareError(f"blocks={blocks} belongs to layout='aligned', not to layout={layout!r}")
    if not 1 <= blocks <= largest:
        raise ShareError(
            f"blocks={blocks} is out of range: a column of this table holds between 1 and "
            f"{largest} whole rows of the weights that are shared"
        )


def read(part: Tensor, rows: int, cols: int, layout: str, blocks: int) -> Tensor:
    """The `(rows, cols)` matrix that stands in `part`, its columns as `(columns, tokens)`.

    Column layout: a view where `part` is contiguous. The others copy rows * cols numbers.
    """
    if layout == "aligned":
        weight = rearrange(part[:, : blocks * cols], "g (q i) -> (q g) i", q=blocks)[:rows]
        return weight.contiguous()  # a column of one block is a view of all its tokens
    if layout == "column":
        return part.reshape(-1)[: rows * cols].view(rows, cols)
    return rearrange(part, "g e -> (e g)")[: rows * cols].view(cols, rows).t()


def table_blocks(table: Tensor | Int8Matrix, cols: int, blocks: int) -> Tensor | Int8Blocks:
    """The first `blocks * cols` tokens of the table as a `(blocks, cols, features)` view."""
    if isinstance(table, Int8Matrix):
        return table.blocks(cols, blocks)
    return table[: blocks * cols].view(blocks, cols, table.shape[1])
