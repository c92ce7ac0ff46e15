"""Depth maps: which weights of a deep module read the same columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from paramshare.errors import ShareError
from paramshare.slots import Slot

DepthMap = str | Callable[[str], Hashable]


def group_slots(slots: Sequence[Slot], depth: DepthMap) -> dict[str, list[Slot]]:
    """Slots by the name of their group, both in the order in which the module registers them.

    `"all"`: the same weight at every depth of a stack of layers; `"none"`: every weight by
    itself; a callable: slots whose paths get equal keys. Slots of unequal 2-D form that the maps
    by name would put together form groups with their equals. A weight that two modules already
    hold in common stays common under every map.
    """
    key_of: Mapping[str, Hashable]
    if callable(depth):
        key_of = _by_callable(slots, depth)
    elif depth == "all":
        key_of = {slot.path: slot.pattern for slot in slots}
    elif depth == "none":
        key_of = {slot.path: slot.path for slot in slots}
    else:
        raise ShareError(f"depth={depth!r} is unknown: use 'all', 'none' or a callable path -> key")

    groups: dict[tuple[Hashable, int, int], list[Slot]] = {}
    group_of_parameter: dict[int, list[Slot]] = {}
    for slot in slots:
        members = group_of_parameter.get(id(slot.parameter))
        if members is None:
            members = groups.setdefault((key_of[slot.path], slot.rows, slot.cols), [])
            group_of_parameter[id(slot.parameter)] = members
        members.append(slot)

    keys = [key for key, _, _ in groups]
    names = [
        str(key) if keys.count(key) == 1 else f"{key} [{rows}x{cols}]" for key, rows, cols in groups
    ]
    if len(set(names)) < len(names):  # keys that only look alike, 1 and "1"
        names = [repr(key) for key in groups]
    return dict(zip(names, groups.values(), strict=True))


def _by_callable(slots: Sequence[Slot], depth: Callable[[str], Hashable]) -> dict[str, Hashable]:
    keys: dict[str, Hashable] = {}
    first: dict[Hashable, Slot] = {}
    for slot in slots:
        key = depth(slot.path)
        if not isinstance(key, Hashable):
            raise ShareError(f"depth({slot.path!r}) is {key!r}: a key must be hashable")
        leader = first.setdefault(key, slot)
        if (leader.rows, leader.cols) != (slot.rows, slot.cols):
            raise ShareError(
                f"depth() gives {leader.path} ({leader.rows} x {leader.cols}) and {slot.path} "
                f"({slot.rows} x {slot.cols}) the same key {key!r}, but weights of unequal shape "
                "cannot read the same columns"
            )
        keys[slot.path] = key
    return keys
