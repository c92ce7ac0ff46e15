"""What the tests take for rounding, and what not."""

from __future__ import annotations

import pytest
import torch
from close import absolute, assert_passes_close, assert_sums_close
from torch import Tensor
from zoo import batch, build, share


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_that_cancel(dtype: torch.dtype) -> None:
    """Another order is close, though it has no digit in common; a single wrong term is not."""
    terms = torch.randn(100, 50, dtype=dtype)
    terms = torch.cat([terms, -terms])
    orders = [sum(order.unbind()) for order in (terms, terms[torch.randperm(len(terms))])]
    assert not torch.allclose(*orders, rtol=0.5, atol=0)
    sizes = terms.abs().sum(0)
    assert_sums_close(*orders, sizes, len(terms))
    # Of a size of one among two hundred: the bound is 200 eps of about 160, so 32,000 eps.
    terms[7, 3] += 50_000 * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="1 of 50 sums are apart by"):
        assert_sums_close(sum(terms.unbind()), orders[1], sizes, len(terms))
    with pytest.raises(AssertionError, match="50 of 50 sums are apart by nan"):
        assert_sums_close(orders[0] * torch.nan, orders[1], sizes, len(terms))


def test_sizes_are_those_of_every_term() -> None:
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]])

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    output, gradients = absolute(product, (x, weight))
    assert output.tolist() == [[5]]  # 3 - 2
    assert [gradient.tolist() for gradient in gradients] == [[[30, 10]], [[10, 20]]]


def test_gradients_that_cancel() -> None:
    """Those of keys' biases are zero but for rounding. The others' are off as soon as one in a
    billion of what reaches them is."""
    module = build("Narrow")
    share(module)
    module(*batch()).square().sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()}
    keys = [name for name in found if name.endswith("key.bias")]
    assert keys
    assert all(found[name].any() for name in keys)
    expected = {**found, **{name: torch.zeros_like(found[name]) for name in keys}}
    assert_passes_close(found, expected)
    for name in found.keys() - keys:
        with pytest.raises(AssertionError, match=f"^{name}: "):
            assert_passes_close({**found, name: found[name] * (1 + 1e-9)}, expected)
    with pytest.raises(AssertionError):
        assert_passes_close({**found, keys[0]: found[keys[0]] * torch.nan}, expected)
