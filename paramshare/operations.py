"""What a call of a module computes: the floating-point operations of its matrix products."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paramshare.costs import generation, whitening
from paramshare.errors import ShareError
from paramshare.marks import original_class, sources
from paramshare.pool import Pool
from paramshare.sharing import check_whole

# How many tokens there are, where no input is given; an input; or all that a module is called with.
Tokens = int | Tensor | tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Operations:
    """FLOPs of one call, two for each multiply-add. Print it for a table.

    weights: of the shared weights that their layers apply by `nn.Linear.forward`, by the name of
        their group, all uses together; what several of them need is computed by the first.
    attention: the products of queries, keys and values, where torch has one operation for them.
    other: everything else, the weights that their owners read among it.
    generation: what materialized weights take before the call, once as long as table and
        projection stay what they are; in training once a call.
    """

    weights: dict[str, int]
    attention: int
    other: int
    generation: int

    @property
    def total(self) -> int:
        """FLOPs of the call, without those of generation."""
        return sum(self.weights.values()) + self.attention + self.other

    def __str__(self) -> str:
        rows = [
            *self.weights.items(),
            ("attention", self.attention),
            ("everything else", self.other),
            ("the call", self.total),
            ("before it, once: materialized weights", self.generation),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {flops / 1e9:12.4f} GFLOPs" for name, flops in rows)

    __repr__ = __str__


def flops(module: nn.Module, tokens: Tokens) -> Operations:
    """Calls `module`, shared or not, in eval mode without gradients, and counts what runs.

    tokens: how many, for a module that is called with ids `(1, tokens)`; or its input; or all its
    inputs, as a tuple or as a dict of keyword arguments.

    torch's own counter, and the operations that it knows nothing of: fused attention on CPUs, the
    fast path of nn.TransformerEncoderLayer, LSTMs. Raises ShareError where the call fails.
    """
    pools = check_whole(module)
    with evaluating(module):
        call(module, tokens)  # generates
        counter = operation_counter()
        with counter:
            call(module, tokens)
    return _sorted(module, counter, sum(_generation(pool) for pool in pools))


_MOST = 1 << 24  # tokens of a call, of which the ids alone take 128 MB


def call(module: nn.Module, tokens: Tokens) -> None:
    """Calls the module. Raises ShareError where that fails."""
    if isinstance(tokens, int):
        if not 1 <= tokens <= _MOST or isinstance(tokens, bool):
            raise ShareError(f"tokens={tokens} is out of range: a call has 1 to {_MOST:,}")
        first = next(module.parameters(), None)
        device = None if first is None else first.device
        tokens = torch.zeros(1, tokens, dtype=torch.long, device=device)
    try:
        if isinstance(tokens, dict):
            module(**tokens)
        else:
            module(*(tokens if isinstance(tokens, tuple) else (tokens,)))
    except ShareError:
        raise
    except Exception as error:
        given = f"ids of {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else "what was given"
        raise ShareError(
            f"this {type(module).__name__} cannot be called with {given} ({error}); give tokens= "
            "all that it is called with: a tuple, or a dict of keyword arguments"
        ) from error


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the modes are restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of prototypes that fast paths use
            yield
    finally:
        for part, training in modes:
            part.training = training


def operation_counter() -> FlopCounterMode:
    """torch's counter, which knows the operations that it misses otherwise."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def _sorted(module: nn.Module, counter: FlopCounterMode, generation: int) -> Operations:
    """What was counted in a call of the module, by what it belongs to."""
    counts = counter.get_flop_counts()
    everything = counts.get("Global", {})
    root = type(module).__name__
    weights: dict[str, int] = {}
    for path, owner in module.named_modules():
        source = sources(owner).get("weight")
        if source is None or source.group is None:
            continue
        if original_class(type(owner)).forward is not nn.Linear.forward:
            continue
        found = sum(counts.get(f"{root}.{path}" if path else root, {}).values())
        name = source.pool.plan.groups[source.group].name
        weights[name] = weights.get(name, 0) + found
    attention = sum(n for operation, n in everything.items() if "dot_product" in str(operation))
    other = sum(everything.values()) - sum(weights.values()) - attention
    return Operations(weights, attention, other, generation)


def _generation(pool: Pool) -> int:
    groups = (g for g in pool.plan.groups if g.execution == "materialized")
    made = sum(generation(pool.plan, group).operations for group in groups)
    return 2 * (made + whitening(pool.plan).operations)


# ---------------------------------------------------------------------- what torch does not count


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    *batch, length, features = query
    return 2 * prod(batch) * length * key[-2] * (features + value[-1])


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """One that is given tensors, of which nested ones have no shape."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def _self_attention(x: Tensor, width: int, weights: list[Tensor]) -> int:
    tokens = x.numel() // width
    if x.is_nested:
        pairs = sum(int(length) ** 2 for length in x._nested_tensor_size()[:, 0])
    else:
        pairs = tokens * x.shape[-2]
    return 2 * (tokens * sum(weight.numel() for weight in weights) + 2 * pairs * width)


@_raw
def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **kwargs: Any
) -> int:
    return _self_attention(query, width, [args[0], args[2]])


@_raw
def _encoder_layer(x: Tensor, width: int, heads: int, *args: Any, **kwargs: Any) -> int:
    matrices = [a for a in args if isinstance(a, Tensor) and a.dim() == 2 and not a.is_nested]
    return _self_attention(x, width, matrices[:4])


def _lstm(x: Any, of_input: Any, of_hidden: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(x[:-1]) * (prod(of_input) + prod(of_hidden))


def _conv_tbc(x: Any, weight: Any, bias: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return 2 * prod(out_shape[:-1]) * prod(weight)


def _matrix_vector(matrix: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(matrix)


def _integers(tokens: Any, values: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(tokens) * values[1]


def _added_product(to: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(left) * right[-1]


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._native_multi_head_attention: _multi_head_attention,
    torch.ops.aten._transformer_encoder_layer_fwd: _encoder_layer,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.conv_tbc: _conv_tbc,
    torch.ops.aten.mv: _matrix_vector,
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten._int_mm: _integers,
}
