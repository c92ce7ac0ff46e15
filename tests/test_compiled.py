"""Compiled and exported: one graph, with all that eager execution does."""

from __future__ import annotations

import pytest
import torch
from test_works import CASES, RECURRENT, in_threads, shared
from zoo import Narrow, batch, build

from paramshare import share_from_embedding

NARROW = [("Narrow", "veps-aligned-bias"), ("Narrow", "veps-whitened")]


@pytest.mark.parametrize(("name", "way"), [*CASES[::4], *NARROW])
# torch traces RNNs only where it is told to.
@torch._dynamo.config.patch(allow_rnn=True)
def test_compiles_to_one_graph(name: str, way: str) -> None:
    torch._dynamo.reset()
    module, _ = shared(name, way)
    tokens, padding = batch()
    padding = None if name in RECURRENT else padding  # torch never traces the packing
    expected = module(tokens, padding)
    expected.square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    module.zero_grad()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    output = compiled(tokens, padding)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with torch.no_grad():
        module.embedding.weight.mul_(1.1)
    torch.testing.assert_close(compiled(tokens, padding), module(tokens, padding))
    assert len(graphs) == 1


def test_compiles_with_aot_autograd() -> None:
    torch._dynamo.reset()
    for name in ("Encoder", "Narrow"):
        module, _ = shared(name, "veps-aligned-bias")
        tokens, padding = batch()
        module(tokens, padding).square().sum().backward()
        gradients = [p.grad for p in module.parameters()]
        module.zero_grad()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        compiled(tokens, padding).square().sum().backward()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_layers_compiled_by_themselves_use_what_the_root_holds() -> None:
    torch._dynamo.reset()
    module, _ = shared("Narrow", execution="materialized")
    tokens, padding = batch()
    expected = module(tokens, padding)
    graphs = []

    def backend(graph, inputs):
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    for block in module.blocks:
        block.compile(fullgraph=True, backend=backend)
    torch.testing.assert_close(module(tokens, padding), expected)
    assert graphs
    assert not any(target is torch.cat for graph in graphs for target in graph)


needs_torch_27 = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="torch 2.6 does not say that it exports, and its strict export bakes weights in",
)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=needs_torch_27)])
@pytest.mark.parametrize("name", ["Encoder", "Seq2Seq", "Narrow", "Recurring"])
@pytest.mark.filterwarnings("ignore:a copy of a part of a shared module")  # strict tracing
def test_exports_whole(name: str, strict: bool) -> None:
    module, _ = shared(name)
    module.eval()
    tokens, padding = batch()
    program = torch.export.export(module, (tokens, padding), strict=strict)
    exported = program.module()
    torch.testing.assert_close(exported(tokens, padding), module(tokens, padding))
    assert set(program.state_dict) == set(module.state_dict()) - {"paramshare._extra_state"}
    assert not program.constants or all(t.numel() < 100 for t in program.constants.values())


@needs_torch_27
def test_export_of_a_part_is_refused() -> None:
    module, _ = shared("Encoder")
    with pytest.raises(Exception, match="export the module that share_from_embedding"):
        torch.export.export(module.encoder.layers[0], (torch.randn(2, 5, 16).double(),))


def test_blocks_compiled_by_themselves_scale_the_tables_gradient_too() -> None:
    torch._dynamo.reset()
    gradients = []
    for compiled in (False, True):
        module, _ = shared("Narrow")
        for block in module.blocks if compiled else ():
            block.compile(backend="aot_eager")
        for _ in range(2):
            module(*batch()).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    for eager, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("name", ["Broken", "Encoder"])
def test_graph_breaks_and_new_threads(name: str) -> None:
    torch._dynamo.reset()

    class Broken(Narrow):
        def forward(self, tokens, padding=None):
            x = super().forward(tokens, padding)
            torch._dynamo.graph_break()
            return x + 0

    torch.manual_seed(0)
    module = Broken().double() if name == "Broken" else build(name)
    share_from_embedding(module, module.embedding)
    compiled = torch.compile(module, backend="eager")
    outputs = [compiled(*batch())]
    in_threads(lambda _: outputs.append(compiled(*batch())), [0, 1])
    assert len(outputs) == 3
    for output in outputs:
        torch.testing.assert_close(output, module(*batch()))
