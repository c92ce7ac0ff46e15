"""An independent derivation of shared weights: by index formulas, one number at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paramshare.plan import Group, SharingPlan
from paramshare.pool import Pool


def places(group: Group, tokens: int) -> tuple[Tensor, Tensor]:
    """(row, column) in the matrix that is read, of each number of the `(rows, cols)` weight."""
    row, column = [], []
    for o in range(group.rows):
        for i in range(group.cols):
            if group.layout == "column":  # flat[n] = virtual[n % E, start + n // E]
                n = o * group.cols + i
                row.append(n % tokens)
                column.append(group.start + n // tokens)
            elif group.layout == "token":  # flat[n] = virtual[n // G, start + n % G], in x out
                n = i * group.rows + o
                row.append(n // group.columns)
                column.append(group.start + n % group.columns)
            else:  # row o = q*G + g is virtual[q*I : (q+1)*I, start + g]
                q, g = divmod(o, group.columns)
                row.append(q * group.cols + i)
                column.append(group.start + g)
    return torch.tensor(row), torch.tensor(column)


def weights(
    plan: SharingPlan,
    table: Tensor,
    projection: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """The weight of every slot, by path; differentiable."""
    result = {}
    for index, group in enumerate(plan.groups):
        read = whitening(plan, group, table) @ projection if plan.whiten else projection
        virtual = table if read is None else table @ read
        if bias is not None:
            virtual = virtual + bias
        weight = virtual[places(group, plan.tokens)].view(group.rows, group.cols)
        if scale is not None:
            weight = weight * scale[index]
        result.update(dict.fromkeys(group.slots, weight))
    return result


def whitening(plan: SharingPlan, group: Group, table: Tensor) -> Tensor:
    """S for the group, by a QR decomposition of the rows that are looked at and of the ridge."""
    read = group.blocks * group.cols if group.layout == "aligned" else plan.tokens
    count = min(read, 8 * plan.features)
    rows = table.detach()[torch.arange(count) * (read // count)]
    length = rows.square().sum().div(count).sqrt()
    spread = length * (count / plan.features) ** 0.5
    ridge = 0.1 * spread * torch.eye(plan.features, dtype=rows.dtype)
    _, upper = torch.linalg.qr(torch.cat([rows, ridge]))
    upper = upper * upper.diagonal().sign().unsqueeze(1)
    return torch.linalg.inv(upper) * (count / plan.features) ** 0.5


def run(
    plain: nn.Module, shared: nn.Module, pool: Pool, *args: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of `plain` with the stored tensors of `shared`, and the gradients of its sum of
    squares: of the table through tokens and weights, of the projection and all the rest."""
    stored = {
        name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in shared.named_parameters()
    }
    prefix = next(name for name, module in shared.named_modules() if module is pool)
    plan = pool.plan
    table = stored[f"{plan.table}.weight"]
    a = plan.table_gradient
    derived = weights(
        plan,
        a * table + (1 - a) * table.detach(),
        stored.get(f"{prefix}.projection"),
        stored.get(f"{prefix}.bias"),
        pool.scale,
    )
    for group in plan.groups:
        for path in group.slots:
            shape = plain.get_parameter(path).shape
            derived[path] = (derived[path].t() if group.out_last else derived[path]).reshape(shape)
    own = {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}
    output = torch.func.functional_call(plain, {**own, **derived}, args)
    grads = torch.autograd.grad(output.square().sum(), list(stored.values()), allow_unused=True)
    return output, {n: g for n, g in zip(stored, grads, strict=True) if g is not None}
