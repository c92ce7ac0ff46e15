"""Against the authors' released code: its outputs, losses, attention and gradients for three tiny
models (A, B; C is post-LN), computed by it in float64 and kept in sharebert_reference.safetensors,
and checkpoint folders as it writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import python
from released import REFERENCE, folder_of, part, released_config, seen
from torch import Tensor

pytest.importorskip("transformers")

from paramshare import ShareError
from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertModel,
)
from paramshare.models.sharebert_released import convert_state, import_sharebert

CASES = ("A", "B", "C")


def config(case: str, **changes: Any) -> ShareBertConfig:
    theirs = released_config(case)
    options = {name: theirs[name] for name in theirs if hasattr(ShareBertConfig(), name)}
    pre_norm = theirs["encoder_ln_mode"] == "pre-ln"
    options |= {"embedding_size": theirs["factor_size"], "pre_norm": pre_norm, "released": True}
    return ShareBertConfig(
        **{**options, "layer_norm_eps": 1e-5, "model_type": "sharebert", **changes}
    )


def state(case: str) -> dict[str, Tensor]:
    return convert_state(part(case, "state"), config(case).pre_norm)


def masked_lm(case: str) -> ShareBertForMaskedLM:
    model = ShareBertForMaskedLM(config(case)).double().eval()
    model.load_state_dict(state(case))
    return model


def inputs(case: str) -> dict[str, Tensor]:
    given = part(case, "in")
    return {name: given[name] for name in ("input_ids", "token_type_ids", "attention_mask")}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str) -> None:
    model, out = masked_lm(case), part(case, "out")
    found = model(**inputs(case), output_attentions=True, output_hidden_states=True)
    close(found.logits, out["mlm_logits"])
    first, *others = found.hidden_states
    close(first, out["embedding"])
    for layer, (hidden, attention) in enumerate(zip(others, found.attentions, strict=True)):
        close(hidden, out[f"hidden.{layer}"])
        close(attention, out[f"attn.{layer}"])
    last, pooled = model.bert(**inputs(case))
    close(last, out["last_hidden"])
    close(pooled, out["pooled"])
    # With output_all_encoded_layers the released pooler sees what the final norm has not seen.
    close(model.bert.pooler(others[-1][:, 0]), out["pooled_without_final_ln"])
    pool = model.bert.paramshare
    close(model.bert.embeddings.tokens.weight @ pool.projection + pool.bias, out["virtual"])


@pytest.mark.parametrize("case", CASES)
def test_fused_attention_gives_the_same(case: str) -> None:
    close(masked_lm(case)(**inputs(case)).logits, part(case, "out")["mlm_logits"])


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case: str) -> None:
    model, labels = masked_lm(case), part(case, "in")["mlm_labels"]
    loss = model(**inputs(case), labels=torch.where(labels == -1, -100, labels)).loss
    close(loss, part(case, "out")["mlm_loss"])
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = convert_state(part(case, "grad"), config(case).pre_norm)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient)


@pytest.mark.parametrize("case", CASES)
def test_training_predicts_the_masked_tokens_only(case: str) -> None:
    """The loss is the same; without dropout training differs in nothing else."""
    model, labels = masked_lm(case), part(case, "in")["mlm_labels"]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    labels = torch.where(labels == -1, -100, labels)
    found = model.train()(**inputs(case), labels=labels)
    close(found.loss, part(case, "out")["mlm_loss"])
    close(found.logits, part(case, "out")["mlm_logits"][labels != -100])


@pytest.mark.parametrize("case", CASES)
def test_classifier(case: str) -> None:
    model = ShareBertForSequenceClassification(config(case, num_labels=2)).double().eval()
    whole = state(case) | {f"classifier.{k}": x for k, x in part(case, "classifier").items()}
    model.load_state_dict({k: x for k, x in whole.items() if not k.startswith("head.")})
    labels = part(case, "in")["cls_labels"]
    found = model(**inputs(case), labels=labels)
    close(found.logits, part(case, "out")["cls_logits"])
    close(found.loss, part(case, "out")["cls_loss"])


@pytest.mark.parametrize("case", CASES)
def test_columns(case: str) -> None:
    """The layout is the released one: columns a matrix needs, and where each begins."""
    square, wide, needed, available = part(case, "config")["columns"].tolist()
    plan = masked_lm(case).bert.sharing.plan
    assert plan.columns == available
    assert sum(group.columns for group in plan.groups) == needed
    names = ("query", "key", "value", "intermediate", "output", "attention_output", "pooler")
    end = available
    for name, group in zip(names, plan.groups, strict=True):
        columns = wide if name in ("intermediate", "output") else square
        assert f".{name}.weight" in f".{group.name}"
        assert (group.start, group.columns) == (end - columns, columns)
        end -= columns


def test_the_reference_holds_nothing_else() -> None:
    """All its tensors are inputs or compared above."""
    for case in CASES:
        for name in ("config", "state", "grad", "in", "classifier"):
            part(case, name)
        layers = range(config(case).num_hidden_layers)
        names = {"virtual", "embedding", "last_hidden", "pooled", "pooled_without_final_ln"}
        names |= {"mlm_logits", "mlm_loss", "cls_logits", "cls_loss"}
        names |= {f"{name}.{layer}" for name in ("hidden", "attn") for layer in layers}
        assert part(case, "out").keys() == names
    assert seen == set(REFERENCE)
    assert len(seen) == 363


# ---------------------------------------------------------------------- checkpoint folders


@pytest.mark.parametrize("case", CASES)
def test_import(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    out = tmp_path / "deep" / "out"
    import_sharebert(folder_of(case, tmp_path / "theirs"), out)
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert isinstance(model, ShareBertForMaskedLM)
    close(model(**inputs(case)).logits, part(case, "out")["mlm_logits"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("w1 w7").input_ids == [2, 6, 12, 3]
    assert tokenizer.model_max_length == config(case).max_position_embeddings
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_import_of_a_classifier_by_the_command(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    theirs, out = folder_of("A", tmp_path / "theirs", classifier=True), tmp_path / "out"
    result = python("-m", "paramshare.cli", "import-sharebert", str(theirs), str(out))
    assert result.returncode == 0, result.stderr
    assert "ShareBertForSequenceClassification, 2,770 parameters, 2,736 of them" in result.stdout
    model = AutoModelForSequenceClassification.from_pretrained(out)
    close(model(**inputs("A")).logits, part("A", "out")["cls_logits"])


def test_import_of_the_encoder_alone(tmp_path: Path) -> None:
    theirs = folder_of("B", tmp_path / "theirs")
    only = {k: x for k, x in part("B", "state").items() if k.startswith("bert.")}
    torch.save(only, theirs / "pytorch_model.bin")
    assert type(import_sharebert(theirs, tmp_path / "out")) is ShareBertModel


def damage(theirs: Path, how: str) -> None:
    weights, settings = theirs / "pytorch_model.bin", theirs / "config.json"
    config = json.loads(settings.read_text())
    tensors = torch.load(weights, weights_only=True)
    match how:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        case "empty":
            weights.write_bytes(b"")
        case "gone":
            weights.unlink()
        case "no tensors":
            torch.save({"a": 1}, weights)
        case "code":
            torch.save({"a": Path("x")}, weights)
        case "missing":
            del tensors["bert.pooler.bias"]
            torch.save(tensors, weights)
        case "unknown":
            torch.save(
                {
                    **tensors,
                    "bert.encoder.layer.0.attention.weight": tensors["cls.predictions.bias"],
                },
                weights,
            )
        case "other size":
            settings.write_text(json.dumps({**config, "max_position_embeddings": 13}))
        case "other heads":
            settings.write_text(json.dumps({**config, "num_attention_heads": 3}))
        case "no config":
            settings.write_text("{")
        case "plain bert":
            del config["factor_size"]
            settings.write_text(json.dumps(config))
        case "too narrow":
            settings.write_text(json.dumps({**config, "intermediate_size": 64}))
        case "other norms":
            settings.write_text(json.dumps({**config, "encoder_ln_mode": "foo"}))
        case "whole numbers":
            torch.save({k: x.long() for k, x in tensors.items()}, weights)
        case "null":
            settings.write_text(json.dumps({**config, "hidden_dropout_prob": None}))
        case "other vocabulary":
            (theirs / "vocab.txt").write_text("[PAD]\n[UNK]\n")
        case "other text":
            (theirs / "vocab.txt").write_bytes(b"\xff\xfe")
        case "two heads":
            extra = {f"classifier.{k}": x for k, x in part("A", "classifier").items()}
            torch.save({**tensors, **extra}, weights)
        case "other activation":
            settings.write_text(json.dumps({**config, "hidden_act": "relu"}))
        case "a token twice":
            text = (theirs / "vocab.txt").read_text()
            (theirs / "vocab.txt").write_text(text.replace("w7\n", "w8\n"))
        case "no mask":
            text = (theirs / "vocab.txt").read_text()
            (theirs / "vocab.txt").write_text(text.replace("[MASK]", "mask"))
        case "a folder of tokens":
            (theirs / "vocab.txt").unlink()
            (theirs / "vocab.txt").mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "pytorch_model.bin cannot be read"),
        ("empty", "pytorch_model.bin cannot be read"),
        ("gone", "pytorch_model.bin cannot be read"),
        ("no tensors", "pytorch_model.bin: a is a int, not a tensor"),
        ("code", "needs pathlib.PosixPath, and what is in a file is not run"),
        ("missing", "has no bert.pooler.bias"),
        ("unknown", "attention.weight is no tensor of the released ShareBERT"),
        ("other size", r"positions.weight .* is \(12, 16\) .* should be \(13, 16\)"),
        ("other heads", "hidden_size=16 is no multiple of num_attention_heads=3"),
        ("no config", "config.json cannot be read"),
        ("plain bert", "has no factor_size: it is not of the released ShareBERT"),
        ("too narrow", "hidden_size=16, and with vocab_size=200 needs 22"),
        ("other norms", "encoder_ln_mode='foo' cannot be converted, only 'pre-ln' or 'post-ln'"),
        ("whole numbers", "is of torch.int64, not of a type that models have"),
        ("null", "hidden_dropout_prob=None cannot be"),
        ("other vocabulary", "has 2 tokens, the table 200"),
        ("other text", "vocab.txt cannot be read"),
        ("two heads", "has head.bias .* beside what makes a model"),
        ("other activation", "hidden_act='relu' cannot be converted"),
        ("a token twice", "vocab.txt has 'w8' twice"),
        ("no mask", r"vocab.txt has no '\[MASK\]', nor has the table"),
        ("a folder of tokens", "vocab.txt cannot be read: Is a directory"),
    ],
)
def test_a_damaged_folder_is_one_error(how: str, message: str, tmp_path: Path) -> None:
    theirs = folder_of("A", tmp_path / "theirs")
    damage(theirs, how)
    with pytest.raises(ShareError, match=message):
        import_sharebert(theirs, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_names_of_labels(tmp_path: Path) -> None:
    theirs = folder_of("A", tmp_path / "theirs", classifier=True)
    settings = theirs / "config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps({**config, "id2label": {"0": "bad", "1": "good"}}))
    assert import_sharebert(theirs, tmp_path / "out").config.label2id == {"bad": 0, "good": 1}
    settings.write_text(json.dumps({**config, "id2label": {"0": "bad"}}))
    for names in ({"0": "bad"}, {"0": "bad", "1": 1}, ["bad", "good"], "bad"):
        settings.write_text(json.dumps({**config, "id2label": names}))
        with pytest.raises(ShareError, match="does not name the 2 labels"):
            import_sharebert(theirs, tmp_path / "other")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShareError, match="cannot be written"):
        import_sharebert(folder_of("A", tmp_path / "theirs"), tmp_path / "file" / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """And that is said before anything is read."""
    theirs = folder_of("A", tmp_path / "theirs")
    for folder in (theirs, tmp_path / "nowhere"):
        with pytest.raises(ShareError, match="exists already"):
            import_sharebert(folder, theirs)


def test_the_command_prints_the_error(tmp_path: Path) -> None:
    result = python(
        "-m", "paramshare.cli", "import-sharebert", str(tmp_path / "no"), str(tmp_path / "out")
    )
    assert result.returncode == 1
    assert result.stderr.startswith("paramshare import-sharebert: ")
    assert "Traceback" not in result.stderr
