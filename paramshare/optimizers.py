"""Keeps optimizers that were built before the call in step with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from paramshare.errors import ShareError


def check_optimizers(optimizers: Iterable[Optimizer], removed: Sequence[Parameter]) -> None:
    """Raises ShareError where an optimizer has already stepped on Parameters that will go."""
    gone = {id(p) for p in removed}
    for optimizer in optimizers:
        stepped = sum(id(p) in gone for p in optimizer.state)
        if stepped:
            raise ShareError(
                f"this {type(optimizer).__name__} has already stepped on {stepped} of the "
                f"{len(gone)} Parameters that sharing removes: their moments would be lost; share "
                "first, and build the optimizer after it"
            )


def repair_optimizers(
    optimizers: Iterable[Optimizer], removed: Sequence[Parameter], added: Sequence[Parameter]
) -> None:
    """Takes the removed Parameters out of the groups; the first group that held one gets the
    added ones, with its own learning rate and decay."""
    gone = {id(p) for p in removed}
    for optimizer in optimizers:
        homes = [g for g in optimizer.param_groups if any(id(p) in gone for p in g["params"])]
        for group in homes:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        if homes:
            homes[0]["params"].extend(added)
