"""The one call and its inverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from paramshare import derived, marks
from paramshare.checks import (
    check_embedding_dim,
    check_finite,
    check_frozen,
    check_slots,
    check_target,
)
from paramshare.depth import DepthMap, check_depth, group_slots
from paramshare.errors import ShareError
from paramshare.optimizers import check_optimizers, optimizers_of, repair_optimizers
from paramshare.plan import SharingPlan, make_plan
from paramshare.pool import Pool, columns_taken, is_read, readers, table_of
from paramshare.report import Sharing, count_parameters
from paramshare.rewrite import apply_plan, join
from paramshare.slots import Select, find_slots


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
    whiten: bool = False,
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
            becomes `table @ lift`, of which the product is never built, everywhere `module`
            holds it, tied output layers included (one outside of `module` is tied no more). The
            values are those of the truncated singular value decomposition.
        table_gradient: share, 0 to 1, of the weights' gradient that reaches the table. The
            weights' dense gradient otherwise drowns the tokens' sparse one, and the embeddings
            learn slowly; measured in recipes/iwslt15_envi (probe.py).
        init: "match": every weight starts with the spread that its layer's own initialisation
            gave it. "paper": N(0, 0.02) projection, and raw columns for EPS.
        whiten: read the table's rows as if they were an orthonormal basis, whatever the table
            learns (VEPS); see `paramshare.whiten`. Nothing is stored for it.
        execution: how weights are applied: "materialized", "factored" (never built; VEPS), or
            "blockwise" (a tile at a time), where their layers allow it; "auto" takes one of the
            first two by their operations. See `paramshare.prepare_for_inference`, too.
        optimizers: optimizers built before the call, whose parameter groups are to be repaired.

    Returns:
        A `Sharing`: print it for one line a group, ask it for counts, plan and plot.

    Raises:
        ShareError: with the numbers and the cure; the module is then exactly what it was.
    """
    optimizers = optimizers_of(optimizers)
    if select is not None and not callable(select):
        raise ShareError(f"select={select!r} must be a callable (path, owner) -> bool")
    check_depth(depth)
    check_not_quantized(module)
    embedding = _narrow(embedding)
    table_path = check_target(module, embedding)
    table = table_of(embedding)
    tokens, features = table.shape
    check_finite(table, table_path)
    check_embedding_dim(embedding_dim, table)
    slots = find_slots(module, embedding, select)
    for slot in slots:
        if is_read(slot.parameter):
            raise ShareError(
                f"{slot.path} is what weights that were shared before are read from; choose other "
                "weights with select=, or call paramshare.materialize first"
            )
    removed = check_slots(module, slots, table)
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
        whiten=whiten,
        execution=execution,
        taken=[] if virtual or embedding_dim is not None else columns_taken(table),
    )
    check_frozen(slots, table, virtual)
    check_optimizers(optimizers, removed)

    dense = count_parameters(module)
    before = {id(parameter) for parameter in module.parameters()}
    pool = apply_plan(module, plan)
    added = {name: p for name, p in module.named_parameters() if id(p) not in before}
    repair_optimizers(optimizers, removed, added)
    return Sharing(module, pool, dense)


@torch.no_grad()
def materialize(module: nn.Module) -> nn.Module:
    """Bakes the shared weights into ordinary Parameters, one independent one a slot, in place,
    and removes every trace of sharing. The step before tools that want plain weights
    (quantisation, pruning, other frameworks). Returns the module.

    Raises ShareError when nothing in it is shared, when it is a part of what was shared, or when
    something in it is quantised.
    """
    check_not_quantized(module)
    pools = check_whole(module)
    if not pools:
        raise ShareError(f"nothing in this {type(module).__name__} is shared")
    factorised = [pool for pool in pools if pool.lift is not None]
    for pool in factorised:
        if any(reader not in pools for reader in readers(table_of(pool.embedding))):
            raise ShareError(
                f"weights outside of this {type(module).__name__} are read from its factorised "
                f"table {pool.plan.table}; materialize the module that holds them as well"
            )
    owners = [part for part in module.modules() if marks.sources(part) or marks.pools(part)]
    for owner in owners:
        derived.check_restore(owner)
    with ExitStack() as stack:
        for pool in pools:
            stack.callback(pool.leave, pool.enter(training=False, all_groups=True))
        tables = {pool: _bake_table(pool) for pool in factorised}
        baked = [
            (
                owner,
                {
                    name: (
                        tables[source.pool] if source.group is None else derived.bake(owner, name)
                    )
                    for name, source in marks.sources(owner).items()
                },
            )
            for owner in owners
        ]
    for owner, weights in baked:
        derived.restore(owner, weights, pools)
    gone = [*pools, *(m for pool in factorised for m in (pool.embedding, pool.lift))]
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if any(child is old for old in gone):
                delattr(part, name)
    for pool in pools:
        pool.retire()
    return module


def check_not_quantized(module: nn.Module) -> None:
    """Raises ShareError where something in `module` is quantised."""
    if isinstance(module, nn.Module) and any(map(marks.is_quantized, module.modules())):
        raise ShareError(
            f"this {type(module).__name__} is quantised, which is for inference and cannot be "
            "undone; take the module that it was made of"
        )


def check_whole(module: nn.Module) -> list[Pool]:
    """The pools of what is shared in `module`. Raises ShareError when it is only a part of that:
    its weights are read from a table or projection outside of it, or is no module at all."""
    if not isinstance(module, nn.Module):
        raise ShareError(f"module must be a torch.nn.Module, not a {type(module).__name__}")
    pools = [pool for _, pool in named_pools(module)]
    for part in module.modules():
        for source in marks.sources(part).values():
            if all(source.pool is not pool for pool in pools):
                raise ShareError(
                    "this is a part of a shared module; use the module that "
                    "share_from_embedding was called on"
                )
    return pools


def named_pools(module: nn.Module) -> Iterator[tuple[str, Pool]]:
    """The paths of all modules in `module` that were shared, each with the pool of each call."""
    for path, part in module.named_modules():
        for pool in marks.pools(part):
            yield path, pool


def stored_plans(module: nn.Module) -> list[dict[str, Any]]:
    """The plans of all that is shared in `module`, each with the path of what was shared: what a
    file must say beside the tensors. Raises ShareError for what could not be loaded again."""
    check_whole(module)
    plans = []
    for root, pool in named_pools(module):
        part = module.get_submodule(root)
        pool.check_embedding(part)
        for path in (path for group in pool.plan.groups for path in group.slots):
            if not _is_read(part, path, pool):
                raise ShareError(
                    f"{path} is not read from the embedding any more (its layer was replaced, or "
                    "its weight norm removed), so that the plan does not hold; call "
                    "paramshare.materialize first"
                )
        plans.append({"root": root, "plan": pool.plan.to_dict()})
    return plans


def sources_in(module: nn.Module) -> dict[str, derived.Source]:
    """Where the weights that are no Parameters of `module` are read from, by their names."""
    return {
        join(path, name): source
        for path, part in module.named_modules(remove_duplicate=False)
        for name, source in marks.sources(part).items()
    }


def empty_weights(module: nn.Module) -> dict[str, Tensor]:
    """An empty tensor under the name of each weight that is read from a table.

    Put into a file, they stop whoever would load it into a plain module, or into one with a part of
    the layers: where a name is missing in the file, `strict=False` leaves the weight random.
    """
    return {
        name: torch.empty(0, dtype=source.pool.dtype)
        for name, source in sources_in(module).items()
        if source.group is not None
    }


def _is_read(module: nn.Module, path: str, pool: Pool) -> bool:
    """Whether the weight at `path` is still the pool's."""
    owner, _, name = path.rpartition(".")
    try:
        source = marks.sources(module.get_submodule(owner)).get(name)
    except AttributeError:
        return False
    return source is not None and source.pool is pool


def read_plans(stored: Any) -> list[tuple[str, SharingPlan]]:
    """What `stored_plans` gave, as (path, plan). Raises ShareError where it is something else."""
    if not isinstance(stored, list):
        raise ShareError(f"these are no sharing plans: a {type(stored).__name__}, not a list")
    for entry in stored:
        if not isinstance(entry, dict) or entry.keys() != {"root", "plan"}:
            raise ShareError("these are no sharing plans: an entry is not a root and a plan")
        if not isinstance(entry["root"], str):
            raise ShareError(f"a sharing plan is of no path, but a {type(entry['root']).__name__}")
    return [(entry["root"], SharingPlan.from_dict(entry["plan"])) for entry in stored]


def _bake_table(pool: Pool) -> Parameter:
    """The wide table of a factorised embedding: one Parameter, also of the layers tied to it."""
    assert pool.lift is not None
    factors = table_of(pool.embedding), table_of(pool.lift)
    trains = any(factor.requires_grad for factor in factors)
    return Parameter(pool.lifted_table().dense(), requires_grad=trains)


def _narrow(embedding: nn.Module) -> nn.Module:
    """The embedding whose weight is the table: of a factorised one, its narrow child."""
    source = marks.sources(embedding).get("weight") if isinstance(embedding, nn.Module) else None
    return embedding if source is None else source.pool.embedding
