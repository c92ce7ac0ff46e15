from __future__ import annotations

import pytest
import torch
from zoo import batch, build

from paramshare import ShareError, share_from_embedding


def test_groups_are_repaired() -> None:
    module = build("Narrow")
    matrices = [p for n, p in module.named_parameters() if p.dim() == 2]
    vectors = [p for n, p in module.named_parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0, "lr": 1e-2}, {"params": matrices, "lr": 3e-3}]
    )
    share_from_embedding(module, module.embedding, optimizers=[optimizer])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in module.parameters()}
    assert len(held) == len(set(map(id, held)))
    assert any(p is module.paramshare.projection for p in optimizer.param_groups[1]["params"])
    before = module.paramshare.projection.detach().clone()
    module(*batch()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module.paramshare.projection, before)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    module = build("Narrow")
    optimizer = torch.optim.Adam(module.parameters())
    module(*batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    names = [name for name, _ in module.named_parameters()]
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    with pytest.raises(ShareError, match="Adam already has the state of 15 of the 15 Parameters"):
        share_from_embedding(module, module.embedding, optimizers=[optimizer])
    assert [name for name, _ in module.named_parameters()] == names
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups


def test_an_optimizer_of_something_else_is_left_alone() -> None:
    module, other = build("Narrow"), build("Chain")
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    share_from_embedding(module, module.embedding, optimizers=[optimizer])
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups


def test_two_optimizers_do_not_step_the_projection_twice() -> None:
    module = build("Narrow")
    parameters = list(module.parameters())
    optimizers = [torch.optim.SGD(part, 0.1) for part in (parameters[:9], parameters[9:])]
    share_from_embedding(module, module.embedding, optimizers=optimizers)
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, module.parameters()))


def test_lbfgs_and_named_parameters() -> None:
    module = build("Narrow")
    optimizer = torch.optim.LBFGS(module.parameters())
    share_from_embedding(module, module.embedding, optimizers=optimizer)
    before = module.paramshare.projection.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = module(*batch()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(module.paramshare.projection, before)

    module = build("Narrow")
    optimizer = torch.optim.Adam(module.named_parameters())
    share_from_embedding(module, module.embedding, optimizers=[optimizer])
    (group,) = optimizer.param_groups
    assert dict(zip(group["param_names"], map(id, group["params"]), strict=True)) == {
        name: id(p) for name, p in module.named_parameters()
    }
