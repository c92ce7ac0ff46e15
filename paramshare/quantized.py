"""A module of 8-bit matrices, for inference.

What `derived` does for weights that are read from a table is done here for all that are stored:
the Parameter is gone, two buffers have its values and scales, and a property has its name. Layers
and the products of factored execution find a stand-in there, which multiplies integers; who cannot
do with one (recurrent kernels take lists of tensors) finds the converted tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from paramshare import int8, marks
from paramshare.errors import ShareError
from paramshare.int8 import Int8Matrix
from paramshare.kinds import kind_of_class
from paramshare.plan import possible_executions
from paramshare.pool import Pool, readers, table_of
from paramshare.sharing import check_not_quantized, check_whole
from paramshare.slots import is_weight_norm

VALUES, SCALE = "_int8", "_scale"  # what the names of the two buffers end with
_SMALLEST_BLOCK = 64  # rows; scales for smaller ones would be more than 3% of the values


@torch.no_grad()
def quantize(module: nn.Module) -> nn.Module:
    """Makes every matrix that `module` stores 8 bits wide, in place, for inference. Returns it.

    Parameters of two dimensions or more become int8 buffers, `NAME_int8`, with scales,
    `NAME_scale`: one a row of the matrix; of the projection one a column; and of a table whose
    weights can be factored one a feature and block of rows, which these products want. What is tied
    is stored once. All other Parameters are rounded to float16, which is also what `save_model`
    writes of them and the scales; in memory they keep their dtype, in which the module computes. So
    are matrices of which a parametrization (torch.nn.utils.parametrize) makes weights, but for
    weight norm: it may read signs or angles from them. Buffers stay as they are.

    It computes as before, but for the rounding: on CPUs with VNNI the inputs of products are
    rounded to 8 bits as well, each token by itself. Afterwards it is in eval mode, and nothing in
    it trains.

    Raises ShareError, the module being what it was: it is quantised already, or a part of a shared
    module, or weights outside of it read its table; it stores no matrices, or none yet; values are
    not finite, or too large for float16; a layer has the name of a buffer already, or cannot change
    its class.
    """
    change = _prepare(module)
    for path, parameter in module.named_parameters():
        finite = parameter.is_meta or parameter.half().isfinite().all()
        if parameter.is_floating_point() and not finite:
            raise ShareError(f"{path} has values that are not finite, or too large for float16")
    for pool in check_whole(module):
        pool.fold()
        pool.folded = False  # for good
    change.commit([int8.quantise(parameter, kept.block) for parameter, kept in change.weights])
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.copy_(parameter.half())
    return module


def restructure(module: nn.Module) -> None:
    """As `quantize`, for values that are still to be loaded."""
    change = _prepare(module)
    change.commit([int8.empty(parameter, kept.block) for parameter, kept in change.weights])


def quantized_paths(module: nn.Module) -> list[str]:
    """The paths of what was quantised in `module`, "" for itself."""
    return [path for path, part in module.named_modules() if marks.is_quantized(part)]


def narrow_names(module: nn.Module) -> set[str]:
    """Names in the state_dict of numbers that float16 holds: what `quantize` rounded to it."""
    names: set[str] = set()
    for root in quantized_paths(module):
        for path, part in module.get_submodule(root).named_modules(prefix=root):
            held = part._parameters.items()
            mine = [name for name, p in held if p is not None and p.is_floating_point()]
            mine += [f"{name}{SCALE}" for name in marks.int8(part)]
            names.update(f"{path}.{name}" if path else name for name in mine)
    return names


@dataclass
class Kept:
    """Where the numbers of a quantised weight are: in buffers of the module that held it first,
    so that tied weights are one however the module is moved."""

    owner: nn.Module
    name: str
    block: int | None

    def read(self) -> Int8Matrix:
        values, scale = (self.owner._buffers[self.name + end] for end in (VALUES, SCALE))
        assert values is not None
        assert scale is not None
        return Int8Matrix(values, scale, self.block)


@dataclass
class _Change:
    """What is to be done to a module: all that can fail is done, and nothing is changed yet."""

    module: nn.Module
    weights: list[tuple[Parameter, Kept]]
    owners: dict[nn.Module, dict[str, Kept]]
    classes: dict[nn.Module, type[nn.Module]]

    def commit(self, made: list[tuple[Tensor, Tensor]]) -> None:
        """made: values and scales of each weight."""
        for owner, weights in self.owners.items():
            for name in weights:
                del owner._parameters[name]
        for (_, kept), buffers in zip(self.weights, made, strict=True):
            for end, buffer in zip((VALUES, SCALE), buffers, strict=True):
                kept.owner.register_buffer(kept.name + end, buffer)
        for owner, weights in self.owners.items():
            owner.__class__ = self.classes[owner]
            owner.__dict__[marks.INT8] = weights
            members = kind_of_class(type(owner)).members
            if members is not None and weights:
                members.on_derive(owner)  # type: ignore[attr-defined]
        self.module.requires_grad_(False).eval()
        for pool in check_whole(self.module):
            pool.holder.kept = None


def _prepare(module: nn.Module) -> _Change:
    """Raises ShareError for what cannot be quantised."""
    if not isinstance(module, nn.Module):
        raise ShareError(f"{module!r} is no module")
    check_not_quantized(module)
    pools = check_whole(module)
    blocks = {}
    for pool in pools:
        table = table_of(pool.embedding)
        blocks[table] = _block_of_table(table, pools)
        if pool.projection is not None:
            blocks[pool.projection] = len(pool.projection)  # one block: a scale a column
    found: dict[Parameter, Kept] = {}
    owners: dict[nn.Module, dict[str, Kept]] = {module: {}}
    for path, owner in module.named_modules():
        exact = isinstance(owner, ParametrizationList) and not is_weight_norm(owner)
        for name, parameter in owner._parameters.items():
            if is_lazy(parameter):
                raise ShareError(f"{path}.{name} has no shape yet: call the module once")
            if parameter is None or exact or not parameter.is_floating_point():
                continue
            if sum(size > 1 for size in parameter.shape) > 1:
                kept = found.setdefault(parameter, Kept(owner, name, blocks.get(parameter)))
                owners.setdefault(owner, {})[name] = kept
                if any(hasattr(kept.owner, kept.name + end) for end in (VALUES, SCALE)):
                    raise ShareError(f"{path} has {name}{VALUES} or {name}{SCALE} of its own")
    if any(reader not in pools for parameter in found for reader in readers(parameter)):
        raise ShareError(
            f"weights outside of this {type(module).__name__} are read from its table; quantise "
            "the module that holds them as well"
        )
    if not found:
        raise ShareError(f"this {type(module).__name__} stores no matrices")
    try:
        classes = {
            owner: _quantized_class(type(owner), tuple(weights), owner is module)
            for owner, weights in owners.items()
        }
    except Exception as error:
        raise ShareError(f"this {type(module).__name__} cannot be quantised: {error}") from None
    return _Change(module, list(found.items()), owners, classes)


def _block_of_table(table: Parameter, pools: list[Pool]) -> int | None:
    """Rows of a table that have scales in common: what the products of factored weights sum over is
    whole blocks of them, or the whole table is one. None where no weight could be factored.

    Of the plans alone, and not of how weights are applied at the time: files fit any of it.
    """
    lengths = [
        group.cols
        for pool in pools
        for group in pool.plan.groups
        if table_of(pool.embedding) is table
        and "factored" in possible_executions(group.layout, pool.plan.virtual)
    ]
    block = gcd(*lengths)
    return None if not lengths else block if block >= _SMALLEST_BLOCK else len(table)


# ---------------------------------------------------------------------- classes


def _make_class(base: type[nn.Module], names: tuple[str, ...], whole: bool) -> type[nn.Module]:
    """A class like `base`, of which the named weights are quantised; whole: of what was."""

    def create(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        if args or kwargs:
            return base(*args, **kwargs)  # type(layer)(...) makes an ordinary layer
        return object.__new__(cls)  # what copying does

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        """Copies and pickles: the class is made again from its base, by what makes that."""
        make, args, state = super(made, self).__reduce_ex__(protocol)[:3]  # type: ignore[misc]
        if marks.BASE not in vars(base):
            make, args = _blank, (base,)
        return _rebuild, (make, args, names, whole), state

    def register_parameter(self: nn.Module, name: str, param: Parameter | None) -> None:
        if name in marks.int8(self):
            raise _cannot_be_set(self, name)
        super(made, self).register_parameter(name, param)  # type: ignore[misc]

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if mode:
            check_not_quantized(self)
        return super(made, self).train(mode)  # type: ignore[misc]

    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": create,
        "__reduce_ex__": reduce,
        "register_parameter": register_parameter,
        marks.QUANTIZED: whole,
        **{name: _weight_property(name, base) for name in names},
    }
    if whole:
        body["train"] = train
    members = kind_of_class(base).members
    bases = (members, base) if names and members is not None else (base,)
    metaclass: Any = type(base)
    made = metaclass(base.__name__, bases, body)
    return made


_quantized_class: Callable[..., type[nn.Module]] = functools.cache(_make_class)


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _rebuild(
    make: Callable[..., nn.Module], args: tuple[Any, ...], names: tuple[str, ...], whole: bool
) -> nn.Module:
    return _blank(_quantized_class(type(make(*args)), names, whole))


def _weight_property(name: str, base: type[nn.Module]) -> property:
    recurrent = issubclass(base, nn.RNNBase)

    def read(self: nn.Module) -> Tensor | Int8Matrix:
        matrix = marks.int8(self)[name].read()
        return matrix.dense() if recurrent or matrix.dim() != 2 else matrix

    def refuse(self: nn.Module, value: object) -> None:
        raise _cannot_be_set(self, name)

    return property(read, refuse)


def _cannot_be_set(module: nn.Module, name: str) -> ShareError:
    return ShareError(
        f"{name} of this {type(module).__name__} is quantised and cannot be set; set that of the "
        "module that it was made of, and quantise again"
    )
