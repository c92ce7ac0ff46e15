"""What cannot be shared, each with the error that says why and what to do."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedParameter

from paramshare.errors import ShareError
from paramshare.slots import Slot


def check_embedding_dim(embedding_dim: int | None, table: Parameter) -> None:
    """Checks that a `(tokens, width)` table can be narrowed to `embedding_dim` features."""
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


def check_target(module: nn.Module, embedding: nn.Module) -> str:
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


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of it: it is a DTensor, as FSDP2 makes them."""
    return hasattr(tensor, "placements")  # the class is slow to import, and not in every torch


def check_finite(weight: Parameter, path: str) -> None:
    """Raises ShareError where values are NaN or infinite, and names their rows."""
    rows = rows_not_finite(weight)
    if rows:
        raise ShareError(
            f"{path} has values that are not finite in {name_rows(rows)}: the weights would not be "
            "finite either; set these rows (torch.nn.init) before sharing"
        )


def rows_not_finite(tensor: Tensor) -> list[int]:
    """The first dimension's indices at which there is a NaN or an infinity."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() == 0:
        return []
    return (~tensor.detach().isfinite().flatten(1).all(1)).nonzero().flatten().tolist()


def rows_of_zeros(table: Tensor) -> list[int]:
    """The tokens all of whose features are zero."""
    return (table.detach() == 0).all(1).nonzero().flatten().tolist()


def name_rows(rows: list[int]) -> str:
    """A few of them, and how many more there are."""
    named = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
    return f"row{'s' if len(rows) > 1 else ''} {named}"


def check_slots(module: nn.Module, slots: list[Slot], table: Parameter) -> list[Parameter]:
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
        check_finite(parameter, slot.path)
        if slot.rows * slot.cols == 0:
            raise ShareError(f"{slot.path} is {slot.rows} x {slot.cols}: there is nothing to share")
    return [slot.parameter for slot in removed.values()]


def check_frozen(slots: list[Slot], table: Parameter, virtual: bool) -> None:
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
