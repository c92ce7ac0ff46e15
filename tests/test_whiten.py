"""Whitened reading: what the weights are, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import batch, build

from paramshare import (
    ShareError,
    load_model,
    materialize,
    prepare_for_inference,
    quantize,
    save_model,
    share_from_embedding,
)
from paramshare.whiten import RIDGE, colored, sampled, whitened, whitening


@given(
    rows=st.integers(1, 60),
    features=st.integers(1, 6),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_rows_become_an_orthonormal_basis(rows, features, spread, seed) -> None:
    torch.manual_seed(seed)
    mixed = torch.randn(features, features, dtype=torch.float64)
    table = spread * torch.randn(rows, features, dtype=torch.float64) @ mixed
    count, step = sampled(rows, features)
    assert count == min(rows, 8 * features)
    assert count * step <= rows
    found = whitening(table, count, step)
    read = table[: count * step : step]
    variance = read.square().sum() / features
    ridge = RIDGE * variance * torch.eye(features, dtype=torch.float64)
    # All but the ridge: (T S)' (T S) = count / features.
    moments = found.t() @ (read.t() @ read + ridge) @ found
    wanted = torch.eye(features, dtype=torch.float64) * count / features
    torch.testing.assert_close(moments, wanted, rtol=1e-8, atol=1e-8 * count)
    columns = torch.randn(features, 3, dtype=torch.float64)
    torch.testing.assert_close(colored(found, whitened(found, columns)), columns)


def test_the_scale_of_the_table_is_nothing_to_the_weights() -> None:
    table = torch.randn(50, 4)
    for factor in (1e-6, 1e-2, 1e4):
        torch.testing.assert_close(
            whitening(factor * table, 32, 1) * factor, whitening(table, 32, 1)
        )


def test_a_table_of_zeros_or_of_one_direction_gives_numbers() -> None:
    assert whitening(torch.zeros(9, 3), 9, 1).isfinite().all()
    line = torch.arange(9.0).view(9, 1) * torch.tensor([[1.0, -2.0, 0.5]])
    found = line @ whitening(line, 9, 1)
    assert found.isfinite().all()
    # The ridge is less than what the rows have in their direction, and more than in the others.
    assert found.square().mean() * 3 <= 3


OPTIONS = (
    {},
    {"blocks": 1},
    {"blocks": 2, "depth": "none"},
    {"layout": "column"},
    {"layout": "token"},
    {"projection_bias": True},
    {"embedding_dim": 2},
    {"table_gradient": 0.0},
    {"virtual_dim": 400},
)
EXECUTIONS = ("materialized", "factored", "blockwise")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["Encoder", "Narrow", "Recurrent", "Convolutional"])
def test_equals_an_independent_derivation(name, options) -> None:
    module = build(name).double()
    plain = copy.deepcopy(module)
    sharing = share_from_embedding(module, module.embedding, whiten=True, **options)
    assert sharing.plan.whiten
    if "embedding_dim" in options:
        plain = None
    inputs = batch()
    output = module(*inputs)
    output.square().sum().backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    if plain is not None:
        expected, gradients = reference.run(plain, module, sharing.pool, *inputs)
        torch.testing.assert_close(output, expected)
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, msg=lambda m, key=key: f"{key}: {m}")
    module.eval()
    with torch.no_grad():
        before = module(*inputs)
    torch.testing.assert_close(materialize(copy.deepcopy(module))(*inputs), before)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_executions_agree(execution) -> None:
    found = []
    for how in (execution, "materialized"):
        module = build("Narrow")
        share_from_embedding(module, module.embedding, execution=how, whiten=True)
        output = module(*batch())
        output.square().sum().backward()
        found.append([output, *(p.grad for p in module.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def shared(whiten: bool = True) -> nn.Module:
    module = build("Narrow")
    share_from_embedding(module, module.embedding, whiten=whiten)
    return module.eval()


def output(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(*batch())


def test_folded_for_inference_and_back_in_training() -> None:
    module = shared()
    before, projection = output(module), module.paramshare.projection.clone()
    prepare_for_inference(module, tokens=batch())
    assert not module.paramshare.plan.whiten
    assert not torch.allclose(module.paramshare.projection, projection)
    torch.testing.assert_close(output(module), before)
    module.load_state_dict(module.state_dict())
    module.load_state_dict({"embedding.weight": module.embedding.weight}, strict=False)
    module.train()
    assert module.paramshare.plan.whiten
    torch.testing.assert_close(module.paramshare.projection, projection)
    torch.testing.assert_close(output(module.eval()), before)
    state = module.state_dict()
    prepare_for_inference(module, tokens=batch())
    module.load_state_dict(state)  # as it was in training
    assert module.paramshare.plan.whiten
    torch.testing.assert_close(output(module), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_other_dtypes(dtype) -> None:
    module, tokens = shared(), batch()[0]
    expected = module(tokens)
    found = copy.deepcopy(module).to(dtype)(tokens)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=64 * eps, atol=64 * eps)


def test_under_autocast_the_table_is_read_as_without() -> None:
    module = build("Narrow").float()
    share_from_embedding(module, module.embedding, whiten=True)
    frame: dict = {}
    plain = module.paramshare._parts(frame)
    with torch.autocast("cpu", torch.bfloat16):
        cast = module.paramshare._parts({})
    for (one, _), (other, _) in zip(plain, cast, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one, other)


def test_states_are_read_as_they_were_made() -> None:
    """Loaded into each other, whichever the module was shared as."""
    for whiten in (False, True):
        source = shared(whiten)
        state = source.state_dict()
        for other in (False, True):
            module = shared(other)
            for parameter in module.parameters():
                parameter.data.neg_()
            module.load_state_dict(state)
            assert module.paramshare.plan.whiten == source.paramshare.plan.whiten
            assert torch.equal(output(module), output(source))


def test_a_state_of_before_there_were_plans_is_refused() -> None:
    state = shared(whiten=False).state_dict()
    del state["paramshare._extra_state"]
    module = shared()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ShareError, match="share with whiten=False"):
        module.load_state_dict(state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    module = shared(whiten=False)
    module.load_state_dict(state)
    module = shared()
    module.load_state_dict({"embedding.weight": state["embedding.weight"]}, strict=False)


def test_files_of_both_kinds(tmp_path) -> None:
    for whiten in (False, True):
        source = shared(whiten)
        save_model(source, tmp_path / "file")
        for module in (build("Narrow").eval(), shared(), shared(whiten=False)):
            load_model(module, tmp_path / "file")
            assert module.paramshare.plan.whiten == source.paramshare.plan.whiten
            assert torch.equal(output(module), output(source))
        with torch.device("meta"):
            module = build("Narrow").eval()
        load_model(module, tmp_path / "file")
        assert torch.equal(output(module), output(source))


def test_quantized(tmp_path) -> None:
    module = shared()
    before = output(module)
    quantize(module)
    assert not module.paramshare.plan.whiten
    expected = output(module)
    assert torch.nn.functional.cosine_similarity(expected.flatten(), before.flatten(), 0) > 0.99
    save_model(module, tmp_path / "file")
    for other in (build("Narrow"), shared()):
        load_model(other, tmp_path / "file")
        assert torch.equal(output(other), expected)


def test_only_of_a_projection() -> None:
    module = build("Encoder")
    with pytest.raises(ShareError, match="whiten=True needs virtual=True"):
        share_from_embedding(module, module.embedding, virtual=False, whiten=True)
    with pytest.raises(ShareError, match="whiten=1 is a int, not"):
        share_from_embedding(module, module.embedding, whiten=1)
    one = {"select": lambda path, owner: path.endswith("0.linear1.weight")}
    assert not share_from_embedding(module, module.embedding, virtual=False, **one).plan.whiten
