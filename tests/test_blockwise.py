from __future__ import annotations

import copy

import pytest
import reference
import seeds
import torch
from close import absolute, assert_passes_close, assert_sums_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Narrow, batch, build

import paramshare
from paramshare.blockwise import apply_tiles

SIZE = st.integers(1, 7)


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE, SIZE, SIZE, st.booleans(), st.integers(0, 3))
def test_equals_the_product_with_the_weight(
    blocks, cols, features, columns, has_projection, dims
) -> None:
    generator = seeds.generator(blocks * 7 + cols)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    table, x = draw(blocks, cols, features), draw(*[2, 3, 4][:dims], cols)
    projection = draw(features, columns) if has_projection else None

    def product(x, table, projection):
        tiles = table if projection is None else table @ projection
        return x.reshape(-1, cols) @ tiles.mT.reshape(-1, cols).t()

    inputs = x, table, projection
    expected, found = product(*inputs), apply_tiles(*inputs)
    size, sizes = absolute(product, inputs)
    assert_sums_close(found, expected, size, cols + features)
    # Forward over columns and features; back over all that a number has a part in.
    terms = 2 * (cols + features) + len(found) + blocks * (cols + columns)
    given_ = [t for t in inputs if t is not None]
    gradients = (torch.autograd.grad(y.square().sum(), given_) for y in (found, expected))
    for sums in zip(*gradients, sizes, strict=True):
        assert_sums_close(*sums, terms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"projection_bias": True, "table_gradient": 0.3},
        {"blocks": 1, "depth": "none"},
        {"virtual": False, "table_gradient": 0.25, "blocks": 3},
        {"virtual": False, "init": "paper"},
    ],
    ids=str,
)
def test_equals_the_plain_module(options: dict) -> None:
    """Outputs and gradients, against weights derived number by number."""
    torch.manual_seed(0)
    module = Narrow(features=48).double()
    # The weights of EPS, where it does not scale them, have the table's spread; those of one are so
    # large that attention, of scores of a thousand, makes a thousand times as much of the rounding.
    nn.init.normal_(module.embedding.weight, 0, 0.25)
    plain = copy.deepcopy(module)
    sharing = paramshare.share_from_embedding(
        module, module.embedding, execution="blockwise", **options
    )
    assert {group.execution for group in sharing.plan.groups} == {"blockwise"}
    tokens, padding = batch()
    expected, gradients = reference.run(plain, module, sharing.pool, tokens, padding)
    output = module(tokens, padding)
    assert_passes_close(output, expected)
    output.square().sum().backward()
    assert_passes_close({name: p.grad for name, p in module.named_parameters()}, gradients)


def test_never_builds_the_weight() -> None:
    """Nothing as large as it is made, forward or backward, and nothing of it is saved."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            views = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            results = result if isinstance(result, (tuple, list)) else [result]
            for t in results:
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in views:
                    sizes.append(t.numel())
            return result

    blocks, cols, features, columns, tokens = 8, 64, 12, 16, 6
    table = torch.randn(blocks, cols, features, requires_grad=True)
    projection = torch.randn(features, columns, requires_grad=True)
    x = torch.randn(tokens, cols, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    )
    with Watch(), hooks:
        apply_tiles(x, table, projection).sum().backward()
    assert max(sizes) == blocks * cols * features  # the table's gradient
    assert max(sizes) < blocks * columns * cols
    assert sum(saved) == table.numel() + projection.numel() + x.numel()


def test_works_under_autocast_and_compiled() -> None:
    torch.manual_seed(0)
    module = build("Narrow", dtype=torch.float32)
    paramshare.share_from_embedding(module, module.embedding, execution="blockwise")
    tokens, padding = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(tokens, padding)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, padding), module(tokens, padding))


def test_no_tokens() -> None:
    assert apply_tiles(torch.ones(0, 3), torch.ones(2, 3, 4), torch.ones(4, 5)).shape == (0, 10)
