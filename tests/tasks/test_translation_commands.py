"""The translation plugin by fairseq's command lines, as users give them, for each architecture."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest
import torch
from commands import fairseq, fairseq_train_workers, python
from translators import FCONV, LSTM, MODEL, TASK

pytest.importorskip("fairseq")

import paramshare.tasks
from paramshare.cli import user_dir

ARCHS = {
    "transformer": [*MODEL, "--share-all-embeddings"],
    "lstm": [*LSTM, "--share-all-embeddings", "--share-depth", "sequence:2"],
    "fconv": [*FCONV, "--share-input-output-embed"],
}
# Of two workers; the first is fairseq's default.
WORKERS = {
    "transformer": ["--ddp-backend", "pytorch_ddp", "--checkpoint-activations"],
    "lstm": ["--ddp-backend", "pytorch_ddp"],
    "fconv": ["--ddp-backend", "legacy_ddp"],
}
EPOCHS = 16
AVERAGE = Path(__file__).resolve().parents[2] / "recipes" / "iwslt15_envi" / "average.py"


class Trained(NamedTuple):
    """A translator, trained at once and in two halves: the folders, and what was logged."""

    arch: str
    data: Path
    whole: Path
    halves: Path
    log: str
    resumed: str

    @property
    def common(self) -> list[object]:
        """Of every command."""
        return [self.data, "--user-dir", user_dir(), *TASK, "--cpu"]

    def generate(self, path: Path, *more: object) -> dict[int, str]:
        done = fairseq("generate", *self.common, *SEARCH, "--path", path, *more)
        return hypotheses(done)


# fairseq drops the last sentences where batches have to be multiples of 8.
SEARCH = ["--beam", 3, "--required-batch-size-multiple", 1, "--num-workers", 0]


def hypotheses(done: CompletedProcess) -> dict[int, str]:
    """By the number of the sentence, score included."""
    assert done.returncode == 0, done.stderr
    return {int(n): text for n, text in re.findall(r"^H-(\d+)\t(.*)$", done.stdout, re.M)}


def words(found: dict[int, str]) -> dict[int, str]:
    """Without the scores, whose last digits depend on the sentences of a batch."""
    return {n: text.split("\t")[1] for n, text in found.items()}


def losses(log: str) -> dict[int, float]:
    """Validation loss by update."""
    found = re.findall(r"valid on 'valid' subset \| loss ([\d.]+) .*?num_updates (\d+)", log)
    return {int(updates): float(loss) for loss, updates in found}


def model_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    paramshare.tasks.allow_checkpoints()  # a Trainer in this process may have taken it back
    return torch.load(checkpoint, weights_only=True)["model"]


@pytest.fixture(scope="module", params=ARCHS)
def trained(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    data, whole, halves = corpus / "joined", folder / "whole", folder / "halves"
    made = Trained(request.param, data, whole, halves, "", "")

    def train(out: Path, epochs: int, *more: object) -> str:
        done = fairseq(
            *("train", *made.common, *ARCHS[request.param], "--save-dir", out, *more),
            *("--optimizer", "adam", "--lr", "0.01", "--lr-scheduler", "inverse_sqrt"),
            *("--warmup-updates", "20", "--clip-norm", "1.0", "--criterion", "cross_entropy"),
            *("--max-tokens", "400", "--update-epoch-batch-itr", "True", "--log-format", "simple"),
            *("--max-epoch", epochs, "--keep-last-epochs", 3),
            *("--num-workers", 0),  # starting one takes longer than an epoch
        )
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-tokenized-bleu"]
    log = train(whole, EPOCHS, *bleu)
    train(halves, EPOCHS // 2)
    return made._replace(log=log, resumed=train(halves, EPOCHS))


def test_training_learns_and_measures_bleu(trained: Trained) -> None:
    found = list(losses(trained.log).values())
    assert len(found) == EPOCHS
    assert found[-1] < 0.75 * found[0]
    bleu = [float(score) for score in re.findall(r"valid on .* \| bleu ([\d.]+)", trained.log)]
    assert len(bleu) == EPOCHS
    if trained.arch != "lstm":  # which so early knows which words there are, and no translations
        assert bleu[-1] > bleu[0]
    assert re.search(r"shared weights of (the model|encoder)", trained.log)


def test_training_that_was_interrupted_goes_on(trained: Trained) -> None:
    """The same losses and parameters, to the bit, and so the same translations."""
    assert "Loaded checkpoint" in trained.resumed
    expected, resumed = losses(trained.log), losses(trained.resumed)
    assert resumed == dict(list(expected.items())[EPOCHS // 2 :])
    models = [
        model_of(folder / f"checkpoint{EPOCHS}.pt") for folder in (trained.whole, trained.halves)
    ]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.equal(models[1][name], tensor), name


def test_translations(trained: Trained, tmp_path: Path, corpus: Path) -> None:
    """Of fairseq-generate, which needs no --share options and ignores them; of fairseq-interactive;
    of a checkpoint that was restored; of an average, alone and in an ensemble."""
    last = trained.whole / "checkpoint_last.pt"
    found = trained.generate(last)
    assert len(found) == 20
    assert trained.generate(trained.halves / "checkpoint_last.pt", "--share", "none") == found
    text = (corpus / "test.en").read_text()
    spoken = fairseq("interactive", *trained.common, *SEARCH, "--path", last, input=text)
    assert words(hypotheses(spoken)) == words(found)

    checkpoints = [trained.whole / f"checkpoint{EPOCHS - n}.pt" for n in (2, 1, 0)]
    mean = tmp_path / "mean.pt"
    done = python(AVERAGE, *checkpoints, "--out", mean)
    assert done.returncode == 0, done.stderr
    models = [model_of(path) for path in checkpoints]
    for name, tensor in model_of(mean).items():
        if tensor.is_floating_point():
            expected = torch.stack([model[name] for model in models]).mean(dim=0)
            torch.testing.assert_close(tensor, expected, msg=name)
        else:
            assert torch.equal(tensor, models[0][name]), name
    both = trained.generate(f"{mean}:{last}")
    assert both.keys() == found.keys()


def test_a_checkpoint_of_other_options_is_not_restored(trained: Trained, tmp_path: Path) -> None:
    refused = fairseq(
        *("train", *trained.common, *ARCHS[trained.arch], "--share-layout", "column"),
        *("--restore-file", trained.whole / "checkpoint_last.pt", "--save-dir", tmp_path),
        *("--optimizer", "adam", "--criterion", "cross_entropy", "--max-tokens", "400"),
    )
    assert refused.returncode != 0
    assert "shared otherwise: its plan differs in" in refused.stderr


@pytest.mark.parametrize("arch", ARCHS)
def test_two_workers_that_stop_and_go_on_train_as_one_that_accumulates(
    arch: str, corpus: Path, tmp_path: Path
) -> None:
    """Losses of six updates, and the parameters after them, of which fairseq prints more digits."""
    options = [
        *(corpus / "joined", "--user-dir", user_dir(), *TASK, *ARCHS[arch]),
        *("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.5", "--clip-norm", "1"),
        *("--criterion", "cross_entropy", "--batch-size", 36, "--disable-validation"),
        *("--required-batch-size-multiple", 1, "--log-format", "simple", "--log-interval", 1),
        *("--num-workers", 0),
    ]

    def inner(log: str) -> dict[int, float]:
        """Training loss by update."""
        found = re.findall(r"train_inner \| .*? loss=([\d.]+), .*?num_updates=(\d+)", log)
        return {int(updates): float(loss) for loss, updates in found}

    one = tmp_path / "one"
    done = fairseq(
        "train", *options, "--cpu", "--update-freq", 2, "--max-update", 6, "--save-dir", one
    )
    assert done.returncode == 0, done.stderr
    expected = inner(done.stdout)
    assert list(expected) == [1, 2, 3, 4, 5, 6]

    two, found = tmp_path / "two", {}
    for updates in (3, 6):
        workers = fairseq_train_workers(
            *(tmp_path / f"store{updates}", *options, *WORKERS[arch]),
            *("--max-update", updates, "--save-dir", two),
        )
        for worker in workers:
            assert worker.returncode == 0, worker.stderr
        found.update(inner(workers[0].stdout))
    assert "Loaded checkpoint" in workers[0].stdout
    assert found == pytest.approx(expected, abs=1.1e-3)  # it prints three digits
    models = [model_of(folder / "checkpoint_last.pt") for folder in (one, two)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
