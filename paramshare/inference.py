"""How each shared weight is applied in inference: chosen from operations and bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from paramshare import derived, marks
from paramshare.costs import cost, generation, kept_numbers, whitening
from paramshare.errors import ShareError
from paramshare.held import weights_in
from paramshare.operations import Tokens, call, evaluating, operation_counter
from paramshare.plan import possible_executions
from paramshare.pool import Pool
from paramshare.sharing import check_not_quantized, check_whole, named_pools
from paramshare.slots import is_linear
from paramshare.trace import Allocations

Key = tuple[Pool, int]  # a group
_MATERIALIZED = ("materialized",)


@dataclass(frozen=True)
class Prepared:
    """What `prepare_for_inference` chose, and what it predicts. Print it for a table.

    executions: by the name of the group. operations: FLOPs of the call. generation: FLOPs that
    materialized weights take once, before it. In bytes: stored; kept, the materialized weights;
    working, the most that the call takes beside these at a time; peak, all of it together, or what
    there is while weights are generated where that is more.
    """

    executions: dict[str, str]
    operations: int
    generation: int
    stored_bytes: int
    kept_bytes: int
    working_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        width = max(map(len, self.executions))
        return "\n".join(
            [
                *(f"{name:{width}}  {how}" for name, how in self.executions.items()),
                f"a call takes {self.operations / 1e9:.3f} GFLOPs; before it, once, weights that "
                f"are kept take {self.generation / 1e9:.3f}",
                f"peak {self.peak_bytes / 1e6:.1f} MB: {self.stored_bytes / 1e6:.1f} stored, "
                f"{self.kept_bytes / 1e6:.1f} weights that are kept, "
                f"{self.working_bytes / 1e6:.1f} working memory",
            ]
        )

    __repr__ = __str__


def prepare_for_inference(
    module: nn.Module, memory_budget: int | None = None, tokens: Tokens = 128
) -> Prepared:
    """Chooses for each shared weight whether it is materialized, factored or blockwise, so that a
    call takes the fewest operations; prints that; and puts the module into eval mode.

    memory_budget: bytes that the module may take at its peak, what is stored included. What does
    not fit in is applied in ways that take less memory, the cheapest first.
    tokens: how many, for a module that is called with ids `(1, tokens)`; or its input; or all its
    inputs, as a tuple or as a dict of keyword arguments. The module is called with them, its shared
    weights giving zeros, to see what they are applied to and which memory the rest takes.

    What whitening makes of the projections is stored in their place; `train()` takes that back.
    The choice is for calls of that size without gradients; prepare for decoding with what one step
    is called with. Weights that are read in it, and not applied by `nn.Linear.forward`
    (attention, recurrent modules), stay materialized.

    Raises ShareError, the module being what it was: nothing is shared, or it is quantised (which
    comes afterwards), the call fails, or no choice fits the budget.
    """
    check_not_quantized(module)
    is_number = isinstance(memory_budget, int | float) and memory_budget == memory_budget
    if memory_budget is not None and not is_number:
        raise ShareError(f"memory_budget={memory_budget!r} is no number of bytes")
    record = _record(module, tokens)
    chosen = _choose(record, memory_budget)
    _set(module, chosen)
    module.eval()
    for pool in check_whole(module):
        pool.fold()
    prepared = _predict(record, chosen)
    print(prepared)
    return prepared


def predict(module: nn.Module, tokens: Tokens = 128) -> Prepared:
    """What a call takes with the executions as they are; see `prepare_for_inference`. Weights that
    are read and not applied are taken as materialized. Raises ShareError."""
    record = _record(module, tokens)
    executions = {
        key: pool.plan.groups[index].execution if len(record.groups[key][1]) > 1 else "materialized"
        for key in record.groups
        for pool, index in [key]
    }
    return _predict(record, executions, folded=False)


def _groups(module: nn.Module) -> dict[Key, tuple[str, tuple[str, ...]]]:
    """Name and possible executions of each group, with the one first that keeps nothing."""
    read = {
        (source.pool, source.group)
        for owner in module.modules()
        for name, source in marks.sources(owner).items()
        if not is_linear(owner, name)
    }
    found = {}
    for path, pool in named_pools(module):
        for index, group in enumerate(pool.plan.groups):
            possible = possible_executions(group.layout, pool.plan.virtual)
            name = f"{path}.{group.name}" if path else group.name
            found[pool, index] = name, _MATERIALIZED if (pool, index) in read else possible[::-1]
    return found


def _set(module: nn.Module, executions: dict[Key, str]) -> None:
    """Makes the groups' executions what is given."""
    for pool in {pool: None for pool, _ in executions}:
        pool.holder.kept = None
        groups = tuple(
            replace(group, execution=executions[pool, index])
            for index, group in enumerate(pool.plan.groups)
        )
        pool.plan = replace(pool.plan, groups=groups)
    for owner in module.modules():
        if marks.sources(owner):
            derived.refresh(owner)


# ---------------------------------------------------------------------- what a call does


@dataclass(frozen=True)
class _Moment:
    """When a weight is applied, or (`group` is None) when an input is gone or the call ends.

    peak: bytes alive at most since the last moment; live: now. Both without what the weights take.
    input: which one it is.
    """

    peak: int
    live: int
    group: Key | None = None
    tokens: int = 0
    input: int | None = None


@dataclass(frozen=True)
class _Record:
    """A call as it went. fixed: FLOPs of all but the weights up to choice. stored: bytes."""

    groups: dict[Key, tuple[str, tuple[str, ...]]]
    moments: list[_Moment]
    fixed: int
    stored: int


def _record(module: nn.Module, tokens: Tokens) -> _Record:
    """Calls the module, in which nothing is materialized meanwhile but what is read."""
    if not check_whole(module):
        raise ShareError(f"nothing in this {type(module).__name__} is shared")
    for owner in module.modules():
        if marks.sources(owner):
            derived.check_restore(owner)  # before anything is changed: it will be made anew
    groups = _groups(module)
    before = {key: key[0].plan.groups[key[1]].execution for key in groups}
    try:
        _set(module, {key: possible[0] for key, (_, possible) in groups.items()})
        return _watch(module, groups, tokens)
    finally:
        _set(module, before)


def _watch(
    module: nn.Module, groups: dict[Key, tuple[str, tuple[str, ...]]], tokens: Tokens
) -> _Record:
    trace, counter = Allocations(), operation_counter()
    moments: list[_Moment] = []
    inputs: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # (reference, version, which)

    def note(*what: Any) -> None:
        moments.append(_Moment(trace.peak_since_last(), trace.live, *what))

    def which(input: Tensor) -> int:
        known = inputs.get(id(input))
        if known is None or known[0]() is not input or known[1] != input._version:
            number = len(moments)
            gone = weakref.ref(input, lambda _: note(None, 0, number))
            known = inputs[id(input)] = gone, input._version, number
        return known[2]

    def stand_in(key: Key) -> Callable[[Tensor], Tensor]:
        rows = key[0].plan.groups[key[1]].rows

        def forward(input: Tensor) -> Tensor:
            note(key, input.numel() // max(input.shape[-1], 1), which(input))
            return input.new_zeros(*input.shape[:-1], rows)

        return forward

    choices = (key for key, (_, possible) in groups.items() if len(possible) > 1)
    with evaluating(module), _replaced(module, {key: stand_in(key) for key in choices}):
        call(module, tokens)  # generates what is read, which is not up to choice
        kept = {pool: pool.holder.kept or {} for pool, _ in groups}
        read = {(pool, index) for pool, frame in kept.items() for index, *_ in weights_in(frame)}
        groups = {
            key: (name, _MATERIALIZED if key in read else possible)
            for key, (name, possible) in groups.items()
        }
        moments.clear()
        inputs.clear()
        with counter, trace:
            call(module, tokens)
        note()
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    stored = sum(t.numel() * t.element_size() for t in tensors.values())
    return _Record(groups, list(moments), counter.get_total_flops(), stored)


@contextmanager
def _replaced(module: nn.Module, forwards: dict[Key, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """The layers that apply the groups' weights have these forwards instead."""
    replaced = []
    try:
        for owner in module.modules():
            source = marks.sources(owner).get("weight")
            forward = source and forwards.get((source.pool, source.group))
            if forward:
                owner.__dict__["forward"] = forward
                replaced.append(owner)
        yield
    finally:
        for owner in replaced:
            del owner.__dict__["forward"]


# ---------------------------------------------------------------------- what is best


def _predict(record: _Record, executions: dict[Key, str], folded: bool = True) -> Prepared:
    """What the call takes with these executions: operations exactly, bytes nearly. folded: as if
    all projections were, as they are going to be."""
    kept = generating = flops = 0
    for pool in {pool: None for pool, _ in executions}:
        if not folded:
            making = whitening(pool.plan)
            flops += 2 * making.operations
            generating = max(generating, kept + pool.dtype.itemsize * making.working)
            kept += pool.dtype.itemsize * making.held
        for index, group in enumerate(pool.plan.groups):
            if executions[pool, index] == "materialized":
                size = pool.dtype.itemsize
                kept += size * kept_numbers(pool.plan, group)
                making = generation(pool.plan, group)
                flops += 2 * making.operations
                generating = max(generating, kept + size * making.working)
    operations = peak = held = 0
    last: tuple[Any, ...] | None = None  # what was reduced last: pool, input, columns, blocks
    for moment in record.moments:
        peak = max(peak, moment.peak + held)
        if moment.group is None:
            if last is not None and last[1] == moment.input:
                held, last = 0, None
            continue
        pool, index = moment.group
        group, size = pool.plan.groups[index], pool.dtype.itemsize
        execution = executions[moment.group]
        reduced = (
            last is not None
            and last[:3] == (pool, moment.input, group.cols)
            and last[3] >= group.blocks
        )
        if execution == "factored" and not reduced:
            held = 0  # what was kept of the last input is dropped first
        its = cost(pool.plan, group, execution, moment.tokens, reduced)
        operations += 2 * its.operations
        peak = max(peak, moment.live + held + size * its.working)
        if execution == "factored" and not reduced:
            held, last = size * its.held, (pool, moment.input, group.cols, group.blocks)
    return Prepared(
        executions={name: executions[key] for key, (name, _) in record.groups.items()},
        operations=operations + record.fixed,
        generation=flops,
        stored_bytes=record.stored,
        kept_bytes=kept,
        working_bytes=peak,
        peak_bytes=record.stored + max(kept + peak, generating),
    )


def _choose(record: _Record, memory_budget: int | None) -> dict[Key, str]:
    """The fewest operations within the budget; materialized where others take no fewer."""
    moves = list(_moves(record))
    chosen = _fewest_operations(record, moves, dict.fromkeys(record.groups, "materialized"), None)
    here = _predict(record, chosen)
    if memory_budget is None:
        return chosen
    while here.peak_bytes > memory_budget:
        prices = []
        for place, move in enumerate(moves):
            there = _predict(record, {**chosen, **move})
            if _saves(there, here):
                prices.append((_price(there, here), place))
        if not prices:
            raise ShareError(
                f"memory_budget={memory_budget:,} bytes is too small: a call takes "
                f"{here.peak_bytes:,} at least, of which {here.stored_bytes:,} are what is "
                "stored; give fewer tokens at a time"
            )
        for _, place in sorted(prices):
            there = _predict(record, {**chosen, **moves[place]})
            if here.peak_bytes > memory_budget and _saves(there, here):
                chosen, here = {**chosen, **moves[place]}, there
    return _fewest_operations(record, moves, chosen, memory_budget)


def _fewest_operations(
    record: _Record,
    moves: list[dict[Key, str]],
    chosen: dict[Key, str],
    memory_budget: int | None,
) -> dict[Key, str]:
    """Makes moves as long as one saves operations, and the peak stays within the budget."""
    here = _predict(record, chosen)
    changed = True
    while changed:
        changed = False
        best_first = sorted(moves, key=lambda move: _predict(record, {**chosen, **move}).operations)
        for move in best_first:
            there = _predict(record, {**chosen, **move})
            fits = memory_budget is None or there.peak_bytes <= memory_budget
            if fits and there.operations < here.operations:
                chosen, here, changed = {**chosen, **move}, there, True
    return chosen


def _saves(there: Prepared, here: Prepared) -> bool:
    """Whether it takes less memory. One weight less that is kept need not lower the peak, but
    brings it nearer."""
    return (there.peak_bytes, there.kept_bytes) < (here.peak_bytes, here.kept_bytes)


def _price(there: Prepared, here: Prepared) -> float:
    """Operations for each byte that is saved."""
    saved = here.peak_bytes - there.peak_bytes + max(here.kept_bytes - there.kept_bytes, 0)
    return (there.operations - here.operations) / saved


def _moves(record: _Record) -> Iterable[dict[Key, str]]:
    """Changes worth a look: of one group, and of all that are given one input, which only pays
    together."""
    inputs: dict[int | None, list[Key]] = {}
    for moment in record.moments:
        if moment.group is not None:
            inputs.setdefault(moment.input, []).append(moment.group)
    together = {tuple(dict.fromkeys(keys)) for keys in inputs.values()}
    together |= {(key,) for key in record.groups}
    for keys in sorted(together, key=lambda keys: [record.groups[key][0] for key in keys]):
        for execution in ("factored", "materialized", "blockwise"):
            if all(execution in record.groups[key][1] for key in keys):
                yield dict.fromkeys(keys, execution)
