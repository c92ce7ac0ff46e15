from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from close import assert_passes_close
from safetensors import safe_open
from safetensors.torch import save_file
from test_sharing import snapshot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, Narrow, Recurrent, batch, build, share

import paramshare
from paramshare import ShareError, int8, load_model, materialize, quantize, save_model
from paramshare.marks import sources
from paramshare.models.sharebert import MaskedLMHead, ShareBert, ShareBertConfig
from paramshare.report import count_bytes, count_parameters
from paramshare.sharing import named_pools

# How each is shared; None: not at all.
SHARED = {
    "plain": None,
    "shared": {},
    "factored": {"execution": "factored", "projection_bias": True},
    "blockwise": {"execution": "blockwise"},
    "lifted": {"embedding_dim": 3},
    "token": {"layout": "token", "depth": "none"},
    "whitened": {"whiten": True, "depth": "none"},
}
# Layers that are called; and a table that can be narrowed.
CALLED = {"Seq2Seq", "Narrow", "Recurring", "Chain", "Convolutional", "Raw"}
POSSIBLE = {"factored": CALLED, "blockwise": CALLED, "lifted": {*ZOO} - {"Narrow"}}
CASES = [(name, how) for name in ZOO for how in SHARED if name in POSSIBLE.get(how, ZOO)]


def made(name: str, shared: str) -> nn.Module:
    module = build(name)
    if SHARED[shared] is not None:
        share(module, **SHARED[shared])
    return module.eval()


def rounded(module: nn.Module) -> nn.Module:
    """A copy with the numbers that are left of the stored ones, by another derivation: the table of
    aligned weights by feature and block, the projection by column, other matrices by row."""
    module = copy.deepcopy(module)
    tables, projections = {}, set()
    for _, pool in named_pools(module):
        aligned = any(group.layout == "aligned" for group in pool.plan.groups)
        tables[pool.embedding.weight] = aligned  # one block: others have 64 rows and more
        pool.fold()  # scales are of what is read
        projections.add(pool.projection)
    for parameter in module.parameters():
        values = parameter.detach().numpy()
        if sum(size > 1 for size in values.shape) < 2:
            parameter.data = parameter.half().double()
            continue
        by_column = parameter in projections or tables.get(parameter)
        largest = abs(values).max(0) if by_column else abs(values.reshape(len(values), -1)).max(1)
        exact = torch.from_numpy(largest / 127)
        # Below the normal numbers of float16: up, to the next that it has.
        coarse = (exact * 2**24).ceil() / 2**24
        scale = torch.where(exact < 2**-14, coarse, exact.half().double())
        scale = scale if by_column else scale.view(-1, *[1] * (values.ndim - 1))
        parameter.data = (parameter.data / scale).round().clamp(-127, 127) * scale
    return module


@pytest.mark.parametrize(("name", "shared"), CASES)
def test_computes_with_rounded_numbers(name: str, shared: str, monkeypatch) -> None:
    """Exactly, where inputs are not rounded; nearly, where they are. A copy does the same."""
    module = made(name, shared)
    inputs = batch() if name != "Encoder" else batch()[:1]
    with torch.no_grad():
        expected = module(*inputs)
        exact = rounded(module)(*inputs)
        assert quantize(module) is module
        found = module(*inputs)
        copies = [copy.deepcopy(module)]
        if name != "Normed":  # torch refuses to pickle parametrized modules
            copies.append(pickle.loads(pickle.dumps(module)))
        for again in copies:
            assert torch.equal(again(*inputs), found)
            assert list(again.state_dict()) == list(module.state_dict())
            again.double().load_state_dict(module.state_dict())
            assert not {id(b) for b in again.buffers()} & {id(b) for b in module.buffers()}
        monkeypatch.setattr(int8, "_ON_CPU", False)
        assert_passes_close(module(*inputs), exact)
    assert (found - expected).norm() < 0.04 * expected.norm()
    matrices = [p for p in module.parameters() if sum(size > 1 for size in p.shape) > 1]
    assert not matrices
    assert type(module).__name__ == name
    assert isinstance(module, ZOO[name])


def test_what_is_tied_is_stored_once() -> None:
    module = quantize(made("Encoder", "plain"))
    keys = module.state_dict().keys()
    assert "embedding.weight_int8" in keys
    assert not any(key.startswith("output.") for key in keys)
    module.float()
    assert module.output.weight.scale is module.embedding.weight.scale
    alone = copy.deepcopy(module.output)
    assert torch.equal(alone.weight.dense(), module.embedding.weight.dense())


def test_scales_go_with_blocks_of_the_table() -> None:
    module = Blocks().eval()
    sharing = share(module, execution="factored")
    assert {group.cols for group in sharing.plan.groups} == {64, 192}
    module.embedding.weight.data[:64] /= 50
    table = module.embedding.weight.detach().clone()
    ids = torch.randint(0, 500, (2, 7))
    with torch.no_grad():
        expected = module(ids)
        quantize(module)
        assert module.embedding.weight.scale.shape == (8, 3)  # of 64 rows, the last of 52
        assert module.embedding.weight.block == 64
        found = module(ids)
    assert (found - expected).norm() < 0.03 * expected.norm()
    # Rows are rounded by the largest of their block, not of the table.
    rows = module.embedding.weight.dense()
    assert (rows - table)[:64].abs().max() < table[:64].abs().max() / 250
    assert (rows - table)[64:].abs().max() > table[:64].abs().max() / 250


class Blocks(Narrow):
    def __init__(self) -> None:
        super().__init__(3, 64)
        self.embedding = nn.Embedding(500, 3)
        for block in self.blocks:
            block.up, block.down = nn.Linear(64, 192), nn.Linear(192, 64, bias=False)


def test_what_a_parametrization_reads_stays_exact() -> None:
    """The orthogonal one keeps signs in a diagonal, as whole numbers."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 6))
    module = nn.Sequential(nn.Embedding(9, 4), layer).eval()
    tokens = torch.arange(9)
    before = module(tokens)
    quantize(module)
    original = layer.parametrizations.weight.original
    assert isinstance(original, nn.Parameter)
    assert torch.equal(original, original.half().float())
    found = module(tokens)
    assert (found - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes(dtype) -> None:
    module = made("Narrow", "factored").to(dtype)
    with torch.no_grad():
        expected = module(batch()[0])
        found = quantize(module)(batch()[0])
        assert found.dtype == dtype
        assert (found - expected).float().norm() < 0.06 * expected.float().norm()
        moved = module.float()(batch()[0])
    assert moved.dtype == torch.float32
    assert (moved - expected).norm() < 0.06 * expected.float().norm()


@pytest.mark.parametrize(("name", "shared"), [("Narrow", "factored"), ("Chain", "lifted")])
def test_compiles_and_exports(name: str, shared: str) -> None:
    module = quantize(made(name, shared).float())
    ids = batch()[0]
    with torch.no_grad():
        expected = module(ids)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids), expected)
        exported = torch.export.export(module, (ids,), strict=False).module()
        torch.testing.assert_close(exported(ids), expected)


# ---------------------------------------------------------------------- ShareBERT Small


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, nn.Module]:
    """The backbone as it was, and quantised."""
    torch.manual_seed(0)
    module = ShareBert(ShareBertConfig.preset("small")).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.02)
    return module, quantize(copy.deepcopy(module))


def test_small_takes_5_megabytes(small, tmp_path) -> None:
    module, quantized = small
    save_model(quantized, tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 5.3e6
    assert 0 < (tmp_path / "m").stat().st_size - count_bytes(quantized) < 50_000  # the header
    assert count_parameters(module) < count_parameters(quantized) < 1.01 * count_parameters(module)
    assert count_bytes(module) == 4 * count_parameters(module)
    assert f"quantised: {count_bytes(quantized):,} bytes" in str(quantized.sharing)
    assert "quantised" not in str(module.sharing)


def test_small_hardly_changes(small) -> None:
    module, quantized = small
    torch.manual_seed(0)
    head = MaskedLMHead(ShareBertConfig.preset("small")).eval()
    ids = torch.randint(0, 30528, (1, 24))
    with torch.no_grad():
        expected = head(module(ids)[0], module.embeddings.tokens.weight)
        found = quantize(head)(quantized(ids)[0], quantized.embeddings.tokens.weight)
    assert torch.cosine_similarity(expected, found, dim=-1).mean() > 0.999


def test_small_allocates_no_table_and_no_weight(small) -> None:
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = [*args, *(args[0] if args and isinstance(args[0], (list, tuple)) else [])]
            views = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in views:
                    sizes.append(t.nbytes)
            return result

    _, quantized = small
    with torch.no_grad(), Watch():
        quantized(torch.randint(0, 30528, (1, 8)))
    weight, table = 2048 * 2048, 30528 * 128
    # 8 tokens through 14 blocks and 4,096 features of the feed-forward; the lift as floats.
    assert max(sizes) <= 4 * 2048 * 128
    assert max(sizes) < min(weight, table)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *(("Encoder", "plain"), ("Encoder", "shared"), ("Encoder", "lifted")),
        *(("Narrow", "factored"), ("Chain", "plain"), ("Chain", "factored"), ("Raw", "shared")),
        *(("Recurrent", "plain"), ("Recurrent", "lifted"), ("NormedByHook", "shared")),
    ],
)
def test_round_trip(name: str, shared: str, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = quantize(made(name, shared))
    inputs = batch() if name != "Encoder" else batch()[:1]
    with torch.no_grad():
        expected = module(*inputs)
    save_model(module, path)
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118
    dtypes = {tensor.dtype for tensor in tensors if tensor.numel()}
    assert dtypes == {torch.int8, torch.float16}
    targets = {
        "plain": build(name, seed=1),
        "shared": made(name, shared),
        "quantised": quantize(made(name, shared)),
    }
    if name != "NormedByHook":  # whose hook has left a tensor with values
        with torch.device("meta"):
            targets["meta"] = build(name)
    for how, other in targets.items():
        load_model(other, path)
        assert all(not tensor.is_meta for tensor in other.state_dict().values()), how
        with torch.no_grad():
            assert torch.equal(other.eval()(*inputs), expected), how
        assert list(other.state_dict()) == list(module.state_dict())
        assert not any(parameter.requires_grad for parameter in other.parameters())
        with pytest.raises(ShareError, match="quantised"):
            other.train()


def test_files_fit_whatever_the_execution(tmp_path) -> None:
    module = made("Narrow", "shared")
    paramshare.prepare_for_inference(module, tokens=batch())
    save_model(quantize(module), tmp_path / "m")
    for execution in ("materialized", "blockwise", "factored"):
        other = build("Narrow", seed=1).eval()
        share(other, execution=execution)
        load_model(other, tmp_path / "m")
        with torch.no_grad():
            expected, found = module(*batch()), other(*batch())
        assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_part_of_a_file(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = made("Seq2Seq", "plain")
    quantize(module.transformer.encoder)
    save_model(module, path)
    other = made("Seq2Seq", "plain")
    load_model(other, path)
    with torch.no_grad():
        assert torch.equal(other(batch()[0]), module(batch()[0]))
    assert other.output.weight.requires_grad
    with safe_open(path, "pt") as file:
        assert file.get_tensor("output.weight").dtype == torch.float64


def test_files_that_do_not_fit(tmp_path) -> None:
    path, plain = tmp_path / "int8", tmp_path / "float"
    module = made("Narrow", "factored")
    save_model(module, plain)
    save_model(quantize(module), path)
    for file, other, message in (
        (plain, quantize(made("Narrow", "factored")), "quantised are nothing in the file"),
        (path, made("Narrow", "token"), "the file's plan is not the module's"),
        (path, build("Chain"), "does not fit the module"),
        (path, Narrow(3, 24).double(), "does not fit the module"),
    ):
        before = snapshot(other)
        with pytest.raises(ShareError, match=message):
            load_model(other, file)
        assert snapshot(other) == before
    part = made("Narrow", "factored")
    quantize(part.lift)
    with pytest.raises(ShareError, match="the module itself in the file, lift in the module"):
        load_model(part, path)


def test_damaged_files(tmp_path) -> None:
    path = tmp_path / "m"
    save_model(quantize(made("Narrow", "factored")), path)
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    content = json.loads(metadata["paramshare"])
    del content["sha256"]  # which would notice all of it
    for change, missing, message in (
        ({"int8": ["nowhere"]}, None, "does not fit the module"),
        ({"int8": 3}, None, "damaged"),
        ({}, "lift.weight_scale", "lift.weight_scale is missing"),
    ):
        kept = {key: tensor for key, tensor in tensors.items() if key != missing}
        save_file(kept, path, {"paramshare": json.dumps({**content, **change})})
        other = build("Narrow")
        before = snapshot(other)
        with pytest.raises(ShareError, match=message):
            load_model(other, path)
        assert snapshot(other) == before


# ---------------------------------------------------------------------- errors


def test_it_is_for_inference_only() -> None:
    module = quantize(made("Narrow", "factored"))
    assert not module.training
    for call in (
        lambda: module.train(),
        lambda: quantize(module),
        lambda: quantize(nn.Sequential(module)),
        lambda: materialize(module),
        lambda: share(module),
        lambda: paramshare.prepare_for_inference(module, tokens=batch()),
    ):
        before = snapshot(module)
        with pytest.raises(ShareError, match="this .* is quantised, which is for inference"):
            call()
        assert snapshot(module) == before
    assert module.eval() is module
    with pytest.raises(ShareError, match="weight of this Linear is quantised"):
        module.lift.weight = nn.Parameter(torch.ones(16, 3))
    with pytest.raises(ShareError, match="weight of this Linear is quantised"):
        module.lift.weight = torch.ones(16, 3)
    with pytest.raises(RuntimeError, match="lift.weight"):
        module.load_state_dict(made("Narrow", "factored").state_dict())
    module.lift.bias.requires_grad_()
    with pytest.raises(ShareError, match="no gradients through a quantised module"):
        module(*batch())
    assert isinstance(type(module.lift)(3, 4).weight, nn.Parameter)


def _infinite(module: nn.Module) -> nn.Module:
    module.lift.weight.data[0, 0] = torch.inf
    return module


def _large(module: nn.Module) -> nn.Module:
    module.lift.bias.data[0] = 1e6
    return module


def _named(module: nn.Module) -> nn.Module:
    module.lift.weight_scale = 3
    return module


def _lazy(module: nn.Module) -> nn.Module:
    module.late = nn.LazyLinear(3)
    return module


def _others_read_the_table(module: nn.Module) -> nn.Module:
    module.other = made("Chain", "plain")
    module.other[0].weight = module.embedding.weight
    return module.other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_infinite, "lift.weight has values that are not finite"),
        (_large, "lift.bias has values that are .* too large for float16"),
        (_named, "lift has weight_int8 or weight_scale of its own"),
        (_lazy, "late.weight has no shape yet"),
        (_others_read_the_table, "weights outside of this Chain are read"),
        (lambda module: "module", "'module' is no module"),
        (lambda module: module.blocks[0], "a part of a shared module"),
        (lambda module: module.embedding, "weights outside of this Embedding are read"),
        (lambda module: nn.LayerNorm(3), "this LayerNorm stores no matrices"),
    ],
    ids=lambda value: getattr(value, "__name__", "")[:12],
)
def test_what_cannot_be_quantised_is_as_it_was(change, message) -> None:
    module = made("Narrow", "factored")
    target = change(module)
    before = snapshot(module)
    with pytest.raises(ShareError, match=message):
        quantize(target)
    assert snapshot(module) == before


def test_on_meta() -> None:
    with torch.device("meta"):
        module = Recurrent()
        share(module)
        quantize(module)
        assert module(torch.zeros(2, 3, dtype=torch.long)).is_meta
    state = module.state_dict()
    assert all(value.is_meta for name, value in state.items() if "_extra_state" not in name)


def test_transformers_say_that_they_cannot_save_it(tmp_path) -> None:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertModel

    import paramshare.models.pretrained  # noqa: F401

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    module = BertModel(BertConfig(vocab_size=50, hidden_size=16, **sizes)).eval()
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        expected = module(ids).last_hidden_state
        found = quantize(module)(ids).last_hidden_state
    assert torch.cosine_similarity(expected, found, dim=-1).min() > 0.999
    with pytest.raises(ShareError, match="use paramshare.save_model"):
        module.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_counts_products_of_integers() -> None:
    module = made("Narrow", "factored")
    expected = paramshare.flops(module, batch())
    assert paramshare.flops(quantize(module), batch()).total == expected.total


def test_quantising_what_was_materialized() -> None:
    """The paper's variant: 8 bits of the weights that were generated."""
    module = made("Narrow", "factored")
    with torch.no_grad():
        expected = module(*batch())
        found = quantize(materialize(module))(*batch())
    assert not any(sources(part) for part in module.modules())
    assert (found - expected).norm() < 0.04 * expected.norm()


def test_weights_are_generated_once_for_many_calls() -> None:
    module = quantize(made("Recurring", "shared"))
    ((_, pool),) = named_pools(module)
    with torch.no_grad():
        module(*batch())
        assert pool.weight(0, False) is pool.weight(0, False)
    assert paramshare.quantize is quantize
