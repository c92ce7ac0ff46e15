"""Save and load: one safetensors file that holds what is stored, and the plan in its metadata."""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from paramshare.checks import is_sharded
from paramshare.errors import ShareError
from paramshare.plan import SharingPlan
from paramshare.quantized import narrow_names, quantized_paths, restructure
from paramshare.rewrite import Rewrite, prepare_all
from paramshare.sharing import check_whole, named_pools, read_plans, stored_plans

_KEY = "paramshare"


def save_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the stored tensors of `module` (tied ones once) and its sharing plans to `path`.

    Of what was quantised the file says so; what was rounded to float16 is written as float16.

    The file appears whole or not at all. Raises ShareError where it cannot be written, for a part
    of a shared module, and for one that is not allocated.
    """
    path = Path(path)
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
            tensors[name] = (tensor.half() if name in narrow else tensor).detach().contiguous()
        else:
            tied[name] = kept
    content = {"sharings": sharings, "tied": tied, "int8": quantized_paths(module)}
    metadata = {"format": "pt", _KEY: json.dumps(content)}
    temporary = path.with_name(f"{path.name}.part") if path.name else path
    try:
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise ShareError(f"{path} cannot be written: {error}") from None


def load_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a file of `save_model` into `module`.

    A plain module is shared by the file's plans first. A shared one must have the same plans: a
    weight read from other columns would be noise. What is quantised in the file is quantised in
    `module`, as `quantize` does it. On the meta device the file's memory-mapped tensors are
    assigned, so that nothing is ever allocated twice.

    Raises ShareError, the module being what it was: no such file, a file that is damaged or
    without a plan, another plan (the first difference is named), tensors missing, unexpected or
    of another shape; `module` is quantised and the file is not; a buffer on the meta device that no
    file holds; and for a part of a shared module.
    """
    path = Path(path)
    check_whole(module)
    try:
        with safe_open(path, framework="pt") as file:
            plans, tied, shapes, quantized = _header(file, path)
            rewrites = _rewrites(module, plans, path)
            narrowed = _to_quantize(module, quantized, path)
            if narrowed:
                _check_tensors(_tried(module, plans, narrowed, path), [], tied, shapes, path)
            else:
                _check_tensors(module, rewrites, tied, shapes, path)
            _check_buffers(module, path)
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ShareError(f"{path} cannot be read: {error}") from None
    for rewrite in rewrites:
        rewrite.commit()
    for root in narrowed:
        restructure(module.get_submodule(root))
    tensors.update({name: tensors[kept] for name, kept in tied.items()})
    if not any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        module.load_state_dict(tensors)
        return
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    ties = _ties(module)
    module.load_state_dict(
        {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}, assign=True
    )
    for owner, name, (first_owner, first_name) in ties:
        owner._parameters[name] = first_owner._parameters[first_name]


def _header(
    file: Any, path: Path
) -> tuple[list[tuple[str, SharingPlan]], dict[str, str], dict[str, tuple[int, ...]], list[str]]:
    """The file's plans by the path of what they share, its ties, its tensors' shapes, and the paths
    of what is quantised."""
    metadata = (file.metadata() or {}).get(_KEY)
    if metadata is None:
        raise ShareError(f"{path} has no sharing plan in it: it is no file of save_model")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    try:
        content = json.loads(metadata)
        plans = read_plans(content["sharings"])
        tied = {str(name): str(kept) for name, kept in content["tied"].items()}
        quantized = [str(root) for root in content.get("int8", [])]
        if not set(tied.values()) <= shapes.keys():
            raise ValueError("a tied tensor is missing")
    except ShareError as error:
        raise ShareError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShareError(f"{path} has a damaged sharing plan in it: {error!r}") from None
    return plans, tied, shapes, quantized


def _rewrites(module: nn.Module, plans: list[tuple[str, SharingPlan]], path: Path) -> list[Rewrite]:
    """What is to be done to a plain module; nothing to a shared one, whose plans must be equal."""
    own = [(root, pool.plan) for root, pool in named_pools(module)]
    try:
        if not own:
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
        difference = plan.difference(mine)
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


def _tried(
    module: nn.Module, plans: list[tuple[str, SharingPlan]], quantized: list[str], path: Path
) -> nn.Module:
    """A copy of the module as it will be, of which nothing is allocated."""
    # Weight norm sets a plain attribute, which by itself could not even be copied.
    plain = (value for part in module.modules() for value in vars(part).values())
    attributes = (value for value in plain if isinstance(value, Tensor))
    tensors = chain(module.parameters(), module.buffers(), attributes)
    memo: dict[int, Tensor] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in module.parameters():
        memo[id(parameter)] = Parameter(memo[id(parameter)], parameter.requires_grad)
    copied = copy.deepcopy(module, memo)
    for rewrite in _rewrites(copied, plans, path):
        rewrite.commit()
    try:
        for root in quantized:
            restructure(copied.get_submodule(root))
    except (AttributeError, ShareError) as error:
        raise ShareError(f"{path} is quantised and does not fit the module: {error}") from None
    return copied


def _check_tensors(
    module: nn.Module,
    rewrites: list[Rewrite],
    tied: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    path: Path,
) -> None:
    """Compares the file's tensors with those of the module as it will be."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    paths: dict[nn.Module, list[str]] = {}
    for part_path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(f"{part_path}." if part_path else "")
    for rewrite in rewrites:
        for owner, weights in rewrite.sources.items():
            for prefix in paths[owner]:
                for name in weights:
                    if expected.pop(prefix + name, None) is None:
                        raise ShareError(f"{path}: {prefix}{name} is shared by two of its plans")
        for parent, child_name, child in rewrite.added:
            for prefix in paths[parent]:
                for name, tensor in child.state_dict().items():
                    expected[f"{prefix}{child_name}.{name}"] = tuple(tensor.shape)
    found = {**shapes, **{name: shapes[kept] for name, kept in tied.items()}}
    for name in expected:
        if name not in found:
            raise ShareError(f"{path}: {name} is missing in the file")
    for name, shape in found.items():
        if name not in expected:
            raise ShareError(f"{path}: {name} of the file is not in the module")
        if shape != expected[name]:
            raise ShareError(
                f"{path}: {name} is {shape} in the file, {expected[name]} in the module"
            )


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
