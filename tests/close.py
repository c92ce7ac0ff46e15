"""How far two ways of computing the same may be apart: by the rounding of what they sum.

A sum of n terms, in whatever order it is added, is off by at most n times half an eps of the sum
of their absolute values (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
4.2). So two orders are at most n * eps times that apart. The sum itself has no part in this: where
terms cancel, little is left of it and all of the rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = Tensor | Sequence[Tensor | None] | Mapping[str, Tensor | None]


def assert_sums_close(found: Tensor, expected: Tensor, sizes: Tensor, terms: int) -> None:
    """The same sums of products in two orders. `sizes`, of their shape: the sums of the absolute
    values of the terms, as `absolute` gives them. `terms`: how many roundings a term may go
    through: the lengths of all sums that it passes, one inside of the other, are added."""
    for other in (expected, sizes):
        assert (found.shape, found.dtype) == (other.shape, other.dtype)
    apart = (found - expected).abs()
    allowed = terms * torch.finfo(found.dtype).eps * sizes
    wrong = ~(apart <= allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are apart by {apart[wrong].max():.3g}, where "
        f"rounding explains {allowed[wrong].max():.3g}"
    )


def absolute(
    formula: Callable[..., Tensor], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sizes of `formula(*inputs)`, made of sums and products alone, and of the gradients of the
    sum of its squares: with absolute values for inputs, no term has a sign and none cancels."""
    positive = [None if t is None else t.detach().abs().requires_grad_() for t in inputs]
    output = formula(*positive)
    given = [tensor for tensor in positive if tensor is not None]
    return output.detach(), torch.autograd.grad(output.square().sum(), given)


def assert_passes_close(found: Tensors, expected: Tensors, terms: int = 1024) -> None:
    """The outputs of a network, or all of its gradients, computed in two ways.

    Layers are no sums of products, so the sizes of the terms are not computed but taken from the
    largest of all the numbers together. It is a sum of the same signals as the others, some of
    which cancel: a key's bias has no gradient, since softmax sees no constant, and what is left is
    the rounding of terms as large as those of the key's weight. `terms`: the lengths of the sums
    on the longest path through the network and back; for a small one, twenty of fifty terms. What
    enters a softmax has to be of ordinary size: an error of it is a relative error behind it."""
    found, expected = _named(found), _named(expected)
    assert found.keys() == expected.keys()
    largest = max(tensor.detach().abs().max().item() for tensor in expected.values())
    for name, tensor in expected.items():
        allowed = terms * torch.finfo(tensor.dtype).eps * largest
        message = (name + ": {}").format
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=allowed, msg=message)


def _named(tensors: Tensors) -> dict[str, Tensor]:
    """But for gradients that there are none of."""
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    if not isinstance(tensors, Mapping):
        tensors = {f"[{index}]": tensor for index, tensor in enumerate(tensors)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
