"""--checkpoint-activations of shared translators; test_translation_commands.py has two workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from translators import build, inputs

pytest.importorskip("fairseq")

from fairseq.modules.checkpoint_activations import unwrap_checkpoint

ONE_TABLE = ("--share-all-embeddings", "--dropout", "0.3")


def step(model: nn.Module) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Gradients of a pass with dropout, and how often each was said to be ready."""
    ready: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.update([name]))
    torch.manual_seed(1)
    model.train()(**inputs())[0].square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, ready


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ("joined", [*ONE_TABLE, "--checkpoint-activations"]),
        ("joined", [*ONE_TABLE, "--checkpoint-activations", "--share-execution", "factored"]),
        ("joined", [*ONE_TABLE, "--checkpoint-activations", "--share-embedding-dim", "8"]),
        ("joined", [*ONE_TABLE, "--offload-activations"]),
        ("separate", ["--dropout", "0.3", "--checkpoint-activations", "--share-depth", "none"]),
    ],
)
def test_each_gradient_is_ready_once_and_the_same(corpus: Path, data: str, more: list[str]) -> None:
    """Once is what DistributedDataParallel takes."""
    _, recomputed = build(corpus / data, *more)
    kept = [option for option in more if not option.endswith("-activations")]
    expected, _ = step(build(corpus / data, *kept)[1])
    found, ready = step(recomputed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=name)
    assert ready == Counter(found.keys())


def test_layers_keep_their_inputs_alone(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, if they are offloaded; fairseq's own function still unwraps them."""
    offloaded = []

    def save_on_cpu() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda x: offloaded.append(tuple(x.shape)) or x, lambda x: x
        )

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_on_cpu)
    _, model = build(corpus / "joined", *ONE_TABLE, "--offload-activations")
    expected = model.eval()(**inputs())[0]
    source, target = (5, 2, 32), (4, 2, 32)  # (length, batch, features)
    padding = (2, 5)
    assert offloaded == [*[source] * 2, *[target, source, padding] * 2]
    offloaded.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs())[0], expected)
    unwrap_checkpoint(model)
    assert torch.equal(model(**inputs())[0], expected)
    assert offloaded == []


def test_the_plain_model_is_fairseqs_own(corpus: Path) -> None:
    _, plain = build(corpus / "joined", *ONE_TABLE, "--checkpoint-activations", "--share", "none")
    layer = plain.encoder.layers[0]
    assert layer.forward.func.__module__ == "fairseq.modules.checkpoint_activations"
