"""Whitening: a weight reads the table's rows as if they were an orthonormal basis.

A weight is `W = T P` with T the table's rows that it reads, so that the projection's gradient is
`T' G`: it is as badly conditioned as T, whose Gram matrix is close to singular where few rows are
read, and becomes so while the table learns. So the product is made of `S P`, with S such that the
columns of `T S` are uncorrelated and its rows have unit length on average. S is a function of the
table alone: nothing is stored for it, and no gradient flows through it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Of the rows that are read, so many for each feature are looked at: all where there are no more.
ROWS_A_FEATURE = 8
# Added to each variance, as a share of their mean, before its root is divided by: directions in
# which the rows hardly differ stay small.
RIDGE = 0.01


def sampled(rows: int, features: int) -> tuple[int, int]:
    """Which of the first `rows` rows of a table are looked at: (how many, each how manieth)."""
    count = min(rows, ROWS_A_FEATURE * features)
    return count, rows // count


@torch.no_grad()
def whitening(table: Tensor, count: int, step: int) -> Tensor:
    """S, `(features, features)`, upper triangular, in float32 at least: the inverse root of the
    rows' second moments, by their Cholesky factor, which changes smoothly with the table."""
    rows = table.detach()[: count * step : step]
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    with _without_autocast(rows):
        moments = rows.t() @ rows
        trace = moments.diagonal().sum().clamp_min(torch.finfo(rows.dtype).tiny ** 0.5)
        identity = torch.eye(len(moments), dtype=rows.dtype, device=rows.device)
        # Of a mean variance of one.
        moments = moments * (len(moments) / trace) + RIDGE * identity
        factor, _ = torch.linalg.cholesky_ex(moments)  # without a look at errors, a GPU's wait
        inverse = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse * (count / trace).sqrt()


def whitened(whitening: Tensor, columns: Tensor) -> Tensor:
    """S P: the columns of the projection that a whitened weight is read from."""
    with _without_autocast(columns):
        return (whitening @ columns.to(whitening.dtype)).to(columns.dtype)


def colored(whitening: Tensor, columns: Tensor) -> Tensor:
    """P of S P."""
    found = torch.linalg.solve_triangular(whitening, columns.to(whitening.dtype), upper=True)
    return found.to(columns.dtype)


def _without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """In its own precision. torch has no autocast on the meta device, not even to end it."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
