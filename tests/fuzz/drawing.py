"""Draws a case: the specification of a model, and the calls that share it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz.options import draw_call
from fuzz.parts import Spec

DRAWN = ["linear", "scaled", "block", "attention", "encoder", "decoder", "kernel", "raw"]
DRAWN += ["lstm", "gru", "rnn", "lstm cell", "gru cell", "rnn cell"]
DRAWN += ["conv", "transposed", "bilinear", "positions"]
NORMED = {"linear": "weight", "scaled": "weight", "conv": "weight", "transposed": "weight"}
NORMED |= {"lstm": "weight_hh_l0", "lstm cell": "weight_hh"}
RARE = 0.06  # of what leads to refusals, or is seldom met


def draw_case(seed: int) -> dict[str, Any]:
    """The case of a seed, as plain data."""
    draw = random.Random(seed)
    spec = draw_model(draw, seed)
    calls = [draw_call(draw, spec)]
    while draw.random() < 0.2:
        calls.append(draw_call(draw, spec))
    return {"model": spec, "calls": calls}


def draw_model(draw: random.Random, seed: int) -> Spec:
    width = draw.choice([2, 3, 4, 6, 8, 8, 12, 16]) if draw.random() > RARE / 2 else 1
    features = draw.choice([1, 2, 3, 20, 32]) if draw.random() < 0.4 else width
    tokens = draw.choice([7, 20, 33, 48, 64, 90])
    kinds = DRAWN
    if draw.random() < RARE:  # where an 8-bit table has scales of several blocks
        width, features, tokens, kinds = 64, 3, 200, ["linear", "scaled"]
    oddities = [kind for kind in ("tie output", "alias", "hooks") if draw.random() < 0.2]
    for kind in ("tie layers", "freeze all", "freeze vectors", "zeros", "ones"):
        oddities += [kind] if draw.random() < RARE else []
    for kind in ("tie outside", "freeze table", "freeze layers", "freeze one", "equal rows"):
        oddities += [kind] if draw.random() < RARE / 3 else []
    for kind in ("not finite", "not finite table", "gradient", "other dtype"):
        oddities += [kind] if draw.random() < RARE / 6 else []
    table: dict[str, Any] = {}
    if draw.random() < 0.3:
        table["padding_idx"] = draw.choice([0, 1, -1])
    if draw.random() < RARE / 6:
        table[draw.choice(["sparse", "scale_grad_by_freq"])] = True
    if draw.random() < RARE / 6:
        table["max_norm"] = 1.0
    return {
        "seed": seed,
        "root": draw.choices(["Model", "InOrder", "ByName", "Inside", "Two"], [6, 1, 1, 1, 1])[0],
        "tokens": tokens,
        "features": features,
        "width": width,
        "dtype": draw.choice(["float64", "float64", "float32"]),
        "training": draw.random() < 0.5,
        "times": 1 if draw.random() < 0.8 else 2,
        "embedding": table,
        "output": draw.choice(["", "bias", "no bias"]),
        "common": [part for part in ("embedding", "stage0") if draw.random() < 0.3],
        "oddities": oddities,
        "stages": [draw_stage(draw, width, kinds) for _ in range(draw.choice([1, 1, 2]))],
    }


def draw_stage(draw: random.Random, width: int, kinds: list[str]) -> Spec:
    kind = draw.choice(kinds)
    args, options = _ARGUMENTS[kind](draw, width)
    homes = ["list"] * 4 + ["sequential", "steps", "dict", "single", "again", "nested", "wrapped"]
    home = draw.choice(homes)
    if kind == "encoder" and draw.random() < 0.6:
        home = "encoder"
    norm, normed = "", ()
    if kind in NORMED and draw.random() < 0.3:
        norm = draw.choice(["hook", "parametrized", "parametrized"])
        normed = (NORMED[kind], draw.choice([0, 0, 1, None]))
    elif kind in ("linear", "conv") and draw.random() < RARE / 2:
        norm, normed = "orthogonal", ("weight",)
    count = 1 if home == "single" else draw.choice([1, 2, 2, 3])
    return {
        **{"kind": kind, "args": args, "options": options, "home": home, "count": count},
        **{"norm": norm, "normed": normed},
    }


Arguments = tuple[tuple[int, ...], dict[str, Any]]


def _linear(draw: random.Random, width: int) -> Arguments:
    return (width, draw.choice([width, width, 1, 5, 16])), _without_bias(draw)


def _hidden(draw: random.Random, width: int) -> Arguments:
    return (width, draw.choice([width, 2, 7, 16])), {}


def _attention(draw: random.Random, width: int) -> Arguments:
    options = {"dropout": 0.0, "batch_first": draw.random() < 0.7, **_without_bias(draw)}
    if draw.random() < 0.4:
        options["kdim"], options["vdim"] = draw.choice([width, 3, 9]), draw.choice([width, 5])
    for name in ("add_bias_kv", "add_zero_attn"):
        if draw.random() < 0.1:
            options[name] = True
    return (width, _heads(draw, width)), options


def _transformer(draw: random.Random, width: int) -> Arguments:
    options = {
        **{"dropout": 0.0, "activation": "gelu", "batch_first": draw.random() < 0.7},
        **{"norm_first": draw.random() < 0.3, **_without_bias(draw)},
    }
    return (width, _heads(draw, width), draw.choice([2, 8, 20])), options


def _recurrent(draw: random.Random, width: int) -> Arguments:
    hidden = draw.choice([2, 5, width, 9])
    return (width, hidden), {
        **{"num_layers": draw.choice([1, 1, 2]), "bidirectional": draw.random() < 0.4},
        **{"batch_first": draw.random() < 0.7, **_without_bias(draw)},
    }


def _lstm(draw: random.Random, width: int) -> Arguments:
    (width, hidden), options = _recurrent(draw, width)
    if draw.random() < 0.3 and hidden > 1:
        options["proj_size"] = draw.randint(1, hidden - 1)
    return (width, hidden), options


def _conv(draw: random.Random, width: int) -> Arguments:
    groups = draw.choice([g for g in (1, 1, 2, 3, width) if width % g == 0])
    return (width, groups * draw.randint(1, 5), draw.choice([1, 2, 3])), {
        **{"groups": groups, "stride": draw.choice([1, 1, 2]), "padding": draw.choice([1, 2])},
        **_without_bias(draw),
    }


def _bilinear(draw: random.Random, width: int) -> Arguments:
    return (width, width, draw.choice([width, 3])), {}


def _positions(draw: random.Random, width: int) -> Arguments:
    return (draw.choice([5, 9]), width), {}


def _without_bias(draw: random.Random) -> dict[str, Any]:
    return {"bias": False} if draw.random() < 0.25 else {}


def _heads(draw: random.Random, width: int) -> int:
    return draw.choice([heads for heads in (1, 2, 3, 4) if width % heads == 0])


_ARGUMENTS: dict[str, Callable[[random.Random, int], Arguments]] = {
    **dict.fromkeys(("linear", "scaled"), _linear),
    **dict.fromkeys(("block", "kernel", "raw"), _hidden),
    "attention": _attention,
    **dict.fromkeys(("encoder", "decoder"), _transformer),
    "lstm": _lstm,
    **dict.fromkeys(("gru", "rnn"), _recurrent),
    **dict.fromkeys(("lstm cell", "gru cell", "rnn cell"), _hidden),
    **dict.fromkeys(("conv", "transposed"), _conv),
    "bilinear": _bilinear,
    "positions": _positions,
}
