"""Models that people have work when they are shared: the same checks for each, whose results are
the table in models/README.md."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from catalogue import Case, fairseq_models, torch_models, transformers_models
from close import assert_passes_close
from tables import check_table
from torch import Tensor, nn

from paramshare import load_model, materialize, save_model, share_from_embedding
from paramshare.marks import pools, sources

CASES: list[Case] = [
    *torch_models.CASES,
    *fairseq_models.CASES,
    *transformers_models.CASES,
]
TABLE = Path(__file__).parent.parent / "models" / "README.md"
COLUMNS = ("share", "train", "save/load", "materialize", "compile", "generate")
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, str], str]:
    """What has been shown: (model, column) -> what stands in the table."""
    return {}


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.build().eval()


def shared(case: Case, seed: int = 0) -> nn.Module:
    model = build(case, seed)
    share_from_embedding(model, case.embedding(model), select=case.select)
    return model


def plain_twin(case: Case, model: nn.Module) -> nn.Module:
    """A plain model of other values, loaded with the weights that `model` computes with."""
    twin = build(case, seed=1)
    twin.load_state_dict(materialize(copy.deepcopy(model)).state_dict())
    return twin


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in model.named_modules():
        for name in sources(part):
            yield f"{path}.{name}", getattr(part, name)


@cases
def test_share(case: Case, cells) -> None:
    """The same function as a plain model that has the weights, and fewer numbers stored."""
    plain = build(case)
    dense = {id(p): p.numel() for p in plain.parameters()}
    model = shared(case)
    derived = dict(weights(model))
    assert derived
    stored = {id(p): p.numel() for p in model.parameters()}
    removed = sum(w.numel() for w in derived.values())
    pool = sum(p.numel() for pool in pools(model) for p in pool.parameters())
    assert sum(stored.values()) == sum(dense.values()) - removed + pool
    twin = plain_twin(case, model)
    for mode in (model.train, model.eval):
        torch.manual_seed(5)
        output = case.run(mode())
        torch.manual_seed(5)
        expected = case.run(twin.train(model.training))
        assert_passes_close(output, expected)
    with torch.no_grad():
        assert_passes_close(case.run(model), expected)
    cells[case.name, "share"] = "yes"


@cases
def test_train(case: Case, cells) -> None:
    """Every weight passes a gradient on, and the loss falls in a few steps."""
    model = shared(case).train()
    before = {name: weight.detach().clone() for name, weight in weights(model)}
    optimizer = torch.optim.Adam(model.parameters(), case.rate)
    losses = []
    for _ in range(10):
        torch.manual_seed(5)  # the same dropout in each step
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses
    for name, weight in weights(model):
        assert not torch.equal(weight, before[name]), name
    unused = [
        n for n, p in model.named_parameters() if n.startswith("paramshare") and p.grad is None
    ]
    assert not unused
    cells[case.name, "train"] = "yes"


@cases
def test_save_and_load(case: Case, cells, tmp_path) -> None:
    """Into a fresh plain model, and through a plain state_dict."""
    model = shared(case)
    save_model(model, tmp_path / "model.safetensors")
    other = build(case, seed=1)
    assert not torch.equal(case.run(other), case.run(model))
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(case.run(other), case.run(model))
    third = shared(case, seed=2)
    third.load_state_dict(model.state_dict())
    assert torch.equal(case.run(third), case.run(model))
    cells[case.name, "save/load"] = "yes"


@cases
def test_materialize(case: Case, cells) -> None:
    """A copy, made plain again, is of the plain classes, has their parameters and the values."""
    model = shared(case)
    case.run(model).sum().backward()
    with torch.no_grad():
        case.run(model)
    twin, plain = copy.deepcopy(model), build(case, seed=1)
    materialize(twin)
    assert [(n, p.shape) for n, p in twin.named_parameters(remove_duplicate=False)] == [
        (n, p.shape) for n, p in plain.named_parameters(remove_duplicate=False)
    ]
    assert [type(m).__name__ for m in twin.modules()] == [type(m).__name__ for m in plain.modules()]
    assert not any("paramshare" in key for m in twin.modules() for key in m.__dict__)
    assert_passes_close(case.run(twin), case.run(model))
    cells[case.name, "materialize"] = "yes"


@cases
def test_compile(case: Case, cells) -> None:
    """One graph, with gradients, where torch makes one of the plain model."""
    torch._dynamo.reset()
    model = shared(case)
    expected = case.run(model)
    expected.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    if case.no_compile:
        with pytest.raises(Exception, match="(?i)graph break|unsupported|not supported|skipped"):
            case.run(torch.compile(build(case), backend="eager", fullgraph=True))
        torch._dynamo.reset()
    backend = "eager" if case.no_compile else "aot_eager"  # takes long for many small graphs
    compiled = torch.compile(model, backend=backend, fullgraph=not case.no_compile)
    output = case.run(compiled)
    assert_passes_close(output, expected)
    output.square().sum().backward()
    assert_passes_close({n: p.grad for n, p in model.named_parameters()}, gradients)
    torch._dynamo.reset()
    cells[case.name, "compile"] = f"graph breaks: {case.no_compile}" if case.no_compile else "yes"


@cases
def test_generate(case: Case, cells) -> None:
    """Token for token what the plain model with the weights generates."""
    if case.generate is None:
        assert case.no_generation
        cells[case.name, "generate"] = f"none: {case.no_generation}"
        return
    for seed in range(8):
        model = shared(case, seed)
        generated = case.generate(model)
        assert generated == case.generate(plain_twin(case, model))
        # An untrained model may say the same to every prompt, but not with every seed.
        if len({tuple(sequence) for sequence in generated}) > 1:
            break
    else:
        pytest.fail("the same for every prompt")
    cells[case.name, "generate"] = "yes"


def test_the_table_in_the_docs(cells, request) -> None:
    """It is what the tests above have shown; `--write-tables` writes it."""
    if len(cells) < len(CASES) * len(COLUMNS):
        pytest.skip("only the whole of this file, all passing, makes the table")
    notes: list[str] = []
    lines = [
        f"| model | kinds of layers | {' | '.join(COLUMNS)} |",
        "|" + " --- |" * (2 + len(COLUMNS)),
    ]
    for case in CASES:
        row = [case.name, case.kinds]
        for column in COLUMNS:
            text, _, note = cells[case.name, column].partition(": ")
            if note:
                notes += [note] if note not in notes else []
                text += f" ({notes.index(note) + 1})"
            row.append(text)
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *(f"({n}) {note}." for n, note in enumerate(notes, 1))]
    table = "\n".join(lines) + "\n"
    check_table(TABLE, "tests/test_catalogue.py", table, request)
