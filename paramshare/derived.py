"""Makes a module's weight a derived one: a property that reads the pool.

The module stays what it was, with the same class name, `isinstance` and `repr`: only its class
becomes a subclass, which has the weight as a property, and the old Parameter is gone (a `None`
left behind would count as a parameter for some trainers, the old tensor for all). Whoever reads
the weight gets the right one: the layer's own forward, an attention module that never calls its
projection, a fused kernel. What would initialise the weight again warns that it cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from paramshare import weight_norm
from paramshare.errors import ShareError
from paramshare.kinds import kind_of_class
from paramshare.lifted import LiftedTable
from paramshare.marks import BASE, POOLS, SOURCES, original_class, pools, sources
from paramshare.readonly import ReadOnlyWeight, read_only

if TYPE_CHECKING:
    from paramshare.pool import Pool


@dataclass
class Source:
    """Where an owner reads one of its weights: from a group's columns, or, where it is the
    embedding's own weight or tied to it, from the factors of the embedding (`group` is None)."""

    pool: Pool
    group: int | None
    shape: tuple[int, ...]  # as the owner's Parameter had it
    out_last: bool  # its last dimension is the output
    normed: bool  # it is the direction of a weight-normed weight
    before: tuple[str, ...]  # the owner's Parameters that stood before it

    def read(self, training: bool) -> Tensor | LiftedTable:
        if self.group is None:
            return self.pool.lifted_table()
        weight = self.pool.weight(self.group, training)
        if self.normed:
            weight = weight.to(self.pool.dtype)  # that of the gain, under autocast too
        return self.guard((weight.t() if self.out_last else weight).view(self.shape))

    def guard(self, weight: Tensor) -> Tensor:
        """The weight as those get it who read it now: a forward as it is, all others so that they
        cannot write into it, which would be lost."""
        if self.pool.holder.running is not None or torch.compiler.is_compiling():
            return weight
        assert self.group is not None
        return read_only(weight, self.pool.plan.groups[self.group].name)


def derive(module: nn.Module, new: dict[str, Source], pool: Pool | None) -> None:
    """Turns the named Parameters of `module` into derived weights; with `pool`, its outermost
    forward generates that pool's weights once and holds them."""
    for name in new:
        del module._parameters[name]
    _set(module, {**sources(module), **new}, pools(module) + ((pool,) if pool else ()))
    for name in weight_norm.normed_names(module, new):
        weight_norm.on_derive(module, name)
    members = kind_of_class(type(module)).members
    if members is not None and new:
        members.on_derive(module)  # type: ignore[attr-defined]


def refresh(module: nn.Module) -> None:
    """Makes the module apply its derived weights by what their groups' executions are now. Raises
    ShareError where something else has changed its class."""
    check_restore(module)
    _set(module, sources(module), pools(module))


def check_derive(module: nn.Module, new: dict[str, Source], pool: Pool | None) -> None:
    """Raises ShareError unless `derive` with the same arguments will succeed."""
    if original_class(type(module)) is not type(module):
        check_restore(module)
    try:
        _class_for(module, {**sources(module), **new}, pools(module) + ((pool,) if pool else ()))
    except Exception as error:
        raise ShareError(f"a {type(module).__name__} cannot be shared: {error}") from None


def restore(module: nn.Module, weights: dict[str, Parameter], released: list[Pool]) -> None:
    """Undoes `derive`: the given Parameters stand where the old ones stood, pools are let go."""
    remaining = dict(sources(module))
    for name, weight in weights.items():
        before = remaining.pop(name).before
        parameters = module._parameters
        tail = {key: parameters.pop(key) for key in list(parameters) if key not in before}
        parameters[name] = weight
        parameters.update(tail)
    kept = tuple(p for p in pools(module) if all(p is not gone for gone in released))
    members = kind_of_class(type(module)).members
    _set(module, remaining, kept)
    if members is not None and weights and not remaining:
        members.on_restore(module)  # type: ignore[attr-defined]
    for name in weight_norm.normed_names(module, weights):
        weight_norm.on_restore(module, name)


@torch.no_grad()
def bake(module: nn.Module, name: str) -> Parameter:
    """An independent Parameter with the values of a derived weight, which trains where what it is
    read from does."""
    pool = sources(module)[name].pool
    trains = any(p.requires_grad for p in (pool.embedding.weight, *pool.parameters()))
    weight = getattr(module, name).clone(memory_format=torch.contiguous_format)
    return Parameter(weight, requires_grad=trains)


def check_restore(module: nn.Module) -> None:
    """Raises ShareError where something else has changed the module's class after us."""
    if BASE not in type(module).__dict__:
        raise ShareError(
            f"something has changed this {type(module).__name__} after it was shared (a "
            "parametrization, FSDP); undo that first"
        )


def _set(module: nn.Module, new: dict[str, Source], held: tuple[Pool, ...]) -> None:
    cls = _class_for(module, new, held)
    for attribute, value in ((SOURCES, new), (POOLS, held)):
        module.__dict__.pop(attribute, None)
        if value:
            module.__dict__[attribute] = value
    module.__class__ = cls


def _class_for(
    module: nn.Module, new: dict[str, Source], held: tuple[Pool, ...]
) -> type[nn.Module]:
    base = original_class(type(module))
    if not new and not held:
        return base
    groups = any(source.group is not None for source in new.values())
    weight = new.get("weight")
    applied = weight is not None and weight.group is not None and base.forward is nn.Linear.forward
    holds = bool(held) or groups and not applied
    normed = weight_norm.normed_names(module, new)
    return _derived_class(base, tuple(new), normed, applied, holds)


def _make_class(
    base: type[nn.Module],
    names: tuple[str, ...],
    normed: tuple[str, ...],
    applied: bool,
    holds: bool,
) -> type[nn.Module]:
    def create(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        if args or kwargs:
            return base(*args, **kwargs)  # type(layer)(...) makes an ordinary layer
        return object.__new__(cls)  # what copying does

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        """Copies and pickles: the class is made again from its base, which can be imported."""
        state = super(made, self).__reduce_ex__(protocol)[2]  # type: ignore[misc]
        return _rebuild, (base, names, normed, applied, holds), state

    def register_parameter(self: nn.Module, name: str, param: Parameter | None) -> None:
        """What setting a Parameter, by hand or by a tool that replaces weights, comes to."""
        if name in sources(self) or isinstance(param, ReadOnlyWeight):  # pruning keeps the latter
            raise _cannot_be_set(self, name)
        super(made, self).register_parameter(name, param)  # type: ignore[misc]

    def load(self: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Of a shared module: its plans are compared before anything in it is written. Of an
        owner: a file's empty weight, which keeps it from plain modules, is not for it."""
        places = {part: path for path, part in self.named_modules()} if pools(self) else {}
        for pool in pools(self):
            pool.check_state(state, f"{prefix}{places[pool]}.")
        for name in sources(self):
            if isinstance(empty := state.get(prefix + name), Tensor) and empty.numel() == 0:
                del state[prefix + name]
        super(made, self)._load_from_state_dict(state, prefix, *args)  # type: ignore[misc]

    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": create,
        "__reduce_ex__": reduce,
        "register_parameter": register_parameter,
        "_load_from_state_dict": load,
        "_paramshare_bake": _restore_one,
        BASE: base,
    }
    body.update({name: _weight_property(name) for name in names})
    body.update({name: _normed_property(name) for name in normed})
    if names:
        body.update(_members(base))
        body["apply"] = _watched_apply(base)
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(base, name):
                body[name] = _resetting(getattr(base, name))
    if applied:
        body["forward"] = _linear_forward
    elif holds:
        body["forward"] = _holding_forward(base)
    metaclass: Any = type(base)
    made = metaclass(base.__name__, (base,), body)
    return made


def _restore_one(module: nn.Module, name: str) -> None:
    """Makes one derived weight a Parameter again, which then has nothing to do with the table."""
    check_restore(module)
    restore(module, {name: bake(module, name)}, [])


def _members(base: type[nn.Module]) -> dict[str, Any]:
    """What the kind of `base` adds to a class with derived weights."""
    members = kind_of_class(base).members
    return {
        name: value
        for name, value in (vars(members) if members is not None else {}).items()
        if name not in ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__")
    }


# One class a combination, not one a module: it holds no state, and compilers see one type.
_derived_class: Callable[..., type[nn.Module]] = functools.cache(_make_class)


def _resetting(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that initialises, which warns of what it cannot initialise."""

    @functools.wraps(method)
    def reset(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _watch(self, anyway=True):
            return method(self, *args, **kwargs)

    return reset


def _watched_apply(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.apply)
    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        def watched(module: nn.Module) -> None:
            with _watch(module) if module is self else nullcontext():
                fn(module)

        return base.apply(self, watched)

    return apply


@contextmanager
def _watch(module: nn.Module, anyway: bool = False) -> Iterator[None]:
    """Warns when the module's derived weights are written into; `anyway`: warns of all of them."""
    groups: dict[Pool, list[int]] = {}
    for source in sources(module).values():
        if source.group is not None:
            groups.setdefault(source.pool, []).append(source.group)
    with ExitStack() as stack:
        for pool, indices in groups.items():
            stack.enter_context(pool.watch(indices if anyway else ()))
        yield


def _rebuild(*combination: Any) -> Any:
    cls = _derived_class(*combination)
    return cls.__new__(cls)


def _weight_property(name: str) -> property:
    def read(self: nn.Module) -> Tensor | LiftedTable:
        source = sources(self).get(name)
        if source is None:  # an ordinary layer, made by type(layer)()
            return nn.Module.__getattr__(self, name)  # type: ignore[return-value]
        return source.read(self.training)

    def refuse(self: nn.Module, value: object = None) -> None:
        raise _cannot_be_set(self, name)

    return property(read, refuse, refuse)


def _normed_property(name: str) -> property:
    def read(self: nn.Module) -> Tensor:
        return sources(self)[f"{name}_v"].guard(weight_norm.normed(self, name))

    def refuse(self: nn.Module, value: object = None) -> None:
        raise _cannot_be_set(self, name)

    return property(read, refuse, refuse)


def _cannot_be_set(module: nn.Module, name: str) -> ShareError:
    return ShareError(
        f"{name} of this {type(module).__name__} is read from the embedding and cannot be set or "
        "removed; call paramshare.materialize on the shared module first"
    )


def _holding_forward(base: type[nn.Module]) -> Any:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A shared module generates all its weights at once. An owner by itself (attention reads
        # its weight several times a call) holds what it reads.
        entered = []
        try:
            for pool in pools(self):
                pool.check_embedding(self)
                entered.append((pool, pool.enter(self.training, all_groups=True)))
            for pool in {s.pool: None for s in sources(self).values() if s.group is not None}:
                entered.append((pool, pool.enter(self.training, all_groups=False)))
            return base.forward(self, *args, **kwargs)
        finally:
            for pool, outer in reversed(entered):
                pool.leave(outer)

    return forward


@functools.wraps(nn.Linear.forward)
def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    source = self.__dict__[SOURCES]["weight"]
    assert source.group is not None
    return source.pool.linear(source.group, input, self.bias, self.training)
