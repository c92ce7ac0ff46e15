"""Masked language modelling, through fairseq's own command lines and in process, and ShareBERT's
weights on the way from fairseq to transformers and back."""

from __future__ import annotations

import math
import os
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from commands import fairseq, python

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from tokenizers import Tokenizer, models
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

import paramshare.models.pretrained  # so that the Auto classes know ours
import paramshare.tasks
from paramshare import ShareError
from paramshare.cli import main, user_dir
from paramshare.models.sharebert import PRESETS, ShareBertConfig
from paramshare.models.sharebert_fairseq import export_sharebert
from paramshare.tasks import masked_lm

WORDS = [["al", "##pha"], ["be", "##ta"], ["ga", "##mma"], *([f"w{i}"] for i in range(33))]
PIECES = [piece for word in WORDS for piece in word]
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *PIECES, "<mask>"]

TASK = ["--task", "shared_masked_lm", "--tokens-per-sample", "32", "--sample-break-mode", "eos"]
SIZES = ["--hidden-size", "32", "--intermediate-size", "48", "--num-hidden-layers", "2"]
SIZES += ["--num-attention-heads", "2", "--max-position-embeddings", "32"]
SMALL = ["--arch", "sharebert_small", "--embedding-size", "16", *SIZES]
EPS = ["--arch", "sharebert_eps_wide", "--embedding-size", "192", *SIZES]
# Its virtual table has as many columns as the encoder is wide.
RELEASED = [*SMALL, "--released", "--no-share-pooler"]
RELEASED += ["--hidden-size", "6", "--intermediate-size", "6"]
ROBERTA = ["--arch", "roberta", "--encoder-layers", "2", "--encoder-embed-dim", "16"]
ROBERTA += ["--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.txt and fairseq's data, `bin`. Each word says which one comes next."""
    folder = tmp_path_factory.mktemp("masked")
    draw = random.Random(0)

    def sentence() -> str:
        start = draw.randrange(len(WORDS))
        words = [WORDS[(start + 7 * i) % len(WORDS)] for i in range(draw.randint(4, 10))]
        return " ".join(piece for word in words for piece in word) + "\n"

    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in PIECES))
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    for split, count in (("train", 400), ("valid", 40)):
        (folder / split).write_text("".join(sentence() for _ in range(count)))
    done = fairseq(
        *("preprocess", "--only-source", "--srcdict", folder / "dict.txt"),
        *("--trainpref", folder / "train", "--validpref", folder / "valid"),
        *("--destdir", folder / "bin"),
    )
    assert done.returncode == 0, done.stderr
    return folder


def train(data: Path, out: Path, *more: object) -> CompletedProcess:
    return fairseq(
        *("train", data / "bin", "--user-dir", user_dir(), *TASK, "--criterion", "masked_lm"),
        *("--lr", "0.01", "--batch-size", "40", "--num-workers", "0", "--cpu"),
        *("--log-format", "simple", "--save-dir", out, *more),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses(done: CompletedProcess) -> dict[int, float]:
    """Validation loss by update."""
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    found = re.findall(r"valid on 'valid' subset \| loss ([\d.]+) .*?num_updates (\d+)", log)
    return {int(updates): float(loss) for loss, updates in found}


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint after two epochs."""
    out = tmp_path_factory.mktemp("trained")
    found = losses(train(data, out, *SMALL, "--optimizer", "adam", "--max-epoch", 2))
    assert list(found) == [10, 20]
    assert found[20] < found[10] < 5.3
    paramshare.tasks.allow_checkpoints()  # a Trainer in this process may have taken it back
    return out / "checkpoint_last.pt"


def set_up(data: Path, *more: str, task: list[str] = TASK):
    """(task, options of the model) as fairseq-train has them."""
    parser = options.get_training_parser()
    given = [str(data / "bin"), *task, "--cpu", "--criterion", "masked_lm", *more]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))
    return tasks.setup_task(cfg.task), cfg


def build(data: Path, *more: str, task: list[str] = TASK):
    made, cfg = set_up(data, *more, task=task)
    return made.build_model(cfg.model)


def batch(task, count: int = 16):
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    dataset.set_epoch(1)  # other tokens are masked in each
    return dataset.collater([dataset[i] for i in range(count)])


@torch.no_grad()
def bits(criterion, model, sample) -> float:
    """The loss as fairseq logs it."""
    loss, size, _ = criterion(model, sample)
    return loss.item() / size.item() / math.log(2)


def load(checkpoint: Path):
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    return model.eval(), task, task.build_criterion(cfg.criterion)


def tokenizer(folder: Path, tokens: list[str]) -> Path:
    vocab = {token: row for row, token in enumerate(tokens)}
    model = models.WordPiece(vocab, unk_token="<unk>")
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **names).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- command lines


def test_restart_goes_on_and_other_options_are_refused(
    data: Path, trained: Path, tmp_path: Path
) -> None:
    more = [*SMALL, "--optimizer", "adam", "--max-epoch", 3, "--restore-file", trained]
    again = train(data, tmp_path / "again", *more)
    assert list(losses(again)) == [30]
    assert "Loaded checkpoint" in again.stdout + again.stderr
    refused = train(data, tmp_path / "refused", *more, "--share-layout", "column")
    assert refused.returncode != 0
    assert "shared otherwise: its plan differs in" in refused.stderr


def test_validation_needs_no_share_option(data: Path, trained: Path) -> None:
    done = fairseq(
        *("validate", data / "bin", "--user-dir", user_dir(), "--task", "shared_masked_lm"),
        *("--path", trained, "--batch-size", 40, "--cpu", "--num-workers", 0),
        "--share=eps",  # of no effect: the model is shared as it was trained
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    found = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1])
    model, task, criterion = load(trained)
    assert found == pytest.approx(bits(criterion, model, batch(task, 40)), abs=1e-3)


def test_other_encoders_and_whole_words(data: Path, tmp_path: Path) -> None:
    """All pieces of a word are masked, or none."""
    more = ["--mask-whole-words", "--bpe", "bert", "--bpe-vocab-file", str(data / "vocab.txt")]
    more += ["--optimizer", "adamax"]  # whose options a checkpoint has as a Namespace
    done = train(data, tmp_path, *ROBERTA, *more, "--max-epoch", 1, "--batch-size", 400)
    (loss,) = losses(done).values()
    assert "table encoder.sentence_encoder.embed_tokens" in done.stdout + done.stderr
    model, task, criterion = load(tmp_path / "checkpoint_last.pt")
    assert len(model.paramshare.plan.groups) == 6
    sample = batch(task, 40)
    assert loss == pytest.approx(bits(criterion, model, sample), abs=1e-3)

    tokens = {piece: task.source_dictionary.index(piece) for piece in PIECES}
    masked = sample["target"] != task.source_dictionary.pad()
    whole = sample["net_input"]["src_tokens"].where(~masked, sample["target"])
    for first, second in (word for word in WORDS if len(word) == 2):
        starts = (whole == tokens[first]).nonzero()
        assert len(starts) > 3
        for row, column in starts:
            assert whole[row, column + 1] == tokens[second]
            assert masked[row, column] == masked[row, column + 1]
    with pytest.raises(ShareError, match="is no checkpoint of fairseq-train --arch sharebert"):
        export_sharebert(tmp_path / "checkpoint_last.pt", tmp_path / "out")


# ---------------------------------------------------------------------- to transformers and back


def test_one_loss_in_fairseq_and_in_transformers(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    good = tokenizer(tmp_path / "tokenizer", TOKENS)
    command = ["export-sharebert", str(trained), str(out), "--tokenizer", str(good)]
    done = python("-m", "paramshare.cli", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: ShareBertForMaskedLM, ")
    model, task, criterion = load(trained)
    sample = batch(task)
    tokens, target = sample["net_input"]["src_tokens"], sample["target"]
    pad = task.source_dictionary.pad()
    assert (tokens == pad).any()
    loss, size, _ = criterion(model, sample)
    expected = loss / size

    theirs = AutoModelForMaskedLM.from_pretrained(out)
    labels = target.masked_fill(target == pad, -100)
    found = theirs(tokens, attention_mask=(tokens != pad).long(), labels=labels).loss
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    torch.manual_seed(5)
    back = build(data, *SMALL, "--sharebert-from", str(out)).eval()
    loss, size, _ = criterion(back, sample)
    torch.testing.assert_close(loss / size, expected, rtol=0, atol=1e-6)
    with pytest.raises(ShareError, match=r"out has intermediate_size=48, the model .* 64$"):
        build(data, *SMALL, "--intermediate-size", "64", "--sharebert-from", str(out))
    tokenizer(out, [*TOKENS[:4], *reversed(PIECES), "<mask>"])
    with pytest.raises(ShareError, match="row 4 of the table is 'al', for .* 'w32'"):
        build(data, *SMALL, "--sharebert-from", str(out))
    with pytest.raises(ShareError, match="nowhere cannot be read: "):
        build(data, *SMALL, "--sharebert-from", str(tmp_path / "nowhere"))

    capsys.readouterr()
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"paramshare export-sharebert: {out} exists already: give a folder that does not\n"
    )


def test_what_cannot_be_exported(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    half = tmp_path / "half.pt"
    half.write_bytes(trained.read_bytes()[:5000])
    with pytest.raises(ShareError, match=r"half.pt cannot be read: it breaks off"):
        export_sharebert(half, out)
    with pytest.raises(ShareError, match=r"nothing.pt cannot be read: No such file"):
        export_sharebert(tmp_path / "nothing.pt", out)
    state = torch.load(trained, weights_only=True)
    torch.save(state["model"], half)
    with pytest.raises(ShareError, match="is no checkpoint of fairseq-train --arch sharebert"):
        export_sharebert(half, out)
    state["cfg"]["task"]["data"] = str(tmp_path / "moved")
    torch.save(state, tmp_path / "moved.pt")
    with pytest.raises(ShareError, match=r"row 3 of the table is '<unk>', for .* 'al'"):
        export_sharebert(
            trained, out, tokenizer(tmp_path / "other", [*TOKENS[:3], "al", "<unk>", *TOKENS[5:]])
        )
    with pytest.raises(ShareError, match="has 42 tokens, the table 44"):
        export_sharebert(trained, out, tokenizer(tmp_path / "few", TOKENS[:-3] + ["<mask>"]))
    assert not out.exists()
    same = tokenizer(tmp_path / "same", TOKENS)
    with pytest.warns(UserWarning, match=r"moved/dict.txt is not there: only the number"):
        export_sharebert(tmp_path / "moved.pt", out, same)
    del state["model"]["bert.norm.weight"]
    torch.save(state, half)
    with pytest.raises(ShareError, match=r"has no bert.norm.weight of shape \(32,\)"):
        export_sharebert(half, tmp_path / "less")


# ---------------------------------------------------------------------- in process


@pytest.mark.parametrize("preset", PRESETS)
def test_an_architecture_is_a_preset(data: Path, preset: str) -> None:
    arch = ["--arch", f"sharebert_{preset.replace('-', '_')}"]
    task, cfg = set_up(data, *arch)
    expected = ShareBertConfig.preset(preset, vocab_size=len(TOKENS))
    assert masked_lm._config(cfg.model, task) == expected
    changes = ["--share", "none", "--share-depth", "none", "--share-layout", "token"]
    changes += ["--hidden-size", "96", "--no-share-pooler", "--no-pre-norm"]
    task, cfg = set_up(data, *arch, *changes)
    changed = {"sharing": "none", "depth": "none", "layout": "token", "hidden_size": 96}
    changed |= {"share_pooler": False, "pre_norm": False}
    assert masked_lm._config(cfg.model, task) == replace(expected, **changed)


@pytest.mark.parametrize("model", [SMALL, EPS, RELEASED])
def test_all_that_is_trained_gets_a_gradient(data: Path, model: list[str]) -> None:
    """Else DistributedDataParallel would not take it; and the names are transformers'."""
    task, cfg = set_up(data, *model)
    built = task.build_model(cfg.model)
    loss, _, _ = task.build_criterion(cfg.criterion)(built, batch(task))
    loss.backward()
    assert task.sharebert["sharing"] == ("eps" if model is EPS else "veps")
    for name, parameter in built.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    config = paramshare.models.sharebert_pretrained.ShareBertConfig(**task.sharebert)
    names = paramshare.models.sharebert_pretrained.ShareBertForMaskedLM(config).state_dict()
    assert set(built.state_dict()) == set(names)


def test_a_shared_state_is_not_for_a_plain_model(data: Path, trained: Path) -> None:
    state = torch.load(trained, weights_only=True)["model"]
    with pytest.raises(RuntimeError, match="made with other --share options: its model is shared"):
        build(data, *SMALL, "--share", "none").load_state_dict(state)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens-per-sample", "64"], "--tokens-per-sample 64 is more than --max-position-emb"),
        (["--share-embedding-dim", "8"], "^--share-embedding-dim is not for --arch sharebert_s"),
        (["--share-init", "paper"], "^--share-init is not for --arch sharebert_small, which has"),
        (["--mask-whole-words"], "^--mask-whole-words needs --bpe, .* --bpe bert --bpe-vocab-file"),
        (["--hidden-size", "33"], "small: --hidden-size 33 is no multiple of --num-attention-h"),
        (["--share", "eps"], "small: needs .* are missing; use --share veps, share fewer"),
        (["--share-depth", "twice"], "small: --share-depth 'twice'"),
    ],
)
def test_options_that_do_not_go_together(data: Path, more: list[str], message: str) -> None:
    with pytest.raises(ShareError, match=message):
        build(data, *SMALL, *more)


def test_sharebert_is_for_its_task(data: Path) -> None:
    with pytest.raises(ShareError, match="^--arch sharebert needs --task shared_masked_lm$"):
        build(data, *SMALL, task=["--task", "masked_lm"])


def test_the_readme_commands_run(data: Path, tmp_path: Path) -> None:
    """For an epoch, on the data at hand."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf8")
    block = re.search(r"```sh\n(fairseq-train data/bert_mlm.*?)```", readme, re.S)
    assert block is not None
    text = block[1].replace("\\\n", " ").replace('"$(paramshare user-dir)"', str(user_dir()))
    text = text.replace("data/bert_mlm/tokenizer/vocab.txt", str(data / "vocab.txt"))
    text = text.replace("data/bert_mlm/fairseq", str(data / "bin"))
    text = text.replace(" --tokenizer data/bert_mlm/tokenizer", "")
    training, export = map(shlex.split, text.strip().splitlines())
    assert (training[0], export[0]) == ("fairseq-train", "paramshare")
    done = fairseq("train", *training[1:], "--max-epoch", 1, "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python("-m", "paramshare.cli", *export[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "bert").config.hidden_size == 256
