"""Slots: which dense weights a module has, found by structure and by kind of layer, never by name.

A new kind of layer is one `register_kind` call: which of its Parameters are dense weights, which
weights of its children it reads itself instead of calling the child, and the spread that its
documented initialisation gives (needed only where there are no values to measure, on meta).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod, sqrt

from torch import nn
from torch.nn.parameter import Parameter

from paramshare.derived import original_class, pools, sources
from paramshare.errors import ShareError

Select = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Kind:
    """What is known of a class of layers."""

    weights: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    spread: Callable[[nn.Module, str], float] | None = None


KINDS: dict[type[nn.Module], Kind] = {}


def register_kind(
    cls: type[nn.Module],
    weights: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    spread: Callable[[nn.Module, str], float] | None = None,
) -> None:
    """Makes `cls` and its subclasses known.

    weights: names of its own Parameters that are dense weights; dimension 0 is the output.
    reads: weights of children (`"out_proj.weight"`) that its forward reads without calling the
    child: those are always materialized.
    spread: `(layer, name)` -> standard deviation of its documented initialisation.
    """
    KINDS[cls] = Kind(weights, reads, spread)


register_kind(
    nn.Linear,
    weights=("weight",),
    # Documented as U(-k, k) with k = 1 / sqrt(in): torch.nn.Linear.
    spread=lambda layer, name: 1 / sqrt(3 * layer.get_parameter(name).shape[1]),
)
register_kind(
    nn.MultiheadAttention,
    weights=("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    reads=("out_proj.weight",),
    # Xavier, over the packed matrix where it is packed: nn.MultiheadAttention._reset_parameters.
    spread=lambda layer, name: sqrt(2 / sum(layer.get_parameter(name).shape)),
)
# Its fast path (eval, no_grad) hands these two to a fused kernel.
register_kind(nn.TransformerEncoderLayer, reads=("linear1.weight", "linear2.weight"))


def kind_of(module: nn.Module) -> Kind:
    """The entry of the nearest registered ancestor of the module's class; empty when unknown."""
    return next((KINDS[cls] for cls in type(module).__mro__ if cls in KINDS), Kind())


@dataclass(frozen=True)
class Slot:
    """One dense weight of one module that can be shared."""

    path: str  # of the Parameter, from the shared module
    pattern: str  # the path with the index in its stack of layers replaced by "*"
    owner: nn.Module
    name: str
    rows: int
    cols: int
    called: bool  # the owner applies it by nn.Linear.forward, so that it can be factored

    @property
    def parameter(self) -> Parameter:
        return self.owner._parameters[self.name]  # type: ignore[return-value]

    def spread(self) -> float:
        """Standard deviation of the weight as it is; on meta, of the kind's initialisation."""
        if not self.parameter.is_meta:
            return float(self.parameter.detach().float().std(correction=0))
        return self.documented_spread()

    def documented_spread(self) -> float:
        """Standard deviation that the owner's kind documents for its initialisation."""
        spread = kind_of(self.owner).spread
        if spread is None:
            raise ShareError(
                f"{self.path}: the initial spread of a {type(self.owner).__name__} is not known; "
                "share after the weights are allocated, or use init='paper'"
            )
        return spread(self.owner, self.name)


def find_slots(module: nn.Module, embedding: nn.Module, select: Select | None) -> list[Slot]:
    """The slots of `module` in the order of registration.

    Default: weights of registered kinds inside the outermost stacks of layers. With
    `select(path, owner)`: any Parameter of two or more dimensions for which it is true. The
    table and whatever is tied to it are never slots.

    Raises ShareError: nothing found, or a selected weight is shared already.
    """
    table = getattr(embedding, "weight")  # noqa: B009
    stacks = list(_stacks(module, embedding))
    ours = {id(pool) for part in module.modules() for pool in pools(part)}
    slots = []
    for owner_path, owner in module.named_modules():
        if id(owner) in ours:
            continue
        pattern = _pattern(owner_path, stacks)
        kind = kind_of(owner)
        for name in _weight_names(owner):
            path = f"{owner_path}.{name}" if owner_path else name
            if select is None:
                chosen = pattern is not None and name in kind.weights
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
                tail = f".{name}" if owner_path else name
                slots.append(make_slot(module, path, (pattern or owner_path) + tail))
    if not slots:
        raise ShareError(_nothing_found(module, select, stacks))
    return slots


def make_slot(module: nn.Module, path: str, pattern: str | None = None) -> Slot:
    """The slot of the Parameter at `path`. Raises ShareError unless it is a plain one."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = module.get_submodule(owner_path)
    except AttributeError as error:
        raise ShareError(f"{path}: there is no such module ({error})") from None
    parameter = owner._parameters.get(name)
    if parameter is None:
        raise ShareError(f"{path} is no Parameter of this {type(module).__name__}")
    parent = module.get_submodule(owner_path.rpartition(".")[0])
    child = f"{owner_path.rpartition('.')[2]}.{name}"
    called = name == "weight" and original_class(type(owner)).forward is nn.Linear.forward
    return Slot(
        path=path,
        pattern=pattern or path,
        owner=owner,
        name=name,
        rows=parameter.shape[0],
        cols=prod(parameter.shape[1:]),
        called=called and child not in kind_of(parent).reads,
    )


def _weight_names(owner: nn.Module) -> list[str]:
    own = [name for name, p in owner._parameters.items() if p is not None and p.dim() >= 2]
    return own + list(sources(owner))


def _stacks(module: nn.Module, embedding: nn.Module, prefix: str = "") -> Iterator[str]:
    """Paths of the outermost repeated containers.

    A `ModuleList` or `Sequential` whose children are all of one class. One child counts (ALBERT
    keeps its only layer in a list), unless a longer stack lies inside of it; a container that
    holds the table is no stack of layers, it is the model.
    """
    inside = list(module.modules())
    if (
        _is_stack(module)
        and all(m is not embedding for m in inside)
        and (
            len(module._modules) > 1
            or not any(_is_stack(m) and len(m._modules) > 1 for m in inside)
        )
    ):
        yield prefix
        return
    for name, child in module.named_children():
        yield from _stacks(child, embedding, f"{prefix}.{name}" if prefix else name)


def _is_stack(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len({original_class(type(child)) for child in module.children()}) == 1
    )


def _pattern(owner_path: str, stacks: list[str]) -> str | None:
    """The owner's path with its index in the stack replaced, or None outside of every stack."""
    for stack in stacks:
        prefix = f"{stack}." if stack else ""
        if owner_path.startswith(prefix) and owner_path != stack:
            _, _, rest = owner_path[len(prefix) :].partition(".")
            return f"{prefix}*.{rest}" if rest else f"{prefix}*"
    return None


def _nothing_found(module: nn.Module, select: Select | None, stacks: list[str]) -> str:
    name = type(module).__name__
    if select is not None:
        return f"select() chose no weight of this {name}: it is called with (path, owner module)"
    kinds = ", ".join(cls.__name__ for cls, kind in KINDS.items() if kind.weights)
    where = (
        f"in its stacks of layers ({', '.join(s or '.' for s in stacks)})"
        if stacks
        else ("(it has no ModuleList or Sequential of equal layers)")
    )
    return (
        f"this {name} has no weight that is shared by default: no {kinds} {where}; name the "
        "weights with select=lambda path, owner: ..., for example "
        "select=lambda path, owner: isinstance(owner, torch.nn.Linear)"
    )
