"""Slots: which dense weights a module has, found by structure and by kind of layer, never by
name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.nn.parameter import Parameter, is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from paramshare.errors import ShareError
from paramshare.kinds import KINDS, kind_of
from paramshare.marks import BASE, original_class, pools, sources
from paramshare.weight_norm import normed_name

Select = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Slot:
    """One dense weight of one module that can be shared."""

    path: str  # of the Parameter, from the shared module
    pattern: str  # the path with the index in its stack of layers replaced by "*"
    index: int  # in its stack of layers
    depth: int  # layers of that stack; 0 outside of every stack
    owner: nn.Module
    name: str
    layer: nn.Module  # whose weight it is: the owner, but for a parametrized weight
    rows: int
    cols: int
    out_last: bool  # the last dimension of the Parameter is the rows, not the first
    called: bool  # the owner applies it by nn.Linear.forward, so that it can be factored
    normed: bool  # it is the direction of a weight-normed weight

    @property
    def parameter(self) -> Parameter:
        return self.owner._parameters[self.name]  # type: ignore[return-value]

    def spread(self) -> float:
        """Standard deviation of the weight as it is; on meta, of the kind's initialisation."""
        values = self.parameter.detach().float()
        if values.is_meta:
            return self.documented_spread()
        return float(values.std(correction=0) if values.numel() > 1 else values.abs())

    def documented_spread(self) -> float:
        """Standard deviation that the layer's kind documents for its initialisation."""
        spread = kind_of(self.layer).spread
        if spread is None:
            raise ShareError(
                f"{self.path}: the initial spread of a {type(self.layer).__name__} is not known; "
                "share after the weights are allocated, or use init='paper'"
            )
        return spread(self.layer, tuple(self.parameter.shape))


def find_slots(module: nn.Module, embedding: nn.Module, select: Select | None) -> list[Slot]:
    """The slots of `module` in the order of registration.

    Default: weights of registered kinds inside the outermost stacks of layers. With
    `select(path, owner)`: any Parameter of two or more dimensions for which it is true. The
    table and whatever is tied to it are never slots, nor are the gains of weight norm.

    Raises ShareError: nothing found, or a selected weight is shared already.
    """
    table = getattr(embedding, "weight")  # noqa: B009
    stacks = list(_stacks(module, embedding))
    ours = {id(pool) for part in module.modules() for pool in pools(part)}
    slots = []
    for owner_path, owner in module.named_modules():
        if id(owner) in ours:
            continue
        for name in _weight_names(owner):
            path = f"{owner_path}.{name}" if owner_path else name
            layer_path, weight = _weight_of(owner_path, owner, name)
            layer = module.get_submodule(layer_path)
            place = _place(layer_path, layer, path, weight, stacks)
            if select is None:
                chosen = place is not None and kind_of(layer).layer_of(weight) is not None
            else:
                chosen = bool(select(path, owner))
            if not chosen:
                continue
            if name in sources(owner):
                raise ShareError(
                    f"{path} is shared already; choose other weights with select=, or call "
                    "paramshare.materialize first"
                )
            if owner._parameters[name] is not table:
                slots.append(make_slot(module, path, place))
    if not slots:
        raise ShareError(_nothing_found(module, select, stacks))
    return slots


@dataclass(frozen=True)
class _Place:
    """Where in a stack of layers a weight stands: see Slot."""

    pattern: str
    index: int
    depth: int


def make_slot(module: nn.Module, path: str, place: _Place | None = None) -> Slot:
    """The slot of the Parameter at `path`. Raises ShareError unless it is one of two or more
    dimensions."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = module.get_submodule(owner_path)
    except AttributeError as error:
        raise ShareError(f"{path}: there is no such module ({error})") from None
    parameter = owner._parameters.get(name)
    if parameter is None:
        raise ShareError(f"{path} is no Parameter of this {type(module).__name__}")
    if is_lazy(parameter) or parameter.dim() < 2:
        raise ShareError(f"{path} is no matrix: it has no shape yet, or less than two dimensions")
    layer_path, weight = _weight_of(owner_path, owner, name)
    layer = module.get_submodule(layer_path)
    kind = kind_of(layer)
    out_last = kind.out_last and kind.layer_of(weight) is not None
    rows = parameter.shape[-1 if out_last else 0]
    return Slot(
        path=path,
        pattern=place.pattern if place else path,
        index=place.index if place else 0,
        depth=place.depth if place else 0,
        owner=owner,
        name=name,
        layer=layer,
        rows=rows,
        cols=prod(parameter.shape[:-1] if out_last else parameter.shape[1:]),
        out_last=out_last,
        called=_is_called(module, path),
        normed=weight != name,
    )


def is_linear(owner: nn.Module, name: str) -> bool:
    """Whether the owner, when it is called, applies the weight by `nn.Linear.forward`."""
    return name == "weight" and original_class(type(owner)).forward is nn.Linear.forward


def _is_called(module: nn.Module, path: str) -> bool:
    """Whether the owner of the weight at `path` applies it so, and nobody above reads it."""
    owner_path, _, name = path.rpartition(".")
    parent_path, _, owner_name = owner_path.rpartition(".")
    reads = kind_of(module.get_submodule(parent_path)).reads
    read = f"{owner_name}.{name}" in reads
    return is_linear(module.get_submodule(owner_path), name) and not read


def _weight_names(owner: nn.Module) -> list[str]:
    own = [
        name
        for name, p in owner._parameters.items()
        if p is not None and p.dim() >= 2 and not _is_gain(owner, name)
    ]
    return own + list(sources(owner))


def _is_gain(owner: nn.Module, name: str) -> bool:
    """Whether it is the gain of weight norm, whose direction is another Parameter."""
    if is_weight_norm(owner):
        return name == "original0"
    return name.endswith("_g") and normed_name(owner, f"{name[:-2]}_v") is not None


def _weight_of(owner_path: str, owner: nn.Module, name: str) -> tuple[str, str]:
    """(path of the layer, its name of the weight) that the owner's Parameter `name` is, or is the
    direction of where the weight is weight-normed."""
    if is_weight_norm(owner) and name == "original1":
        layer_path, _, weight = owner_path.rpartition(".")
        return layer_path.rpartition("parametrizations")[0].rstrip("."), weight
    return owner_path, normed_name(owner, name) or name


def is_weight_norm(owner: nn.Module) -> bool:
    """Whether it is what `torch.nn.utils.parametrizations.weight_norm` puts under a layer."""
    return (
        isinstance(owner, ParametrizationList)
        and len(owner) == 1
        and isinstance(owner[0], _WeightNorm)
    )


def _stacks(module: nn.Module, embedding: nn.Module, prefix: str = "") -> Iterator[_Stack]:
    """The outermost repeated containers.

    A `ModuleList` or `Sequential` whose children are all of one class, or a module that holds
    layers by itself (nn.LSTM). One layer counts (ALBERT keeps its only layer in a list), unless a
    longer stack of modules with an inside lies inside of it (the only layer's list of its four
    projections is no stack); a container that holds the table is none either, it is the model.
    """
    inside = list(module.modules())
    length = _length(module)
    if (
        length
        and all(m is not embedding for m in inside)
        and (length > 1 or not any(_length(m) > 1 and _is_deep(m) for m in inside))
    ):
        yield _Stack(prefix, length, list(module._modules))
        return
    for name, child in module.named_children():
        yield from _stacks(child, embedding, f"{prefix}.{name}" if prefix else name)


@dataclass(frozen=True)
class _Stack:
    path: str
    length: int
    names: list[str]  # of the children; none where the module holds the layers by itself


def _length(module: nn.Module) -> int:
    """How many layers the module is a stack of; 0 when it is none."""
    layers = kind_of(module).layers
    if layers is not None:
        return layers(module)
    classes = {_plain_class(child) for child in module.children()}
    is_stack = isinstance(module, nn.ModuleList | nn.Sequential) and len(classes) == 1
    return len(module._modules) if is_stack else 0


def _is_deep(stack: nn.Module) -> bool:
    """Whether a stack's layers are more than single known layers, as those of an nn.LSTM are, and
    more than norms."""
    return kind_of(stack).layers is not None or any(
        (not kind_of(child).weights or kind_of(child).layers) and _has_matrices(child)
        for child in stack.children()
    )


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters()) or any(
        sources(part) for part in module.modules()
    )


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Its class without what sharing and parametrizing, in any order, have made of it."""
    cls = type(module)
    while True:
        base = cls.__bases__[0]
        if BASE in vars(cls):
            cls = original_class(cls)
        elif is_parametrized(module) and cls.__name__ == f"Parametrized{base.__name__}":
            cls = base
        else:
            return cls


def _place(
    layer_path: str, layer: nn.Module, path: str, weight: str, stacks: list[_Stack]
) -> _Place | None:
    """Where the weight at `path` stands in its stack, None outside of every stack."""
    for stack in stacks:
        prefix = f"{stack.path}." if stack.path else ""
        if layer_path == stack.path and kind_of(layer).layers is not None:
            index = kind_of(layer).layer_of(weight)
            if index is None:
                return None
            # Only a module of several layers has their index in its names.
            ending = path[len(prefix) :]
            if stack.length > 1:
                ending = ending.replace(f"_l{index}", "_l*", 1)
            return _Place(prefix + ending, index, stack.length)
        if layer_path.startswith(prefix) and layer_path != stack.path:
            name, _, rest = path[len(prefix) :].partition(".")
            return _Place(f"{prefix}*.{rest}", stack.names.index(name), stack.length)
    return None


def _nothing_found(module: nn.Module, select: Select | None, stacks: list[_Stack]) -> str:
    name = type(module).__name__
    if select is not None:
        return f"select() chose no weight of this {name}: it is called with (path, owner module)"
    kinds = ", ".join(_class_name(cls) for cls, kind in KINDS.items() if kind.weights)
    where = (
        f"in its stacks of layers ({', '.join(s.path or '.' for s in stacks)})"
        if stacks
        else ("(it has no ModuleList or Sequential of equal layers)")
    )
    return (
        f"this {name} has no weight that is shared by default: no {kinds} {where}; name the "
        "weights with select=lambda path, owner: ..., for example "
        "select=lambda path, owner: isinstance(owner, torch.nn.Linear)"
    )


def _class_name(cls: type[nn.Module] | str) -> str:
    return (cls if isinstance(cls, str) else cls.__name__).rpartition(".")[2]
