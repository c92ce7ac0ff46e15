"""The one call and its inverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.optim import Optimizer

from paramshare import derived
from paramshare.depth import DepthMap, check_depth, group_slots
from paramshare.errors import ShareError
from paramshare.lifted import LIFT, TABLE, make_factors
from paramshare.optimizers import check_optimizers, repair_optimizers
from paramshare.plan import SharingPlan, make_plan
from paramshare.pool import Pool, columns_taken, table_of
from paramshare.report import Sharing, count_parameters
from paramshare.slots import Select, Slot, find_slots, make_slot


def share_from_embedding(
    module: nn.Module,
    embedding: nn.Module,
    virtual: bool = True,
    *,
    select: Select | None = None,
    depth: DepthMap = "all",
    layout: str = "aligned",
    blocks: int | None = None,
    virtual_dim: int | None = None,
    projection_bias: bool = False,
    embedding_dim: int | None = None,
    table_gradient: float = 0.1,
    init: str = "match",
    execution: str = "auto",
    optimizers: Iterable[Optimizer] | None = None,
) -> Sharing:
    """Turns the dense weights of `module` into views of its own embedding table, in place.

    Call it after the model is built and initialised, before it is wrapped (DDP, FSDP,
    torch.compile) and before the optimizer is built.

    Args:
        module: any module; it and all its parts keep their classes' names, and work unchanged.
        embedding: the embedding module, inside `module`, whose `(tokens, features)` weight is
            the table. The `padding_idx` row is read like any other and gets gradients from it.
        virtual: True (VEPS): read `table @ projection` with a learned `(features, columns)`
            projection. False (EPS): read the table's own columns, which must suffice.
        select: `(parameter path, owner module) -> bool`; replaces the default, which takes the
            dense weights in the outermost stacks of layers.
        depth: which weights read the same columns: "all" the same weight at every depth, "none"
            each its own, "sequence:M", "cycle:M", "cycle-rev:M", "sandwich", or a callable
            path -> key; see `paramshare.depth.group_slots`.
        layout: "aligned", "column" or "token"; see `paramshare.layout`.
        blocks: aligned only: at most this many rows of a weight in one column. Fewer cost
            columns and rank (at most `blocks * features`) and save operations when factored.
        virtual_dim: columns of the virtual table; default: exactly those needed.
        projection_bias: the projection has a bias, as in the released ShareBERT.
        embedding_dim: narrow the table to this many features first (a factorised embedding): it
            becomes `table @ lift`, of which the product is never built, everywhere the module
            holds it, tied output layers included. The values are those of the truncated singular
            value decomposition.
        table_gradient: share, 0 to 1, of the weights' gradient that reaches the table. The
            weights' dense gradient otherwise drowns the tokens' sparse one, and the embeddings
            learn slowly; measured in recipes/iwslt15_envi (probe.py).
        init: "match": every weight starts with the spread that its layer's own initialisation
            gave it. "paper": N(0, 0.02) projection, and raw columns for EPS.
        execution: "auto" (by operation count), "materialized" or "factored".
        optimizers: optimizers built before the call, whose parameter groups are to be repaired.

    Returns:
        A `Sharing`: print it for one line a group, ask it for counts, plan and plot.

    Raises:
        ShareError: with the numbers and the cure; the module is then exactly what it was.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    if select is not None and not callable(select):
        raise ShareError(f"select={select!r} must be a callable (path, owner) -> bool")
    check_depth(depth)
    embedding = _narrow(embedding)
    table_path = _check_target(module, embedding)
    table = table_of(embedding)
    tokens, features = table.shape
    _check_embedding_dim(embedding_dim, table)
    slots = find_slots(module, embedding, select)
    removed = _check_slots(module, slots, table)
    if embedding_dim is not None:
        removed.append(table)
    plan = make_plan(
        group_slots(slots, depth),
        table=table_path,
        tokens=tokens,
        features=embedding_dim or features,
        width=features if embedding_dim is not None else None,
        virtual=virtual,
        layout=layout,
        blocks=blocks,
        virtual_dim=virtual_dim,
        projection_bias=projection_bias,
        table_gradient=table_gradient,
        init=init,
        execution=execution,
        taken=[] if virtual or embedding_dim is not None else columns_taken(table),
    )
    _check_frozen(slots, table, virtual)
    check_optimizers(optimizers, removed)

    dense = count_parameters(module)
    before = {id(parameter) for parameter in module.parameters()}
    pool = apply_plan(module, plan)
    added = {name: p for name, p in module.named_parameters() if id(p) not in before}
    repair_optimizers(optimizers, removed, added)
    return Sharing(module, pool, dense)


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
            source = derived.Source(pool, index, shape, group.out_last, before)
            new.setdefault(slot.owner, {})[slot.name] = source
            parameters.append(slot.parameter)
    if lift is not None:
        table = table_of(outer)
        for owner, name in _holders(module, table):
            source = derived.Source(pool, None, tuple(table.shape), False, _before(owner, name))
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


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """Bakes the shared weights into ordinary Parameters, one independent one a slot, in place,
    and removes every trace of sharing. The step before tools that want plain weights
    (quantisation, pruning, other frameworks). Returns the module.

    Raises ShareError when nothing in it is shared, or when it is a part of what was shared.
    """
    pools = check_whole(module)
    if not pools:
        raise ShareError(f"nothing in this {type(module).__name__} is shared")
    owners = [part for part in module.modules() if derived.sources(part) or derived.pools(part)]
    for owner in owners:
        derived.check_restore(owner)
    with ExitStack() as stack:
        for pool in pools:
            stack.callback(pool.leave, pool.enter(training=False, all_groups=True))
        tables = {pool: _bake_table(pool) for pool in pools if pool.lift is not None}
        baked = [
            (
                owner,
                {
                    name: tables[source.pool] if source.group is None else _bake(owner, name)
                    for name, source in derived.sources(owner).items()
                },
            )
            for owner in owners
        ]
    for owner, weights in baked:
        derived.restore(owner, weights, pools)
    gone: list[nn.Module] = [*pools]
    for pool in pools:
        gone += [pool.embedding, pool.lift] if pool.lift is not None else []
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if any(child is old for old in gone):
                delattr(part, name)
    for pool in pools:
        pool.retire()
    return module


def check_whole(module: nn.Module) -> list[Pool]:
    """The pools of what is shared in `module`. Raises ShareError when it is only a part of that:
    its weights are read from a table or projection outside of it."""
    pools = [pool for _, pool in named_pools(module)]
    for part in module.modules():
        for source in derived.sources(part).values():
            if all(source.pool is not pool for pool in pools):
                raise ShareError(
                    "this is a part of a shared module; use the module that "
                    "share_from_embedding was called on"
                )
    return pools


def named_pools(module: nn.Module) -> Iterator[tuple[str, Pool]]:
    """The paths of all modules in `module` that were shared, each with the pool of each call."""
    for path, part in module.named_modules():
        for pool in derived.pools(part):
            yield path, pool


def stored_plans(module: nn.Module) -> list[dict[str, Any]]:
    """The plans of all that is shared in `module`, each with the path of what was shared: what a
    file must say beside the tensors. Raises ShareError for what could not be loaded again."""
    check_whole(module)
    plans = []
    for root, pool in named_pools(module):
        pool.check_embedding(module.get_submodule(root))
        plans.append({"root": root, "plan": pool.plan.to_dict()})
    return plans


def read_plans(stored: Any) -> list[tuple[str, SharingPlan]]:
    """What `stored_plans` gave, as (path, plan). Raises ShareError where it is something else."""
    try:
        return [(str(s["root"]), SharingPlan.from_dict(s["plan"])) for s in stored]
    except (KeyError, TypeError) as error:
        raise ShareError(f"these are no sharing plans: {error!r}") from None


def _bake(owner: nn.Module, name: str) -> Parameter:
    pool = derived.sources(owner)[name].pool
    trains = any(p.requires_grad for p in (table_of(pool.embedding), *pool.parameters()))
    weight = getattr(owner, name).detach().clone(memory_format=torch.contiguous_format)
    return Parameter(weight, requires_grad=trains)


def _bake_table(pool: Pool) -> Parameter:
    """The wide table of a factorised embedding: one Parameter, also of the layers tied to it."""
    assert pool.lift is not None
    factors = table_of(pool.embedding), table_of(pool.lift)
    trains = any(factor.requires_grad for factor in factors)
    return Parameter(pool.lifted_table().dense(), requires_grad=trains)


def _narrow(embedding: nn.Module) -> nn.Module:
    """The embedding whose weight is the table: of a factorised one, its narrow child."""
    source = derived.sources(embedding).get("weight") if isinstance(embedding, nn.Module) else None
    return embedding if source is None else source.pool.embedding


def _check_embedding_dim(embedding_dim: int | None, table: Parameter) -> None:
    if embedding_dim is None:
        return
    tokens, width = table.shape
    if not isinstance(embedding_dim, int) or isinstance(embedding_dim, bool):
        raise ShareError(f"embedding_dim={embedding_dim!r} must be a whole number")
    if not 1 <= embedding_dim < width:
        raise ShareError(
            f"embedding_dim={embedding_dim} is out of range: the table is {tokens} x {width}, use "
            f"1 to {width - 1}"
        )
    if table.grad is not None:
        raise ShareError(
            "the table has a .grad already, which would be lost with embedding_dim; share before "
            "the first backward, or call zero_grad(set_to_none=True)"
        )


def _check_target(module: nn.Module, embedding: nn.Module) -> str:
    """Checks what is shared and from where; returns the embedding's path."""
    for value, name in ((module, "module"), (embedding, "embedding")):
        if not isinstance(value, nn.Module):
            raise ShareError(f"{name} must be a torch.nn.Module, not a {type(value).__name__}")
    for path, part in module.named_modules():
        wrappers = _WRAPPERS & {cls.__name__ for cls in type(part).__mro__}
        if wrappers:
            raise ShareError(
                f"{path or 'the module'} is already wrapped ({wrappers.pop()}); share the plain "
                "module first, then wrap it"
            )
    for path, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ShareError(f"{path} has no shape yet: run the module once, then share it")
    table = getattr(embedding, "weight", None)
    if not isinstance(table, Parameter) or table.dim() != 2:
        raise ShareError(
            f"a {type(embedding).__name__} has no 2-D weight to read from; pass the nn.Embedding"
        )
    if getattr(embedding, "sparse", False):
        raise ShareError(
            "the embedding is sparse=True: its weights' gradient is dense; use sparse=False"
        )
    if getattr(embedding, "max_norm", None) is not None:
        raise ShareError(
            f"the embedding has max_norm={embedding.max_norm}, which rewrites rows in every "
            "forward; use max_norm=None"
        )
    paths = [path for path, part in module.named_modules() if part is embedding]
    if not paths:
        raise ShareError(
            f"the embedding is not inside this {type(module).__name__}: copies and checkpoints of "
            "it would lose its weights; share the module that holds both"
        )
    return paths[0]


# By name: importing all of them is slow, and fails where torch is built without distributed.
_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "OptimizedModule",  # torch.compile
    "ScriptModule",
}


def _check_slots(module: nn.Module, slots: list[Slot], table: Parameter) -> list[Parameter]:
    """Checks the Parameters that will go; returns them."""
    removed = {id(slot.parameter): slot for slot in slots}
    chosen = {(slot.owner, slot.name) for slot in slots}
    for path, owner in module.named_modules():
        for name, held in owner._parameters.items():
            if id(held) in removed and (owner, name) not in chosen:
                raise ShareError(
                    f"{removed[id(held)].path} is tied to {path}.{name}, which is not selected: "
                    "select both or neither (select=)"
                )
    for slot in slots:
        parameter = slot.parameter
        if parameter.grad is not None:
            raise ShareError(
                f"{slot.path} has a .grad already, which would be lost; share before the first "
                "backward, or call zero_grad(set_to_none=True)"
            )
        if (parameter.dtype, parameter.device) != (table.dtype, table.device):
            raise ShareError(
                f"{slot.path} is {parameter.dtype} on {parameter.device}, the table is "
                f"{table.dtype} on {table.device}; move the module to one dtype and device first"
            )
        if slot.rows * slot.cols == 0:
            raise ShareError(f"{slot.path} is {slot.rows} x {slot.cols}: there is nothing to share")
    return [slot.parameter for slot in removed.values()]


def _check_frozen(slots: list[Slot], table: Parameter, virtual: bool) -> None:
    """Raises ShareError where sharing would let frozen weights train, or trained ones freeze."""
    frozen = [slot.path for slot in slots if not slot.parameter.requires_grad]
    if frozen and (len(frozen) < len(slots) or table.requires_grad):
        raise ShareError(
            f"{frozen[0]} is frozen (requires_grad=False), with {len(frozen)} of {len(slots)} "
            "weights, but would train with what it is read from; unfreeze it or leave it out "
            "(select=), or freeze the whole module"
        )
    if not frozen and not virtual and not table.requires_grad:
        raise ShareError(
            "the table is frozen (requires_grad=False): with EPS none of the weights would ever "
            "train; unfreeze it, or use virtual=True"
        )
