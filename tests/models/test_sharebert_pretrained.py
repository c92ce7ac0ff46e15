"""ShareBERT as a model of transformers: Auto classes, folders, Trainer, pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import python
from mapped import in_memory
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import paramshare
from paramshare import ShareError
from paramshare.report import count_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from paramshare.models.sharebert_pretrained import (  # noqa: E402
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertForTokenClassification,
    ShareBertModel,
)

TINY = {
    "vocab_size": 200,
    "embedding_size": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
}
KINDS = [{}, {"released": True}, {"sharing": "eps", "embedding_size": 32}, {"depth": "none"}]


def config(**changes: Any) -> ShareBertConfig:
    return ShareBertConfig(**{**TINY, **changes})


def build(kind: Any = ShareBertForMaskedLM, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return kind(config(**changes)).eval()


def ids() -> Tensor:
    return torch.arange(30).view(3, 10) + 5


# ---------------------------------------------------------------------- folders


@pytest.mark.parametrize("change", KINDS)
def test_round_trip(change: dict[str, Any], tmp_path: Path) -> None:
    model = build(**change)
    model.save_pretrained(tmp_path)
    for auto in (transformers.AutoModelForMaskedLM, ShareBertForMaskedLM):
        again = auto.from_pretrained(tmp_path)
        assert type(again) is ShareBertForMaskedLM
        found = in_memory(again)(ids()).logits
        torch.testing.assert_close(found, model(ids()).logits, rtol=0, atol=0)
        assert again.bert.sharing.plan == model.bert.sharing.plan


def test_a_model_that_was_shared_otherwise(tmp_path: Path) -> None:
    """By the user, after materialize, or without its class having done so: the plan goes along."""
    plain = build(sharing="none")
    again = paramshare.materialize(build())
    for name, model, options in (("plain", plain, {}), ("again", again, {"layout": "column"})):
        paramshare.share_from_embedding(model.bert, model.bert.embeddings.tokens, **options)
        model.save_pretrained(tmp_path / name)
        loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / name)
        found = in_memory(loaded)(ids()).logits
        torch.testing.assert_close(found, model(ids()).logits, rtol=0, atol=0)


def test_resizing_a_materialized_model(tmp_path: Path) -> None:
    for change in ({}, {"released": True}):
        model = paramshare.materialize(build(**change))
        before = model(ids()).logits
        model.resize_token_embeddings(300)
        after = model(ids()).logits
        assert after.shape == (3, 10, 300)
        torch.testing.assert_close(after[..., :200], before)
        model.save_pretrained(tmp_path / str(len(change)))
        loaded = ShareBertForMaskedLM.from_pretrained(tmp_path / str(len(change)))
        torch.testing.assert_close(loaded(ids()).logits, after)


def test_freezing_the_encoder_leaves_the_head() -> None:
    model = build(ShareBertForSequenceClassification)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "classifier.weight",
        "classifier.bias",
    }


def test_what_the_user_froze_stays_frozen() -> None:
    model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not any(p.requires_grad for p in model.train().parameters())


def test_one_device() -> None:
    with pytest.raises(ShareError, match="must be on one device"):
        ShareBertForMaskedLM.from_pretrained("x", device_map={"bert": "cpu", "head": "disk"})


@pytest.mark.parametrize("change", KINDS)
def test_a_folder_holds_what_is_stored_and_no_more(change: dict[str, Any], tmp_path: Path) -> None:
    model = build(**change)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.pop("bert.paramshare._extra_state").numel() < 1000  # the plan
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(model)
    assert all(tensor.numel() for tensor in tensors.values())
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "sharebert"
    assert "quantization_config" not in settings


def test_in_a_new_process(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, paramshare.models.pretrained\n"
        "from transformers import AutoModelForMaskedLM\n"
        "model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])\n"
        "print(model(torch.arange(30).view(3, 10) + 5).logits.double().sum().item())"
    )
    done = python("-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    expected = model(ids()).logits.double().sum().item()
    assert float(done.stdout) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("auto", "kind"),
    [
        ("AutoModel", ShareBertModel),
        ("AutoModelForSequenceClassification", ShareBertForSequenceClassification),
        ("AutoModelForTokenClassification", ShareBertForTokenClassification),
    ],
)
def test_other_classes_load_the_encoder(auto: str, kind: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    other = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(other) is kind
    found = in_memory(other).bert(ids())
    torch.testing.assert_close(found, model.bert(ids()), rtol=0, atol=0)
    if hasattr(other, "classifier"):
        assert 0.005 < other.classifier.weight.std() < 0.05  # new, and of BERT's spread
        assert not other.classifier.bias.any()


def test_a_masked_lm_of_an_encoder_gets_a_new_head(tmp_path: Path) -> None:
    build(ShareBertModel).save_pretrained(tmp_path)
    head = ShareBertForMaskedLM.from_pretrained(tmp_path).head
    assert 0.01 < head.transform.weight.std() < 0.03
    assert not head.bias.any()
    assert (head.norm.weight == 1).all()


def test_half_precision(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    model = ShareBertForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model(ids()).logits.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["bert.paramshare.projection", "bert.embeddings.tokens.weight"])
def test_what_weights_are_read_from_must_be_there(name: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = f"{name.rpartition('.')[2]} of .* has no values, .* missing in the file"
    with pytest.raises(ShareError, match=message):
        ShareBertForMaskedLM.from_pretrained(tmp_path)


def test_materialized_models_are_saved_as_plain_ones(tmp_path: Path) -> None:
    model = build()
    expected = model(ids()).logits
    paramshare.materialize(model).save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert again.config.sharing == "none"
    assert again.bert.sharing is None
    torch.testing.assert_close(again(ids()).logits, expected)
    assert model.config.sharing == "veps"  # the model at hand keeps what it was made of


def test_files_of_the_library(tmp_path: Path) -> None:
    model, other = build(), build(seed=3)
    paramshare.save_model(model, tmp_path / "model.safetensors")
    paramshare.load_model(other, tmp_path / "model.safetensors")
    torch.testing.assert_close(other(ids()).logits, model(ids()).logits, rtol=0, atol=0)


def test_the_table_cannot_be_resized() -> None:
    with pytest.raises(ShareError, match="a table of 200 tokens, which cannot be resized to 300"):
        build().resize_token_embeddings(300)


def test_presets_are_transformers_configurations_too() -> None:
    preset = ShareBertConfig.preset("light-small", released=True, num_labels=5)
    assert isinstance(preset, transformers.PreTrainedConfig)
    assert (preset.hidden_size, preset.released, preset.num_labels) == (768, True, 5)
    again = ShareBertConfig.from_dict(preset.to_dict())
    assert again.to_dict() == preset.to_dict()


# ---------------------------------------------------------------------- outputs and losses


def test_outputs_on_demand() -> None:
    model = build(ShareBertModel)
    out = model(ids(), output_hidden_states=True, output_attentions=True)
    assert (len(out.hidden_states), len(out.attentions)) == (3, 2)
    assert model(ids()).hidden_states is None
    last, pooled = model(ids(), return_dict=False)
    torch.testing.assert_close(last, out.last_hidden_state)
    torch.testing.assert_close(pooled, out.pooler_output)


def test_masked_lm_losses() -> None:
    """In training only what is predicted goes through the head; the loss is the same."""
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    labels = torch.where(torch.rand(3, 10) < 0.3, ids(), -100)
    whole = model(ids(), labels=labels)
    expected = nn.functional.cross_entropy(whole.logits.view(-1, 200), labels.view(-1))
    torch.testing.assert_close(whole.loss, expected)
    training = model.train()(ids(), labels=labels)
    assert training.logits.shape == (int((labels != -100).sum()), 200)
    torch.testing.assert_close(training.loss, expected)


@pytest.mark.parametrize(
    ("options", "labels", "loss"),
    [
        ({"num_labels": 3}, torch.tensor([0, 2, 1]), nn.functional.cross_entropy),
        (
            {"num_labels": 1},
            torch.tensor([0.5, -1.0, 2.0]),
            lambda x, y: ((x.squeeze(1) - y) ** 2).mean(),
        ),
        (
            {"num_labels": 2, "problem_type": "regression"},
            torch.tensor([[0.0, 1.5], [1.0, 1.0], [0.0, -2.0]]),
            nn.functional.mse_loss,
        ),
        (
            {"num_labels": 2},
            torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
            nn.functional.binary_cross_entropy_with_logits,
        ),
        (
            {"num_labels": 2, "problem_type": "multi_label_classification"},
            torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
            nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
)
def test_classification_losses(options: dict[str, Any], labels: Tensor, loss: Any) -> None:
    out = build(ShareBertForSequenceClassification, **options)(ids(), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits, labels))


def test_token_classification_loss() -> None:
    labels = torch.where(ids() % 3 == 0, -100, ids() % 4)
    out = build(ShareBertForTokenClassification, num_labels=4)(ids(), labels=labels)
    assert out.logits.shape == (3, 10, 4)
    expected = nn.functional.cross_entropy(out.logits[labels != -100], labels[labels != -100])
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("change", [{}, {"released": True}, {"sharing": "none"}])
@pytest.mark.parametrize(
    "kind", [ShareBertForMaskedLM, ShareBertForTokenClassification, ShareBertModel]
)
def test_everything_trainable_gets_a_gradient(kind: Any, change: dict, tmp_path: Path) -> None:
    """DistributedDataParallel takes nothing else; of loaded models, too."""
    build(kind, **change).save_pretrained(tmp_path)
    materialized = build(kind, **change)
    if change.get("sharing") != "none":
        paramshare.materialize(materialized)
    for model in (build(kind, **change), kind.from_pretrained(tmp_path), materialized.train()):
        out = model(ids(), labels=ids() % 2) if kind is not ShareBertModel else model(ids())
        (sum(x.sum() for x in out.values()) if kind is ShareBertModel else out.loss).backward()
        without = [
            name for name, p in model.named_parameters() if p.requires_grad != (p.grad is not None)
        ]
        assert without == []


def test_gradient_checkpointing() -> None:
    plain, checkpointed = (
        build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train() for _ in range(2)
    )
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    checkpointed.bert.layers[0].query.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, checkpointed):
        model(ids(), labels=ids()).loss.backward()
    assert len(calls) == 2
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


# ---------------------------------------------------------------------- Trainer and pipelines


class Masked(Dataset):
    """Rows of numbers in order, of which the third is masked."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.arange(10) + 5 + index % 16
        labels = torch.full((10,), -100)
        labels[2] = row[2]
        return {"input_ids": torch.where(labels == -100, row, 4), "labels": labels}


def trainer(folder: Path, steps: int, stop_at: int | None = None) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_steps=20, logging_steps=1, learning_rate=1e-2,
        per_device_train_batch_size=8, report_to="none", use_cpu=True, seed=1, disable_tqdm=True,
    )  # fmt: skip
    stop = transformers.TrainerCallback()
    stop.on_step_end = lambda args, state, control, **_: setattr(
        control, "should_training_stop", state.global_step == stop_at
    )
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.Trainer(model, arguments, train_dataset=Masked(), callbacks=[stop])


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_trainer_learns_and_resumes(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 40)
    whole.train()
    assert losses(whole)[-1] < 0.7 * losses(whole)[0]
    trainer(tmp_path / "parts", 40, stop_at=20).train()
    second = trainer(tmp_path / "parts", 40)
    second.train(resume_from_checkpoint=True)
    assert losses(second)[-20:] == pytest.approx(losses(whole)[-20:], rel=1e-4)
    saved = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "whole/checkpoint-40")
    torch.testing.assert_close(saved(ids()).logits, whole.model.eval()(ids()).logits)


def test_fill_mask_pipeline(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(195))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    )
    model = build()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fill = transformers.pipeline("fill-mask", str(tmp_path), device="cpu", top_k=3)
    row = torch.tensor([[7, 8, 4, 10]])
    best = model(row).logits[0, 2].softmax(-1).topk(3)
    found = fill("w2 w3 [MASK] w5")
    assert [entry["token_str"] for entry in found] == [names[i] for i in best.indices]
    assert [entry["score"] for entry in found] == pytest.approx(best.values.tolist(), rel=1e-4)
