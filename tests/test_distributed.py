"""DistributedDataParallel, in one process: what it asks of parameters and graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zoo import batch, build

from paramshare import ShareError, share_from_embedding


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_equal_those_of_the_bare_module(compiled: bool) -> None:
    """No Parameter without a gradient, which DDP refuses at its second step; and its splitting of
    compiled graphs, which walks the names of weights."""
    torch._dynamo.reset()
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    bare = copy.deepcopy(module)
    wrapped = DistributedDataParallel(module)
    if compiled:
        wrapped = torch.compile(wrapped, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (module, bare)]
    for step in range(3):
        tokens, _ = batch(step)
        for model, optimizer in zip((wrapped, bare), optimizers, strict=True):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    for a, b in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("group")
def test_a_wrapped_module_is_refused() -> None:
    module = build("Encoder")
    wrapped = DistributedDataParallel(module)
    with pytest.raises(ShareError, match=r"already wrapped \(DistributedDataParallel\)"):
        share_from_embedding(wrapped, module.embedding)
