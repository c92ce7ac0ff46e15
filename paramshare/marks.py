"""What sharing leaves on a module, and how it is found there again.

Plain attributes, of the instance: a registered pool would be in the state_dict once a weight.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SOURCES = "_paramshare_sources"  # of an owner: dict of weight name -> derived.Source
POOLS = "_paramshare_pools"  # of a shared module: its pools
BASE = "_paramshare_base"  # of a derived class: the class that it is derived from


def sources(module: nn.Module) -> dict[str, Any]:
    """The module's derived weights by name, each a `paramshare.derived.Source`."""
    return module.__dict__.get(SOURCES, {})


def pools(module: nn.Module) -> tuple[Any, ...]:
    """The pools that the module's forward fills: those of the calls that shared it."""
    return module.__dict__.get(POOLS, ())


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before any of its weights was derived."""
    return getattr(cls, BASE, cls)
