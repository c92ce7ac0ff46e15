"""Save and load: one file that holds what is stored, and the plan in its metadata."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.utils._pytree import tree_leaves

from paramshare.checks import is_sharded
from paramshare.errors import ShareError
from paramshare.marks import int8
from paramshare.plan import SharingPlan
from paramshare.pool import Pool
from paramshare.quantized import narrow_names, quantized_paths, restructure
from paramshare.rewrite import Rewrite, join, prepare_all
from paramshare.sharing import (
    check_whole,
    empty_weights,
    named_pools,
    read_plans,
    stored_plans,
)
from paramshare.state import KEY
from paramshare.stored import read_file, write_file


def save_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the stored tensors of `module` (tied ones once) and its sharing plans to `path`.

    Of what was quantised the file says so; what was rounded to float16 is written as float16.
    Equal modules give equal bytes. Where others would look for a weight that is not stored, the
    file has an empty tensor: into a plain module it loads by `load_model` only.

    The file appears whole or not at all. Raises ShareError where it cannot be written, for a part
    of a shared module, and for one that is not allocated.
    """
    path = _check_call(module, path)
    sharings = stored_plans(module)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    narrow = narrow_names(module)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise ShareError(f"{name} is no tensor with values, and cannot be saved to {path}")
        if is_sharded(tensor):
            raise ShareError(
                f"{name} is sharded: gather the state (get_model_state_dict of torch.distributed."
                "checkpoint.state_dict with full_state_dict=True), load it into a module that is "
                "shared alike and not sharded, and save that"
            )
        kept = first.setdefault(id(tensor), name)
        if kept == name:
            tensors[name] = (tensor.half() if name in narrow else tensor).detach().cpu()
        else:
            tied[name] = kept
    empty = {**empty_weights(module), **_empty_matrices(module)}
    content = {
        "sharings": sharings,
        "tied": tied,
        "int8": quantized_paths(module),
        "empty": sorted(empty),
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_file(path, {**tensors, **empty}, content)


def load_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a file of `save_model` into `module`.

    A plain module is shared by the file's plans first. A shared one must have the same plans: a
    weight read from other columns would be noise. What is quantised in the file is quantised in
    `module`, as `quantize` does it. Floating-point numbers are converted to the dtypes of `module`.
    On the meta device the file's memory-mapped tensors are assigned, so that nothing is ever
    allocated twice.

    Raises ShareError, the module being what it was: no such file, a file that is damaged or
    without a plan, another plan (the first difference is named), tensors missing, unexpected or
    of another shape or kind of number; `module` is quantised and the file is not; a buffer on the
    meta device that no file holds; and for a part of a shared module.
    """
    path = _check_call(module, path)
    check_whole(module)
    stored = _read(path)
    rewrites = _rewrites(module, stored, path)
    try:
        narrowed = _to_quantize(module, stored.quantized, path)
        if narrowed:
            expected = _expected(_tried(module, stored, narrowed, path), [])
        else:
            expected = _expected(module, rewrites)
        _compare(stored, expected, path)
        _check_buffers(module, path)
    except BaseException:
        for rewrite in rewrites:
            rewrite.drop()
        raise
    for rewrite in rewrites:
        rewrite.commit()
    for (_, pool), (_, plan) in zip(named_pools(module), stored.plans, strict=True):
        pool.read_as(plan)
    for root in narrowed:
        restructure(module.get_submodule(root))
    state = module.state_dict()
    tensors = {
        name: tensor if expected.get(name) is None else stored.found[name]
        for name, tensor in state.items()
    }
    if not any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        module.load_state_dict(tensors)
        return
    ties = _ties(module)
    module.load_state_dict(
        {name: tensor.to(state[name].dtype) for name, tensor in tensors.items()}, assign=True
    )
    for owner, name, (first_owner, first_name) in ties:
        owner._parameters[name] = first_owner._parameters[first_name]


def _check_call(module: nn.Module, path: str | os.PathLike[str]) -> Path:
    """The path; raises ShareError for what is no module, or no path."""
    if not isinstance(module, nn.Module):
        raise ShareError(f"module must be a torch.nn.Module, not a {type(module).__name__}")
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ShareError(f"{name} has no shape yet: call the module once")
    try:
        return Path(path)
    except TypeError:
        raise ShareError(f"path must be one of a file, not a {type(path).__name__}") from None


def _empty_matrices(module: nn.Module) -> dict[str, Tensor]:
    """As `empty_weights`, for what was quantised."""
    empty = {}
    for root in quantized_paths(module):
        parts = module.get_submodule(root).named_modules()
        path, name = next((path, name) for path, part in parts for name in int8(part))
        empty[join(root, join(path, name))] = torch.empty(0, dtype=torch.float16)
    return empty


@dataclass
class _Stored:
    """What a file holds."""

    found: dict[str, Tensor]  # by all names, also those that are tied
    plans: list[tuple[str, SharingPlan]]  # each with the path of what it shares
    quantized: list[str]  # paths


def _read(path: Path) -> _Stored:
    tensors, content = read_file(path)
    try:
        unknown = content.keys() - {"sharings", "tied", "int8", "empty"}
        if unknown:
            raise ValueError(f"unknown entries {sorted(unknown)}")
        plans = read_plans(content["sharings"])
        quantized, empty = (_texts(content.get(key, [])) for key in ("int8", "empty"))
        tied = content["tied"]
        if not isinstance(tied, dict):
            raise TypeError("its ties are no object")
        _texts([*tied.values()])
        for name in empty:
            if tuple(tensors.pop(name).shape) != (0,):
                raise ValueError(f"{name} is not empty")
        if not set(tied.values()) <= tensors.keys() or tied.keys() & tensors.keys():
            raise ValueError("a tied tensor is missing")
    except ShareError as error:
        raise ShareError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ShareError(f"{path} has a damaged sharing plan in it: {error!r}") from None
    return _Stored(
        {**tensors, **{name: tensors[kept] for name, kept in tied.items()}}, plans, quantized
    )


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("no list of names")
    return values


def _rewrites(module: nn.Module, stored: _Stored, path: Path) -> list[Rewrite]:
    """What is to be done to a plain module; nothing to a shared one, whose plans must be equal."""
    plans = stored.plans
    own = [(root, pool.plan) for root, pool in named_pools(module)]
    if not own:
        shapes = {tuple(tensor.shape) for tensor in stored.found.values()}
        for root, plan in plans:  # before such a one is allocated
            if plan.virtual and (plan.features, plan.columns) not in shapes:
                raise ShareError(
                    f"{path}: the projection of {root or 'the module itself'}, "
                    f"{plan.features} x {plan.columns}, is missing in the file"
                )
        try:
            return prepare_all(module, plans)
        except ShareError as error:
            raise ShareError(f"{path} does not fit the module: {error}") from None
    if [root for root, _ in own] != [root for root, _ in plans]:
        found, wanted = (
            ", ".join(root or "the module itself" for root, _ in some) or "nothing"
            for some in (plans, own)
        )
        raise ShareError(f"{path}: the file shares {found}, the module shares {wanted}")
    for (_, plan), (_, mine) in zip(plans, own, strict=True):
        difference = plan.difference(replace(mine, whiten=plan.whiten))
        if difference is not None:
            raise ShareError(f"{path}: the file's plan is not the module's: {difference}")
    return []


def _to_quantize(module: nn.Module, quantized: list[str], path: Path) -> list[str]:
    """What is to be quantised: nothing in a module that is as the file says."""
    own = quantized_paths(module)
    if own and own != quantized:
        found, wanted = (
            ", ".join(root or "the module itself" for root in some) or "nothing"
            for some in (quantized, own)
        )
        raise ShareError(f"{path}: quantised are {found} in the file, {wanted} in the module")
    return [] if own else quantized


def _tried(module: nn.Module, stored: _Stored, quantized: list[str], path: Path) -> nn.Module:
    """A copy of the module as it will be, of which nothing is allocated."""
    # Weight norm sets a plain attribute, and recurrent modules keep a list of what they read: these
    # could not even be copied by themselves.
    plain = (tree_leaves(value) for part in module.modules() for value in vars(part).values())
    attributes = (value for value in chain.from_iterable(plain) if isinstance(value, Tensor))
    tensors = chain(module.parameters(), module.buffers(), attributes)
    memo: dict[int, Tensor] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in module.parameters():
        memo[id(parameter)] = Parameter(memo[id(parameter)], parameter.requires_grad)
    copied = copy.deepcopy(module, memo)
    for rewrite in _rewrites(copied, stored, path):
        rewrite.commit()
    try:
        for root in quantized:
            restructure(copied.get_submodule(root))
    except (AttributeError, ShareError) as error:
        raise ShareError(f"{path} is quantised and does not fit the module: {error}") from None
    return copied


def _expected(module: nn.Module, rewrites: list[Rewrite]) -> dict[str, Tensor | None]:
    """The state of the module as it will be. None for what pools say of their plans there: the
    plans themselves are compared, and older files do not have it."""
    expected: dict[str, Tensor | None] = dict(module.state_dict())
    paths: dict[nn.Module, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(path)
    for rewrite in rewrites:
        for owner, weights in rewrite.sources.items():
            for path in paths[owner]:
                for name in weights:
                    del expected[join(path, name)]
        for parent, child_name, child in rewrite.added:
            paths[child] = [join(path, child_name) for path in paths[parent]]
            for name, tensor in child.state_dict().items():
                expected.update({join(path, name): tensor for path in paths[child]})
    for part in paths:
        if isinstance(part, Pool):
            expected.update({join(path, KEY): None for path in paths[part]})
    return expected


def _compare(stored: _Stored, expected: dict[str, Tensor | None], path: Path) -> None:
    """Compares the file's tensors with those of the module as it will be."""
    for name, tensor in expected.items():
        found = stored.found.get(name)
        if tensor is None:
            continue
        if found is None:
            raise ShareError(f"{path}: {name} is missing in the file")
        if found.shape != tensor.shape:
            raise ShareError(
                f"{path}: {name} is {tuple(found.shape)} in the file, {tuple(tensor.shape)} in the "
                "module"
            )
        converts = found.is_floating_point() and tensor.is_floating_point()
        if found.dtype != tensor.dtype and not converts:
            raise ShareError(
                f"{path}: {name} is {found.dtype} in the file, {tensor.dtype} in the module"
            )
    for name in stored.found:
        if name not in expected:
            raise ShareError(f"{path}: {name} of the file is not in the module")


def _check_buffers(module: nn.Module, path: Path) -> None:
    """Buffers that are in no state_dict need their values already."""
    in_files = set(module.state_dict())
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_meta and name not in in_files:
            raise ShareError(
                f"{path}: no file holds the buffer {name} (it is not persistent), and on the meta "
                "device it has no values: build the module elsewhere, or set it before loading"
            )


def _ties(module: nn.Module) -> list[tuple[nn.Module, str, tuple[nn.Module, str]]]:
    """(owner, name, where the same Parameter stands first) of every tied Parameter."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, Parameter):
                place = first.setdefault(id(parameter), (owner, name))
                if place != (owner, name):
                    ties.append((owner, name, place))
    return ties
