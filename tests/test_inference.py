from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import TOKENS, Narrow, batch, build

import paramshare
from paramshare import ShareError, flops, prepare_for_inference
from paramshare.trace import Allocations


class Attention(nn.Module):
    """Three weights on one input, and one on another: each of the three by itself is cheapest
    materialized, all together factored."""

    def __init__(self, features: int = 12, width: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, features)
        self.lift = nn.Linear(features, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(width, width) for n in ("query", "key", "value", "out")})
            for _ in range(2)
        )

    def forward(self, tokens):
        x = self.lift(self.embedding(tokens))
        for layer in self.layers:
            y = x.tanh()
            q, k, v = (layer[name](y).unsqueeze(1) for name in ("query", "key", "value"))
            attended = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
            x = x + layer["out"](attended)
        return x


def executions(module: nn.Module) -> list[str]:
    return [g.execution for p in module._paramshare_pools for g in p.plan.groups]


def measured(module: nn.Module, inputs: tuple) -> tuple[int, int, int]:
    """Bytes kept, and at most alive beside them: in the first call, and in a later one."""
    for pool in module._paramshare_pools:
        pool.holder.kept = None
    with torch.no_grad():
        with Allocations() as first:
            module(*inputs)
        with Allocations() as later:
            module(*inputs)
    return first.live, first.peak, later.peak


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Narrow", {}),
        ("Narrow", {"blocks": 1, "projection_bias": True}),
        ("Narrow", {"layout": "column"}),
        ("Narrow", {"whiten": True}),
        ("Encoder", {"whiten": True}),
        ("Recurrent", {}),
        ("Seq2Seq", {"depth": "none"}),
        ("attention", {}),
    ],
)
@pytest.mark.parametrize("smaller", [False, True])
def test_what_is_predicted(name: str, options: dict, smaller: bool, capsys) -> None:
    torch.manual_seed(0)
    module = Attention() if name == "attention" else build(name, dtype=torch.float32)
    inputs = (batch()[0] % TOKENS,)
    paramshare.share_from_embedding(module, module.embedding, **options)
    plain = paramshare.materialize(copy.deepcopy(module)).eval()
    prepared = prepare_for_inference(module, None, inputs)
    if smaller:
        generous = prepared
        try:
            prepared = prepare_for_inference(module, generous.peak_bytes - 1, inputs)
        except ShareError as error:
            assert "is too small" in str(error)  # noqa: PT017
        else:
            assert prepared.peak_bytes < generous.peak_bytes
            assert prepared.operations >= generous.operations
    assert capsys.readouterr().out.endswith(f"{prepared}\n")
    assert not module.training
    assert prepared.operations == flops(module, inputs).total
    assert prepared.generation == flops(module, inputs).generation
    kept, first, later = measured(module, inputs)
    assert prepared.kept_bytes == kept
    assert prepared.working_bytes == pytest.approx(later, rel=0.15)
    assert prepared.stored_bytes == sum(p.numel() * 4 for p in module.parameters())
    peak = prepared.stored_bytes + max(first, kept + later)
    assert prepared.peak_bytes == pytest.approx(peak, rel=0.15)
    with torch.no_grad():
        torch.testing.assert_close(module(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)


def test_weights_of_one_input_are_chosen_together(capsys) -> None:
    """At these sizes factoring pays for three of them together, and for none by itself."""
    module = Attention()
    paramshare.share_from_embedding(module, module.embedding, execution="materialized", blocks=1)
    prepared = prepare_for_inference(module, tokens=(torch.zeros(1, 6, dtype=torch.long),))
    chosen = {name.rpartition("*.")[2]: how for name, how in prepared.executions.items()}
    factored = 12 * (20 + 20)
    assert factored > 20 * 20  # one
    assert 12 * (20 + 3 * 20) < 3 * 20 * 20  # three
    assert chosen == {
        "query.weight": "factored",
        "key.weight": "factored",
        "value.weight": "factored",
        "out.weight": "materialized",
    }


def test_a_budget_that_nothing_fits(capsys) -> None:
    module = build("Narrow", dtype=torch.float32)
    paramshare.share_from_embedding(module, module.embedding, execution="materialized")
    with pytest.raises(ShareError, match=r"memory_budget=1,000 bytes is too small: .* at least"):
        prepare_for_inference(module, 1000, batch()[0])
    assert module.training
    assert set(executions(module)) == {"materialized"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0 is out of range"),
        ({"memory_budget": "40 MB"}, "memory_budget='40 MB' is no number of bytes"),
        ({"memory_budget": float("nan")}, "memory_budget=nan is no number of bytes"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    module = build("Narrow", dtype=torch.float32)
    paramshare.share_from_embedding(module, module.embedding, execution="factored")
    with pytest.raises(ShareError, match=message):
        prepare_for_inference(module, **options)
    assert module.training
    assert set(executions(module)) == {"factored"}


def test_a_layer_that_something_else_has_changed() -> None:
    """It is seen before the executions of the others are changed."""
    module = build("Narrow", dtype=torch.float32)
    paramshare.share_from_embedding(module, module.embedding, execution="factored")
    last = module.blocks[-1].down
    last.__class__ = type("Changed", (type(last),), {})
    classes = [type(part) for part in module.modules()]
    with pytest.raises(ShareError, match="something has changed this Changed"):
        prepare_for_inference(module, tokens=batch()[0])
    assert [type(part) for part in module.modules()] == classes
    assert set(executions(module)) == {"factored"}


def test_a_call_that_fails_changes_nothing() -> None:
    module = build("Narrow", dtype=torch.float32)
    paramshare.share_from_embedding(module, module.embedding, execution="factored")
    with pytest.raises(ShareError, match="cannot be called with"):
        prepare_for_inference(module, tokens={"nothing": 0})
    assert module.training
    assert set(executions(module)) == {"factored"}
    module(*batch()).sum().backward()


def test_nothing_is_shared() -> None:
    with pytest.raises(ShareError, match="nothing in this Linear is shared"):
        prepare_for_inference(nn.Linear(2, 2))


def test_a_file_keeps_what_was_chosen(tmp_path, capsys) -> None:
    module = Narrow(features=12)
    paramshare.share_from_embedding(module, module.embedding, execution="materialized")
    generous = prepare_for_inference(module, None, batch()[0])
    prepare_for_inference(module, generous.peak_bytes - 1000, batch()[0])
    assert set(executions(module)) != {"materialized"}
    paramshare.save_model(module, tmp_path / "model.safetensors")
    again = Narrow(features=12)
    paramshare.load_model(again, tmp_path / "model.safetensors")
    assert executions(again) == executions(module)


def test_trains_after_it(capsys) -> None:
    """The choice is for inference, but nothing is lost."""
    torch.manual_seed(0)
    module = build("Narrow")
    paramshare.share_from_embedding(module, module.embedding)
    tokens, padding = batch()
    gradients = []
    for _ in range(2):
        module.zero_grad()
        module.train()(tokens, padding).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
        prepare_for_inference(module, tokens=(tokens, padding))
    for once, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, once)
