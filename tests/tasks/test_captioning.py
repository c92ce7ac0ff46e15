"""The captioning plugin, in process and through fairseq's own command lines."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import fairseq

pytest.importorskip("fairseq", reason="needs the fairseq extra")

from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import paramshare.tasks
from paramshare import ShareError, materialize
from paramshare.cli import user_dir
from paramshare.models.captioner import LSTMCaptioner, LSTMCaptionerOptions
from paramshare.sharing import named_pools
from paramshare.tasks.caption import CaptionModel
from paramshare.tasks.caption_text import words
from paramshare.tasks.features import Features, write_features

COLORS, SHAPES, WIDTH = ("red", "blue", "green"), ("circle", "square"), 12
TASK = ("--task", "shared_captioning", "--decoder-embed-dim", "32", "--dropout", "0")
ARCHITECTURES = {
    "transformer": (
        *("--width", "16", "--ffn-width", "24", "--attention-heads", "2"),
        *("--encoder-layers", "2", "--decoder-layers", "2"),
    ),
    "lstm": ("--hidden-size", "16", "--decoder-layers", "2"),
    "fconv": ("--channels", "16", "--decoder-layers", "2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.py and features.py make: pictures of 4 cells in a folder `grid`, of 2 to 4
    regions in `regions`."""
    folder = tmp_path_factory.mktemp("captioning")
    generator = np.random.default_rng(0)
    looks = {name: generator.normal(size=WIDTH) for name in (*COLORS, *SHAPES)}
    counts: Counter[str] = Counter()
    for split, pictures in (("train", 24), ("valid", 6), ("test", 6)):
        images, annotations, cells = [], [], {}
        for n in range(pictures):
            color, shape = COLORS[n % 3], SHAPES[n % 2]
            images.append({"id": 100 + n, "file_name": f"{n}.png"})
            for text in (f"A {color} {shape}.", f"one {shape} that is {color}"):
                number = len(annotations)
                annotations.append({"id": number, "image_id": 100 + n, "caption": text})
                counts.update(words(text))
            noise = generator.normal(size=(4, WIDTH)) / 10
            cells[100 + n] = looks[color] + looks[shape] + noise
        write_json(folder / f"{split}.json", images, annotations)
        for name, of in (
            ("grid", cells),
            ("regions", {n: x[: 2 + n % 3] for n, x in cells.items()}),
        ):
            write_features(
                folder / name / split,
                list(of),
                lambda ids, of=of: [of[n] for n in ids],
                width=WIDTH,
                grid=(2, 2) if name == "grid" else None,
                backbone=None,
                batch=5,
            )
    lines = [f"{word} {count}\n" for word, count in sorted(counts.items())]
    (folder / "dict.txt").write_text("".join(lines))
    return folder


def write_json(path: Path, images: list, annotations: list) -> None:
    path.write_text(json.dumps({"images": images, "annotations": annotations}))


def build(data: Path, arch: str, *more: str, features: str = "grid"):
    """(task, model) as fairseq-train would build them."""
    torch.manual_seed(0)
    parser = options.get_training_parser()
    sizes = (*TASK, "--arch", f"caption_{arch}", *ARCHITECTURES[arch], "--cpu")
    source = () if "--backbone" in more else ("--features", str(data / features))
    args = options.parse_args_and_arch(parser, [str(data), *sizes, *source, *more])
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    return task, task.build_model(cfg.model)


def batch(task, split: str = "train", size: int = 5) -> dict:
    task.load_dataset(split)
    dataset = task.dataset(split)
    return dataset.collater([dataset[n] for n in range(size)])


@pytest.mark.parametrize("features", ["grid", "regions"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shared_is_plain_with_the_same_weights(data: Path, arch: str, features: str) -> None:
    task, model = build(data, arch, features=features)
    ((path, pool),) = named_pools(model)
    assert path == ""
    assert pool.embedding is model.decoder.embed_tokens
    inputs = batch(task)["net_input"]
    expected, _ = model.eval()(**inputs)
    materialize(model)
    _, plain = build(data, arch, "--share", "none", features=features)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain.eval()(**inputs)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_shared(data: Path, arch: str) -> None:
    """All layers of decoder and encoder; not what comes before them."""
    _, model = build(data, arch)
    shared = {slot for _, pool in named_pools(model) for slot in map(str, pool.plan.groups)}
    assert any("decoder." in slot for slot in shared)
    assert any("encoder.layers" in slot for slot in shared) == (arch == "transformer")
    assert "encoder.project.weight" in dict(model.named_parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_padding_of_regions_changes_nothing(data: Path, arch: str) -> None:
    task, model = build(data, arch, features="regions")
    inputs = batch(task, size=6)["net_input"]
    assert inputs["src_lengths"].tolist() == [3, 3, 4, 4, 2, 2]
    together, _ = model.eval()(**inputs)
    for n, cells in enumerate(inputs["src_lengths"].tolist()):
        alone, _ = model(
            inputs["src_tokens"][n : n + 1, :cells],
            torch.tensor([cells]),
            inputs["prev_output_tokens"][n : n + 1],
        )
        torch.testing.assert_close(alone[0], together[n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_step_by_step_is_the_same(data: Path, arch: str) -> None:
    """Incremental decoding, with the encoder's output in another order."""
    task, model = build(data, arch)
    inputs = batch(task)["net_input"]
    expected, _ = model.eval()(**inputs)
    order = torch.tensor([3, 0, 1])
    encoded = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
    encoded = model.encoder.reorder_encoder_out(encoded, order)
    previous, state = inputs["prev_output_tokens"][order], {}
    steps = [
        model.decoder(previous[:, : n + 1], encoder_out=encoded, incremental_state=state)[0][:, -1]
        for n in range(previous.shape[1])
    ]
    there = previous.ne(task.dictionary.pad())
    found = torch.stack(steps, 1)[there]
    torch.testing.assert_close(found, expected[order][there], rtol=0, atol=1e-5)


def test_dataset(data: Path) -> None:
    task, _ = build(data, "lstm")
    for split, pairs in (("train", 48), ("valid", 12), ("test", 6)):  # test: one a picture
        task.load_dataset(split)
        assert len(task.dataset(split)) == pairs
    train = pickle.loads(pickle.dumps(task.dataset("train")))  # as for a worker
    np.random.seed(0)
    order = train.ordered_indices()
    assert sorted(order) == list(range(48))
    assert (np.diff(train.sizes[order]) >= 0).all()
    assert not np.array_equal(order, train.ordered_indices())
    one = train[1]
    assert task.decode(one["target"]) == "one circle that is red"
    stored = Features(data / "grid" / "train")[100]
    np.testing.assert_array_equal(one["source"].numpy(), stored.astype(np.float32))


BAD = {
    "picture id twice": lambda x: x["images"].append(x["images"][0]),
    "caption id twice": lambda x: x["annotations"].append(x["annotations"][0]),
    "caption without picture": lambda x: x["annotations"][0].update(image_id=7),
    "empty caption": lambda x: x["annotations"][0].update(caption=" .,!"),
    "picture without caption": lambda x: [
        a.update(image_id=101) for a in x["annotations"] if a["image_id"] == 100
    ],
    "picture without features": lambda x: (
        x["images"].append({"id": 9, "file_name": "new.png"}),
        x["annotations"].append({"id": 999, "image_id": 9, "caption": "a dog"}),
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_defects_are_named_or_left_out(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    content = json.loads((data / "valid.json").read_text())
    BAD[kind](content)
    (tmp_path / "valid.json").write_text(json.dumps(content))
    (tmp_path / "dict.txt").write_bytes((data / "dict.txt").read_bytes())
    task, _ = build(tmp_path, "lstm", "--features", str(data / "grid"))
    with pytest.raises(ShareError, match=rf"defects\n  \d x {kind}: .*\n.*--skip-bad"):
        task.load_dataset("valid")
    assert "valid" not in task.datasets
    task.cfg.skip_bad = True
    task.load_dataset("valid")
    assert f"x {kind}: " in caplog.text
    assert 10 <= len(task.dataset("valid")) <= 12


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--features", "/nowhere"), "/nowhere holds no features of train, valid, test"),
        (("--backbone", "resnet18", "--features", "x"), "give one of them"),
        (("--finetune-backbone",), "belong to --backbone"),
        (("--share-blocks", "0"), "--share-blocks"),
    ],
)
def test_options_that_do_not_go_together(data: Path, more: tuple, message: str) -> None:
    with pytest.raises(ShareError, match=message):
        build(data, "lstm", *more)


def test_through_the_command_lines(data: Path, tmp_path: Path) -> None:
    """Train, self-critical training from there, generate, captions without the data."""
    plugin = ("--user-dir", str(user_dir()))
    common = (
        *(str(data), *plugin, *TASK, "--arch", "caption_lstm", *ARCHITECTURES["lstm"]),
        *("--features", str(data / "grid"), "--optimizer", "adam", "--batch-size", "8"),
        *("--no-epoch-checkpoints", "--log-format", "simple", "--cpu", "--num-workers", "1"),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    run = fairseq(
        *("train", *common, "--criterion", "cross_entropy", "--lr", "1e-2"),
        *("--max-epoch", "12", "--save-dir", first),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    run = fairseq(
        *("train", *common, "--criterion", "self_critical", "--lr", "1e-3", "--samples", "3"),
        *("--max-epoch", "2", "--save-dir", second),
        *("--finetune-from-model", first / "checkpoint_best.pt"),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    log = run.stdout + run.stderr
    rewards = [float(x) for x in re.findall(r"valid on 'valid'.*\| reward ([\d.]+)", log)]
    assert len(rewards) == 2
    assert all(1 < reward <= 10 for reward in rewards)
    run = fairseq(
        *("generate", data, *plugin, "--task", "shared_captioning"),
        *("--features", data / "grid", "--path", first / "checkpoint_best.pt"),
        *("--batch-size", "4", "--beam", "3", "--max-len-b", "10", "--cpu"),
        *("--required-batch-size-multiple", "1"),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", run.stdout, re.M))
    paramshare.tasks.allow_checkpoints()
    model = CaptionModel(first)
    features = Features(data / "grid" / "test")
    sources = [torch.tensor(np.array(features[n]), dtype=torch.float) for n in features.ids]
    ours = model.generate(sources, beam=3, no_repeat_ngram_size=0, max_len_b=10)
    assert [theirs[str(n)] for n in range(6)] == ours
    assert ours[0] in ("a red circle", "one circle that is red")


def test_a_captioner_needs_its_task(data: Path) -> None:
    _, model = build(data, "lstm")
    other = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    cfg = SimpleNamespace(**{**vars(LSTMCaptionerOptions()), "_name": "caption_lstm"})
    with pytest.raises(ShareError, match="--arch caption_lstm needs --task shared_captioning"):
        LSTMCaptioner.build_model(cfg, other)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ShareError, match="is not there"):
        CaptionModel(tmp_path)
    (tmp_path / "checkpoint_best.pt").write_bytes(b"nonsense")
    with pytest.raises(ShareError, match="checkpoint_best.pt"):
        CaptionModel(tmp_path)
