from __future__ import annotations

import seeds
import torch
from close import absolute, assert_sums_close
from hypothesis import given, settings
from hypothesis import strategies as st

from paramshare.factored import expand, reduce


def factored_linear(x, table_blocks, projection, projection_bias, rows, bias):
    return expand(reduce(x, table_blocks), x, projection, projection_bias, rows, bias)


SIZE = st.integers(1, 9)


@settings(max_examples=120, deadline=None)
@given(SIZE, SIZE, SIZE, SIZE, st.booleans(), st.booleans(), st.integers(0, 3))
def test_equals_the_linear_layer_of_the_weight(
    blocks, cols, features, columns, has_projection_bias, has_bias, dims
) -> None:
    generator = seeds.generator(blocks * 7 + cols)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    rows = blocks * columns - (columns - 1 if columns > 1 else 0)  # the last block in part
    table, projection = draw(blocks, cols, features), draw(features, columns)
    projection_bias = draw(columns) if has_projection_bias else None
    bias = draw(rows) if has_bias else None
    x = draw(*[2, 3, 4][:dims], cols)

    def linear(x, table, projection, projection_bias, bias):
        weight = torch.einsum("qif,fg->qgi", table, projection)
        if projection_bias is not None:
            weight = weight + projection_bias[:, None]
        return torch.nn.functional.linear(x, weight.reshape(-1, cols)[:rows], bias)

    inputs = x, table, projection, projection_bias, bias
    expected = linear(*inputs)
    size, sizes = absolute(linear, inputs)
    terms = cols + features + 2  # and the biases
    found = factored_linear(*inputs[:4], rows, bias)
    assert_sums_close(found, expected, size, terms)
    with torch.no_grad():
        without = factored_linear(*inputs[:4], rows, bias)
    assert_sums_close(without, expected, size, terms)
    assert found.is_contiguous()
    assert without.is_contiguous()
    given_ = [t for t in inputs if t is not None]
    gradients = (torch.autograd.grad(y.square().sum(), given_) for y in (found, expected))
    # And back over all that a number has a part in.
    terms += terms + x.numel() // cols + blocks * (cols + columns)
    for sums in zip(*gradients, sizes, strict=True):
        assert_sums_close(*sums, terms)


def test_never_builds_the_weight() -> None:
    """No tensor of rows x cols numbers is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in [result] if isinstance(t, torch.Tensor))
            return result

    blocks, cols, features, columns, tokens = 8, 64, 4, 16, 6
    table = torch.randn(blocks, cols, features, requires_grad=True)
    projection = torch.randn(features, columns, requires_grad=True)
    x = torch.randn(tokens, cols, requires_grad=True)
    with Watch():
        factored_linear(x, table, projection, None, blocks * columns, None).sum().backward()
    assert max(sizes) == tokens * blocks * cols  # what the input's gradient takes
    assert max(sizes) < blocks * columns * cols


def test_no_tokens() -> None:
    output = factored_linear(
        torch.ones(0, 3), torch.ones(2, 3, 4), torch.ones(4, 5), None, 9, torch.ones(9)
    )
    assert output.shape == (0, 9)
