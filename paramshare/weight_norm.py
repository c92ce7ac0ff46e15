"""Weight-normed layers: the direction is read from the table, the gain stays a parameter.

`torch.nn.utils.weight_norm` keeps `weight_g` and `weight_v` as Parameters, and sets `weight` in
every forward (Salimans and Kingma, arXiv:1602.07868). The direction `weight_v` is what is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm


def normed_name(module: nn.Module, name: str) -> str | None:
    """The weight of which the Parameter `name` is the direction; None when it is none."""
    return name[:-2] if name.endswith("_v") and hook_of(module, name[:-2]) else None


def normed_names(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """The weights of which the named Parameters are the directions."""
    return tuple(filter(None, (normed_name(module, name) for name in names)))


def hook_of(module: nn.Module, name: str) -> WeightNorm | None:
    """The hook that normalises the weight `name`."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == name:
            return hook
    return None


def kept_dimension(owner: nn.Module, name: str) -> int:
    """The dimension at each of whose indices the direction `name` has a norm; -1: it has one."""
    weight = normed_name(owner, name)
    norm: Any = owner[0] if weight is None else hook_of(owner, weight)  # type: ignore[index]
    return norm.dim


class DerivedWeightNorm(WeightNorm):
    """The hook of a weight whose direction is derived.

    The weight is a property then, computed when it is read: set by the hook, as it usually is, it
    would keep a step's graph alive and could not be copied.
    """

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        pass

    def remove(self, module: nn.Module) -> None:
        """What `torch.nn.utils.remove_weight_norm` calls: the weight is a Parameter then."""
        module._paramshare_bake(f"{self.name}_v")  # type: ignore[operator]
        WeightNorm.remove(self, module)  # this hook is an ordinary one by now


def on_derive(module: nn.Module, name: str) -> None:
    """Of a module whose `name`'s direction is derived now."""
    hook = hook_of(module, name)
    assert hook is not None
    hook.__class__ = DerivedWeightNorm
    module.__dict__.pop(name, None)


def on_restore(module: nn.Module, name: str) -> None:
    """Of a module whose `name`'s direction is a Parameter again."""
    hook = hook_of(module, name)
    if hook is not None:
        hook.__class__ = WeightNorm
        hook(module, None)


def normed(module: nn.Module, name: str) -> Tensor:
    """The weight, from direction and gain as they are now."""
    hook = hook_of(module, name)
    assert hook is not None
    return hook.compute_weight(module)
