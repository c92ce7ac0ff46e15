"""What sharing leaves on a module, and how it is found there again.

Plain attributes, of the instance: a registered pool would be in the state_dict once a weight.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SOURCES = "_paramshare_sources"  # of an owner: dict of weight name -> derived.Source
POOLS = "_paramshare_pools"  # of a shared module: its pools
BASE = "_paramshare_base"  # of a derived class: the class that it is derived from
QUANTIZED = "_paramshare_quantized"  # of a quantised class: whether all below it is, too
INT8 = "_paramshare_int8"  # of a quantised owner: dict of weight name -> quantized.Kept


def sources(module: nn.Module) -> dict[str, Any]:
    """The module's derived weights by name, each a `paramshare.derived.Source`."""
    return module.__dict__.get(SOURCES, {})


def pools(module: nn.Module) -> tuple[Any, ...]:
    """The pools that the module's forward fills: those of the calls that shared it."""
    return module.__dict__.get(POOLS, ())


def int8(module: nn.Module) -> dict[str, Any]:
    """The module's quantised weights by name, each a `paramshare.quantized.Kept`."""
    return module.__dict__.get(INT8, {})


def is_quantized(module: nn.Module) -> bool:
    """Whether the module was given to `paramshare.quantize`."""
    return getattr(type(module), QUANTIZED, False)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before any of its weights was derived."""
    return getattr(cls, BASE, cls)
