"""A derived weight as those get it who read it outside of a forward: it cannot be written into.

What is written into a tensor that was derived is lost. Writes through `.data` leave no mark in
torch, so that they can only be noticed where they are made: tools that merge adapters, prune or
initialise get an error there, instead of a model that is not what they made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paramshare.errors import ShareError

_HARMLESS = {"requires_grad_", "share_memory_"}
_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv")}
_OPERATORS |= {f"__i{name}__" for name in ("mod", "pow", "and", "or", "xor", "lshift", "rshift")}
_WRITERS = _OPERATORS | {"__setitem__"}


class ReadOnlyWeight(Tensor):
    """A view of a weight, as which it computes. Functions that write raise ShareError; its own
    views, `data` and `detach()` are like it, `clone()` is an ordinary tensor."""

    _paramshare_name: str  # of the weight

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(function, args, kwargs)
        if written is not None:
            raise ShareError(
                f"{written._paramshare_name} is read from the embedding, and what is written into "
                "it would be lost; call paramshare.materialize on the whole module first (before "
                "PEFT merges: paramshare.materialize(peft_model)), or write into a clone() of it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if isinstance(result, Tensor | tuple | list):
                mine = [a for a in args if isinstance(a, cls)]
                return _guarded(result, mine[0]) if mine else result
        if getattr(function, "__name__", "") in ("numpy", "__array__"):
            result.flags.writeable = False  # numpy has an error of its own
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def read_only(weight: Tensor, name: str) -> Tensor:
    """The weight, guarded. A subclass, which knows more of itself, and what is traced stay."""
    if type(weight) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return weight
    guarded = weight.as_subclass(ReadOnlyWeight)
    guarded._paramshare_name = name
    return guarded


def _plain(weight: ReadOnlyWeight) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return weight.as_subclass(Tensor)


def _guarded(result: Any, weight: ReadOnlyWeight) -> Any:
    """With views of the weight guarded, too."""
    if type(result) in (tuple, list):
        return type(result)(_guarded(part, weight) for part in result)
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    same = result.untyped_storage()._cdata == weight.untyped_storage()._cdata
    return read_only(result, weight._paramshare_name) if same else result


def _written(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ReadOnlyWeight | None:
    """The guarded weight into which the function writes."""
    name = getattr(function, "__name__", "")
    targets = [kwargs.get("out")]
    if name == "__set__":  # of a property
        targets += args[:1] if getattr(function, "__self__", None) is Tensor.data else ()
    elif name in _WRITERS or name[-1:] == "_" and name[-2:] != "__" and name not in _HARMLESS:
        targets += args[:1] or list(kwargs.values())[:1]
    for target in targets:
        for tensor in target if isinstance(target, tuple | list) else (target,):
            if isinstance(tensor, ReadOnlyWeight):
                return tensor
    return None
