"""Keeps optimizers that were built before the call in step with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from paramshare.errors import ShareError


def optimizers_of(given: object) -> list[Optimizer]:
    """What was given as `optimizers=`, as a list. Raises ShareError for what is none."""
    if given is None:
        return []
    several = isinstance(given, Iterable) and not _is_optimizer(given)
    optimizers: list[Optimizer] = list(given) if several else [given]  # type: ignore
    for optimizer in optimizers:
        if not _is_optimizer(optimizer):
            raise ShareError(
                f"optimizers= has a {type(optimizer).__name__} in it, which is no "
                "torch.optim.Optimizer; pass one, or a list of them"
            )
    return optimizers


def _is_optimizer(value: object) -> bool:
    """Also what wraps one, as trainers do."""
    groups = getattr(value, "param_groups", None)
    return (
        isinstance(getattr(value, "state", None), Mapping)
        and isinstance(groups, list)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    )


def check_optimizers(optimizers: Iterable[Optimizer], removed: Sequence[Parameter]) -> None:
    """Raises ShareError where an optimizer already has a state of Parameters that will go."""
    gone = {id(p) for p in removed}
    for optimizer in optimizers:
        known = sum(id(p) in gone for p in optimizer.state)
        if known:
            raise ShareError(
                f"this {type(optimizer).__name__} already has the state of {known} of the "
                f"{len(gone)} Parameters that sharing removes, which would be lost; share first, "
                "and build the optimizer after it"
            )


def repair_optimizers(
    optimizers: Iterable[Optimizer], removed: Sequence[Parameter], added: dict[str, Parameter]
) -> None:
    """Takes the removed Parameters out of the groups. The first group of the first optimizer that
    held one gets the added ones, by name where it has names, with its own rate and decay."""
    gone = {id(p) for p in removed}
    waiting = dict(added)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = [id(p) not in gone for p in group["params"]]
            if all(held):
                continue
            # In place: an optimizer may hold the list itself (LBFGS).
            group["params"][:] = [
                p for p, stays in zip(group["params"], held, strict=True) if stays
            ]
            group["params"].extend(waiting.values())
            if "param_names" in group:
                names = zip(group["param_names"], held, strict=True)
                group["param_names"] = [name for name, stays in names if stays] + list(waiting)
            waiting = {}
