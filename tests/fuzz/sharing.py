"""Makes the calls of a case, and sees to it that a refused one leaves everything as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fuzz.options import Unwilling, call_of
from paramshare import ShareError, share_from_embedding
from paramshare.pool import readers


def share_all(module: nn.Module, calls: list[dict[str, Any]]) -> list[str]:
    """Makes the calls in order; returns the message of each that was refused, "" of others."""
    messages = []
    for call in calls:
        part, table, options = call_of(call, module)
        optimizers = _optimizers(options.get("optimizers"))
        before = snapshot(module, optimizers)
        try:
            share_from_embedding(part, table, **options)
            messages.append("")
            _assert_repaired(before, module, part, optimizers)
            continue
        except ShareError as error:
            messages.append(str(error) or "no message")
        except Unwilling:
            messages.append("unwilling")
        assert_unchanged(before, snapshot(module, optimizers), messages[-1])
    return messages


def _optimizers(given: Any) -> list[Optimizer]:
    if isinstance(given, Optimizer):
        return [given]
    is_list = isinstance(given, list | tuple)
    return [one for one in given if isinstance(one, Optimizer)] if is_list else []


def _assert_repaired(
    before: list[Any], module: nn.Module, part: nn.Module, optimizers: list[Optimizer]
) -> None:
    """Optimizers that trained what was shared train what there is instead, each of it once."""
    trained = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    assert len(set(trained)) == len(trained), "an optimizer has a Parameter twice"
    old = {described[0] for _, described, *_ in before if isinstance(described, tuple)}
    now = {id(p) for p in module.parameters()}
    assert not old & set(trained) - now, "an optimizer has a Parameter that is no more"
    if {id(p) for p in part.parameters()} & old <= set(trained) and optimizers:
        left = {name for name, p in part.named_parameters() if id(p) not in trained}
        assert not left, f"no optimizer has {left}"


def assert_unchanged(before: list[Any], after: list[Any], message: str) -> None:
    """Of two snapshots, around what ended with this message."""
    assert len(before) == len(after), f"refused ({message}), but parts came or went"
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            assert a == b, f"refused ({message}), but of {old[0]} {a!r:.200} became {b!r:.200}"


def snapshot(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[Any]:
    """Everything of a module that a refusal must leave alone, bit by bit."""
    found: list[Any] = []
    for path, part in module.named_modules(remove_duplicate=False):
        inside = vars(part)
        dicts = {k: [(n, id(v)) for n, v in d.items()] for k, d in inside.items() if _is_dict(d)}
        rest = {
            k: id(v) for k, v in inside.items() if not _is_dict(v) and k != "_is_full_backward_hook"
        }
        found.append((path, id(part), type(part), part.training, dicts, rest))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        described = (id(tensor), type(tensor), tensor.dtype, tensor.requires_grad, id(tensor.grad))
        found.append(
            (name, described, readers_of(tensor) if tensor.dim() == 2 else 0, _bits(tensor))
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.append(
                (id(optimizer), [id(p) for p in group["params"]], group.get("param_names"))
            )
        found.append((id(optimizer), [id(p) for p in optimizer.state]))
    return found


def readers_of(tensor: Tensor) -> int:
    return len(readers(tensor))  # type: ignore[arg-type]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_meta:
        return tuple(tensor.shape), tensor.stride()
    values = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), digest
