"""How often weights are generated, and for how long they are kept: counted, never timed."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import batch, build

from paramshare import share_from_embedding


class Count(TorchDispatchMode):
    """Numbers of operator calls, and the sizes of the zero tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.zeros: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        result = function(*args, **(kwargs or {}))
        if name in ("zeros", "new_zeros", "zeros_like", "slice_backward"):
            self.zeros.append(result.numel())
        return result


def generated(module: nn.Module, run) -> int:
    """How many groups' weights are generated while `run` runs."""
    count = 0
    original = module.paramshare._generate

    def counting(indices, frame):
        nonlocal count
        count += len(indices)
        return original(indices, frame)

    module.paramshare._generate = counting
    try:
        run()
    finally:
        del module.paramshare._generate
    return count


def test_each_weight_once_a_forward_pass() -> None:
    for name, groups in (("Encoder", 4), ("Seq2Seq", 10), ("CrossAttention", 4), ("Recurring", 5)):
        module = build(name)
        assert len(share_from_embedding(module, module.embedding).plan.groups) == groups
        inputs = batch()
        assert generated(module, lambda: module(*inputs)) == groups  # noqa: B023


def test_one_product_a_forward_pass() -> None:
    counts = []
    for whiten in (False, True):
        module = build("Encoder")
        share_from_embedding(module, module.embedding, whiten=whiten)
        with Count() as count:
            module.paramshare.enter(training=True, all_groups=True)
        module.paramshare.leave(None)
        counts.append(count.calls)
    plain, whitened = counts
    assert plain["mm"] == 1
    assert plain["split_with_sizes"] == 2  # of the projection and of the product
    # Of the table's rows with themselves, of that with the projection, and of the table with that.
    assert whitened["mm"] == 3
    assert whitened["linalg_cholesky_ex"] == 1
    # Of the projection, of what it is whitened, and of the product.
    assert whitened["split_with_sizes"] == 3


def test_factored_weights_are_not_generated() -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    assert generated(module, lambda: module(*batch()).sum().backward()) == 0


def test_a_factored_weight_that_is_read_is_right_and_generated_once() -> None:
    class Reads(nn.Module):
        """Reads its child's weight and never calls it, unknown to the library."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 24)

        def forward(self, x):
            return nn.functional.linear(x, self.linear.weight, self.linear.bias)[..., :16]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(60, 3)
            self.layers = nn.ModuleList(Reads() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    module = Model().double()
    sharing = share_from_embedding(module, module.embedding)
    assert sharing.plan.groups[0].execution == "factored"
    x = torch.randn(4, 16, dtype=torch.float64)
    assert generated(module, lambda: module(x).sum().backward()) == 1
    assert module.paramshare.projection.grad.abs().sum() > 0
    called = module.layers[0].linear(x)
    torch.testing.assert_close(called[:, :16], module.layers[0](x))


def test_decoding_generates_once() -> None:
    """Step by step, by calls of a part: eval mode without gradients keeps what it read."""
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    module.eval()
    x = torch.randn(2, 3, 16, dtype=torch.float64)

    def decode():
        with torch.no_grad():
            for _ in range(5):
                module.encoder(x)
                module(batch()[0])

    assert generated(module, decode) == 4
    assert generated(module, decode) == 0
    changes = [
        lambda: torch.optim.SGD(module.parameters(), 0.1).step(),
        lambda: module.load_state_dict(module.state_dict()),
        lambda: module.to(torch.float32),
        lambda: module.to(torch.float64),
        lambda: setattr(module.embedding, "weight", nn.Parameter(torch.randn(60, 16).double())),
        lambda: module.load_state_dict(module.state_dict(), assign=True),
    ]
    for change in changes:
        module.train()
        module(batch()[0]).sum().backward()
        module.eval()
        decode()
        with torch.no_grad():
            change()
        dtype = module.embedding.weight.dtype
        x = x.to(dtype)
        assert generated(module, decode) == 4, change


def test_writes_through_data_are_seen_after_any_training_step() -> None:
    """fairseq's optimizers write to `.data`, which no version counter shows."""
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    tokens, _ = batch()
    with torch.no_grad():
        before = module.eval()(tokens)
    module.train()(tokens).sum().backward()
    module.embedding.weight.data.mul_(1.5)
    module.paramshare.projection.data.mul_(1.5)
    with torch.no_grad():
        after = module.eval()(tokens)
    with torch.enable_grad():
        expected = module(tokens)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected)


def test_backward_makes_no_zero_tensor_of_the_table_for_each_weight() -> None:
    """N slices of the virtual table would."""
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding, depth="none")
    assert len(sharing.plan.groups) == 12
    output = module(batch()[0]).sum()
    with Count() as count:
        output.backward()
    virtual = 60 * sharing.plan.columns
    assert count.zeros
    assert max(count.zeros) < virtual / 4


def test_eps_backward_splits_the_table_once() -> None:
    module = build("Chain")
    sharing = share_from_embedding(
        module,
        module.embedding,
        virtual=False,
        depth="none",
        layout="column",
    )
    assert len(sharing.plan.groups) == 3
    output = module(batch()[0]).sum()
    with Count() as count:
        output.backward()
    assert sum(size >= module.embedding.weight.numel() for size in count.zeros) <= 1
