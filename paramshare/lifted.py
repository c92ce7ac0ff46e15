"""The factorised embedding: a narrow table and a lift, where the module had a wide table.

Lan et al., "ALBERT" (2020), section 3.1: `E x H` numbers become `E x F + F x H`. Whoever reads the
embedding's weight, or a head's that is tied to it, gets a `LiftedTable`: what is looked up in it or
multiplied by it goes through the factors, and the `E x H` table never exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paramshare.errors import ShareError
from paramshare.standin import StandIn, tensors_of

TABLE, LIFT = "table", "lift"  # names of the factors under the embedding module


class LiftedTable(StandIn):
    """`left @ right` in the place of a tensor: `(tokens, features) @ (features, width)`.

    Lookups, products and transposes use the factors. Anything else that torch is asked to do with
    it works as well, by building the product first.
    """

    left: Tensor
    right: Tensor
    what = "a factorised embedding's weight"
    instead = f"set the weights of its children {TABLE!r} and {LIFT!r}"

    def __init__(self, left: Tensor, right: Tensor) -> None:
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)

    def dense(self) -> Tensor:
        """The product itself."""
        return self.left @ self.right

    def parts(self) -> tuple[Tensor, ...]:
        return (*tensors_of(self.left), *tensors_of(self.right))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.left.shape[0], self.right.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def data(self) -> LiftedTable:
        return LiftedTable(self.left.detach(), self.right.detach())

    def t(self) -> LiftedTable:
        return LiftedTable(self.right.t(), self.left.t())

    def __getitem__(self, index: Any) -> Tensor:
        mask = isinstance(index, Tensor) and index.dtype is torch.bool
        if mask or isinstance(index, tuple):
            return self.dense()[index]
        return self.left[index] @ self.right

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.left @ (self.right @ other)

    def __mul__(self, other: Any) -> Any:
        # Scaled, as some embeddings do in every lookup, it still goes through the factors.
        if isinstance(other, int | float):
            return LiftedTable(self.left, self.right * other)
        return self.dense() * other


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LiftedTable) or not isinstance(input, Tensor):
        return NotImplemented
    return F.linear(F.linear(input, weight.right), weight.left, bias)


def _embedding(
    input: Tensor,
    weight: LiftedTable,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented  # both are of the rows of the product, and of their gradients
    found = F.embedding(input, weight.left, padding_idx, sparse=sparse) @ weight.right
    if padding_idx is None or not torch.is_grad_enabled():
        return found
    # Nothing of the product trains there: the lift does not, either.
    padded = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(padded, found.detach(), found)


def _matmul(left: Any, right: Any) -> Any:
    if isinstance(left, LiftedTable) and isinstance(right, Tensor):
        return left @ right
    if isinstance(left, Tensor) and isinstance(right, LiftedTable):
        return left @ right.left @ right.right
    return NotImplemented


LiftedTable.through = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.__matmul__: _matmul,
}


@torch.no_grad()
def factorise(weight: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """The `(tokens, features)` table and `(width, features)` lift whose product `table @ lift.T`
    is nearest to `weight` `(tokens, width)`: its truncated singular value decomposition. Raises
    ShareError where that does not exist.

    The lift's columns are orthonormal, so that tokens keep their lengths. They are turned by a
    random rotation: else the first columns would carry most of the table, and weights that are
    read from single columns would differ as much as these do.
    """
    wide = weight.double()
    if not wide.isfinite().all():
        raise ShareError("the table has values that are not finite, and no nearest narrow one")
    # Of the small square matrix: for a table of many tokens an order faster than its SVD.
    _, vectors = torch.linalg.eigh(wide.t() @ wide)
    rotation, _ = torch.linalg.qr(torch.randn(features, features, dtype=wide.dtype).to(wide.device))
    lift = vectors[:, -features:] @ rotation
    return (wide @ lift).to(weight.dtype), lift.to(weight.dtype)


def make_factors(
    embedding: nn.Module, features: int, warm_start: bool
) -> tuple[nn.Embedding, nn.Linear]:
    """The table and the lift for an embedding module, as modules. Raises ShareError.

    warm_start: with the values of `factorise`; else, and on the meta device, without any.
    """
    weight: nn.Parameter = embedding.weight  # type: ignore[assignment]
    tokens, width = weight.shape
    where = {"device": "meta", "dtype": weight.dtype}
    padding = getattr(embedding, "padding_idx", None)
    table = nn.Embedding(tokens, features, padding_idx=padding, **where)  # type: ignore[arg-type]
    lift = nn.Linear(features, width, bias=False, **where)  # type: ignore[arg-type]
    if warm_start and not weight.is_meta:
        values = factorise(weight, features)
    else:
        values = weight.new_empty(tokens, features), weight.new_empty(width, features)
    for module, value in zip((table, lift), values, strict=True):
        module.weight = nn.Parameter(value, requires_grad=weight.requires_grad)
        module.train(embedding.training)
    return table, lift
