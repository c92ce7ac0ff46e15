"""Save and load: one safetensors file that holds what is stored, and the plan in its metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from paramshare.errors import ShareError
from paramshare.plan import SharingPlan
from paramshare.pool import Pool
from paramshare.sharing import apply_plan, named_pools

_KEY = "paramshare"


def save_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the stored tensors of `module` (tied ones once) and its sharing plans to `path`.

    The file appears whole or not at all. Raises ShareError where it cannot be written.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(tensor), name)
        if kept == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            tied[name] = kept
    pools = [{"path": pool_path, "plan": p.plan.to_dict()} for pool_path, p in named_pools(module)]
    metadata = {"format": "pt", _KEY: json.dumps({"pools": pools, "tied": tied})}
    temporary = path.with_name(path.name + ".part")
    try:
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ShareError(f"{path} cannot be written: {error}") from None


def load_model(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a file of `save_model` into `module`.

    A plain module is shared by the file's plans first. A shared one must have the same plans: a
    weight read from other columns would be noise. On the meta device the file's memory-mapped
    tensors are assigned, so that nothing is ever allocated twice.

    Raises ShareError, the module being what it was: no such file, a file that is damaged or
    without a plan, another plan (the first difference is named), tensors missing, unexpected or
    of another shape.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            content, shapes = _header(file, path)
            plans = {p["path"]: SharingPlan.from_dict(p["plan"]) for p in content["pools"]}
            plain = _check_plans(module, plans, path)
            _check_tensors(module, plans if plain else {}, content["tied"], shapes, path)
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ShareError(f"{path} cannot be read: {error}") from None
    if plain:
        for pool_path, plan in plans.items():
            apply_plan(module.get_submodule(pool_path.rpartition(".")[0]), plan)
    tensors.update({name: tensors[kept] for name, kept in content["tied"].items()})
    ties = _ties(module)
    module.load_state_dict(tensors, assign=any(p.is_meta for p in module.parameters()))
    for owner, name, (first_owner, first_name) in ties:
        owner._parameters[name] = first_owner._parameters[first_name]


def _header(file: Any, path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    metadata = (file.metadata() or {}).get(_KEY)
    if metadata is None:
        raise ShareError(f"{path} has no sharing plan in it: it is no file of save_model")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return json.loads(metadata), shapes


def _check_plans(module: nn.Module, plans: dict[str, SharingPlan], path: Path) -> bool:
    """True when the module is plain and the plans are to be applied; else they must be its own."""
    own = {pool_path: pool.plan for pool_path, pool in named_pools(module)}
    if not own:
        return True
    if list(own) != list(plans):
        raise ShareError(
            f"{path}: the file's sharing is at {', '.join(plans) or 'nothing'}, the module's at "
            f"{', '.join(own)}"
        )
    for pool_path, plan in plans.items():
        difference = plan.difference(own[pool_path])
        if difference is not None:
            raise ShareError(f"{path}: the file's plan is not the module's: {difference}")
    return False


def _check_tensors(
    module: nn.Module,
    to_apply: dict[str, SharingPlan],
    tied: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    path: Path,
) -> None:
    """Compares the file's tensors with those of the module as it will be with the plans."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for pool_path, plan in to_apply.items():
        root_path = pool_path.rpartition(".")[0]
        prefix = f"{root_path}." if root_path else ""
        try:
            embedding = module.get_submodule(prefix + plan.table)
        except AttributeError:
            raise ShareError(
                f"{path}: the table {prefix}{plan.table} is not in the module"
            ) from None
        for group in plan.groups:
            for slot in group.slots:
                shape = expected.pop(prefix + slot, None)
                if shape is None or shape[0] != group.rows:
                    raise ShareError(
                        f"{path}: the file shares {prefix}{slot} ({group.rows} x {group.cols}), "
                        f"the module has {'no such weight' if shape is None else shape}"
                    )
        stored = Pool(embedding, plan).to("meta").state_dict()
        expected.update({f"{pool_path}.{name}": tuple(t.shape) for name, t in stored.items()})
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
