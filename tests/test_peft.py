"""Adapters of PEFT on shared layers: they train and are kept; merging says what to do first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paramshare import ShareError, materialize, share_from_embedding

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
IDS = torch.arange(14).view(2, 7)


class Encoder(nn.Module):
    """nn.TransformerEncoder, whose attention reads its weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embedding(ids))


def linear() -> tuple[nn.Module, list[str]]:
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return transformers.BertModel(config), ["query", "value"]


def conv1d() -> tuple[nn.Module, list[str]]:
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config), ["c_attn"]


def attention() -> tuple[nn.Module, list[str]]:
    return Encoder(), ["self_attn"]


def shared(make: Any) -> tuple[nn.Module, list[str]]:
    torch.manual_seed(0)
    model, targets = make()
    table = model.embedding if make is attention else model.get_input_embeddings()
    share_from_embedding(model, table)
    return model.eval(), targets


def config(kind: str, targets: list[str], make: Any) -> Any:
    if kind == "vera":
        return peft.VeraConfig(r=4, target_modules=targets)
    return peft.LoraConfig(
        r=4,
        target_modules=targets,
        use_dora=kind == "dora",
        fan_in_fan_out=make is conv1d,
        init_lora_weights="pissa" if kind == "pissa" else True,
    )


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(IDS)
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "vera"])
@pytest.mark.parametrize("make", [linear, conv1d], ids=lambda make: make.__name__)
def test_merging_is_an_error_until_the_model_is_materialized(make, kind, safe) -> None:
    model, targets = shared(make)
    before = output(model)
    adapted = peft.get_peft_model(model, config(kind, targets, make))
    torch.testing.assert_close(output(adapted), before)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "vera_lambda" in name:
            nn.init.normal_(parameter)
    expected = output(adapted)
    assert (expected - before).abs().max() > 0.01
    with pytest.raises(ShareError, match=r"paramshare\.materialize\(peft_model\)"):
        copy.deepcopy(adapted).merge_and_unload(safe_merge=safe)
    with pytest.raises(ShareError, match=r"paramshare\.materialize\(peft_model\)"):
        adapted.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(output(adapted), expected)
    merged = materialize(adapted).merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(output(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [linear, conv1d, attention], ids=lambda make: make.__name__)
def test_an_adapter_that_is_cut_out_of_the_weights_is_refused(make) -> None:
    """PiSSA subtracts its adapter from the weight when it is put on."""
    model, targets = shared(make)
    with pytest.raises(ShareError, match=r"call paramshare\.materialize"):
        peft.get_peft_model(model, config("pissa", targets, make))


def test_attention_that_merges_in_every_forward_is_refused() -> None:
    """PEFT's way with nn.MultiheadAttention, which takes its weight away for that time."""
    model, targets = shared(attention)
    with pytest.raises(ShareError, match=r"in_proj_weight .* cannot be set or removed"):
        output(peft.get_peft_model(model, config("lora", targets, attention)))
    plain, _ = shared(attention)
    before = output(plain)
    adapted = peft.get_peft_model(materialize(plain), config("lora", targets, attention))
    torch.testing.assert_close(output(adapted), before)


def test_adapters_train_and_are_saved_by_themselves(tmp_path) -> None:
    model, targets = shared(linear)
    adapted = peft.get_peft_model(model, config("lora", targets, linear))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 20.0)
    table = model.get_input_embeddings().weight.clone()
    before = output(adapted)
    for _ in range(2):
        optimizer.zero_grad()
        # Not the mean square, which layer normalisation keeps at one.
        (adapted(IDS)[0] - 1).abs().mean().backward()
        optimizer.step()
    assert (output(adapted) - before).abs().max() > 1e-3
    assert torch.equal(model.get_input_embeddings().weight, table)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(shared(linear)[0], tmp_path)
    torch.testing.assert_close(output(again), output(adapted))
