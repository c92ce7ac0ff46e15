"""What is trained by several processes, each test by two that talk through gloo: a step of both is
the step that one process makes on their batches together."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from close import assert_passes_close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from workers import WORLD, in_two_processes, needs_gloo
from zoo import Encoder, Narrow, batch, build, share

from paramshare import ShareError, materialize, save_model, share_from_embedding

pytestmark = needs_gloo


def _hidden(path: str, owner: nn.Module) -> bool:
    """What fits into the columns of an LSTM's table (EPS)."""
    return re.fullmatch(r"rnn\.weight_hh_l\d", path) is not None


# A model of every kind that derives its weights, or applies them, in a way of its own.
MODELS = {
    "fast path, tied": ("Encoder", {}),
    "factorised table": ("Encoder", {"embedding_dim": 8}),
    "two stacks": ("Seq2Seq", {"depth": "none", "projection_bias": True}),
    "factored": ("Narrow", {"projection_bias": True}),
    "whitened": ("Narrow", {"whiten": True, "blocks": 1, "depth": "none"}),
    "blockwise": ("Narrow", {"execution": "blockwise"}),
    "LSTM": ("Recurrent", {"layout": "column"}),
    "LSTM, EPS": ("Recurrent", {"virtual": False, "select": _hidden}),
    "weight norm": ("Normed", {}),
}


def shared(name: str, seed: int = 0) -> nn.Module:
    model, options = MODELS[name]
    module = build(model, seed)
    share(module, **options)
    return module


def layers(module: nn.Module) -> list[nn.Module]:
    """Its layers, each of which FSDP gathers by itself."""
    stacks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [layer for stack in stacks for layer in stack] or [module.rnn]


def recompute(module: nn.Module, **how: bool) -> None:
    for layer in layers(module):
        layer.forward = functools.partial(checkpoint, layer.forward, **how)


def batches(step: int) -> list[Tensor]:
    """That of each process."""
    return [batch(WORLD * step + rank)[0] for rank in range(WORLD)]


def mine(step: int) -> Tensor:
    return batches(step)[dist.get_rank()]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: where a gradient is zero but for rounding, it makes a step of the rounding.
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(model: nn.Module, bare: nn.Module, what: str) -> None:
    """Same parameters with the same gradients."""
    for read in (lambda p: p, lambda p: p.grad):
        found, expected = (
            {f"{what}, {n}": whole(read(p)) for n, p in enumerate(each.parameters())}
            for each in (model, bare)
        )
        # Up to four passes of two batches, each of which carries on the rounding of the last.
        assert_passes_close(found, expected, terms=8 * 1024)


def assert_trains_as_one(wrapped: nn.Module, bare: nn.Module, what: str) -> None:
    """Three steps of the two processes, against those of one on both batches."""
    optimizers = [optimizer_of(model) for model in (wrapped, bare)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(wrapped, mine(step)).backward()
        loss(bare, torch.cat(batches(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same(wrapped, bare, what)


# ---------------------------------------------------------------------- DistributedDataParallel


def test_ddp(tmp_path: Path) -> None:
    in_two_processes(_ddp, tmp_path)


def _ddp() -> None:
    for name in MODELS:
        bare = shared(name)
        # DDP starts from what the first process has.
        assert_trains_as_one(DistributedDataParallel(shared(name, dist.get_rank())), bare, name)
    for options in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        for name in ("fast path, tied", "factored", "LSTM, EPS"):
            module = shared(name)
            wrapped = DistributedDataParallel(copy.deepcopy(module), **options)
            assert_trains_as_one(wrapped, module, f"{name}, {options}")
    _accumulation()
    _two_passes_before_backward()
    _layers_that_are_dropped()
    with pytest.raises(ShareError, match=r"already wrapped \(DistributedDataParallel\)"):
        share_from_embedding(wrapped, module.embedding)


def _accumulation() -> None:
    for name in ("fast path, tied", "factored"):
        bare = shared(name)
        wrapped = DistributedDataParallel(copy.deepcopy(bare))
        with wrapped.no_sync():
            loss(wrapped, mine(0)).backward()
        loss(wrapped, mine(1)).backward()
        for step in range(2):
            loss(bare, torch.cat(batches(step))).backward()
        assert_same(wrapped, bare, name)


def _two_passes_before_backward() -> None:
    """DDP writes the buffers of the first process into those of the others before each."""
    for name, options in (
        ("LSTM, EPS", {}),
        ("EPS, blockwise", {"execution": "blockwise"}),
    ):
        if name in MODELS:
            bare = shared(name)
        else:
            bare = build("Chain")
            select = lambda path, owner: re.fullmatch(r"1\.\d\.weight", path)  # noqa: E731
            share_from_embedding(bare, bare.embedding, False, select=select, **options)
        wrapped = DistributedDataParallel(copy.deepcopy(bare))
        sum(loss(wrapped, mine(step)) for step in range(2)).backward()
        sum(loss(bare, torch.cat(batches(step))) for step in range(2)).backward()
        assert_same(wrapped, bare, name)


class Dropping(Encoder):
    """Drops its last layers, as many as the process says."""

    def forward(self, tokens: Tensor, dropped: int) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.encoder.layers[: 3 - dropped]:
            x = layer(x)
        return self.output(x)


def _layers_that_are_dropped() -> None:
    for depth in ("all", "none"):
        torch.manual_seed(0)
        bare = Dropping().double()
        share_from_embedding(bare, bare.embedding, depth=depth)
        wrapped = DistributedDataParallel(copy.deepcopy(bare), find_unused_parameters=True)
        for step in range(2):
            for model in (wrapped, bare):
                model.zero_grad()
            wrapped(mine(step), dist.get_rank()).square().mean().backward()
            for rank, tokens in enumerate(batches(step)):
                (bare(tokens, rank).square().mean() / WORLD).backward()
            assert_same(wrapped, bare, f"depth {depth}")


def test_ddp_with_gradient_checkpointing(tmp_path: Path) -> None:
    in_two_processes(_ddp_with_gradient_checkpointing, tmp_path)


def _ddp_with_gradient_checkpointing() -> None:
    for name in ("fast path, tied", "factored", "blockwise", "two stacks"):
        bare = shared(name)
        module = copy.deepcopy(bare)
        recompute(module, use_reentrant=False)
        assert_trains_as_one(DistributedDataParallel(module), bare, name)
    # Reentrant regions give their gradients one by one: what several read is then ready too often.
    for name in ("factored", "blockwise"):
        bare = shared(name)
        modules = [copy.deepcopy(bare) for _ in range(2)]
        for module in modules:
            recompute(module, use_reentrant=True)
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            assert_trains_as_one(DistributedDataParallel(modules[0]), copy.deepcopy(bare), name)
        wrapped = DistributedDataParallel(modules[1], static_graph=True)
        assert_trains_as_one(wrapped, bare, name)


def test_compiled_ddp(tmp_path: Path) -> None:
    in_two_processes(_compiled_ddp, tmp_path)


def _compiled_ddp() -> None:
    """In as many graphs as there are buckets of gradients, so that weights cross from one to the
    next."""
    from torch._dynamo.testing import CompileCounterWithBackend

    dist._DEFAULT_FIRST_BUCKET_BYTES = bucket = 8000
    for name in ("fast path, tied", "factored"):
        torch._dynamo.reset()
        bare = shared(name)
        wrapped = DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=bucket / 2**20)
        graphs = CompileCounterWithBackend("aot_eager")
        assert_trains_as_one(torch.compile(wrapped, backend=graphs), bare, name)
        assert graphs.frame_count > 2


def test_averages_of_what_ddp_trains(tmp_path: Path) -> None:
    in_two_processes(_averages, tmp_path)


def _averages() -> None:
    """Averaged is what is stored; the weights are read from that, at once after every update."""
    for name in ("fast path, tied", "factored", "LSTM, EPS"):
        module = shared(name)
        wrapped = DistributedDataParallel(module)
        optimizer = optimizer_of(wrapped)
        averages = [
            AveragedModel(module),
            AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True),
        ]
        expected: list[list[Tensor]] = [[], []]
        for step in range(3):
            optimizer.zero_grad()
            loss(wrapped, mine(step)).backward()
            optimizer.step()
            now = [p.detach().clone() for p in module.parameters()]
            for average, mean, share_of_new in zip(
                averages, expected, (1 / (step + 1), 0.3 if step else 1.0), strict=True
            ):
                average.update_parameters(module)
                mean[:] = [
                    old + share_of_new * (new - old)
                    for old, new in zip(mean or now, now, strict=True)
                ]
                twin = copy.deepcopy(module)
                for p, value in zip(twin.parameters(), mean, strict=True):
                    p.data = value.clone()
                assert_passes_close([*average.parameters()], [*twin.parameters()])
                average.eval()
                with torch.no_grad():
                    torch.testing.assert_close(average(mine(0)), twin.eval()(mine(0)))


# ---------------------------------------------------------------------- FSDP2


FSDP2 = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp2 = pytest.mark.skipif(not FSDP2, reason="this torch runs FSDP2 on GPUs only")


def sharded(module: nn.Module, **root: object) -> nn.Module:
    """Each layer by itself, all else with the module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in layers(module):
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh, **root)


@needs_fsdp2
def test_fsdp(tmp_path: Path) -> None:
    in_two_processes(_fsdp, tmp_path)


def _fsdp() -> None:
    for name in MODELS:
        for options in ({}, {"reshard_after_forward": True}):
            bare = shared(name)
            wrapped = sharded(shared(name), **options)
            assert_trains_as_one(wrapped, bare, f"{name}, {options}")
            for model in (wrapped, bare):
                model.eval()
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(wrapped(mine(0)), bare(mine(0)))
    for name in ("fast path, tied", "factored", "blockwise"):
        bare = shared(name)
        module = copy.deepcopy(bare)
        recompute(module, use_reentrant=False)
        assert_trains_as_one(sharded(module), bare, f"{name}, recomputed")
    _two_shared_modules_in_one()
    _decoding_sees_what_was_loaded()


class Side(Narrow):
    """An encoder, or a decoder that reads its output."""

    def forward(self, tokens: Tensor, memory: Tensor | float = 0.0) -> Tensor:
        x = self.lift(self.embedding(tokens)) + memory
        for block in self.blocks:
            x = block(x, None)
        return x


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Side(), Side()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.encoder(tokens).tanh()).tanh()  # steps stay small


def _two_shared_modules_in_one() -> None:
    """Each in a group of its own, with its table: the decoder's is reduced while the encoder's
    backward pass has not begun."""
    from torch.distributed.fsdp import fully_shard

    for execution in ("materialized", "factored"):
        torch.manual_seed(0)
        bare = Sides().double()
        for side in (bare.encoder, bare.decoder):
            share_from_embedding(side, side.embedding, execution=execution)
        module = copy.deepcopy(bare)
        for side in (module.encoder, module.decoder):
            sharded(side)
        assert_trains_as_one(fully_shard(module), bare, execution)


def _decoding_sees_what_was_loaded() -> None:
    """FSDP gathers into the same tensors, whose versions it keeps, and often into the same
    memory."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    for name in ("fast path, tied", "factored"):
        wrapped, other = sharded(shared(name)).eval(), shared(name, seed=1).eval()
        with torch.no_grad():
            wrapped(mine(0))
            wrapped.reshard()
            set_model_state_dict(
                wrapped, other.state_dict(), options=StateDictOptions(full_state_dict=True)
            )
            torch.testing.assert_close(wrapped(mine(0)), other(mine(0)))
            for model in (wrapped, other):
                table = model.embedding.weight
                with torch.autograd._unsafe_preserve_version_counter((table,)):
                    table.mul_(2)
            torch.testing.assert_close(wrapped(mine(0)), other.train()(mine(0)))


@needs_fsdp2
def test_what_fsdp_cannot_share(tmp_path: Path) -> None:
    in_two_processes(_what_fsdp_cannot_share, tmp_path, str(tmp_path))


def _what_fsdp_cannot_share(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    message = "is sharded where a weight is read from it.*fully_shard to its layers and to itself"
    # Not a model that ties its output: of that, torch refuses an embedding by itself.
    for name in ("two stacks", "factored", "blockwise", "factorised table", "LSTM, EPS"):
        for part in ("embedding", "paramshare"):
            module = shared(name)
            if not list(module.get_submodule(part).parameters()):
                continue  # constants are no parameters
            fully_shard(module.get_submodule(part))
            sharded(module)
            for context in (torch.no_grad, torch.enable_grad):
                with context(), pytest.raises(ShareError, match=message):
                    module(mine(0))
    module = sharded(shared("factored"))
    with pytest.raises(ShareError, match=message):  # nobody has gathered the table
        module.blocks[0](torch.randn(2, 3, 16).double(), None)
    with pytest.raises(ShareError, match="is sharded.*get_model_state_dict"):
        save_model(module, Path(folder) / f"{dist.get_rank()}.safetensors")
    with pytest.raises(ShareError, match="after it was shared .*FSDP"):
        materialize(module)
    plain = build("Encoder")
    with pytest.raises(ShareError, match=r"already wrapped \(FSDPModule\)"):
        share_from_embedding(fully_shard(plain), plain.embedding)


# ---------------------------------------------------------------------- checkpoints


CHECKPOINTED = ("fast path, tied", "factorised table", "factored", "LSTM, EPS")
WRAPPERS = {"ddp": DistributedDataParallel, **({"fsdp": sharded} if FSDP2 else {})}


def test_distributed_checkpoints(tmp_path: Path) -> None:
    """Training goes on from them as if nothing had happened, and one process alone reads them."""
    from torch.distributed.checkpoint import load

    in_two_processes(_checkpoints, tmp_path, str(tmp_path))
    for name in CHECKPOINTED:
        for wrapper in WRAPPERS:
            folder = tmp_path / name / wrapper
            module = shared(name, seed=1)
            state = {"model_state_dict": module.state_dict()}
            load(state, checkpoint_id=folder, no_dist=True)
            module.load_state_dict(state["model_state_dict"])
            expected = torch.load(folder / "output.pt")
            torch.testing.assert_close(module(batch(0)[0]), expected)


def _checkpoints(root: str) -> None:
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
        names = ("model_state_dict", "optim_state_dict")
        return dict(zip(names, get_state_dict(model, optimizer), strict=True))

    for name in CHECKPOINTED:
        for wrapper, wrap in WRAPPERS.items():
            folder = Path(root, name, wrapper)
            model = wrap(shared(name))
            optimizer = optimizer_of(model)
            _steps(model, optimizer, range(2))
            save(states(model, optimizer), checkpoint_id=folder)
            output = model(batch(0)[0])
            if dist.get_rank() == 0:
                torch.save(output.detach(), folder / "output.pt")
            expected = _steps(model, optimizer, range(2, 4))

            again = wrap(shared(name, seed=1))
            optimizer = optimizer_of(again)
            state = states(again, optimizer)
            load(state, checkpoint_id=folder)
            set_state_dict(again, optimizer, **state)
            found = _steps(again, optimizer, range(2, 4))
            torch.testing.assert_close(found, expected, msg=f"{name}, {wrapper}")


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, mine(step))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)
