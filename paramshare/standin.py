"""An object in the place of a tensor, which is built only for those who need it as it is.

What torch's functions are asked to do with a stand-in goes through what it is made of where its
class knows how; for all else the tensor is built first, so that every reader gets the right
numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paramshare.errors import ShareError


class StandIn:
    """In the place of a matrix. Subclasses say how it is built, and what needs no building."""

    # Function of torch -> what does it for the same arguments; that may return NotImplemented.
    through: ClassVar[dict[Any, Callable[..., Any]]] = {}
    what: ClassVar[str]  # what it stands for, and
    instead: ClassVar[str]  # what to do instead of writing into it

    def __setattr__(self, name: str, value: object) -> None:
        raise self._cannot_be_set(name)

    def __setitem__(self, index: object, value: object) -> None:
        raise self._cannot_be_set("rows")

    def dense(self) -> Tensor:
        """The tensor itself."""
        raise NotImplementedError

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.parts()[0].device

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self.parts())

    @property
    def T(self) -> Any:
        return self.t()

    @property
    def mT(self) -> Any:
        return self.t()

    def t(self) -> Any:
        return self.dense().t()

    def transpose(self, first: int, second: int) -> Any:
        return self if (first - second) % 2 == 0 else self.t()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]

    def __matmul__(self, other: Any) -> Any:
        return self.dense() @ built(other)

    def __mul__(self, other: Any) -> Any:
        return self.dense() * other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __getattr__(self, name: str) -> Any:
        # Python asks for the names of slots and annotations that are not set yet, copying does.
        if name.startswith("__") or name in type(self).__annotations__:
            raise AttributeError(name)
        self._warn_of_writing(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        through = cls.through.get(function)
        if through is not None:
            result = through(*args, **kwargs)
            if result is not NotImplemented:
                return result
        cls._warn_of_writing(getattr(function, "__name__", ""))
        return function(*built(args), **{key: built(value) for key, value in kwargs.items()})

    @classmethod
    def _cannot_be_set(cls, name: str) -> ShareError:
        return ShareError(
            f"{name} of {cls.what} cannot be set: {cls.instead}, or call paramshare.materialize "
            "first"
        )

    @classmethod
    def _warn_of_writing(cls, name: str) -> None:
        if name[-1:] == "_" and name[-2:] != "__":  # by slices, which compilers can trace
            warnings.warn(f"{name}() of {cls.what} has no effect: {cls.instead}", stacklevel=3)


def built(value: Any) -> Any:
    """With every stand-in in it as a tensor."""
    if isinstance(value, StandIn):
        return value.dense()
    return type(value)(map(built, value)) if type(value) in (list, tuple) else value


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensor itself, what a stand-in is made of, nothing for None."""
    if value is None:
        return ()
    return value.parts() if isinstance(value, StandIn) else (value,)


def _operator(name: str) -> Any:
    def apply(self: StandIn, *others: Any) -> Any:
        return getattr(self.dense(), name)(*built(others))

    return apply


for _name in ("add", "sub", "truediv", "pow"):
    for _prefix in ("", "r"):
        setattr(StandIn, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "iter"):
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
