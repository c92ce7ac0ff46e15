"""The plan: which weights read which columns. Pure data, checked before a module is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from math import sqrt
from typing import Any

from paramshare.errors import ShareError
from paramshare.layout import LAYOUTS, check_blocks, fit, largest_blocks
from paramshare.slots import Slot

INITS = ("match", "paper")
EXECUTIONS = ("auto", "materialized", "factored")


@dataclass(frozen=True)
class Group:
    """The slots that read the same columns, and how. Fields out of `==` do not change values."""

    name: str
    slots: tuple[str, ...]  # paths of Parameters, from the shared module
    rows: int
    cols: int
    layout: str
    start: int  # first column
    columns: int
    blocks: int  # aligned layout: rows of the matrix in a column; else 0
    execution: str = field(compare=False, default="materialized")
    spread: float | None = field(compare=False, default=None)  # that init="match" gives

    def wasted(self, tokens: int) -> int:
        """Numbers in the columns that the weight does not use: delta of the paper."""
        return self.columns * tokens - self.rows * self.cols


@dataclass(frozen=True)
class SharingPlan:
    """The finished allocation. `to_dict` and `from_dict` keep it as JSON-able data."""

    table: str  # path of the embedding module, from the shared module
    tokens: int
    features: int
    virtual: bool
    columns: int  # of the matrix that is read: the virtual table's, or the table's own
    projection_bias: bool
    init: str
    groups: tuple[Group, ...]
    table_gradient: float = field(compare=False, default=1.0)

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only."""
        plan = asdict(self)
        plan["groups"] = [{**group, "slots": list(group["slots"])} for group in plan["groups"]]
        return {"version": 1, **plan}

    @classmethod
    def from_dict(cls, plan: dict[str, Any]) -> SharingPlan:
        """Raises ShareError when the data is not a plan of a version that is known."""
        plan = dict(plan)
        version = plan.pop("version", None)
        if version != 1:
            raise ShareError(f"a sharing plan of version {version!r} cannot be read, only of 1")
        try:
            groups = tuple(Group(**{**g, "slots": tuple(g["slots"])}) for g in plan.pop("groups"))
            return cls(**plan, groups=groups)
        except (KeyError, TypeError) as error:
            raise ShareError(f"this is no sharing plan: {error}") from None

    def difference(self, other: SharingPlan) -> str | None:
        """The first thing in which the weights that two plans give differ, None when nothing."""
        if len(self.groups) != len(other.groups):
            return f"{len(self.groups)} groups against {len(other.groups)}"
        pairs: list[tuple[str, Any, Any]] = [("", self, other)]
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            pairs.append((f"group {mine.name}: ", mine, theirs))
        for where, ours, others in pairs:
            for f in fields(ours):
                a, b = getattr(ours, f.name), getattr(others, f.name)
                if f.compare and f.name != "groups" and a != b:
                    return f"{where}{f.name} {a!r} against {b!r}"
        return None


def make_plan(
    groups: dict[str, list[Slot]],
    *,
    table: str,
    tokens: int,
    features: int,
    virtual: bool,
    layout: str,
    blocks: int | None,
    virtual_dim: int | None,
    projection_bias: bool,
    table_gradient: float,
    init: str,
    execution: str,
    taken: int,
) -> SharingPlan:
    """Allocates columns to the groups in their order.

    taken: EPS columns of this table that earlier calls use already; ours come after them. In the
    token layout columns are handed out from the last one backwards, as the released code does.
    Raises ShareError when an option makes no sense or the columns do not suffice (Eq. 4).
    """
    _check_options(virtual, layout, virtual_dim, projection_bias, table_gradient, init, execution)
    shapes = {name: (slots[0].rows, slots[0].cols) for name, slots in groups.items()}
    check_blocks(blocks, layout, max(largest_blocks(cols, tokens) for _, cols in shapes.values()))
    fits = {name: fit(layout, *shape, tokens, blocks) for name, shape in shapes.items()}
    needed = sum(columns for _, columns, _ in fits.values())
    available = _columns(virtual, virtual_dim, features, needed, taken)

    done = []
    start = 0 if virtual else taken
    backwards = layout == "token"
    for name, slots in groups.items():
        used_layout, columns, used_blocks = fits[name]
        done.append(
            Group(
                name=name,
                slots=tuple(slot.path for slot in slots),
                rows=slots[0].rows,
                cols=slots[0].cols,
                layout=used_layout,
                start=available - start - columns if backwards else start,
                columns=columns,
                blocks=used_blocks,
                execution=choose_execution(execution, slots, used_layout, *fits[name][1:], features)
                if virtual
                else "materialized",
                spread=_spread(slots, virtual) if init == "match" else None,
            )
        )
        start += columns
    if execution == "factored" and all(group.execution != "factored" for group in done):
        raise ShareError(
            "execution='factored' fits none of the weights: it needs virtual=True, the aligned "
            "layout and layers that apply their weight by nn.Linear.forward; use execution='auto'"
        )
    return SharingPlan(
        table=table,
        tokens=tokens,
        features=features,
        virtual=virtual,
        columns=available,
        projection_bias=projection_bias,
        init=init,
        groups=tuple(done),
        table_gradient=table_gradient,
    )


def factored_operations(rows: int, cols: int, columns: int, blocks: int, features: int) -> int:
    """Multiply-adds a token of the factored product; the dense one needs rows * cols."""
    return features * (blocks * cols + blocks * columns)


def choose_execution(
    execution: str, slots: Sequence[Slot], layout: str, columns: int, blocks: int, features: int
) -> str:
    """How a group of a virtual table is applied: `"materialized"` or `"factored"`."""
    rows, cols = slots[0].rows, slots[0].cols
    possible = layout == "aligned" and all(slot.called for slot in slots)
    wins = factored_operations(rows, cols, columns, blocks, features) < rows * cols
    if possible and (execution == "factored" or (execution == "auto" and wins)):
        return "factored"
    return "materialized"


def _check_options(
    virtual: bool,
    layout: str,
    virtual_dim: int | None,
    projection_bias: bool,
    table_gradient: float,
    init: str,
    execution: str,
) -> None:
    for name, value, known in (
        ("layout", layout, LAYOUTS),
        ("init", init, INITS),
        ("execution", execution, EXECUTIONS),
    ):
        if value not in known:
            raise ShareError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")
    if not 0 <= table_gradient <= 1:
        raise ShareError(f"table_gradient={table_gradient} is out of range: use 0 to 1")
    if not virtual:
        if virtual_dim is not None:
            raise ShareError(f"virtual_dim={virtual_dim} needs virtual=True")
        if projection_bias:
            raise ShareError("projection_bias=True needs virtual=True")
        if table_gradient == 0:
            raise ShareError("table_gradient=0 needs virtual=True: with EPS nothing would train")


def _columns(virtual: bool, virtual_dim: int | None, features: int, needed: int, taken: int) -> int:
    """Columns of the matrix that is read, checked against those that are needed."""
    if virtual:
        if virtual_dim is not None and virtual_dim < needed:
            raise ShareError(
                f"needs {needed} columns, virtual_dim={virtual_dim} is {needed - virtual_dim} too "
                "few; leave virtual_dim out, or share fewer weights"
            )
        return needed if virtual_dim is None else virtual_dim
    if taken + needed > features:
        earlier = f", of which earlier calls use {taken}" if taken else ""
        raise ShareError(
            f"needs {needed} columns, the table has {features}{earlier}: "
            f"{taken + needed - features} are missing; use virtual=True, share fewer weights "
            "(select=, depth='all'), or widen the table"
        )
    return features


def _spread(slots: Sequence[Slot], virtual: bool) -> float:
    """Root mean square of the spreads of the group's weights."""
    spread = sqrt(sum(slot.spread() ** 2 for slot in slots) / len(slots))
    # A weight that starts at zero can do so through its projection, but an EPS constant of zero
    # would keep it there for ever.
    return spread if spread > 0 or virtual else slots[0].documented_spread()
