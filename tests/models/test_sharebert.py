"""ShareBERT by itself: the papers' counts and operations, and plain encoders with its weights."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_passes_close
from tables import check_table
from torch import Tensor, nn

import paramshare
from paramshare import ShareError
from paramshare.models.sharebert import (
    PRESETS,
    MaskedLMHead,
    ShareBert,
    ShareBertConfig,
    report,
)
from paramshare.report import count_parameters
from paramshare.sharing import empty_weights
from paramshare.trace import Allocations

TABLE = Path(__file__).parents[2] / "models" / "README.md"

# Of the released code, as its own modules count: encoder, its head, its token table.
RELEASED = {
    "small": (4_983_040, 71_735_360, 3_907_584),
    "base": (13_847_296, 80_599_616, 11_722_752),
    "large": (27_008_512, 93_760_832, 23_445_504),
    "light-base": (12_695_296, 45_038_144, 11_722_752),
    "light-small": (4_245_504, 28_313_664, 3_907_584),
}
# GFLOPs of the encoder for 128 tokens. The paper prints 8.85, 5.83 and, for BERT's sizes, 22.34.
OPERATIONS = {
    "small": 104.690,
    "base": 104.690,
    "large": 52.345,
    "light-base": 8.858,
    "light-small": 5.838,
    "eps": 22.347,
}
TINY = {
    "vocab_size": 200,
    "embedding_size": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tiny(**changes: Any) -> ShareBertConfig:
    return ShareBertConfig(**{**TINY, **changes})


def encoder(seed: int = 0, **changes: Any) -> ShareBert:
    """With biases and norms that are not zero and one: a mistake in them must show."""
    torch.manual_seed(seed)
    model = ShareBert(tiny(**changes)).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


def batch() -> tuple[Tensor, Tensor]:
    """Ids, and a mask with padding at either end."""
    torch.manual_seed(1)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[1, 7:] = 0
    mask[2, :4] = 0
    return torch.randint(0, TINY["vocab_size"], (3, 10)), mask


def on_meta(config: ShareBertConfig) -> tuple[ShareBert, MaskedLMHead]:
    with torch.device("meta"):
        return ShareBert(config), MaskedLMHead(config)


# ---------------------------------------------------------------------- the papers' numbers


@pytest.mark.parametrize("name", RELEASED)
def test_released_counts(name: str) -> None:
    encoder_count, with_head, table = RELEASED[name]
    config = ShareBertConfig.preset(name, released=True)
    model, head = on_meta(config)
    assert count_parameters(model) == encoder_count
    assert count_parameters(model) + count_parameters(head) == with_head
    assert model.embeddings.tokens.weight.numel() == table
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", RELEASED)
def test_released_counts_are_the_formula(name: str) -> None:
    """E*F + 2(FH+H) + 2F + 2H + P*H + 2H + 2H + L(9H+I) + H."""
    c = ShareBertConfig.preset(name, released=True)
    e, f, h = c.vocab_size, c.embedding_size, c.hidden_size
    i, p, layers = c.intermediate_size, c.max_position_embeddings, c.num_hidden_layers
    formula = e * f + 2 * (f * h + h) + 2 * f + 2 * h + p * h + 4 * h + layers * (9 * h + i) + h
    assert formula == RELEASED[name][0]


@pytest.mark.parametrize("name", RELEASED)
def test_ours_stores_less_than_the_released_model(name: str) -> None:
    """No bias of the projection, no columns that nobody reads, no norms around the lift, and a
    head that is tied."""
    model, head = on_meta(ShareBertConfig.preset(name))
    assert count_parameters(model) < RELEASED[name][0]
    assert count_parameters(model) + count_parameters(head) < 1.1 * RELEASED[name][0]
    plan = model.sharing.plan
    assert sum(group.columns for group in plan.groups) == plan.columns


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    assert round(ShareBertConfig.preset(name).operations(128) / 1e9, 3) == OPERATIONS[name]


def test_the_table_in_the_docs(request: pytest.FixtureRequest) -> None:
    """What the presets store; `--write-tables` writes it."""
    lines = [
        "| preset | F, H, I, layers | GFLOPs | ours | released | ours, MLM | released, MLM |",
        "|" + " --- |" * 7,
    ]
    for name in PRESETS:
        ours = ShareBertConfig.preset(name)
        sizes = (ours.embedding_size, ours.hidden_size, ours.intermediate_size)
        cells = [name, f"{', '.join(map(str, sizes))}, {ours.num_hidden_layers}"]
        cells.append(f"{ours.operations(128) / 1e9:.3f}")
        counts: list[tuple[str, str]] = []
        for released in (False, True):
            if released and ours.sharing == "eps":
                counts.append(("-", "-"))
                continue
            model, head = on_meta(replace(ours, released=released))
            encoder_count = count_parameters(model)
            whole = encoder_count + count_parameters(head)
            counts.append((f"{encoder_count:,}", f"{whole:,}"))
        cells += [count[part] for part in (0, 1) for count in counts]
        lines.append(f"| {' | '.join(cells)} |")
    check_table(TABLE, "tests/models/test_sharebert.py", "\n".join(lines) + "\n", request)


def test_report_shows_all_counts() -> None:
    text = report(ShareBertConfig.preset("small"))
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    ours = count_parameters(on_meta(ShareBertConfig.preset("small"))[0])
    assert f"{ours:,}" in lines["ours"]
    assert "4,983,040" in lines["released"]
    assert "71,735,360" in lines["released"]
    assert "1,075,456" in lines["released"]  # "1.0M outside of embeddings"
    assert "411,564,032" in lines["not shared"]
    assert text.endswith("encoder, 128 tokens: 104.690 GFLOPs")
    # Neither EPS nor so short a table have a released model.
    for config in (
        ShareBertConfig.preset("eps"),
        ShareBertConfig.preset("small", vocab_size=8000),
    ):
        assert re.search(r"^released +-  +-  +-  +-$", report(config), re.M)


def test_the_wide_eps_model() -> None:
    """Its encoder takes 1102 of 1152 columns, in the column layout alone, and no pooler fits."""
    model, _ = on_meta(ShareBertConfig.preset("eps-wide"))
    groups = model.sharing.plan.groups
    assert sum(group.columns for group in groups) == 1102
    assert not any("pooler" in group.name for group in groups)
    assert round(count_parameters(model) / 1e6, 2) == 42.27
    for change in ({"layout": "aligned"}, {"share_pooler": True}):
        with pytest.raises(ShareError, match="the table has 1152"):
            on_meta(ShareBertConfig.preset("eps-wide", **change))


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 3}, "hidden_size=16 is no multiple of num_attention_heads=3"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": 16.0}, "hidden_size=16.0 cannot be: it is like 2048"),
        ({"hidden_size": True}, "hidden_size=True cannot be"),
        ({"released": "false"}, "released='false' cannot be: it is like False"),
        ({"layout": 3}, "layout=3 cannot be"),
        ({"hidden_dropout_prob": 2.0}, "hidden_dropout_prob=2.0 is out of range"),
        ({"hidden_size": 0}, "hidden_size=0 is out of range: use 1 to 16,777,216"),
        ({"intermediate_size": 2**63}, "intermediate_size=9223372036854775808 is out of range"),
        ({"released": True, "intermediate_size": 10**400}, "is out of range"),
        ({"layer_norm_eps": "1e-5"}, "layer_norm_eps='1e-5' cannot be"),
        ({"released": True, "depth": "none"}, "has its own depth: leave depth='none' out"),
        ({"released": True, "layout": "column"}, "has its own layout"),
        ({"released": True, "vocab_size": 150}, "hidden_size=16, and with vocab_size=150 needs 18"),
        ({"sharing": "some"}, "sharing='some' is unknown"),
        ({"sharing": "eps", "released": True}, "no EPS model"),
        ({"sharing": "eps"}, "the table has 8"),
        ({"depth": "cycle:2"}, "cycle:2"),
        ({"blocks": 99}, "blocks=99"),
    ],
)
def test_bad_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShareError, match=message):
        ShareBert(tiny(**change))


def test_unknown_preset() -> None:
    with pytest.raises(ShareError, match="'huge' is unknown: use one of small, base"):
        ShareBertConfig.preset("huge")


def test_released_eps_preset() -> None:
    with pytest.raises(ShareError, match="no EPS model"):
        ShareBertConfig.preset("eps", released=True)


def test_too_long_an_input() -> None:
    with pytest.raises(ShareError, match="13 tokens, the model's longest is 12"):
        encoder()(torch.zeros(1, 13, dtype=torch.long))


# ---------------------------------------------------------------------- against plain encoders


@pytest.mark.parametrize("sharing", ["veps", "eps", "none"])
@pytest.mark.parametrize("layout", ["aligned", "column", "token"])
def test_against_torchs_encoder(sharing: str, layout: str) -> None:
    """Pre-LN: torch's own layers with the weights that were read from the table."""
    features = 16 if sharing == "eps" else 8
    ours = encoder(sharing=sharing, layout=layout, embedding_size=features)
    ids, mask = batch()
    found, pooled = ours(ids, mask)

    plain = paramshare.materialize(copy.deepcopy(ours)) if sharing != "none" else ours
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
    )
    theirs = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False).double()
    with torch.no_grad():
        for mine, other in zip(plain.layers, theirs.layers, strict=True):
            attention = other.self_attn
            heads = (mine.query, mine.key, mine.value)
            attention.in_proj_weight.copy_(torch.cat([x.weight for x in heads]))
            attention.in_proj_bias.copy_(torch.cat([x.bias for x in heads]))
            attention.out_proj.load_state_dict(mine.attention_output.state_dict())
            other.linear1.load_state_dict(mine.intermediate.state_dict())
            other.linear2.load_state_dict(mine.output.state_dict())
            other.norm1.load_state_dict(mine.attention_norm.state_dict())
            other.norm2.load_state_dict(mine.output_norm.state_dict())
        theirs.norm.load_state_dict(plain.norm.state_dict())
        parts = plain.embeddings
        x = parts.tokens(ids) if sharing == "eps" else parts.lift(parts.tokens(ids))
        x = parts.norm(x + parts.positions.weight[:10] + parts.types.weight[0])
        expected = theirs.eval()(x, src_key_padding_mask=mask == 0)
    real = mask.bool()
    assert_passes_close(found[real], expected[real])
    assert not found[~real].any()
    first = found[torch.arange(3), [0, 0, 4]]  # the third row begins with padding
    torch.testing.assert_close(pooled, torch.tanh(plain.pooler(first)))


def test_against_transformers_bert() -> None:
    """Post-LN with the lift folded into the table is BERT."""
    transformers = pytest.importorskip("transformers")
    ours = encoder(pre_norm=False, layer_norm_eps=1e-12)
    plain = paramshare.materialize(copy.deepcopy(ours))
    theirs = transformers.BertModel(
        transformers.BertConfig(**{**TINY, "layer_norm_eps": 1e-12})
    ).double()
    table = plain.embeddings.tokens.weight @ plain.embeddings.lift.weight.T
    names = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "attention_output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "intermediate": "intermediate.dense",
        "output": "output.dense",
        "output_norm": "output.LayerNorm",
    }
    with torch.no_grad():
        theirs.embeddings.word_embeddings.weight.copy_(table)
        theirs.embeddings.position_embeddings.weight.copy_(plain.embeddings.positions.weight)
        theirs.embeddings.token_type_embeddings.weight.copy_(plain.embeddings.types.weight)
        theirs.embeddings.LayerNorm.load_state_dict(plain.embeddings.norm.state_dict())
        theirs.pooler.dense.load_state_dict(plain.pooler.state_dict())
        for mine, other in zip(plain.layers, theirs.encoder.layer, strict=True):
            for name, path in names.items():
                other.get_submodule(path).load_state_dict(getattr(mine, name).state_dict())
    ids, mask = batch()
    types = (torch.arange(10) > 4).long().expand(3, -1)
    expected = theirs.eval()(ids, mask, types)
    found, pooled = ours(ids, mask, types)
    real = mask.bool()
    assert_passes_close(found[real], expected[0][real])
    first = torch.tanh(plain.pooler(found[torch.arange(3), real.int().argmax(1)]))
    torch.testing.assert_close(pooled, first)
    assert_passes_close(pooled[:2], expected[1][:2])


# ---------------------------------------------------------------------- padding


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("change", [{}, {"pre_norm": False}, {"sharing": "none"}])
def test_without_padding_is_the_same(change: dict[str, Any]) -> None:
    """Outputs and gradients of packed tokens are those of the padded batch, and of each row."""
    packed, padded = (encoder(table_gradient=1.0, **change) for _ in range(2))
    ids, mask = batch()
    weight = torch.randn(3, 10, 16, dtype=torch.double) * mask[..., None]
    states: list[Tensor] = []
    found = packed(ids, mask)[0]
    expected = padded(ids, mask, hidden_states=states)[0]
    real = mask.bool()
    assert_passes_close(found[real], expected[real])
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_passes_close(gradients(packed), gradients(padded))
    assert_passes_close(packed(ids[1:2, :7])[0], found[1:2, :7])
    assert len(states) == 4


def test_packed_tokens_alone_are_multiplied() -> None:
    """Of a batch of which half is padding, the layers see half of the rows."""
    model, seen = encoder(), []
    model.layers[0].intermediate.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape))
    ids, mask = batch()
    model(ids, mask)
    model(ids, torch.ones_like(mask))
    assert seen == [(int(mask.sum()), 16), (3, 10, 16)]


@pytest.mark.parametrize("shape", [(1, 10), (3, 9), (3, 10, 10), (10,)])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShareError, match=r"must be \(batch, length\), here \(3, 10\)"):
        encoder()(batch()[0], torch.ones(shape))


def test_left_padding_changes_nothing() -> None:
    """A row with its padding before it gets the same pooled output; positions count from zero."""
    model = encoder()
    ids, _ = batch()
    mask = torch.ones(3, 10)
    mask[:, :4] = 0
    positions = (torch.arange(10) - 4).clamp(min=0).expand(3, -1)
    for wanted in (None, []):
        _, pooled = model(ids, mask, position_ids=positions, attentions=wanted)
        torch.testing.assert_close(pooled, model(ids[:, 4:])[1])


def test_a_row_of_padding_alone() -> None:
    ids, mask = batch()
    mask[1] = 0
    found, _ = encoder()(ids, mask)
    assert found.isfinite().all()


# ---------------------------------------------------------------------- as a module


def test_lists_get_states_and_probabilities() -> None:
    model = encoder()
    ids, mask = batch()
    states: list[Tensor] = []
    probabilities: list[Tensor] = []
    last, _ = model(ids, mask, hidden_states=states, attentions=probabilities)
    assert [x.shape for x in states] == [(3, 10, 16)] * 4
    assert [x.shape for x in probabilities] == [(3, 4, 10, 10)] * 3
    torch.testing.assert_close(probabilities[0].sum(-1), torch.ones(3, 4, 10).double())
    assert not probabilities[0][..., 7:][1].any()
    torch.testing.assert_close(model.norm(states[-1]), last)
    real = mask.bool()
    torch.testing.assert_close(last[real], model(ids, mask)[0][real])


def test_embeddings_instead_of_ids() -> None:
    model = encoder()
    ids, mask = batch()
    vectors = model.embeddings.tokens(ids)
    assert vectors.shape[-1] == 8
    torch.testing.assert_close(model(None, mask, inputs_embeds=vectors)[0], model(ids, mask)[0])


@pytest.mark.parametrize("released", [False, True])
def test_compiles_in_one_graph(released: bool) -> None:
    model = encoder(released=released)
    ids, mask = batch()
    compiled = torch.compile(model, fullgraph=True)
    real = mask.bool()
    torch.testing.assert_close(compiled(ids, mask)[0][real], model(ids, mask)[0][real])


def test_gradient_checkpointing_by_itself() -> None:
    plain, checkpointed = (encoder(**DRY).train() for _ in range(2))
    checkpointed.gradient_checkpointing = True
    for model in (plain, checkpointed):
        model(*batch())[0].sum().backward()
    expected = gradients(plain)
    for name, gradient in gradients(checkpointed).items():
        torch.testing.assert_close(gradient, expected[name])


def test_sharing_ends_with_materialize() -> None:
    model = encoder()
    assert model.sharing is not None
    assert copy.deepcopy(model).sharing.pool is not model.sharing.pool
    assert paramshare.materialize(model).sharing is None
    assert encoder(sharing="none").sharing is None


@pytest.mark.parametrize("change", [{}, {"released": True}, {"depth": "cycle:3"}])
def test_file(change: dict[str, Any], tmp_path: Path) -> None:
    model = encoder(**change)
    paramshare.save_model(model, tmp_path / "model.safetensors")
    other = encoder(seed=5, **change)
    paramshare.load_model(other, tmp_path / "model.safetensors")
    torch.testing.assert_close(other(*batch())[0], model(*batch())[0], rtol=0, atol=0)
    size = (tmp_path / "model.safetensors").stat().st_size
    plan = model.paramshare.get_extra_state()
    names = 150 * len(model.state_dict() | empty_weights(model))  # in the header, one in a list
    groups = 400 * len(model.paramshare.plan.groups)  # in the metadata's plan
    assert size < 8 * count_parameters(model) + 2 * plan.numel() + names + groups


@pytest.mark.parametrize("released", [False, True])
def test_initial_values(released: bool) -> None:
    """Ours: N(0, 0.02) everywhere, so that tokens are as large as positions where they meet.
    Released: biases stay N(0, 1), the same in all layers."""
    torch.manual_seed(0)
    wide = tiny(vocab_size=2000, hidden_size=128, intermediate_size=256, released=released)
    model = ShareBert(wide)
    assert abs(model.embeddings.tokens.weight.std() - 0.02) < 0.001
    first, second = (model.layers[index].intermediate.bias for index in (0, 1))
    torch.testing.assert_close(first, second)
    assert abs(first.std() - (1.0 if released else 0.0)) < 0.2
    # The released code leaves what it carves at 0.0004 * sqrt(F).
    spread = model.layers[0].query.weight.std()
    # That of 128 x 128 draws is itself off, by a 181st of it.
    assert abs(spread - (0.0004 * 8**0.5 if released else 0.02)) < 4e-4
    if not released:
        tokens = model.embeddings.lift(model.embeddings.tokens.weight)
        assert abs(tokens.std() / model.embeddings.positions.weight.std() - 1) < 0.1


def test_head_is_tied_to_the_table() -> None:
    config = tiny()
    model, head = ShareBert(config), MaskedLMHead(config)
    hidden, _ = model(batch()[0])
    logits = head(hidden, model.embeddings.tokens.weight)
    assert logits.shape == (3, 10, 200)
    logits.logsumexp(-1).sum().backward()
    assert model.embeddings.tokens.weight.grad.abs().sum(1).count_nonzero() == 200
    assert count_parameters(head) == 16 * 8 + 8 + 2 * 8 + 200


def test_every_preset_is_tested() -> None:
    assert set(PRESETS) == {*RELEASED, "eps", "eps-wide"}


def test_changing_a_preset() -> None:
    config = ShareBertConfig.preset("small", num_hidden_layers=2)
    assert config == replace(ShareBertConfig.preset("small"), num_hidden_layers=2)


@pytest.mark.parametrize("preset", ["small", "base"])
def test_no_weight_is_ever_allocated(preset: str, capsys) -> None:
    """Nothing as large as a weight or the virtual table, in a call of 1 x 128 tokens of the papers'
    sizes; and little beside what is stored. Base needs to be told."""
    with torch.device("meta"):
        model = ShareBert(ShareBertConfig.preset(preset, num_hidden_layers=2)).eval()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    groups = model.sharing.plan.groups
    smallest = min(group.rows * group.cols for group in groups)
    assert smallest == 2048**2
    assert {g.execution for g in groups} == {"factored" if preset == "small" else "materialized"}
    if preset == "base":
        paramshare.prepare_for_inference(model, 4 * count_parameters(model) + 12_000_000)
    with torch.no_grad(), Allocations() as trace:
        model(torch.zeros(1, 128, dtype=torch.long))
    assert trace.largest < 4 * smallest / 4  # bytes
    assert trace.peak < 12e6
