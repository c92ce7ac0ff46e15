"""Rewrites a module by a finished plan: prepares everything, and only then touches the module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn
from torch.nn.parameter import Parameter, is_lazy

from paramshare import derived
from paramshare.checks import name_rows, rows_of_zeros
from paramshare.errors import ShareError
from paramshare.lifted import LIFT, TABLE, make_factors
from paramshare.plan import SharingPlan
from paramshare.pool import Pool, readers, table_of
from paramshare.slots import Slot, make_slot
from paramshare.weight_norm import kept_dimension


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

    def drop(self) -> None:
        """Instead of `commit`: the pool would count as a reader of the table while it exists."""
        self.pool.retire()


def prepare(
    module: nn.Module, plan: SharingPlan, earlier: Sequence[Rewrite] = (), draw: bool = True
) -> Rewrite:
    """Checks that the plan fits the module and makes its pool. Raises ShareError.

    earlier: rewrites that will be committed before this one.
    draw: gives what is stored its first values; without, it is only allocated.
    """
    outer = _find_embedding(module, plan, earlier)
    slots = _find_slots(module, plan, outer, earlier)
    added: list[tuple[nn.Module, str, nn.Module]] = []
    embedding, lift = outer, None
    if plan.width is not None:
        _check_lift(outer, plan, earlier)
        embedding, lift = make_factors(outer, plan.features, draw)
        added += [(outer, TABLE, embedding), (outer, LIFT, lift)]
    _check_columns(plan, table_of(embedding), earlier)
    try:
        pool = Pool(module, plan, embedding, lift)
    except RuntimeError as error:
        raise ShareError(
            f"a projection of {plan.features} x {plan.columns} cannot be allocated: {error}"
        ) from None
    new: dict[nn.Module, dict[str, derived.Source]] = {}
    for index, slot in slots:
        shape = tuple(slot.parameter.shape)
        before = _before(slot.owner, slot.name)
        out_last = plan.groups[index].out_last
        source = derived.Source(pool, index, shape, out_last, slot.normed, before)
        new.setdefault(slot.owner, {})[slot.name] = source
    if lift is not None:
        table = table_of(outer)
        for owner, name in _holders(module, table):
            before = _before(owner, name)
            source = derived.Source(pool, None, tuple(table.shape), False, False, before)
            new.setdefault(owner, {})[name] = source
    random = torch.random.get_rng_state()
    try:
        for owner in dict.fromkeys((*new, module)):
            derived.check_derive(owner, new.get(owner, {}), pool if owner is module else None)
        if draw and not table_of(embedding).is_meta:
            pool.reset_parameters()
            _check_drawn(pool, slots)
    except BaseException:
        pool.retire()
        torch.random.set_rng_state(random)
        raise
    pool.requires_grad_(any(slot.parameter.requires_grad for _, slot in slots))
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
    try:
        while waiting:
            # In this order, which is that of the modules, a call may read the table that a later
            # one factorises. Of one module, the order of the calls is kept: the names of their
            # pools follow it.
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
    except BaseException:
        for rewrite in rewrites:
            rewrite.drop()
        raise
    return rewrites


@torch.no_grad()
def _check_drawn(pool: Pool, slots: list[tuple[int, Slot]]) -> None:
    """Raises ShareError where rows of zeros in the table leave nothing of a weight, or of the
    direction of a weight norm, which would be divided by its length."""
    for index, group in enumerate(pool.plan.groups):
        normed = [slot for of, slot in slots if of == index and slot.normed]
        if group.spread == 0 and not normed:
            continue  # as its layer has it
        weight = pool.weight(index, training=True)
        of_zeros = [] if weight.any() else [group.slots[0]]
        for slot in normed:
            shaped = (weight.t() if group.out_last else weight).view(slot.parameter.shape)
            norms = torch.norm_except_dim(shaped, 2, kept_dimension(slot.owner, slot.name))
            if not norms.all():
                of_zeros.append(f"a norm of {slot.path}")
        if of_zeros:
            rows = rows_of_zeros(table_of(pool.embedding))
            raise ShareError(
                f"{of_zeros[0]} would be zero, since it reads nothing but zeros: {name_rows(rows)} "
                f"of {pool.plan.table} (padding_idx makes one); fill them first "
                "(torch.nn.init.normal_), or leave the weight out (select=)"
            )


def join(root: str, path: str) -> str:
    return f"{root}.{path}" if root else path


def _find_embedding(module: nn.Module, plan: SharingPlan, earlier: Sequence[Rewrite]) -> nn.Module:
    """The module whose weight is the plan's table, which an earlier rewrite may be going to add."""
    path, _, name = plan.table.rpartition(".")
    try:
        parent = module.get_submodule(path)
        added = {
            name: child
            for rewrite in earlier
            for home, name, child in rewrite.added
            if home is parent
        }
        found = added[name] if name in added else module.get_submodule(plan.table)
    except AttributeError:
        raise ShareError(f"the table {plan.table} is not in the module") from None
    table = getattr(found, "weight", None)
    if not isinstance(table, Parameter) or is_lazy(table) or table.dim() != 2:
        raise ShareError(f"the table {plan.table} is a {type(found).__name__} without a 2-D weight")
    size, wanted = tuple(table.shape), (plan.tokens, plan.width or plan.features)
    if size != wanted:
        raise ShareError(
            f"the table {plan.table} is {size[0]} x {size[1]}, the plan's is {wanted[0]} x "
            f"{wanted[1]}"
        )
    return found


def _find_slots(
    module: nn.Module, plan: SharingPlan, embedding: nn.Module, earlier: Sequence[Rewrite]
) -> list[tuple[int, Slot]]:
    """The weights that the plan takes, each with the index of its group. Raises ShareError unless
    they are of its sizes, and no other's."""
    taken = {
        (owner, name)
        for rewrite in earlier
        for owner, weights in rewrite.sources.items()
        for name in weights
    }
    found = []
    for index, group in enumerate(plan.groups):
        for path in group.slots:
            slot = make_slot(module, path)
            shape = tuple(slot.parameter.shape)
            rows, numbers = shape[-1 if group.out_last else 0], slot.parameter.numel()
            if (rows, numbers) != (group.rows, group.rows * group.cols):
                raise ShareError(
                    f"{path} is {rows} x {numbers // max(rows, 1)}, the plan's is "
                    f"{group.rows} x {group.cols}"
                )
            if slot.parameter is table_of(embedding):
                raise ShareError(f"{path} is the table itself, and cannot be read from it")
            if group.execution != "materialized" and not slot.called:
                raise ShareError(f"{path} cannot run {group.execution}: no nn.Linear applies it")
            if (slot.owner, slot.name) in taken:
                raise ShareError(f"{path} is shared by two plans, or stands in one twice")
            taken.add((slot.owner, slot.name))
            found.append((index, slot))
    return found


def _check_columns(plan: SharingPlan, table: Parameter, earlier: Sequence[Rewrite]) -> None:
    """Raises ShareError where an earlier rewrite reads columns of the table itself, and this plan
    the same (EPS)."""
    pools = [rewrite.pool for rewrite in earlier if not rewrite.pool.plan.virtual]
    taken = [g for pool in pools if table_of(pool.embedding) is table for g in pool.plan.groups]
    for group in () if plan.virtual else plan.groups:
        for other in taken:
            if (
                group.start < other.start + other.columns
                and other.start < group.start + group.columns
            ):
                raise ShareError(f"{group.name} and {other.name} read the same columns")


def _check_lift(embedding: nn.Module, plan: SharingPlan, earlier: Sequence[Rewrite]) -> None:
    """Raises ShareError unless the embedding can be factorised as the plan says."""
    if readers(table_of(embedding)):
        raise ShareError(
            f"{plan.table} is read by an earlier call already: give embedding_dim={plan.features} "
            "in the first call on a table"
        )
    added = {name for rewrite in earlier for home, name, _ in rewrite.added if home is embedding}
    for name in (TABLE, LIFT):
        if name in added or hasattr(embedding, name):
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
