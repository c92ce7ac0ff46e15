"""How much of the weights' gradient reaches the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Narrow, batch

from paramshare import share_from_embedding
from paramshare.gradients import scale_gradient, virtual_columns


def drawn(bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    shapes = [(11, 3), (3, 5), (5,)]
    table, projection, last = (torch.randn(s, dtype=torch.float64) for s in shapes)
    made = table, projection, last if bias else None
    return tuple(t if t is None else t.requires_grad_() for t in made)


def reference(table: Tensor, projection: Tensor, bias: Tensor | None, share: float) -> Tensor:
    mixed = share * table + (1 - share) * table.detach()
    return (mixed @ projection + (0 if bias is None else bias)).t()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_virtual_columns(share: float, bias: bool) -> None:
    inputs = drawn(bias)
    given = [tensor for tensor in inputs if tensor is not None]
    ours, theirs = virtual_columns(*inputs, share), reference(*inputs, share)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    options = {"create_graph": True, "allow_unused": True}
    first = torch.autograd.grad((ours.sin() * weight).sum(), given, **options)
    expected = torch.autograd.grad((theirs.sin() * weight).sum(), given, **options)
    for gradient, other in zip(first, expected, strict=True):
        if share == 0 and gradient is None:
            assert not other.any()
            continue
        torch.testing.assert_close(gradient, other)
    # Gradients of gradients, for penalties on them.
    second = torch.autograd.grad(first[1].square().sum(), inputs[1])[0]
    torch.testing.assert_close(
        second, torch.autograd.grad(expected[1].square().sum(), inputs[1])[0]
    )


def test_without_gradients_and_frozen() -> None:
    table, projection, bias = drawn(True)
    with torch.no_grad():
        assert virtual_columns(table, projection, bias, 0.1).grad_fn is None
    frozen = virtual_columns(table.detach(), projection, bias, 0.1)
    frozen.sum().backward()
    assert table.grad is None
    assert projection.grad is not None


class Products(TorchDispatchMode):
    """The shapes of the results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "mm" in function.__name__:
            self.shapes.append(tuple(result.shape))
        return result


def test_no_product_for_a_gradient_that_nobody_gets() -> None:
    for share, expected in ((0.0, [(5, 11), (3, 5)]), (0.1, [(5, 11), (11, 3), (3, 5)])):
        with Products() as seen:
            virtual_columns(*drawn(False), share).sum().backward()
        assert seen.shapes == expected


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_scale_gradient(share: float) -> None:
    tensor = torch.randn(4, requires_grad=True)
    scaled = scale_gradient(tensor, share)
    assert torch.equal(scaled, tensor)
    (scaled * torch.arange(4.0)).sum().backward()
    torch.testing.assert_close(tensor.grad, share * torch.arange(4.0))
    with torch.no_grad():
        assert scale_gradient(tensor, share) is tensor


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_gradient_of_another_dtype(share: float) -> None:
    """That of a product made under autocast, in a backward pass outside of it."""
    inputs = [tensor.detach().float().requires_grad_() for tensor in drawn(True)]
    exact = torch.autograd.grad(
        virtual_columns(*inputs, share).square().sum(), inputs, allow_unused=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        columns = virtual_columns(*inputs, share)
    assert columns.dtype == torch.bfloat16
    found = torch.autograd.grad(columns.float().square().sum(), inputs, allow_unused=True)
    for gradient, expected in zip(found, exact, strict=True):
        if expected is None:
            assert gradient is None
            continue
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("execution", ["materialized", "factored", "blockwise"])
@pytest.mark.parametrize("options", [{}, {"projection_bias": True}, {"virtual": False}], ids=str)
def test_forward_mode_is_the_transpose_of_backward(execution: str, options: dict) -> None:
    """By torch.func and by dual numbers, the share of the gradient included."""
    if not options.get("virtual", True) and execution == "factored":
        execution = "auto"  # EPS has nothing to factor
    torch.manual_seed(0)
    module = Narrow(features=48).double()
    share_from_embedding(
        module, module.embedding, execution=execution, table_gradient=0.3, **options
    )
    parameters = dict(module.named_parameters())
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    inputs = batch()

    def run(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, values, inputs)

    output, tangent = torch.func.jvp(run, (parameters,), (tangents,))
    direction = torch.randn_like(output)
    found = torch.autograd.grad(run(parameters), [*parameters.values()], direction)
    terms = [g * t for g, t in zip(found, tangents.values(), strict=True)]
    expected = sum(term.sum() for term in terms)
    size = sum(term.abs().sum() for term in terms)
    assert abs((tangent * direction).sum() - expected) < 1e-13 * size
    with forward_ad.dual_level():
        dual = {
            name: forward_ad.make_dual(p.detach(), tangents[name]) for name, p in parameters.items()
        }
        again = forward_ad.unpack_dual(run(dual)).tangent
    assert (again - tangent).abs().max() < 1e-12 * tangent.abs().max()
