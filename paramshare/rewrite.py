"""Rewrites a module by a finished plan: prepares everything, and only then touches the module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn
from torch.nn.parameter import Parameter

from paramshare import derived
from paramshare.errors import ShareError
from paramshare.lifted import LIFT, TABLE, make_factors
from paramshare.plan import SharingPlan
from paramshare.pool import Pool, readers, table_of
from paramshare.slots import make_slot


def apply_plan(module: nn.Module, plan: SharingPlan) -> Pool:
    """Rewrites `module` by a finished plan, and draws what the pool stores.

    Raises ShareError where the plan does not fit the module, which is then what it was.
    """
    return prepare(module, plan).commit()


@dataclass
class Rewrite:
    """A plan made ready for a module: all that can fail is done, and nothing is changed yet."""

    module: nn.Module
    pool: Pool
    sources: dict[nn.Module, dict[str, derived.Source]]
    added: list[tuple[nn.Module, str, nn.Module]]  # (parent, name, child), the pool among them

    def commit(self) -> Pool:
        for parent, name, child in self.added:
            parent.add_module(name, child)
        for owner in dict.fromkeys((*self.sources, self.module)):
            pool = self.pool if owner is self.module else None
            derived.derive(owner, self.sources.get(owner, {}), pool)
        return self.pool


def prepare(
    module: nn.Module, plan: SharingPlan, earlier: Sequence[Rewrite] = (), draw: bool = True
) -> Rewrite:
    """Checks that the plan fits the module and makes its pool. Raises ShareError.

    earlier: rewrites that will be committed before this one.
    draw: gives what is stored its first values; without, it is only allocated.
    """
    added: list[tuple[nn.Module, str, nn.Module]] = []
    embedding = outer = _find_embedding(module, plan, earlier)
    lift = None
    if plan.width is not None:
        _check_lift(outer, plan)
        embedding, lift = make_factors(outer, plan.features, draw)
        added += [(outer, TABLE, embedding), (outer, LIFT, lift)]
    pool = Pool(module, plan, embedding, lift)
    new: dict[nn.Module, dict[str, derived.Source]] = {}
    parameters = []
    for index, group in enumerate(plan.groups):
        for path in group.slots:
            slot = make_slot(module, path)
            shape = tuple(slot.parameter.shape)
            rows = shape[-1 if group.out_last else 0]
            if (rows, slot.parameter.numel()) != (group.rows, group.rows * group.cols):
                raise ShareError(
                    f"{path} is {rows} x {slot.parameter.numel() // rows}, the plan's is "
                    f"{group.rows} x {group.cols}"
                )
            before = _before(slot.owner, slot.name)
            source = derived.Source(pool, index, shape, group.out_last, slot.normed, before)
            new.setdefault(slot.owner, {})[slot.name] = source
            parameters.append(slot.parameter)
    if lift is not None:
        table = table_of(outer)
        for owner, name in _holders(module, table):
            before = _before(owner, name)
            source = derived.Source(pool, None, tuple(table.shape), False, False, before)
            new.setdefault(owner, {})[name] = source
    for owner in dict.fromkeys((*new, module)):
        derived.check_derive(owner, new.get(owner, {}), pool if owner is module else None)
    if draw and not table_of(embedding).is_meta:
        pool.reset_parameters()
    pool.requires_grad_(any(parameter.requires_grad for parameter in parameters))
    # In a container that is shared itself, a pool would be one of the layers.
    container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    home = outer if container else module
    candidates = (f"paramshare_{n}" if n > 1 else "paramshare" for n in count(1))
    taken = {name for rewrite in earlier for parent, name, _ in rewrite.added if parent is home}
    name = next(name for name in candidates if name not in taken and not hasattr(home, name))
    added.append((home, name, pool))
    return Rewrite(module, pool, new, added)


def prepare_all(module: nn.Module, plans: Sequence[tuple[str, SharingPlan]]) -> list[Rewrite]:
    """Rewrites of a plain module by the plans that a file has, by path, for values that come from
    the file. Raises ShareError."""
    rewrites: list[Rewrite] = []
    waiting = list(plans)
    while waiting:
        # In this order, which is that of the modules, a call may read the table that a later one
        # factorises. Of one module, the order of the calls is kept: the names of their pools
        # follow it.
        made = {f"{join(root, p.table)}.{TABLE}": root for root, p in waiting if p.width}
        late = {root for root, p in waiting if made.get(join(root, p.table), root) != root}
        ready = [(root, plan) for root, plan in waiting if root not in late] or waiting
        for root, plan in ready:
            try:
                part = module.get_submodule(root)
            except AttributeError:
                raise ShareError(f"there is no {root} in it") from None
            rewrites.append(prepare(part, plan, rewrites, draw=False))
        waiting = [entry for entry in waiting if entry not in ready]
    return rewrites


def join(root: str, path: str) -> str:
    return f"{root}.{path}" if root else path


def _find_embedding(module: nn.Module, plan: SharingPlan, earlier: Sequence[Rewrite]) -> nn.Module:
    """The module whose weight is the plan's table, which an earlier rewrite may be going to add."""
    path, _, name = plan.table.rpartition(".")
    try:
        parent = module.get_submodule(path)
        for rewrite in earlier:
            for home, added, child in rewrite.added:
                if home is parent and added == name:
                    return child
        return module.get_submodule(plan.table)
    except AttributeError:
        raise ShareError(f"the table {plan.table} is not in the module") from None


def _check_lift(embedding: nn.Module, plan: SharingPlan) -> None:
    """Raises ShareError unless the embedding can be factorised as the plan says."""
    shape = tuple(getattr(embedding, "weight", torch.empty(0)).shape)
    if shape != (plan.tokens, plan.width):
        raise ShareError(
            f"the embedding {plan.table} is {' x '.join(map(str, shape))}, the plan's is "
            f"{plan.tokens} x {plan.width}"
        )
    if readers(table_of(embedding)):
        raise ShareError(
            f"{plan.table} is read by an earlier call already: give embedding_dim={plan.features} "
            "in the first call on a table"
        )
    for name in (TABLE, LIFT):
        if hasattr(embedding, name):
            raise ShareError(
                f"{plan.table} has a {name!r} already, the name that a factor of it would get"
            )


def _before(owner: nn.Module, name: str) -> tuple[str, ...]:
    """The owner's Parameters that stand before the one of this name."""
    names = list(owner._parameters)
    return tuple(names[: names.index(name)])


def _holders(module: nn.Module, parameter: Parameter) -> list[tuple[nn.Module, str]]:
    """The modules that hold a Parameter, and under which names."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, held in owner._parameters.items()
        if held is parameter
    ]
