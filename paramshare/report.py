"""What sharing did to a module: counts, a table, pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from paramshare import marks
from paramshare.checks import name_rows, rows_not_finite
from paramshare.costs import cost, generation, whitening
from paramshare.errors import ShareError
from paramshare.files import whole_file
from paramshare.plan import Group, SharingPlan
from paramshare.pool import Pool, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def count_parameters(module: nn.Module) -> int:
    """Numbers that the module stores: its Parameters, each once, the constants of EPS, and what
    was quantised, with its scales."""
    scales = [m.scale for m in module.modules() if isinstance(m, Pool)]
    stored = [*module.parameters(), *(scale for scale in scales if scale is not None)]
    return sum(tensor.numel() for tensor in [*stored, *_quantized(module)])


def count_bytes(module: nn.Module) -> int:
    """Of these numbers in a file of `save_model`: one for an int8 number, two for all others that
    `quantize` rounded, else what they take in memory."""
    rounded = [part for part in module.modules() if marks.is_quantized(part)]
    narrow = {id(t) for part in rounded for t in (*part.parameters(), *_quantized(part))}
    scales = [m.scale for m in module.modules() if isinstance(m, Pool) and m.scale is not None]
    return sum(
        tensor.numel() * min(tensor.element_size(), 2 if id(tensor) in narrow else 8)
        for tensor in (*module.parameters(), *scales, *_quantized(module))
    )


def _quantized(module: nn.Module) -> list[Tensor]:
    """Values and scales of its quantised weights, each once."""
    kept = (kept for part in module.modules() for kept in marks.int8(part).values())
    return list({id(part): part for one in kept for part in one.read().parts()}.values())


class Sharing:
    """The result of `share_from_embedding`: print it, ask it, plot it. Which factored weights are
    given the same input, it says once the module has run.

    dense_parameters: numbers that the same module stored before the call.
    """

    def __init__(self, module: nn.Module, pool: Pool, dense_parameters: int) -> None:
        self.module = module
        self.pool = pool
        self.dense_parameters = dense_parameters

    @property
    def plan(self) -> SharingPlan:
        """The allocation, pure data."""
        return self.pool.plan

    @property
    def stored_parameters(self) -> int:
        """Numbers that the whole module stores now, each tensor once."""
        return count_parameters(self.module)

    @property
    def compression(self) -> float:
        """Dense over stored parameters."""
        return self.dense_parameters / self.stored_parameters

    def __str__(self) -> str:
        plan = self.plan
        rows: list[tuple[str, ...]] = [
            ("weight", "uses", "shape", "layout", "columns", "used", "wasted", "execution")
        ]
        for group in plan.groups:
            rows.append(
                (
                    group.name,
                    f"{len(group.slots)}x",
                    f"{group.rows} x {group.cols}",
                    _layout_name(group),
                    f"{group.start}-{group.start + group.columns - 1}",
                    f"{group.rows * group.cols:,}",
                    f"{group.wasted(plan.tokens):,}",
                    group.execution,
                )
            )
        return "\n".join([*_table(rows), *self._totals()])

    __repr__ = __str__

    def _totals(self) -> list[str]:
        plan = self.plan
        used = sum(group.columns for group in plan.groups)
        lifted = f", lifted to {plan.width}" if plan.width is not None else ""
        table = f"table {plan.table} ({plan.tokens} x {plan.features}{lifted})"
        kind = (
            f"virtual table {plan.tokens} x {plan.columns} = {table} @ projection "
            f"({plan.features} x {plan.columns})"
            if plan.virtual
            else table
        )
        lines = [f"{used} of {plan.columns} columns read from {kind}"]
        if any(g.layout == "column" for g in plan.groups) and any(
            g.layout == "aligned" for g in plan.groups
        ):
            lines.append(
                "weights whose rows are longer than a column cannot be aligned: column layout"
            )
        same = self.pool.same_input
        for first in sorted({first for first, other in same if other != first}):
            others = sorted(other for earlier, other in same if earlier == first != other)
            names = ", ".join(plan.groups[index].name for index in (first, *others))
            lines.append(f"given the same input, which is reduced once: {names}")
        rows = rows_not_finite(table_of(self.pool.embedding))
        if rows:
            lines.append(f"not finite: {name_rows(rows)} of {plan.table}, and all that reads there")
        if self.pool.projection is not None and rows_not_finite(self.pool.projection):
            lines.append("not finite: the projection, and all weights that read it")
        if any(map(marks.is_quantized, self.module.modules())):
            lines.append(f"quantised: {count_bytes(self.module):,} bytes")
        lines.append(self._operations())
        lines.append(
            f"stored {self.stored_parameters:,}   dense {self.dense_parameters:,}   "
            f"compression {self.compression:.2f}x"
        )
        return lines

    def _operations(self) -> str:
        """What the weights compute as they are applied; `paramshare.flops` counts a whole call."""
        plan = self.plan
        again = {other for first, other in self.pool.same_input if other != first}
        token = dense = call = 0
        for index, group in enumerate(plan.groups):
            uses = len(group.slots)
            one, two = (
                uses * cost(plan, group, group.execution, tokens, index in again).operations
                for tokens in (1, 2)
            )
            token += two - one
            call += 2 * one - two
            dense += uses * group.rows * group.cols
        materialized = [g for g in plan.groups if g.execution == "materialized"]
        once = sum(generation(plan, group).operations for group in materialized)
        once += whitening(plan).operations
        lines = [f"multiply-adds a token {token:,}   dense {dense:,}   ratio {token / dense:.2f}"]
        if call:
            lines.append(f"{call:,} a call for tiles of blockwise weights")
        if once:
            for_what = "materialized weights" if materialized else "whitening"
            lines.append(f"{once:,} once for {for_what} (in training once a call)")
        return "; ".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture: which weight reads which columns, and stored against dense.

        The format follows the file's ending. Needs the extra `plot` (matplotlib).
        Raises ShareError where matplotlib is missing or does not know the ending, and where the
        file cannot be written.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ShareError("plot() needs matplotlib: pip install 'paramshare[plot]'") from None
        path = Path(path)
        ending = path.suffix.lstrip(".").lower() or "png"
        groups = self.plan.groups
        figure = Figure(figsize=(10, 2.4 + 0.3 * len(groups)), layout="constrained")
        if ending not in FigureCanvasAgg(figure).get_supported_filetypes():
            raise ShareError(f"{path.name}: matplotlib writes no .{ending}; use .png, .svg or .pdf")
        columns, bars = figure.subplots(2, 1, height_ratios=[1 + len(groups), 2])
        self._draw_columns(columns)
        self._draw_sizes(bars)
        with whole_file(path) as temporary:
            figure.savefig(temporary, format=ending, dpi=120)

    def _draw_columns(self, axes: Axes) -> None:
        plan = self.plan
        for row, group in enumerate(plan.groups):
            used = 1 - group.wasted(plan.tokens) / (group.columns * plan.tokens)
            axes.barh(row, group.columns, left=group.start, color=f"C{row % 10}", height=0.8)
            axes.text(
                group.start + group.columns,
                row,
                f" {group.columns} columns, {used:.0%} used",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(
            range(len(plan.groups)),
            [f"{g.name}  ({len(g.slots)}x {g.rows}x{g.cols})" for g in plan.groups],
            fontsize=8,
        )
        axes.invert_yaxis()
        axes.set_xlim(0, plan.columns * 1.25)
        axes.axvline(plan.columns, color="0.6", linewidth=0.8)
        name = "virtual table" if plan.virtual else f"table {plan.table}"
        axes.set_title(f"{name}: which weight reads which of its {plan.columns} columns")
        axes.set_xlabel("column")

    def _draw_sizes(self, axes: Axes) -> None:
        table = self.plan.tokens * self.plan.features
        own = count_parameters(self.pool)
        rest = self.stored_parameters - table - own
        left = 0
        what = "projection" if self.plan.virtual else "constants"
        for label, size in (("table", table), (what, own), ("not shared", rest)):
            axes.barh(1, size, left=left, label=f"{label} {size:,}")
            left += size
        axes.barh(0, self.dense_parameters, color="0.7", label=f"dense {self.dense_parameters:,}")
        axes.set_yticks([0, 1], ["dense", "stored"])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"parameters (compression {self.compression:.2f}x)")
        axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _layout_name(group: Group) -> str:
    return f"aligned/{group.blocks}" if group.layout == "aligned" else group.layout


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
