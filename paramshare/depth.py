"""Depth maps: which weights of a deep module read the same columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence

from paramshare.errors import ShareError
from paramshare.slots import Slot

DepthMap = str | Callable[[str], Hashable]

# (index of the layer, layers in the stack, M) -> which of the distinct layers it is.
_MAPS: dict[str, Callable[[int, int, int], int]] = {
    # Takase and Kiyono, "Lessons on Parameter Sharing across Layers in Transformers" (2021),
    # Figure 1, with M distinct layers: 1 1 2 2 3 3, 1 2 3 1 2 3 and 1 2 3 3 2 1 for six of them.
    "sequence": lambda layer, layers, m: layer // (layers // m),
    "cycle": lambda layer, layers, m: layer % m,
    "cycle-rev": lambda layer, layers, m: (
        layer % m if layer < layers - m or layers == m else layers - 1 - layer
    ),
}
MAPS = "'all', 'none', 'sandwich', 'sequence:M', 'cycle:M', 'cycle-rev:M'"


def group_slots(slots: Sequence[Slot], depth: DepthMap) -> dict[str, list[Slot]]:
    """Slots by the name of their group, both in the order in which the module registers them.

    * `"all"`: the same weight at every depth of a stack of layers;
    * `"none"`: every weight by itself;
    * `"sequence:M"`, `"cycle:M"`, `"cycle-rev:M"`: M distinct layers in a stack, each used by
      neighbours, in turns, or in turns whose last one runs backwards (Takase and Kiyono 2021);
    * `"sandwich"`: the first and the last layer have their own, all between them read the same
      (Subformer; Reid, Marrese-Taylor and Matsuo 2021);
    * a callable: slots whose paths get equal keys.

    Slots of unequal 2-D form that the maps by name would put together form groups with their
    equals. A weight that two modules already hold in common stays common under every map.
    Raises ShareError: an unknown map, or M does not divide the layers of a stack.
    """
    key_of: Mapping[str, Hashable] = (
        _by_callable(slots, depth) if callable(depth) else _by_name(slots, depth)
    )

    groups: dict[tuple[Hashable, int, int, bool], list[Slot]] = {}
    group_of_parameter: dict[int, list[Slot]] = {}
    for slot in slots:
        members = group_of_parameter.get(id(slot.parameter))
        if members is None:
            key = (key_of[slot.path], slot.rows, slot.cols, slot.out_last)
            members = groups.setdefault(key, [])
            group_of_parameter[id(slot.parameter)] = members
        members.append(slot)

    keys = [key for key, *_ in groups]
    names = [
        str(key) if keys.count(key) == 1 else f"{key} [{rows}x{cols}]"
        for key, rows, cols, _ in groups
    ]
    if len(set(names)) < len(names):  # keys that only look alike, 1 and "1"
        names = [repr(key) for key in groups]
    return dict(zip(names, groups.values(), strict=True))


def check_depth(depth: DepthMap) -> None:
    """Raises ShareError unless it is the name of a depth map, or a callable."""
    if not callable(depth):
        _parse(depth)


def _by_name(slots: Sequence[Slot], depth: str) -> dict[str, str]:
    """Keys that say which layers of its stack read the same columns."""
    kind, distinct = _parse(depth)
    keys = {}
    for slot in slots:
        layers = slot.depth
        if kind == "none" or not layers:
            keys[slot.path] = slot.path
            continue
        if kind == "all":
            keys[slot.path] = slot.pattern
            continue
        if distinct and layers % distinct:
            raise ShareError(
                f"depth={depth!r} does not fit {slot.pattern}: {distinct} distinct layers do not "
                f"divide {layers} layers; use one of {_divisors(layers)}"
            )
        part = [_layer(kind, layer, layers, distinct) for layer in range(layers)]
        same = [str(layer) for layer in range(layers) if part[layer] == part[slot.index]]
        keys[slot.path] = slot.pattern.replace("*", ",".join(same), 1)
    return keys


def _layer(kind: str, layer: int, layers: int, distinct: int) -> int:
    """Which of the distinct layers a layer is."""
    if kind == "sandwich":
        return 0 if layer == 0 else 2 if layer == layers - 1 else 1
    return _MAPS[kind](layer, layers, distinct)


def _parse(depth: object) -> tuple[str, int]:
    """The map's name and its M, 0 where it has none."""
    if depth in ("all", "none", "sandwich"):
        return str(depth), 0
    match = re.fullmatch(rf"({'|'.join(_MAPS)}):([1-9]\d*)", depth) if type(depth) is str else None
    if match is None:
        raise ShareError(
            f"depth={depth!r} is unknown: use one of {MAPS} (M distinct layers), or a callable "
            "path -> key"
        )
    return match[1], int(match[2])


def _divisors(layers: int) -> str:
    return ", ".join(str(m) for m in range(1, layers + 1) if layers % m == 0)


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
