from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zoo import batch, build

import paramshare
from paramshare import ShareError, flops
from paramshare.models.sharebert import ShareBert, ShareBertConfig


@pytest.mark.parametrize(
    ("hidden", "inner", "depth", "options", "paper"),
    [
        (768, 3072, 12, {"sharing": "none", "embedding_size": 768}, "22.34"),
        (1024, 2048, 4, {"released": True, "embedding_size": 384}, "8.85"),
        (768, 2048, 4, {"released": True, "embedding_size": 128}, "5.83"),
        (2048, 4096, 12, {"released": True, "embedding_size": 128}, "104.69"),
    ],
)
def test_the_papers_table(hidden: int, inner: int, depth: int, options: dict, paper: str) -> None:
    """GFLOPs at 128 tokens, which the papers truncate and count without the lift and the pooler."""
    config = ShareBertConfig(
        vocab_size=30528,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=16,
        max_position_embeddings=128,
        **options,
    )
    with torch.device("meta"):
        model = ShareBert(config)
    found = flops(model, 128)
    lifted = options["embedding_size"] != hidden
    beside = 2 * hidden**2 + lifted * 2 * 128 * options["embedding_size"] * hidden
    encoder = found.total - beside
    assert encoder == config.operations(128)
    assert f"{encoder / 1e9:.3f}".startswith(paper)


@pytest.mark.parametrize("execution", ["materialized", "factored", "blockwise"])
@pytest.mark.parametrize("whiten", [False, True])
def test_agrees_with_torchs_counter(execution: str, whiten: bool) -> None:
    module = build("Narrow")
    sharing = paramshare.share_from_embedding(
        module, module.embedding, execution=execution, whiten=whiten
    )
    tokens, padding = batch()
    found = flops(module, (tokens, padding))
    module.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        sharing.pool.holder.kept = None
        first, again = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with first:
            module(tokens, padding)
        with again:
            module(tokens, padding)
    assert found.total == again.get_total_flops()
    assert found.generation == first.get_total_flops() - again.get_total_flops()
    assert (found.generation > 0) == (execution == "materialized" or whiten)
    assert set(found.weights) == {group.name for group in sharing.plan.groups}
    for line in str(found).splitlines():
        assert line.endswith("GFLOPs")


LENGTH, WIDTH = 6, 16


def self_attention(tokens: int) -> int:
    return 2 * (4 * tokens * WIDTH**2 + 2 * tokens * LENGTH * WIDTH)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True),
            self_attention(2 * LENGTH) + 2 * 2 * 2 * LENGTH * WIDTH * 32,
        ),
        (nn.LSTM(WIDTH, WIDTH, batch_first=True), 2 * 2 * LENGTH * 2 * 4 * WIDTH**2),
        (
            nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True),
            2 * 2 * (2 * LENGTH * 4 * 8 * (WIDTH + 8)),
        ),
        (nn.GRU(WIDTH, WIDTH, batch_first=True), 2 * 2 * LENGTH * 2 * 3 * WIDTH**2),
        (nn.Conv1d(LENGTH, 5, 3), 2 * 2 * 5 * (WIDTH - 2) * LENGTH * 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_torch_does_not_count(module: nn.Module, expected: int) -> None:
    """The fast path of encoder layers, LSTMs; and what it does."""
    assert flops(module, torch.randn(2, LENGTH, WIDTH)).total == expected


def test_fused_attention() -> None:
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x[..., :3, :], x[..., :3, :])

    x = torch.randn(2, 4, LENGTH, WIDTH)
    assert flops(Attention(), x).attention == 2 * 2 * (2 * 4) * LENGTH * 3 * WIDTH


def test_attention_of_several_inputs() -> None:
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    x = torch.randn(2, LENGTH, WIDTH)
    found = flops(attention, {"query": x, "key": x, "value": x, "need_weights": False})
    assert found.total == self_attention(2 * LENGTH)


def test_a_call_that_fails() -> None:
    module = build("Narrow")
    module.blocks[0].eval()
    with pytest.raises(ShareError, match=r"Narrow cannot be called with .*; give tokens="):
        flops(module, {"nothing": 1})
    assert module.training
    assert not module.blocks[0].training


@pytest.mark.parametrize("tokens", [0, -1, True, 10**12, 10**400])
def test_numbers_of_tokens_that_make_no_sense(tokens: int) -> None:
    module = build("Encoder")
    paramshare.share_from_embedding(module, module.embedding)
    for ask in (flops, lambda m, t: paramshare.prepare_for_inference(m, tokens=t)):
        with pytest.raises(ShareError, match="is out of range: a call has 1 to 16,777,216"):
            ask(module, tokens)
