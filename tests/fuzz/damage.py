"""Damages content: bytes, JSON, files of safetensors, what was pickled. Seeded, one thing a time.

Every function returns what it made and, in words, what it did.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Marks in JSON text, for what `json` does not write.
_TWICE, _DEEP = "\x00twice", "\x00deep"
NESTED = 10_000
ODD = [
    *(float("nan"), float("inf"), 0.0, 1.5, -1, 0, 1, True, False, None, "", "x", [], {}),
    *([None], [[]], {"": None}, 10**12, 2**63, -(10**12), 10**400, 1e300, "\ud800", _DEEP),
]
SHALLOW = ODD[:-1]  # for readers that are not ours, and give up on what is nested so deep


# ---------------------------------------------------------------------- bytes


def damaged_bytes(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    made = bytearray(data)
    at = draw.randrange(len(data))
    end = min(len(data), at + draw.choice([1, 2, 8, 64]))
    kind = draw.choice(["flip", "flip", "flips", "cut", "drop", "insert", "zero", "copy", "head"])
    if kind == "flip":
        made[at] ^= 1 << draw.randrange(8)
    elif kind == "flips":
        for _ in range(8):
            made[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del made[at:]
    elif kind == "drop":
        del made[at:end]
    elif kind == "insert":
        made[at:at] = draw.randbytes(end - at)
    elif kind == "zero":
        made[at:end] = bytes(end - at)
    elif kind == "copy":
        made[at:at] = made[at:end]
    else:  # where formats say what comes
        made[draw.randrange(min(16, len(data)))] = draw.randrange(256)
    return bytes(made), f"{kind} at byte {at}"


# ---------------------------------------------------------------------- JSON


def damaged_json(
    draw: random.Random, value: Any, odd_values: Sequence[Any] = ODD
) -> tuple[Any, str]:
    """A copy with one change, which `json_text` writes."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return draw.choice(odd_values), "all of it"
    holder, key, path = draw.choice(places)
    kind = draw.choice(["replace"] * 5 + ["delete", "rename", "twice", "swap", "more"])
    odd = draw.choice(odd_values)
    if kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice([f"{key}x", "", str(key).upper()])] = holder.pop(key)
    elif kind == "twice" and isinstance(holder, dict):
        holder[f"{key}{_TWICE}"] = odd
    elif kind == "twice":
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "swap":
        other, other_key, other_path = draw.choice(places)
        if path.startswith(other_path) or other_path.startswith(path):
            holder[key] = odd
        else:
            holder[key], other[other_key] = other[other_key], holder[key]
            path = f"{path} and {other_path}"
    elif kind == "more" and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += draw.choice([-1, 1, 64])
    else:
        kind, holder[key] = "replace", odd
    shown = f" by {odd!r:.20}" if kind in ("replace", "twice") else ""
    return value, f"{kind} {path or 'the whole'}{shown}"


def _places(value: Any, path: str = "") -> Any:
    """(holder, key, path) of everything in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in list(pairs):
        yield value, key, f"{path}.{key}"
        if isinstance(inside, dict | list):
            yield from _places(inside, f"{path}.{key}")


def json_text(value: Any) -> str:
    text = json.dumps(value).replace(json.dumps(_TWICE)[1:-1], "")
    return text.replace(json.dumps(_DEEP), "[" * NESTED + "]" * NESTED)


# ---------------------------------------------------------------------- safetensors


def damaged_safetensors(
    draw: random.Random, data: bytes, key: str, typed: str = ""
) -> tuple[bytes, str]:
    """key: of the metadata that is JSON itself, and is damaged as such in every second case.
    typed: pattern of the names whose dtype may change."""
    header, payload = _opened(data)
    about = header.get("__metadata__", {})
    names = [name for name in header if name != "__metadata__"]
    if key in about and draw.random() < 0.5:
        content, what = damaged_json(draw, json.loads(about[key]))
        about[key] = json_text(content)
        return _closed(header, payload), f"{key}: {what}"
    one, other = draw.choice(names), draw.choice(names)
    kind = draw.choice(
        ["names", "offsets", "dtype", "shape", "drop", "rename", "add", "header", "plain", "type"]
    )
    if kind in ("dtype", "type"):
        one = draw.choice([name for name in names if re.match(typed, name)])
    if kind == "names":
        header[one], header[other] = header[other], header[one]
    elif kind == "offsets":
        first, second = header[one], header[other]
        pair = first["data_offsets"], second["data_offsets"]
        second["data_offsets"], first["data_offsets"] = pair
    elif kind == "dtype":
        header[one]["dtype"] = draw.choice(["F64", "F32", "I64", "I32", "F16", "BOOL", "U8", "X"])
    elif kind == "type":  # as many bytes, other numbers
        same = {"F64": "I64", "F32": "I32", "F16": "BF16", "I8": "U8", "I64": "F64"}
        header[one]["dtype"] = same.get(header[one]["dtype"], "F32")
    elif kind == "shape":
        shape = header[one]["shape"]
        header[one]["shape"] = draw.choice([shape[::-1], [*shape, 1], shape[1:], [-1], [10**12]])
    elif kind == "drop":
        del header[one]
    elif kind == "rename":
        header[f"{one}x"] = header.pop(one)
    elif kind == "add":
        header["surprise"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == "plain":
        header.pop("__metadata__", None)
    else:
        header, what = damaged_json(draw, header)
        return _closed(header, payload), f"header: {what}"
    return _closed(header, payload), f"{kind} of {one}, {other}"


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _closed(header: dict[str, Any], payload: bytes) -> bytes:
    text = json_text(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


# ---------------------------------------------------------------------- pickles

TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse() if x.dim() else x.reshape(1).to_sparse(),
    "meta": lambda x: x.to("meta"),
    "expanded": lambda x: x.reshape(-1)[:1].expand(x.numel()).reshape(x.shape),
    "huge": lambda x: x.reshape(-1)[:1].expand(10**12),
    "integer": lambda x: x.long(),
    "boolean": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "half": lambda x: x.half(),
    "transposed": lambda x: x.mT if x.dim() > 1 else x[None],
    "empty": lambda x: x.reshape(-1)[:0],
    "number": lambda x: 3.5,
    "list": lambda x: x.tolist(),
    "parameter": lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
    "flat": lambda x: x.reshape(-1),
    "not finite": lambda x: x * float("nan") if x.is_floating_point() else x,
    "nothing": lambda x: None,
}
# They hold the same numbers, in a form that is no worse.
HARMLESS = {"parameter"}


def damaged_pickle(
    draw: random.Random, value: Any, names: Sequence[Any] = ("x", 7, None, ("a",))
) -> tuple[Any, str]:
    """A copy of a tree of dicts and lists with one change. names: that keys may get."""
    value = copy.deepcopy(value)
    holder, key, path = draw.choice(list(_places(value)))
    inside = holder[key]
    kind = draw.choice(["replace"] * 3 + ["delete", "rename", "swap", "kind"])
    if kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice(names)] = holder.pop(key)
    elif kind == "swap":
        other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]
        path = f"{path} and {other}"
    elif isinstance(inside, Tensor):
        how = draw.choice(list(TENSORS))
        holder[key], kind = TENSORS[how](inside), f"make {how}"
    elif kind == "kind" and isinstance(inside, dict | list):
        holder[key] = list(inside.items()) if isinstance(inside, dict) else dict(enumerate(inside))
    else:
        holder[key] = draw.choice(SHALLOW)
        kind = f"replace by {holder[key]!r:.20}:"
    return value, f"{kind} {path}"
