"""fairseq's layers and models when their weights are derived, in training and step by step."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable

import pytest
import reference
import seeds
import torch
from catalogue import Case, fairseq_models
from close import assert_passes_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("fairseq")

from fairseq.modules import LinearizedConvolution, MultiheadAttention
from fairseq.modules.conv_tbc import ConvTBC
from fairseq.trainer import _catalog_shared_params

from paramshare import Sharing, materialize, prepare_for_inference, share_from_embedding
from paramshare.derived import original_class, sources
from paramshare.pool import Pool

# fairseq's own attention takes the softmax in float32: of each of few layers a rounding that is
# 2**29 times that of float64.
SINGLE = 16 * 2**29


def loaded(plain: nn.Module, model: nn.Module) -> nn.Module:
    """`plain` with the weights that `model` computes with."""
    plain.load_state_dict(materialize(copy.deepcopy(model)).state_dict())
    return plain.train(model.training)


def check_training(build: Callable[[], nn.Module], sharing: Sharing, *args: Tensor) -> Tensor:
    """Output and gradients of the shared module are those of an independent derivation."""
    model = sharing.module.train()
    output = model(*args)
    output.square().sum().backward()
    expected, gradients = reference.run(build(), model, sharing.pool, *args)
    assert_passes_close(output, expected)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_passes_close(found, gradients)
    return output


# ---------------------------------------------------------------------- convolutions


class Convolutions(nn.Module):
    """Four layers whose widths go up and down: two weights of each shape."""

    def __init__(
        self, kind: type[ConvTBC], kernel: int, narrow: int, wide: int, tokens: int, normed: bool
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tokens, narrow)
        padding = kernel - 1 if kind is LinearizedConvolution else kernel // 2
        layers = (
            kind(*widths, kernel, padding=padding)
            for widths in ((narrow, wide), (wide, narrow), (narrow, wide), (wide, narrow))
        )
        self.layers = nn.ModuleList(
            nn.utils.weight_norm(layer, dim=2) if normed else layer for layer in layers
        )
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.transpose(0, 1)

    def step_by_step(self, tokens: Tensor) -> Tensor:
        state, outputs = {}, []
        for x in self.embedding(tokens).split(1, dim=1):
            for layer in self.layers:
                x = torch.tanh(layer(x, state))
            outputs.append(x)
        return torch.cat(outputs, dim=1)


KERNEL, WIDTH, WORDS = st.integers(1, 4), st.integers(2, 6), st.integers(2, 40)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm:FutureWarning", "ignore:Using non-ful"
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([ConvTBC, LinearizedConvolution]),
    *(KERNEL, WIDTH, WIDTH, WORDS, st.booleans()),
    st.sampled_from(["aligned", "column", "token"]),
    st.sampled_from(["all", "none"]),
)
def test_training_of_convolutions(
    kind: type[ConvTBC],
    kernel: int,
    narrow: int,
    wide: int,
    tokens: int,
    normed: bool,
    layout: str,
    depth: str,
) -> None:
    def build() -> nn.Module:
        return Convolutions(kind, kernel, narrow, wide, tokens, normed)

    model = build()
    sharing = share_from_embedding(model, model.embedding, layout=layout, depth=depth)
    assert sum(len(group.slots) for group in sharing.plan.groups) == 4
    check_training(build, sharing, torch.arange(12).view(2, 6) % tokens)


@settings(max_examples=20, deadline=None)
@given(KERNEL, WIDTH, WIDTH, WORDS, st.booleans())
def test_decoding_by_convolutions(
    kernel: int, narrow: int, wide: int, tokens: int, normed: bool
) -> None:
    """It is what the plain module decodes, also after an optimizer's step between decodings."""

    def build() -> nn.Module:
        return Convolutions(LinearizedConvolution, kernel, narrow, wide, tokens, normed)

    model = build().eval()
    share_from_embedding(model, model.embedding)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.arange(12).view(2, 6) % tokens
    output = model(batch)  # all at once: a convolution sees no later token
    output.square().sum().backward()
    decoded = []
    for _ in range(2):
        with torch.no_grad():
            decoded.append(model.step_by_step(batch))
            expected = loaded(build(), model).step_by_step(batch)
        assert_passes_close(decoded[-1], expected)
        optimizer.step()
    assert_passes_close(decoded[0], output)
    assert not torch.allclose(*decoded)


# ---------------------------------------------------------------------- attention


class Attention(nn.Module):
    """A decoder's attention to itself and to a memory of another width. The table is read by
    the weights alone, so that what reaches it came through them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 10)
        self.itself, self.memory = (
            nn.ModuleList(MultiheadAttention(8, 2, **options) for _ in range(2))
            for options in (
                {"self_attention": True},
                {"encoder_decoder_attention": True, "kdim": 6, "vdim": 6},
            )
        )
        self.double()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        for itself, other in zip(self.itself, self.memory, strict=True):
            x = x + itself(x, x, x, attn_mask=mask)[0]
            x = x + other(x, memory, memory)[0]
        return x

    def step_by_step(self, x: Tensor, memory: Tensor) -> Tensor:
        state, outputs = {}, []
        for step in x.split(1):
            for itself, other in zip(self.itself, self.memory, strict=True):
                step = step + itself(step, step, step, incremental_state=state)[0]
                step = (
                    step + other(step, memory, memory, incremental_state=state, static_kv=True)[0]
                )
            outputs.append(step)
        return torch.cat(outputs)


def sequences() -> tuple[Tensor, Tensor]:
    generator = seeds.generator(0)
    return tuple(
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((5, 2, 8), (4, 2, 6))
    )


def test_attention_in_training_and_step_by_step() -> None:
    """The first hands its children's weights to torch, the second calls the children."""
    model = Attention()
    sharing = share_from_embedding(model, model.embedding)
    assert sum(len(group.slots) for group in sharing.plan.groups) == 16
    output = check_training(Attention, sharing, *sequences())
    plain = loaded(Attention(), model)
    assert_passes_close(plain(*sequences()), output)
    assert_passes_close(model.step_by_step(*sequences()), output, terms=SINGLE)
    with torch.no_grad():
        steps = [m.eval().step_by_step(*sequences()) for m in (model, plain)]
    assert_passes_close(*steps)
    assert_passes_close(steps[0], output, terms=SINGLE)


def test_the_gradient_of_an_output_projection_reaches_table_and_projection() -> None:
    model = Attention()
    sharing = share_from_embedding(
        model, model.embedding, select=lambda path, owner: path.endswith("out_proj.weight")
    )
    check_training(Attention, sharing, *sequences())
    stored = [model.embedding.weight, sharing.pool.projection]
    gradients = [tensor.grad for tensor in stored]
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    steps = model.step_by_step(*sequences()).square().sum()
    assert_passes_close(torch.autograd.grad(steps, stored), gradients, terms=SINGLE)


# ---------------------------------------------------------------------- whole models

CASES = {case.name.partition(" ")[2]: case for case in fairseq_models.CASES}
decoders = pytest.mark.parametrize("name", ["transformer", "lstm", "fconv"])


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().eval()


def shared(case: Case) -> nn.Module:
    model = build(case)
    share_from_embedding(model, case.embedding(model), select=case.select)
    return model


@pytest.mark.parametrize("prepared", [False, True])
@decoders
def test_fast_generation(name: str, prepared: bool) -> None:
    """What fairseq-generate does to every model changes no token and leaves no weight norm."""

    def fast(model: nn.Module) -> nn.Module:
        if prepared:
            generation = Namespace(beam=3, print_alignment=True)
            model.prepare_for_inference_(Namespace(generation=generation))
        else:
            model.make_generation_fast_()
        return model

    case = CASES[name]
    model = shared(case)
    tokens = case.generate(model)
    assert tokens == case.generate(materialize(copy.deepcopy(model)))
    quick = fast(copy.deepcopy(model))
    assert case.generate(quick) == tokens
    normed = [path for path, _ in model.named_parameters() if path.endswith("weight_g")]
    assert bool(normed) == (name == "fconv")
    for path in normed:
        layer = quick.get_submodule(path.rpartition(".")[0])
        assert type(layer.weight) is nn.Parameter
        assert type(layer) is original_class(type(layer))
        assert not sources(layer)
        assert "weight_v" not in layer.__dict__ | layer._parameters
    assert not [n for n, _ in quick.named_parameters() if n.endswith(("weight_g", "weight_v"))]
    names = [n for n, _ in quick.named_parameters()]
    assert [n for n, _ in fast(quick).named_parameters()] == names
    assert case.generate(quick) == tokens

    for plain in (materialize(quick), fast(materialize(copy.deepcopy(model)))):
        assert case.generate(plain) == tokens
        assert not any("paramshare" in key for part in plain.modules() for key in part.__dict__)
        assert not any("paramshare" in n for n, _ in plain.named_modules())
    assert case.generate(model) == tokens  # it is what it was
    assert sum(len(sources(part)) for part in model.modules()) > 0


@decoders
def test_a_decoder_that_is_called_directly(name: str) -> None:
    """fairseq's generators call it step by step, and never the model that was shared."""
    case = CASES[name]
    model = shared(case).double()
    plain = loaded(build(case).double(), model)
    tokens = fairseq_models.TARGET[:, :-1]
    outputs = []
    for m in (model, plain):
        encoded = m.encoder.forward_torchscript(
            {"src_tokens": fairseq_models.SOURCE, "src_lengths": fairseq_models.LENGTHS}
        )
        state: dict = {}
        with torch.no_grad():
            steps = [
                m.decoder.forward(tokens[:, :n], encoder_out=encoded, incremental_state=state)[0]
                for n in range(1, tokens.shape[1] + 1)
            ]
        outputs.append(torch.cat(steps, dim=1))
    assert_passes_close(*outputs)
    assert_passes_close(outputs[0], case.run(model), terms=SINGLE)


@decoders
def test_how_often_weights_are_generated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once for a training step; each once for all decoding until the table changes."""
    generated: list[list[int]] = []
    generate = Pool._generate

    def counting(pool: Pool, indices: list[int], frame: dict) -> list[Tensor]:
        generated.append(list(indices))
        return generate(pool, indices, frame)

    monkeypatch.setattr(Pool, "_generate", counting)
    case = CASES[name]
    model = shared(case)
    groups = list(range(len(model.paramshare.plan.groups)))
    generated.clear()
    case.loss(model.train()).backward()
    assert generated == [groups]
    generator = fairseq_models.generator(model)
    for change in (0, 0.1):
        generated.clear()
        with torch.no_grad():
            model.paramshare.projection.add_(change)
        for _ in range(2):
            generator.generate([model], fairseq_models.SAMPLE)
        assert sorted(sum(generated, [])) == groups


TIES = {
    "transformer": [
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.output_projection.weight",
    ],
    "transformer_lm": ["decoder.embed_tokens.weight", "decoder.output_projection.weight"],
    "lstm": ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
    "fconv": ["decoder.embed_tokens.weight", "decoder.fc3.weight"],
    "roberta": ["encoder.sentence_encoder.embed_tokens.weight", "encoder.lm_head.weight"],
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_trainer_ties_again(name: str) -> None:
    """It sets every Parameter that it finds twice: a derived weight must not be among them."""
    ties = _catalog_shared_params(shared(CASES[name]))
    assert ties == _catalog_shared_params(build(CASES[name]))
    if name in TIES:
        assert [names for names in ties if names[0].endswith(".weight")] == [TIES[name]]


def test_step_by_step_attention_is_factored_where_that_was_prepared_for(capsys) -> None:
    """A step calls queries, keys and values one by one, and they have one input."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(200, 2)
            self.layers = nn.ModuleList(
                MultiheadAttention(32, 2, self_attention=True) for _ in range(2)
            )
            self.double()

        def forward(self, x: Tensor, step: bool) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x, incremental_state={} if step else None)[0]
            return x

    module = Step()
    sharing = share_from_embedding(module, module.embedding)
    assert {group.execution for group in sharing.plan.groups} == {"materialized"}
    plain = loaded(Step(), module)
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    for step, execution in ((True, "factored"), (False, "materialized")):
        prepared = prepare_for_inference(module, tokens=(x, step))
        assert set(prepared.executions.values()) == {execution}
        with torch.no_grad():
            assert_passes_close(module(x, step), plain(x, step), terms=SINGLE)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert f"layers.*.{name}.weight" in str(sharing).split("reduced once: ")[1].split("\n")[0]
