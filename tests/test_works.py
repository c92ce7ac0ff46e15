"""What must go on working with a shared module, for every kind of model and of sharing."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import threading
import warnings
import weakref

import pytest
import reference
import torch
from close import assert_passes_close
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint
from zoo import TOKENS, ZOO, Encoder, Narrow, batch, build, share

import paramshare
from paramshare import ShareError, materialize, share_from_embedding
from paramshare.sharing import named_pools

# Options that fit every model of the zoo (EPS needs few columns: one Linear of each stack).
WAYS = {
    "veps-aligned": {},
    "veps-aligned-blocks": {"blocks": 1},
    "veps-aligned-bias": {"projection_bias": True, "table_gradient": 0.3},
    "veps-column": {"layout": "column", "projection_bias": True},
    "veps-token": {"layout": "token", "projection_bias": True, "virtual_dim": 300},
    "veps-none": {"depth": "none", "table_gradient": 0.0},
    "veps-paper": {"init": "paper"},
    "veps-whitened": {"whiten": True, "depth": "none", "blocks": 2},
    "eps-aligned": {"virtual": False, "table_gradient": 0.25},
    "eps-column": {"virtual": False, "layout": "column"},
    "eps-token": {"virtual": False, "layout": "token", "init": "paper"},
}
CASES = [
    (name, way)
    for name in ZOO
    for way in WAYS
    # EPS finds no columns in the first three. In the last its one stack of layers takes all, and
    # layers of this kind that are not shared cannot be copied (torch).
    if not (way.startswith("eps") and name in ("Narrow", "Seq2Seq", "Encoder", "NormedByHook"))
]
RECURRENT = ("Recurrent", "Projected", "Gated", "Elman")


def shared(name: str, way: str = "veps-aligned", **more):
    """(shared module, its Sharing). Narrow shares factored where nothing else is said."""
    module = build(name)
    options = {**WAYS[way], **more}
    if not options.get("virtual", True):
        options["select"] = _few(module)
    return module, share(module, **options)


def _few(module: nn.Module):
    """One weight at each depth, so that it fits into 16 columns."""
    few = {
        "CrossAttention": r"layers\.\d\.out_proj\.weight",
        "Recurring": r"layers\.0\.up\.weight",
        "Chain": r"1\.\d\.weight",
        "Recurrent": r"rnn\.weight_hh_l\d",
        "Projected": r"rnn\.weight_hr_l\d.*",
        "Gated": r"rnn\.weight_hh_l\d",
        "Elman": r"rnn\.weight_hh_l\d.*",
        "Cells": r"gru\.weight_hh",
        "Convolutional": r"layers\.\d\.weight",
        "Normed": r"layers\.\d\.parametrizations\.weight\.original1",
        "NormedByHook": r"layers\.\d\.weight_v",
        "Raw": "child.weight|matrix|heads",
    }[type(module).__name__]
    return lambda path, owner: re.fullmatch(few, path) is not None


@pytest.mark.parametrize(("name", "way"), CASES)
def test_parity_with_an_independent_derivation(name: str, way: str) -> None:
    module, sharing = shared(name, way)
    tokens, padding = batch()
    module.train()
    output = module(tokens, padding)
    output.square().sum().backward()
    expected, gradients = reference.run(build(name), module, sharing.pool, tokens, padding)
    assert_passes_close(output, expected)
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert_passes_close(found, gradients)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_materialized_is_a_plain_module_with_the_same_values(name: str, way: str) -> None:
    module, _ = shared(name, way)
    plain = build(name)
    tokens, padding = batch()
    expected = module(tokens, padding)
    assert materialize(module) is module
    assert [(n, p.shape) for n, p in module.named_parameters(remove_duplicate=False)] == [
        (n, p.shape) for n, p in plain.named_parameters(remove_duplicate=False)
    ]
    assert [_class(m) for m in module.modules()] == [_class(m) for m in plain.modules()]
    assert not any("paramshare" in key for m in module.modules() for key in m.__dict__)
    storages = [p.data_ptr() for p in module.parameters()]
    assert len(set(storages)) == len(storages)
    assert_passes_close(module(tokens, padding), expected)
    plain.load_state_dict(module.state_dict())
    assert_passes_close(plain(tokens, padding), expected)


def _class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_mode_gives_the_same(name: str, way: str) -> None:
    module, _ = shared(name, way)
    tokens, padding = batch()
    for mask in (None, padding):
        module.train()
        expected = module(tokens, mask)
        keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else ~mask
        keep = keep[:, : expected.shape[1]]  # a fast path fills padded positions with zeros
        module.eval()
        outputs = [module(tokens, mask)]
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outputs += [module(tokens, mask), module(tokens, mask)]
        for output in outputs:
            assert_passes_close(output[keep], expected[keep])


@pytest.mark.parametrize(("name", "way"), CASES)
def test_state_dict_holds_what_is_stored_and_no_more(name: str, way: str) -> None:
    module, sharing = shared(name, way)
    state = module.state_dict()
    slots = {path for group in sharing.plan.groups for path in group.slots}
    assert not slots & state.keys()
    distinct = {t.data_ptr(): t for key, t in state.items() if not key.endswith("._extra_state")}
    assert sum(t.numel() for t in distinct.values()) == sharing.stored_parameters
    for tensor in state.values():  # no partial view, which safetensors refuses
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    other = build(name, seed=7)
    options = dict(WAYS[way])
    if not options.get("virtual", True):
        options["select"] = _few(other)
    share(other, **options)
    tokens, padding = batch()
    assert not torch.equal(other(tokens, padding), module(tokens, padding))
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(tokens, padding), module(tokens, padding))


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _torch_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _torch_saved])
@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize(("name", "way"), CASES[::3])
def test_copies_are_tied_to_their_own_table(name, way, copied, after_forward) -> None:
    module, _ = shared(name, way)
    if name == "Normed" and copied is not copy.deepcopy:
        with pytest.raises(RuntimeError, match="parametrized modules is only supported through"):
            copied(module)  # torch, of every parametrized module
        return
    tokens, padding = batch()
    if after_forward:
        module(tokens, padding).sum().backward()
        with torch.no_grad():
            module.eval()(tokens, padding)
            module.train()
    twin = copied(module)
    before = module(tokens, padding)
    assert torch.equal(twin(tokens, padding), before)
    assert type(twin).__name__ == type(module).__name__
    with torch.no_grad():
        twin.embedding.weight.mul_(1.5)
    assert not torch.equal(twin(tokens, padding), before)
    assert torch.equal(module(tokens, padding), before)
    names = [n for n, _ in module.named_parameters()]
    assert [n for n, _ in twin.named_parameters()] == names
    materialize(twin)  # undoing the copy leaves the original alone
    assert torch.equal(module(tokens, padding), before)


@pytest.mark.parametrize("name", ZOO)
def test_averaged_model(name: str) -> None:
    module, sharing = shared(name)
    tokens, padding = batch()
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    assert torch.equal(average(tokens, padding), module(tokens, padding))
    ((_, pool),) = named_pools(average.module)
    assert pool is not sharing.pool
    assert pool.embedding is average.module.embedding


@pytest.mark.parametrize("name", ZOO)
def test_dtype_and_device_moves(name: str) -> None:
    module, _ = shared(name)
    tokens, padding = batch()
    expected = module(tokens, padding)
    with torch.no_grad():
        module.eval()(tokens, padding)  # something is kept from here
        module.float()
        single = module(tokens, padding)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(module.to("cpu")(tokens, padding), module(tokens, padding))
    assert module.double()(tokens, padding).dtype == torch.float64
    meta = copy.deepcopy(module).to("meta").train()
    padding = None if name in RECURRENT else padding.to("meta")  # packing needs lengths
    assert meta(tokens.to("meta"), padding).is_meta


AUTOCAST_WAYS = [
    *("veps-aligned", "veps-aligned-bias", "veps-column", "veps-token", "veps-none"),
    "veps-whitened",
]


@pytest.mark.parametrize("way", AUTOCAST_WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_backward_after_autocast(name: str, way: str) -> None:
    """As it is used: the forward pass under autocast, the backward pass not."""
    found = []
    for inside in (True, False):
        module = build(name, dtype=torch.float32)
        torch.manual_seed(1)
        share(module, **WAYS[way])
        tokens, padding = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(tokens, padding).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        assert found[1][key].dtype == torch.float32, key
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (found[1][key] - gradient).abs().max() <= 0.05 * scale, key


@pytest.mark.parametrize("name", ["Encoder", "Narrow"])
def test_autocast(name: str) -> None:
    module = build(name, dtype=torch.float32)
    share_from_embedding(module, module.embedding)
    plain = materialize(copy.deepcopy(module))
    tokens, padding = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = module(tokens, padding), plain(tokens, padding)
        output.float().square().sum().backward()
    assert output.dtype == expected.dtype
    scale = expected.float().std()
    assert (output.float() - expected.float()).abs().max() < 0.1 * scale
    assert module.paramshare.projection.grad.abs().sum() > 0
    # An island of full precision inside sees weights of full precision.
    layer = module.encoder.layers[0].linear1 if name == "Encoder" else module.blocks[0].up
    seen = []
    hook = layer.register_forward_pre_hook(
        lambda m, a: seen.append(_outside_autocast(lambda: m.weight.dtype))
    )
    with torch.autocast("cpu", torch.bfloat16):
        module(tokens, padding)
    hook.remove()
    assert set(seen) == {torch.float32}


def _outside_autocast(read):
    with torch.autocast("cpu", enabled=False):
        return read()


def test_gradient_accumulation_and_interleaved_passes() -> None:
    module, _ = shared("Encoder")
    first, second = batch(0)[0], batch(1)[0]
    for tokens in (first, second):
        module(tokens).square().sum().backward()
    accumulated = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    losses = [module(tokens).square().sum() for tokens in (first, second)]
    for loss in losses:  # forward, forward, backward, backward
        loss.backward()
    for parameter, gradient in zip(module.parameters(), accumulated, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_optimizer_steps_change_the_weights_at_once() -> None:
    module, _ = shared("Encoder")
    tokens, _ = batch()
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    module.eval()
    with torch.no_grad():
        before = module(tokens), module.encoder.layers[0].linear1.weight.clone()
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(tokens).mT, tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        after = module(tokens), module.encoder.layers[0].linear1.weight
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.allclose(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    module, _ = shared("Encoder")
    tokens, _ = batch()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(tokens).sum().backward()
    loss = module(tokens).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="in place|inplace"):
        loss.backward()


class Checkpointed(Narrow):
    """Narrow whose blocks are recomputed in backward."""

    reentrant = False

    def forward(self, tokens, padding=None):
        x = self.lift(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, padding, use_reentrant=self.reentrant)
        return self.output(x)


class CheckpointedEncoder(Encoder):
    reentrant = False

    def forward(self, tokens, padding=None):
        x = self.embedding(tokens)
        for layer in self.encoder.layers:
            x = checkpoint(layer, x, None, padding, use_reentrant=self.reentrant)
        return self.output(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("execution", ["materialized", "auto"])
@pytest.mark.parametrize("cls", [Checkpointed, CheckpointedEncoder])
def test_gradient_checkpointing(cls, reentrant: bool, execution: str) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = cls().double()
        if not recompute:
            module.__class__ = cls.__mro__[1]
        share_from_embedding(
            module, module.embedding, execution=execution, table_gradient=0.5, depth="all"
        )
        module.reentrant = reentrant
        for _ in range(2):  # accumulation over two passes as well
            module(*batch()).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize(
    ("way", "execution"),
    [
        ("veps-aligned-bias", "materialized"),
        ("veps-aligned-bias", "factored"),
        ("veps-aligned-bias", "blockwise"),
        ("veps-column", "materialized"),
        ("veps-token", "materialized"),
        ("eps-aligned", "materialized"),
        ("eps-aligned", "blockwise"),
    ],
)
def test_gradcheck(way: str, execution: str) -> None:
    torch.manual_seed(0)

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.layers = nn.ModuleList(nn.Linear(3, 5) for _ in range(2))

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    module = Tiny().double()
    options = {**WAYS[way], "table_gradient": 1.0, "virtual_dim": None, "execution": execution}
    share_from_embedding(module, module.embedding, **options)
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def function(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *module.parameters()))


def test_two_threads_with_a_replica_each() -> None:
    module, _ = shared("Encoder")
    tokens, _ = batch()
    module(tokens).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    replicas = [copy.deepcopy(module), copy.deepcopy(module)]
    errors = []

    def work(replica: nn.Module) -> None:
        try:
            for _ in range(100):
                replica.zero_grad()
                replica(tokens).square().sum().backward()
                for parameter, gradient in zip(replica.parameters(), expected, strict=True):
                    torch.testing.assert_close(parameter.grad, gradient)
        except Exception as error:  # raised in the main thread below
            errors.append(error)

    in_threads(work, replicas)
    assert errors == []


def test_two_threads_in_one_module() -> None:
    module, _ = shared("Encoder")
    inputs = [batch(0)[0], batch(1)[0]]
    expected = [module(tokens) for tokens in inputs]
    errors = []

    def work(index: int) -> None:
        try:
            for _ in range(50):
                output = module(inputs[index])
                torch.testing.assert_close(output, expected[index])
                torch.autograd.grad(output.sum(), list(module.parameters()), allow_unused=True)
        except Exception as error:  # raised in the main thread below
            errors.append(error)

    in_threads(work, [0, 1])
    assert errors == []


def in_threads(work, arguments) -> None:
    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", ZOO)
def test_parts_can_be_called_without_their_root(name: str) -> None:
    """fairseq decodes by calling the decoder; the weight must be right on its own."""
    module, sharing = shared(name)
    tokens, padding = batch()
    module(tokens, padding)
    slot = sharing.plan.groups[0].slots[0]
    owner_path, _, weight_name = slot.rpartition(".")
    expected = reference.weights(
        sharing.plan, module.embedding.weight, sharing.pool.projection, None, None
    )[slot]
    read = getattr(module.get_submodule(owner_path), weight_name)
    torch.testing.assert_close(read, expected.reshape(read.shape))
    read.sum().backward()
    assert sharing.pool.projection.grad.abs().sum() > 0


def test_nothing_is_alive_after_a_training_step() -> None:
    module, sharing = shared("Encoder")
    tokens, _ = batch()
    seen = []

    def look(layer, args, output):
        held = sharing.pool.holder.running.values()
        seen.extend(weakref.ref(w[0]) for w in held if isinstance(w, tuple))

    hook = module.encoder.layers[0].linear1.register_forward_hook(look)
    loss = module(tokens).sum()
    assert len(seen) == 4
    loss.backward()
    hook.remove()
    del loss
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4
    assert sharing.pool.holder.running is None
    assert sharing.pool.holder.kept is None


def test_an_error_in_forward_leaves_nothing_held() -> None:
    module, sharing = shared("Encoder")
    with pytest.raises(IndexError):
        module(torch.full((1, 3), TOKENS + 5))
    assert sharing.pool.holder.running is None
    tokens, _ = batch()
    with torch.no_grad():
        module.embedding.weight.mul_(2)
    plain = materialize(copy.deepcopy(module))
    torch.testing.assert_close(module(tokens), plain(tokens))


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        module, sharing = shared("Encoder")
        module(batch()[0]).sum().backward()
        gone = weakref.ref(module)
        del module, sharing
        assert gone() is None
    finally:
        gc.enable()


def test_modules_look_as_before() -> None:
    plain = build("Encoder")
    module, _ = shared("Encoder")
    assert repr(module.encoder) == repr(plain.encoder)
    for a, b in zip(module.encoder.modules(), plain.encoder.modules(), strict=True):
        assert isinstance(a, type(b))
        assert type(a).__name__ == type(b).__name__
        assert type(a).__module__ == type(b).__module__
        assert inspect.signature(a.forward) == inspect.signature(b.forward)
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)


def test_first_pass_without_gradients_inside_one_with() -> None:
    """As reentrant checkpointing and two-pass models do: the frame must not mix the modes."""

    class TwoPasses(Narrow):
        def forward(self, tokens, padding=None):
            with torch.no_grad():
                super().forward(tokens, padding)
            return super().forward(tokens, padding)

    for execution in ("materialized", "factored", "blockwise"):
        gradients = []
        for cls in (Narrow, TwoPasses):
            torch.manual_seed(0)
            module = cls().double()
            share_from_embedding(module, module.embedding, execution=execution)
            layer = module.blocks[0].up
            layer(torch.ones(1, 16, dtype=torch.float64))
            module(*batch()).square().sum().backward()
            gradients.append([p.grad for p in module.parameters()])
        for once, twice in zip(*gradients, strict=True):
            torch.testing.assert_close(twice, once)


def test_torch_func() -> None:
    for execution in ("materialized", "factored", "blockwise"):
        module, _ = shared("Narrow", execution=execution)
        tokens, _ = batch()
        parameters = dict(module.named_parameters())

        def loss(values, tokens):
            output = torch.func.functional_call(module, values, (tokens,))  # noqa: B023
            return output.square().sum()

        found = torch.func.grad(loss)(parameters, tokens)
        loss(parameters, tokens).backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name], parameter.grad)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens[:, None])
        for name, parameter in parameters.items():
            torch.testing.assert_close(each[name].sum(0), parameter.grad)


def test_factored_layers_have_the_dtype_of_autocast() -> None:
    module = build("Narrow", dtype=torch.float32)
    share_from_embedding(module, module.embedding, projection_bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        for layer in (module.blocks[0].up, module.lift):
            x = torch.ones(2, layer.in_features)
            assert layer(x).dtype == torch.bfloat16


def test_writing_into_a_derived_weight_lasts_for_no_other_read() -> None:
    for name, options in (("Encoder", {}), ("Chain", {"virtual": False, "init": "paper"})):
        module, sharing = shared(name, **options)
        tokens, _ = batch()
        owner, _, weight = sharing.plan.groups[0].slots[0].rpartition(".")
        table = module.embedding.weight.detach().clone()
        module.eval()
        with torch.no_grad():
            before = module(tokens)
            with pytest.raises(ShareError, match="is read from the embedding"):
                getattr(module.get_submodule(owner), weight).zero_()
            assert torch.equal(module(tokens), before)
        assert torch.equal(module.embedding.weight, table)


def test_a_table_that_forward_normalises() -> None:
    class Normalised(Encoder):
        def forward(self, tokens, padding=None):
            with torch.no_grad():
                self.embedding.weight.mul_(0.5)
            return super().forward(tokens, padding)

    torch.manual_seed(0)
    module = Normalised().double()
    share_from_embedding(module, module.embedding)
    tokens, _ = batch()
    for context in (torch.no_grad, torch.enable_grad):
        module.eval()
        with context():
            output = module(tokens)
        plain = materialize(copy.deepcopy(module))
        torch.testing.assert_close(output, Encoder.forward(plain, tokens))
        if output.requires_grad:
            output.sum().backward()


def test_another_embedding_is_an_error_at_the_next_use(tmp_path) -> None:
    module, _ = shared("Narrow")
    module.embedding = nn.Embedding(TOKENS, 3).double()
    with pytest.raises(ShareError, match="embedding was replaced after sharing.*materialize"):
        module(*batch())
    module, _ = shared("Narrow")
    module.embedding.weight = nn.Parameter(torch.randn(TOKENS + 1, 3).double())
    with pytest.raises(ShareError, match="the table embedding is 61 x 3, the plan's is 60 x 3"):
        module(*batch())


def test_a_copy_of_a_part_warns() -> None:
    module, _ = shared("Encoder")
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    for root in (module, copy.deepcopy(module)):
        with pytest.warns(UserWarning, match="copy the whole module, or materialize"):
            part = copy.deepcopy(root.encoder)
        assert torch.equal(part(x), module.encoder(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(module)
        copy.deepcopy(materialize(module).encoder)


def test_layers_make_ordinary_layers() -> None:
    module, _ = shared("Narrow")
    layer = type(module.blocks[0].up)(4, 5)
    assert type(layer) is nn.Linear
    assert layer.weight.shape == (5, 4)


def test_a_parametrized_bias_beside_a_derived_weight() -> None:
    module, _ = shared("Narrow")
    layer = module.blocks[0].up
    before = module(*batch())
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())
    assert torch.equal(module(*batch()), before)
    with pytest.raises(ShareError, match="changed this ParametrizedLinear after it was shared"):
        materialize(module)
    nn.utils.parametrize.remove_parametrizations(layer, "bias")
    torch.testing.assert_close(materialize(module)(*batch()), before)


def test_reading_and_training_threads_do_not_disturb_each_other() -> None:
    module, _ = shared("Encoder")
    module.eval()
    tokens, _ = batch()
    expected, errors = module(tokens), []

    def work(gradients: bool) -> None:
        try:
            for _ in range(100):
                with torch.set_grad_enabled(gradients):
                    torch.testing.assert_close(module(tokens), expected)
                    module.encoder.layers[0].linear1.weight.sum()
        except Exception as error:  # raised in the main thread below
            errors.append(error)

    in_threads(work, [True, False])
    assert errors == []


def test_containers_keep_their_length() -> None:
    module, sharing = shared("Chain")
    assert len(module) == 4
    assert type(module[-1]) is nn.Linear
    assert "0.paramshare.projection" in module.state_dict()
    assert sharing.stored_parameters == sum(p.numel() for p in module.parameters())
    materialize(module)
    assert not hasattr(module[0], "paramshare")


def test_tools_that_do_not_know_derived_weights_say_what_does() -> None:
    module, _ = shared("Narrow")
    module.eval()
    tokens = batch()[0]
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        with pytest.raises(ShareError, match=r"use torch\.export\.export, .*materialize"):
            torch.jit.trace(module, (tokens,), check_trace=False)
        with pytest.raises(ShareError, match=r"use paramshare\.quantize, .*materialize"):
            torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
        expected = module(tokens)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        materialize(module)
        torch.testing.assert_close(
            torch.jit.trace(module, (tokens,), check_trace=False)(tokens), expected
        )
    assert torch.ao.quantization.quantize_dynamic(module.float(), {nn.Linear})(tokens).any()


@pytest.mark.parametrize("call", ["materialize", "save_model", "load_model", "prepare", "flops"])
def test_what_is_no_module_is_refused(call: str, tmp_path) -> None:
    calls = {
        "materialize": materialize,
        "save_model": lambda module: paramshare.save_model(module, tmp_path / "m"),
        "load_model": lambda module: paramshare.load_model(module, tmp_path / "m"),
        "prepare": paramshare.prepare_for_inference,
        "flops": lambda module: paramshare.flops(module, 3),
    }
    for given in (None, 3, "model", torch.zeros(2)):
        name = type(given).__name__
        with pytest.raises(ShareError, match=f"must be a torch.nn.Module, not a {name}"):
            calls[call](given)
