"""Draws the options of a call, sensible and senseless; callables are named, so that they print."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

from fuzz.parts import Spec


class Unwilling(Exception):
    """What a user's own callable raises."""


def _unwilling(*_: Any) -> Any:
    raise Unwilling


def _hashed(path: str) -> int:
    return sum(map(ord, path))


SELECTS: dict[str, Callable[[str, nn.Module], Any]] = {
    "everything": lambda path, owner: True,
    "stages": lambda path, owner: "stage" in path,
    "linear": lambda path, owner: isinstance(owner, nn.Linear),
    "half": lambda path, owner: "stage" in path and _hashed(path) % 2 == 0,
    "other half": lambda path, owner: "stage" in path and _hashed(path) % 2 == 1,
    "stage0": lambda path, owner: "stage0" in path,
    "stage1": lambda path, owner: "stage1" in path,
    "first of each": lambda path, owner: "stage" in path and ".1." not in path,
    "one": lambda path, owner: path.endswith(("stage0.0.weight", "stage0.weight", "l0")),
    "nothing": lambda path, owner: False,
    "text": lambda path, owner: "x" if "stage" in path else "",
    "nonsense": lambda path, owner: None,
    "unwilling": _unwilling,
}
DEPTHS: dict[str, Callable[[str], Any]] = {
    "by name": lambda path: path.rpartition(".")[2],
    "by path": lambda path: path,
    "one key": lambda path: 1,
    "by stage": lambda path: path.partition(".")[0],
    "by parity": lambda path: (path.rpartition(".")[2], _hashed(path) % 2),
    "1 and '1'": lambda path: 1 if _hashed(path) % 2 else "1",
    "same text": lambda path: Same(_hashed(path) % 2),
    "list": lambda path: [path],
    "unwilling": _unwilling,
}


class Same:
    """Keys that differ and look alike."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.number == other.number

    def __repr__(self) -> str:
        return "same"


# Of each option: what makes sense, and what does not. Tuples ("select", name) stand for callables.
SENSE: dict[str, list[Any]] = {
    "virtual": [True, False],
    "select": [("select", name) for name in list(SELECTS)[:9]],
    "depth": [
        *("all", "none", "sandwich", "sequence:1", "sequence:2", "cycle:2", "cycle-rev:2"),
        *("cycle:1", "sequence:3", "cycle-rev:3"),
        *(("depth", name) for name in list(DEPTHS)[:7]),
    ],
    "layout": ["aligned", "column", "token"],
    "blocks": [1, 2, 3],
    "virtual_dim": [100, 400],
    "projection_bias": [True],
    "embedding_dim": [1, 2, 3, 5],
    "table_gradient": [0, 0.0, 0.5, 1, 1.0, True],
    "init": ["match", "paper"],
    "whiten": [True],
    "execution": ["auto", "materialized", "factored", "blockwise"],
    "optimizers": [("optimizers", name) for name in ("sgd", "adam", "groups", "names", "two")],
}
HUGE = 10**12
ODD = [None, "", "x", 0, -1, 1.5, float("nan"), float("inf"), HUGE, 10**400, [], {}, (), b"x"]
SENSELESS: dict[str, list[Any]] = {
    **dict.fromkeys(SENSE, ODD),
    "virtual": ODD[1:],
    "select": [*ODD[1:], *(("select", name) for name in list(SELECTS)[9:])],
    "depth": [*ODD, "cycle", "cycle:0", "cycle:-1", "cycle:1.5", f"cycle:{HUGE}", "cycle:x"]
    + [("depth", name) for name in list(DEPTHS)[7:]],
    "blocks": [*ODD, True, 4, 10],
    "virtual_dim": [*ODD, True, 4],
    "embedding_dim": [*ODD, True, 12, 13],
    "optimizers": [*ODD, *(("optimizers", name) for name in ("used", "foreign", "none", "module"))],
}


def draw_call(draw: random.Random, spec: Spec) -> dict[str, Any]:
    """A call of `share_from_embedding`: on which part, of which table, with which options."""
    options = {
        name: draw.choice(SENSE[name])
        for name in SENSE
        if draw.random() < (0.2 if name in ("optimizers", "embedding_dim") else 0.35)
    }
    if draw.random() < 0.85:
        options = _fitting(draw, spec, options)
    if draw.random() < 0.12:
        name = draw.choice(list(SENSE))
        options[name] = draw.choice(SENSELESS[name])
    part, table = "", "embedding"
    if spec["root"] in ("Inside", "Two"):
        part = draw.choice(["", "left", "right" if spec["root"] == "Two" else "left"])
        table = "embedding" if part else "left.embedding"
    if draw.random() < 0.04:
        table = draw.choice(["", "output", "stage0", "outside", "number", "weight", "missing"])
    return {"on": part, "table": table, "options": options}


# Kinds whose weights are shared by default, and those whose layers are called.
NOT_KNOWN = {"raw", "bilinear", "positions", "transposed"}
CALLED = {"linear", "block"}


def _fitting(draw: random.Random, spec: Spec, options: dict[str, Any]) -> dict[str, Any]:
    """Without what the model, or another option, would have refused."""
    kinds = {stage["kind"] for stage in spec["stages"] if stage["home"] != "single"}
    if "select" not in options and not kinds - NOT_KNOWN:
        options["select"] = ("select", "stages")
    virtual, dropped = options.get("virtual", True), set()
    if not virtual:
        dropped |= {"virtual_dim", "projection_bias", "embedding_dim", "blocks", "whiten"}
        dropped |= {"table_gradient"} if options.get("table_gradient") == 0 else set()
        if spec["features"] < 6:
            dropped |= {"virtual"}
        elif spec["features"] < 20:
            options["select"] = ("select", draw.choice(["one", "stage0", "half", "linear"]))
    if options.get("layout", "aligned") != "aligned":
        dropped |= {"blocks", "execution"}
    if not kinds & CALLED or not virtual and options.get("execution") == "factored":
        dropped |= {"execution"}
    if options.get("embedding_dim", 0) >= spec["features"]:
        dropped |= {"embedding_dim"}
    if ":" in str(options.get("depth")) and draw.random() < 0.5:
        dropped |= {"depth"}
    return {name: value for name, value in options.items() if name not in dropped}


def call_of(call: dict[str, Any], module: nn.Module) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(part, embedding, options) for the call on this module."""
    part = module.get_submodule(call["on"])
    options = {name: _real(value, part) for name, value in call["options"].items()}
    return part, _table(call["table"], part), options


def _table(name: str, part: nn.Module) -> Any:
    if name == "outside":
        return nn.Embedding(20, 4)
    if name == "number":
        return 3
    if name == "weight":
        return Parameter(torch.ones(20, 4))
    try:
        return part.get_submodule(name)
    except AttributeError:
        return None


def _real(value: Any, part: nn.Module) -> Any:
    if not isinstance(value, tuple) or not value:
        return value
    what, name = value
    return (
        {"select": SELECTS, "depth": DEPTHS}[what][name]
        if what in "select depth"
        else (OPTIMIZERS[name](part))
    )


def _groups(part: nn.Module) -> Any:
    parameters = list(part.parameters())
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.5}]
    return torch.optim.AdamW(groups, 1e-3)


def _two(part: nn.Module) -> list[Any]:
    parameters = list(part.parameters())
    half = max(len(parameters) // 2, 1)
    made = [torch.optim.SGD(parameters[:half], 0.1)]
    if parameters[half:]:
        made.append(torch.optim.SGD(parameters[half:], 0.1))
    return made


def _used(part: nn.Module) -> Any:
    optimizer = torch.optim.SGD(part.parameters(), 0.0, momentum=0.9)
    for p in part.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda part: torch.optim.SGD(part.parameters(), 0.1),
    "adam": lambda part: [torch.optim.Adam(part.parameters())],
    "groups": _groups,
    "names": lambda part: torch.optim.SGD(list(part.named_parameters()), 0.1),
    "two": _two,
    "used": _used,
    "foreign": lambda part: torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1),
    "none": lambda part: [None],
    "module": lambda part: part,
}
