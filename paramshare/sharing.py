"""The one call and its inverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.optim import Optimizer

from paramshare import derived
from paramshare.depth import DepthMap, group_slots
from paramshare.errors import ShareError
from paramshare.optimizers import check_optimizers, repair_optimizers
from paramshare.plan import SharingPlan, make_plan
from paramshare.pool import Pool, table_of
from paramshare.report import Sharing, count_parameters
from paramshare.slots import Select, Slot, find_slots, make_slot

_COLUMNS = "_paramshare_columns"  # of an embedding: (first, end) of each EPS call, in order


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
            each its own, or a callable path -> key.
        layout: "aligned", "column" or "token"; see `paramshare.layout`.
        blocks: aligned only: at most this many rows of a weight in one column. Fewer cost
            columns and rank (at most `blocks * features`) and save operations when factored.
        virtual_dim: columns of the virtual table; default: exactly those needed.
        projection_bias: the projection has a bias, as in the released ShareBERT.
        embedding_dim: not available yet.
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
    optimizers = list(optimizers or ())
    if embedding_dim is not None:
        raise ShareError("embedding_dim is not available yet; leave it out")
    table_path = _check_target(module, embedding)
    tokens, features = table_of(embedding).shape
    slots = find_slots(module, embedding, select)
    removed = _check_slots(slots, embedding)
    plan = make_plan(
        group_slots(slots, depth),
        table=table_path,
        tokens=tokens,
        features=features,
        virtual=virtual,
        layout=layout,
        blocks=blocks,
        virtual_dim=virtual_dim,
        projection_bias=projection_bias,
        table_gradient=table_gradient,
        init=init,
        execution=execution,
        taken=0 if virtual else _columns_taken(module, embedding),
    )
    if not virtual and not table_of(embedding).requires_grad:
        raise ShareError(
            "the table is frozen (requires_grad=False): with EPS none of the weights would ever "
            "train; unfreeze it, or use virtual=True"
        )
    check_optimizers(optimizers, removed)

    dense = count_parameters(module)
    pool = apply_plan(module, plan)
    repair_optimizers(optimizers, removed, list(pool.parameters()))
    return Sharing(module, pool, dense)


def apply_plan(module: nn.Module, plan: SharingPlan) -> Pool:
    """Rewrites `module` by a finished plan, and draws what the pool stores.

    Raises ShareError where the plan does not fit the module, which is then what it was.
    """
    try:
        embedding = module.get_submodule(plan.table)
    except AttributeError:
        raise ShareError(f"the plan's table {plan.table} is not in the module") from None
    check_table(embedding, plan)
    new: dict[nn.Module, dict[str, derived.Source]] = {}
    pool = Pool(embedding, plan)
    for index, group in enumerate(plan.groups):
        for path in group.slots:
            slot = make_slot(module, path)
            if (slot.rows, slot.cols) != (group.rows, group.cols):
                raise ShareError(
                    f"{path} is {slot.rows} x {slot.cols}, the plan's is {group.rows} x "
                    f"{group.cols}"
                )
            names = list(slot.owner._parameters)
            before = tuple(names[: names.index(slot.name)])
            source = derived.Source(pool, index, tuple(slot.parameter.shape), before)
            new.setdefault(slot.owner, {})[slot.name] = source
    for part in (module, *new):
        derived.check_class(part)

    for owner, weights in new.items():
        derived.derive(owner, weights)
    module.add_module(_free_name(module), pool)
    derived.hold(module, pool)
    if not plan.virtual:
        embedding.__dict__.setdefault(_COLUMNS, []).append(_span(plan))
    if not table_of(embedding).is_meta:
        pool.reset_parameters()
    return pool


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """Bakes the shared weights into ordinary Parameters, one independent one a slot, in place,
    and removes every trace of sharing. The step before tools that want plain weights
    (quantisation, pruning, other frameworks). Returns the module.

    Raises ShareError when nothing in it is shared, or when it is a part of what was shared.
    """
    pools = dict(named_pools(module))
    owners = [owner for owner in module.modules() if derived.sources(owner)]
    for owner in owners:
        for source in derived.sources(owner).values():
            if all(source.pool is not pool for pool in pools.values()):
                raise ShareError(
                    "this is a part of a shared module; materialize the module that "
                    "share_from_embedding was called on"
                )
    if not pools:
        raise ShareError(f"nothing in this {type(module).__name__} is shared")

    for pool in pools.values():
        pool.enter(training=False, all_groups=True)
    try:
        baked = [
            (owner, {name: _bake(owner, name) for name in derived.derived_names(owner)})
            for owner in owners
        ]
    finally:
        for pool in pools.values():
            pool.leave(None)
    for owner, weights in baked:
        derived.restore(owner, weights)
    for path, pool in pools.items():
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        delattr(parent, name)
        derived.release(parent, pool)
        if not pool.plan.virtual:
            _release_columns(pool.embedding, pool.plan)
    return module


def named_pools(module: nn.Module) -> Iterator[tuple[str, Pool]]:
    """The paths and pools of everything that is shared in `module`."""
    for path, child in module.named_modules():
        if isinstance(child, Pool):
            yield path, child


def check_table(embedding: nn.Module, plan: SharingPlan) -> None:
    """Raises ShareError unless the module's table has the size that the plan was made for."""
    shape = tuple(table_of(embedding).shape)
    if shape != (plan.tokens, plan.features):
        raise ShareError(
            f"the table {plan.table} is {shape[0]} x {shape[1]}, the plan's is {plan.tokens} x "
            f"{plan.features}"
        )


def _bake(owner: nn.Module, name: str) -> Parameter:
    return Parameter(getattr(owner, name).detach().clone(memory_format=torch.contiguous_format))


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


def _check_slots(slots: list[Slot], embedding: nn.Module) -> list[Parameter]:
    """Checks the Parameters that will go; returns them."""
    table = table_of(embedding)
    removed = list({id(slot.parameter): slot.parameter for slot in slots}.values())
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
    return removed


def _span(plan: SharingPlan) -> tuple[int, int]:
    """First column that the plan reads, and the one after its last."""
    first = min(group.start for group in plan.groups)
    return first, max(group.start + group.columns for group in plan.groups)


def _release_columns(embedding: nn.Module, plan: SharingPlan) -> None:
    taken = embedding.__dict__[_COLUMNS]
    taken.remove(_span(plan))
    if not taken:
        del embedding.__dict__[_COLUMNS]


def _columns_taken(module: nn.Module, embedding: nn.Module) -> int:
    """Columns of the table that earlier EPS calls use, through any embedding tied to it."""
    tied = [
        part
        for part in (embedding, *module.modules())
        if getattr(part, "weight", None) is table_of(embedding)
    ]
    return max((end for part in tied for _, end in part.__dict__.get(_COLUMNS, ())), default=0)


def _free_name(module: nn.Module) -> str:
    names = ["paramshare", *(f"paramshare_{n}" for n in range(2, 2 + len(module._modules)))]
    return next(name for name in names if not hasattr(module, name))
