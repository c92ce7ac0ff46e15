"""What one application of a shared weight costs, by its execution: operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from paramshare.factored import TOKENS_AT_ONCE
from paramshare.plan import Group, SharingPlan, factored_operations
from paramshare.whiten import sampled


@dataclass(frozen=True)
class Cost:
    """operations: multiply-adds of one call. held: numbers that stay as long as the input does.
    working: numbers at most at a time in the call, the output and what is held among them."""

    operations: int
    held: int
    working: int


def cost(
    plan: SharingPlan, group: Group, execution: str, tokens: int, reduced: bool = False
) -> Cost:
    """Of the group's weight applied to `tokens` tokens, without gradients.

    reduced: an earlier weight has reduced this input already.
    """
    rows, cols, features = group.rows, group.cols, plan.features
    padded = group.blocks * group.columns  # rows that whole blocks give
    if execution == "materialized":
        return Cost(tokens * rows * cols, 0, tokens * rows)
    if execution == "blockwise":
        tile = cols * group.columns * plan.virtual
        building = group.blocks * tile * features
        joined = tokens * padded  # not there yet while the first tile is
        filling = max(tile, joined) if group.blocks == 1 else tile + joined
        working = max(_completing(plan, group, tokens), filling + tokens * group.columns)
        return Cost(tokens * padded * cols + building, 0, working)
    operations = tokens * factored_operations(cols, group.columns, group.blocks, features)
    first = min(tokens, TOKENS_AT_ONCE)
    second = min(tokens - first, TOKENS_AT_ONCE)  # none, or the rest, or as many again
    output = _completing(plan, group, first)
    if second:
        output = max(output, tokens * rows + max(first * rows, _completing(plan, group, second)))
    if reduced:
        operations -= tokens * features * group.blocks * cols
        return Cost(operations, 0, output)
    held = tokens * group.blocks * features
    # Before it is reordered it is there once more; in parts, each part is.
    reordering = max(first, 2 * second) * group.blocks * features
    return Cost(operations, held, held + max(output, reordering))


def _completing(plan: SharingPlan, group: Group, tokens: int) -> int:
    """Numbers at a time while products become outputs: rows that are no whole blocks, and a bias of
    the projection, make copies."""
    padded = group.blocks * group.columns
    copies = (group.rows < padded) + 2 * plan.projection_bias
    return tokens * (padded + copies * group.rows)


def kept_numbers(plan: SharingPlan, group: Group) -> int:
    """What a materialized weight keeps in memory: the padding of its columns, too, where it was
    not copied once more."""
    if group.out_last or _scaled(plan):
        return group.rows * group.cols
    return _as_read(plan, group)


def generation(plan: SharingPlan, group: Group) -> Cost:
    """Of materializing the group's weight without gradients; what is kept of it is not counted as
    working numbers."""
    columns = group.columns * group.tokens_read(plan.tokens)
    kept_is_copy = group.out_last or _scaled(plan)
    copies = _as_read(plan, group) if kept_is_copy and group.layout != "column" else 0
    if not plan.virtual:
        return Cost(0, 0, columns + copies)
    is_view = (group.layout == "column" or group.blocks == 1) and not group.out_last
    working = group.columns * plan.features + (0 if is_view else columns) + copies
    return Cost(columns * plan.features, 0, working)


def whitening(plan: SharingPlan) -> Cost:
    """Of what the projection is multiplied by, its products and what they give, which is held; in
    training once a call, else once before it, and not at all where the projection is folded."""
    if not plan.whiten:
        return Cost(0, 0, 0)
    read: dict[tuple[int, int], int] = {}  # columns by the rows that are looked at
    for group in plan.groups:
        sample = sampled(group.tokens_read(plan.tokens), plan.features)
        read[sample] = read.get(sample, 0) + group.columns
    square = plan.features**2
    operations = sum(square * (count + columns) for (count, _), columns in read.items())
    held = sum(square + plan.features * columns for columns in read.values())
    joined = plan.features * max(read.values())
    return Cost(operations, held, held + max(3 * square, joined))


def _scaled(plan: SharingPlan) -> bool:
    """Whether weights are multiplied by constants of theirs."""
    return not plan.virtual and plan.init == "match"


def _as_read(plan: SharingPlan, group: Group) -> int:
    """Numbers that the layout reads, before they are cut to the weight's size."""
    return group.columns * group.tokens_read(plan.tokens)
