"""Kinds of layers: what a class of layers does with its weights.

A new kind is one `register_kind` call. Layers of fairseq and transformers are known by the full
names of their classes, so that neither has to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import sqrt
from typing import Any

from torch import nn

from paramshare.errors import ShareError
from paramshare.recurrent import FlatWeights

# (layer, shape of one of its weights) -> standard deviation of its documented initialisation.
Spread = Callable[[nn.Module, tuple[int, ...]], float]


@dataclass(frozen=True)
class Kind:
    """What is known of a class of layers. `register_kind` says what the fields mean.

    members: a class whose members a module gets as long as its weights are derived, and whose
    static `on_derive(module)` and `on_restore(module)` are called when that begins and has ended.
    """

    weights: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    spread: Spread | None = None
    out_last: bool = False
    layers: Callable[[nn.Module], int] | None = None
    members: type | None = None

    def layer_of(self, name: str) -> int | None:
        """Which of its layers the weight belongs to; None when `name` is no dense weight."""
        for pattern in self.weights:
            match = re.fullmatch(pattern.replace("*", r"(\d+)"), name)
            if match:
                return int(match[1]) if match.groups() else 0
        return None


KINDS: dict[type[nn.Module] | str, Kind] = {}


def register_kind(
    cls: type[nn.Module] | str,
    weights: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    spread: Spread | None = None,
    out_last: bool = False,
    layers: Callable[[nn.Module], int] | None = None,
) -> None:
    """Makes `cls` (the class, or its full name "package.module.Class") and its subclasses known.

    weights: names of its own Parameters that are dense weights; "*" stands for the index of the
    layer in a module that holds several.
    reads: weights of children (`"out_proj.weight"`) that its forward reads without calling the
    child: those are always materialized.
    spread: `(layer, shape)` -> standard deviation of its documented initialisation; needed only
    where there are no values to measure, on the meta device.
    out_last: the last dimension of a weight is the output, not the first.
    layers: how many layers a module holds; its weights are then shared by default wherever it
    stands, as those of a stack of layers are.
    What is left out is that of the nearest known base class. Raises ShareError where names are a
    string instead of a tuple.
    """
    for value in (weights, reads):
        if isinstance(value, str):
            raise ShareError(f"{value!r} must be a tuple of names: ({value!r},)")
    KINDS[cls] = Kind(weights, reads, spread, out_last, layers)


def kind_of(module: nn.Module) -> Kind:
    """What is known of the module's class, by itself or by its bases."""
    return kind_of_class(type(module))


def kind_of_class(cls: type[nn.Module]) -> Kind:
    """What is known of the class, by itself or by its bases, of which the nearest says it."""
    known: dict[str, Any] = {}
    for ancestor in cls.__mro__:
        for key in (ancestor, f"{ancestor.__module__}.{ancestor.__qualname__}"):
            for field in fields(Kind) if key in KINDS else ():
                value = getattr(KINDS[key], field.name)
                if value != field.default:
                    known.setdefault(field.name, value)
    return Kind(**known)


# ---------------------------------------------------------------------- torch

register_kind(
    nn.Linear,
    weights=("weight",),
    # Documented as U(-k, k) with k = 1 / sqrt(in): torch.nn.Linear.
    spread=lambda layer, shape: 1 / sqrt(3 * shape[1]),
)
register_kind(
    nn.MultiheadAttention,
    weights=("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    reads=("out_proj.weight",),
    # Xavier, over the packed matrix where it is packed: nn.MultiheadAttention._reset_parameters.
    spread=lambda layer, shape: sqrt(2 / sum(shape)),
)
# Its fast path (eval, no_grad) hands these two to a fused kernel.
register_kind(nn.TransformerEncoderLayer, reads=("linear1.weight", "linear2.weight"))


def _recurrent_spread(layer: nn.Module, shape: tuple[int, ...]) -> float:
    # Documented as U(-k, k) with k = 1 / sqrt(hidden): torch.nn.LSTM, LSTMCell and the others.
    return 1 / sqrt(3 * layer.hidden_size)  # type: ignore[operator]


KINDS[nn.RNNBase] = Kind(
    weights=tuple(
        f"weight_{what}_l*{direction}"
        for direction in ("", "_reverse")
        for what in ("ih", "hh", "hr")
    ),
    spread=_recurrent_spread,
    layers=lambda rnn: rnn.num_layers,  # type: ignore[arg-type, return-value]
    members=FlatWeights,
)
register_kind(
    nn.RNNCellBase,
    weights=("weight_ih", "weight_hh"),
    spread=_recurrent_spread,
    layers=lambda cell: 1,
)
register_kind(
    nn.Conv1d,
    weights=("weight",),
    # Kaiming with a = sqrt(5): torch.nn.Conv1d documents U(-k, k), k = 1 / sqrt(in * kernel).
    spread=lambda layer, shape: 1 / sqrt(3 * shape[1] * shape[2]),
)

# ---------------------------------------------------------------------- fairseq

# Outside of step-by-step decoding it hands its children's weights to torch's attention function
# (F.multi_head_attention_forward in its forward) and never calls them.
register_kind(
    "fairseq.modules.multihead_attention.MultiheadAttention",
    reads=tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
)
# (kernel, in, out); LinearizedConvolution is a subclass.
register_kind(
    "fairseq.modules.conv_tbc.ConvTBC",
    weights=("weight",),
    # nn.init.xavier_normal_ of a 3-D tensor: ConvTBC.reset_parameters.
    spread=lambda layer, shape: sqrt(2 / ((shape[0] + shape[1]) * shape[2])),
    out_last=True,
)

# ---------------------------------------------------------------------- transformers

# GPT-2's "1D-convolution" is a linear layer whose weight is (in, out), N(0, 0.02).
register_kind(
    "transformers.pytorch_utils.Conv1D",
    weights=("weight",),
    spread=lambda layer, shape: 0.02,
    out_last=True,
)
# They look at the weight's dtype before they call the layer.
for _model, _prefix in (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5")):
    for _name in ("DenseActDense", "DenseGatedActDense"):
        register_kind(
            f"transformers.models.{_model}.modeling_{_model}.{_prefix}{_name}",
            reads=("wo.weight",),
        )
