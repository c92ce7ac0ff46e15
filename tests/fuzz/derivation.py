"""What a shared module must compute: the plain module with weights put together by index.

In float64, whatever the module's dtype. How far rounding may carry a result from it is found by
running it once more with stored numbers that are off by what sums of their lengths lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import reference
import torch
from torch import Tensor, nn

from paramshare.marks import int8, sources
from paramshare.sharing import named_pools

Place = tuple[nn.Module, str]  # the owner of a Parameter, and its name there
SLACK = 64  # times what one disturbance did: others, of as much, may do more


@dataclass
class Expected:
    """The output, the gradients by name, and what either may be off by."""

    output: Tensor
    gradients: dict[str, Tensor]
    output_bound: float
    gradient_bounds: dict[str, float]

    def check(self, output: Tensor, what: str) -> None:
        assert_near(output, self.output, self.output_bound, what)


def assert_near(found: Tensor, expected: Tensor, bound: float, what: str) -> None:
    found = found.detach().double()
    assert found.shape == expected.shape, f"{what}: {found.shape} against {expected.shape}"
    if bound == inf:
        return  # numbers that are not finite, or soon will be
    equal = (found == expected) | (found.isnan() & expected.isnan())
    off = float(torch.where(equal, 0.0, (found - expected).abs()).max()) if equal.numel() else 0.0
    assert off <= bound, f"{what}: off by {off:.3g}, where rounding gives at most {bound:.3g}"


def derive(plain: nn.Module, shared: nn.Module, tokens: Tensor) -> Expected:
    """What `shared` must give for `tokens`. `plain`: the same model, not shared, in float64."""
    stored = (*shared.parameters(), *shared.buffers())
    dtypes = {tensor.dtype for tensor in stored if tensor.is_floating_point()}
    noise = max(torch.finfo(dtype).eps for dtype in dtypes) * _longest_sum(shared, tokens)
    output, gradients = _run(plain, shared, tokens, 0.0)
    other_output, other_gradients = _run(plain, shared, tokens, noise)
    # Gradients that cancel are of the size of what was summed to them, which is not seen here.
    largest = max((float(g.abs().max()) for g in gradients.values()), default=0.0)
    bounds = {n: _bound(g, other_gradients[n], noise, largest) for n, g in gradients.items()}
    if inf in bounds.values():  # what is all rounding was passed on to others
        bounds = dict.fromkeys(bounds, inf)
    bound = _bound(output, other_output, noise, float(output.abs().max()))
    return Expected(output, gradients, bound, bounds)


def _bound(value: Tensor, disturbed: Tensor, noise: float, size: float) -> float:
    off = SLACK * (float((value - disturbed).abs().max()) + noise * size)
    # Beyond the size of what is compared, all is rounding, and how much of it is not known.
    return inf if not isfinite(off) or off > size > 0 else off


def _longest_sum(shared: nn.Module, tokens: Tensor) -> int:
    lengths = [tokens.numel()]
    for _, pool in named_pools(shared):
        lengths += [pool.plan.features, *(group.cols for group in pool.plan.groups)]
    return max(lengths)


def _run(
    plain: nn.Module, shared: nn.Module, tokens: Tensor, noise: float
) -> tuple[Tensor, dict[str, Tensor]]:
    stored = _stored(shared, noise)
    derived = _derived(shared, stored)
    values = {
        f"{path}.{name}" if path else name: value
        for path, owner in plain.named_modules()
        for name, value in _values(owner, shared.get_submodule(path), stored, derived).items()
    }
    output = torch.func.functional_call(plain, values, (tokens,), tie_weights=False)
    leaves = [leaf for leaf in stored.values() if leaf.requires_grad]
    grads = (
        torch.autograd.grad(loss(output), leaves, allow_unused=True)
        if output.requires_grad
        else [None] * len(leaves)
    )
    by_leaf = {
        id(leaf): torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    }
    names = {name: stored[id(p)] for name, p in shared.named_parameters() if p.requires_grad}
    return output.detach(), {name: by_leaf[id(leaf)] for name, leaf in names.items()}


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _stored(shared: nn.Module, noise: float) -> dict[int, Tensor]:
    """Leaves in float64 by the identity of the stored tensor, disturbed by as much as is said."""
    leaves = {}
    generator = torch.Generator().manual_seed(0)
    for p in [*shared.parameters(), *shared.buffers()]:
        value = p.detach().double() if p.is_floating_point() else p.detach().clone()
        if noise and p.is_floating_point() and p.numel():
            off = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value = value + noise * off * (value.abs() + value.abs().max()) / 2
        elif p.dtype == torch.float64:
            value = value.clone()
        leaves[id(p)] = value.requires_grad_(p.requires_grad)
    return leaves


def _values(
    owner: nn.Module, twin: nn.Module, stored: dict[int, Tensor], derived: dict[Place, Tensor]
) -> dict[str, Tensor]:
    """The values of the Parameters of a module of the plain model, whose twin is shared."""
    values = {}
    for name, parameter in owner._parameters.items():
        if parameter is None:
            continue
        held = twin._parameters.get(name)
        if held is not None:
            values[name] = stored[id(held)]
        elif (twin, name) in derived:
            values[name] = derived[twin, name].reshape(parameter.shape)
        else:
            values[name] = _converted(twin, name)
    return values


def _converted(owner: nn.Module, name: str) -> Tensor:
    """A quantised weight, number by number."""
    kept = int8(owner)[name]
    values, scale = (kept.owner._buffers[kept.name + end] for end in ("_int8", "_scale"))
    rows = torch.arange(len(values)) // (kept.block or 1)
    return values.double() * scale.double()[rows]


def _derived(shared: nn.Module, stored: dict[int, Tensor]) -> dict[Place, Tensor]:
    """The weight of every slot, and the wide table wherever it was narrowed."""
    derived: dict[Place, Tensor] = {}
    for root, pool in named_pools(shared):
        plan = pool.plan

        def value(owner: nn.Module, name: str) -> Tensor:
            held = getattr(owner, "_parameters").get(name)  # noqa: B009
            return _converted(owner, name) if held is None else stored[id(held)]

        table = value(pool.embedding, "weight")
        a = plan.table_gradient
        weights = reference.weights(
            plan,
            a * table + (1 - a) * table.detach(),
            value(pool, "projection") if plan.virtual else None,
            value(pool, "bias") if plan.virtual and plan.projection_bias else None,
            None if pool.scale is None else pool.scale.double(),
        )
        part = shared.get_submodule(root)
        for group in plan.groups:
            for path in group.slots:
                owner, _, name = path.rpartition(".")
                weight = weights[path]
                derived[part.get_submodule(owner), name] = weight.t() if group.out_last else weight
        if plan.width is not None:
            wide = table @ value(pool.lift, "weight").t()
            for owner in part.modules():
                for name, source in sources(owner).items():
                    if source.group is None and source.pool is pool:
                        derived[owner, name] = wide
    return derived
