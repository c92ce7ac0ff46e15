"""The plan: which weights read which columns. Pure data, checked before a module is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite, sqrt
from reprlib import repr as shorten  # of any length and depth
from typing import Any

from paramshare.errors import ShareError
from paramshare.layout import LAYOUTS, check_blocks, fit, largest_blocks
from paramshare.slots import Slot

INITS = ("match", "paper")
EXECUTIONS = ("auto", "materialized", "factored", "blockwise")


@dataclass(frozen=True)
class Group:
    """The slots that read the same columns, and how. Fields out of `==` do not change values."""

    name: str = field(compare=False)
    slots: tuple[str, ...]  # paths of Parameters, from the shared module
    rows: int
    cols: int
    layout: str
    start: int  # first column
    columns: int
    blocks: int  # aligned layout: rows of the matrix in a column; else 0
    out_last: bool = False  # the last dimension of the Parameter is its rows, not the first
    execution: str = field(compare=False, default="materialized")
    spread: float | None = field(compare=False, default=None)  # that init="match" gives

    def tokens_read(self, tokens: int) -> int:
        """How many of the first tokens the weight's numbers stand in."""
        return self.blocks * self.cols if self.layout == "aligned" else tokens

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
    groups: tuple[Group, ...]
    init: str = field(compare=False)  # whether EPS has constants shows in what is stored
    table_gradient: float = field(compare=False, default=1.0)
    width: int | None = None  # of the module's embedding, where embedding_dim narrowed its table
    whiten: bool = False  # the projection is multiplied by the inverse root of the table's moments

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers only."""
        plan = asdict(self)
        plan["groups"] = [{**group, "slots": list(group["slots"])} for group in plan["groups"]]
        return {"version": 2, **plan}

    @classmethod
    def from_dict(cls, plan: dict[str, Any]) -> SharingPlan:
        """Raises ShareError when the data is not a plan of a version that is known."""
        if not isinstance(plan, dict):
            raise ShareError(f"this is no sharing plan: a {type(plan).__name__}")
        plan = dict(plan)
        version = plan.pop("version", None)
        if type(version) is not int or version not in (1, 2):
            raise ShareError(
                f"a sharing plan of version {shorten(version)} cannot be read, only of 1 and 2"
            )
        try:
            if ("whiten" in plan) != (version > 1):
                raise ValueError(f"'whiten' belongs to version 2, and this is of {version}")
            groups = tuple(map(_read_group, _sequence(plan.pop("groups"), "groups")))
            made = cls(**plan, groups=groups)
            made._check()
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ShareError(f"this is no sharing plan: {error}") from None
        return made

    def _check(self) -> None:
        """Raises ValueError or TypeError unless the data is what `make_plan` could have made."""
        _check_types(self, "")
        for number, group in enumerate(self.groups, 1):
            _check_types(group, f"group {number}: ")
        if self.init not in INITS or not self.table:
            raise ValueError("its init is no known word, or its table no path")
        if not min(self.tokens, self.features, self.columns) > 0 or not self.groups:
            raise ValueError("its sizes are not positive whole numbers")
        if self.width is not None and self.width <= self.features:
            raise ValueError(f"its table of {self.features} features is no narrow one of a wide")
        if not 0 <= self.table_gradient <= 1 or self.columns > self.features and not self.virtual:
            raise ValueError("its table_gradient or columns are out of range")
        if not self.virtual and (self.projection_bias or self.table_gradient == 0):
            raise ValueError("it has no projection, but a bias of it or no gradient of the table")
        if not self.virtual and self.whiten:
            raise ValueError("it has no projection that could be whitened")
        position = 0
        for group in sorted(self.groups, key=lambda g: g.start):
            limit = group.blocks if group.layout == "aligned" else None
            if min(group.rows, group.cols, 1 if limit is None else limit) < 1:
                raise ValueError(f"group {group.name} has sizes that are not above zero")
            found = fit(group.layout, group.rows, group.cols, self.tokens, limit)
            wanted = (group.layout, group.columns, group.blocks)
            if found != wanted or group.start < position:
                raise ValueError(f"group {group.name} does not fit its columns")
            if group.layout not in LAYOUTS or group.execution not in EXECUTIONS[1:]:
                raise ValueError(f"group {group.name} has an unknown layout or execution")
            if group.execution not in possible_executions(group.layout, self.virtual):
                raise ValueError(f"group {group.name} cannot run {group.execution}")
            if not group.slots:
                raise ValueError(f"group {group.name} has no paths of weights")
            if group.spread is not None and group.spread < 0:
                raise ValueError(f"group {group.name} has a spread below zero")
            position = group.start + group.columns
        if position > self.columns:
            raise ValueError(f"its groups need {position} columns of {self.columns}")
        paths = [path for group in self.groups for path in group.slots]
        if len(set(paths)) < len(paths):
            raise ValueError("one of its weights stands there twice")

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


def _read_group(group: Any) -> Group:
    return Group(**{**group, "slots": _sequence(group["slots"], "slots")})


def _sequence(values: Any, what: str) -> tuple[Any, ...]:
    # A text is one, too, of its letters.
    if not isinstance(values, list | tuple):
        raise TypeError(f"its {what} are a {type(values).__name__}, not a list")
    return tuple(values)


# As the fields above are annotated. True and 1.0 are no whole numbers: as a size or a position they
# would only fail in the forward.
_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**63,
    "float": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v),
    "int | None": lambda value: value is None or _FITS["int"](value),
    "float | None": lambda value: value is None or _FITS["float"](value),
    "tuple[str, ...]": lambda value: all(map(_FITS["str"], value)),
    "tuple[Group, ...]": lambda value: True,
}


def _check_types(data: SharingPlan | Group, where: str) -> None:
    for f in fields(data):
        value = getattr(data, f.name)
        if not _FITS[str(f.type)](value):
            raise TypeError(f"{where}{f.name} is {shorten(value)}, not of type {f.type}")


def make_plan(
    groups: dict[str, list[Slot]],
    *,
    table: str,
    tokens: int,
    features: int,
    width: int | None,
    virtual: bool,
    layout: str,
    blocks: int | None,
    virtual_dim: int | None,
    projection_bias: bool,
    table_gradient: float,
    init: str,
    whiten: bool,
    execution: str,
    taken: list[tuple[int, int]],
) -> SharingPlan:
    """Allocates columns to the groups in their order.

    taken: (first, end) of EPS columns of this table that earlier calls use; ours are a free run
    beside them. In the token layout columns are handed out from the last one backwards, as the
    released code does.
    Raises ShareError when an option makes no sense or the columns do not suffice (Eq. 4).
    """
    _check_options(
        virtual,
        layout,
        blocks,
        virtual_dim,
        projection_bias,
        table_gradient,
        init,
        whiten,
        execution,
    )
    shapes = {name: (slots[0].rows, slots[0].cols) for name, slots in groups.items()}
    check_blocks(blocks, layout, max(largest_blocks(cols, tokens) for _, cols in shapes.values()))
    fits = {name: fit(layout, *shape, tokens, blocks) for name, shape in shapes.items()}
    needed = sum(columns for _, columns, _ in fits.values())
    backwards = layout == "token"
    available = _columns(virtual, virtual_dim, features, needed)
    first = _free_run(needed, available, taken, backwards)

    done = []
    position = first + needed if backwards else first
    for name, slots in groups.items():
        used_layout, columns, used_blocks = fits[name]
        position -= columns if backwards else 0
        done.append(
            Group(
                name=name,
                slots=tuple(slot.path for slot in slots),
                rows=slots[0].rows,
                cols=slots[0].cols,
                layout=used_layout,
                start=position,
                columns=columns,
                blocks=used_blocks,
                out_last=slots[0].out_last,
                execution=choose_execution(
                    execution, slots, used_layout, columns, used_blocks, features, virtual
                ),
                spread=_spread(slots, virtual) if init == "match" else None,
            )
        )
        position += 0 if backwards else columns
    if execution != "auto" and all(group.execution != execution for group in done):
        virtual_too = "virtual=True, " if execution == "factored" else ""
        raise ShareError(
            f"execution={execution!r} fits none of the weights: it needs {virtual_too}the aligned "
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
        width=width,
        whiten=whiten,
    )


def factored_operations(cols: int, columns: int, blocks: int, features: int) -> int:
    """Multiply-adds a token of the factored product; the dense one needs rows * cols."""
    return features * (blocks * cols + blocks * columns)


def choose_execution(
    execution: str,
    slots: Sequence[Slot],
    layout: str,
    columns: int,
    blocks: int,
    features: int,
    virtual: bool,
) -> str:
    """How a group is applied: as the call says where that is possible, by operations where it says
    `"auto"`."""
    rows, cols = slots[0].rows, slots[0].cols
    if execution == "auto":
        wins = factored_operations(cols, columns, blocks, features) < rows * cols
        execution = "factored" if wins else "materialized"
    called = all(slot.called for slot in slots)
    return (
        execution
        if called and execution in possible_executions(layout, virtual)
        else "materialized"
    )


def possible_executions(layout: str, virtual: bool) -> tuple[str, ...]:
    """Of a weight that its layer applies by `nn.Linear.forward`; of others the first only."""
    if layout != "aligned":
        return ("materialized",)
    return ("materialized", "blockwise", "factored") if virtual else ("materialized", "blockwise")


def _check_options(
    virtual: bool,
    layout: str,
    blocks: int | None,
    virtual_dim: int | None,
    projection_bias: bool,
    table_gradient: float,
    init: str,
    whiten: bool,
    execution: str,
) -> None:
    for name, value, known in (
        ("layout", layout, LAYOUTS),
        ("init", init, INITS),
        ("execution", execution, EXECUTIONS),
    ):
        if value not in known:
            raise ShareError(f"{name}={value!r} is unknown: use one of {', '.join(known)}")
    for name, number, kind in (
        ("blocks", blocks, int | None),
        ("virtual_dim", virtual_dim, int | None),
        ("table_gradient", table_gradient, float | int),
        ("virtual", virtual, bool),
        ("projection_bias", projection_bias, bool),
        ("whiten", whiten, bool),
    ):
        if not isinstance(number, kind) or isinstance(number, bool) and kind is not bool:
            raise ShareError(f"{name}={number!r} is a {type(number).__name__}, not {kind}")
    if not 0 <= table_gradient <= 1:
        raise ShareError(f"table_gradient={table_gradient} is out of range: use 0 to 1")
    if not virtual:
        if virtual_dim is not None:
            raise ShareError(f"virtual_dim={virtual_dim} needs virtual=True")
        if projection_bias:
            raise ShareError("projection_bias=True needs virtual=True")
        if whiten:
            raise ShareError("whiten=True needs virtual=True: it changes the projection")
        if table_gradient == 0:
            raise ShareError("table_gradient=0 needs virtual=True: with EPS nothing would train")


_MOST_COLUMNS = 2**31


def _columns(virtual: bool, virtual_dim: int | None, features: int, needed: int) -> int:
    """Columns of the matrix that is read."""
    if not virtual:
        return features
    if virtual_dim is not None and virtual_dim < needed:
        raise ShareError(
            f"needs {needed} columns, virtual_dim={virtual_dim} is {needed - virtual_dim} too "
            "few; leave virtual_dim out, or share fewer weights"
        )
    if virtual_dim is not None and virtual_dim > _MOST_COLUMNS:
        raise ShareError(
            f"virtual_dim={virtual_dim} is out of range: {needed} suffice, and {_MOST_COLUMNS:,} "
            "are the most"
        )
    return needed if virtual_dim is None else virtual_dim


def _free_run(needed: int, available: int, taken: list[tuple[int, int]], backwards: bool) -> int:
    """First column of the first (last, going backwards) run of free columns that suffices."""
    edges = [(0, 0), *sorted(taken), (available, available)]
    gaps = [(a[1], b[0]) for a, b in zip(edges, edges[1:], strict=False)]
    free = [(start, end) for start, end in gaps if end - start >= needed]
    if not free:
        used = sum(end - start for start, end in taken)
        longest = max(end - start for start, end in gaps)
        earlier = f", of which earlier calls use {used}" if used else ""
        raise ShareError(
            f"needs {needed} columns, the table has {available}{earlier}: "
            f"{needed - longest} are missing; use virtual=True, share fewer weights "
            "(select=, depth='all'), or widen the table"
        )
    return free[-1][1] - needed if backwards else free[0][0]


def _spread(slots: Sequence[Slot], virtual: bool) -> float:
    """Root mean square of the spreads of the group's weights."""
    spread = sqrt(sum(slot.spread() ** 2 for slot in slots) / len(slots))
    # A weight that starts at zero can do so through its projection, but an EPS constant of zero
    # would keep it there for ever, and a direction of zero is none.
    zero_will_do = virtual and not slots[0].normed
    return spread if spread > 0 or zero_will_do else slots[0].documented_spread()
