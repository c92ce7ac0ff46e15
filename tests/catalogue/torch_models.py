"""Models of torch's own layers, and of layers that users write: one for each kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from warned import filtered

from catalogue import Case, batch, greedy
from paramshare.models import TransformerLM

TOKENS, WIDTH = 60, 16


class LanguageModel(nn.Module):
    """Predicts the next token: table, body, output tied to the table."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.body = body
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.body(self.embedding(tokens)))


class Recurrent(nn.Module):
    """nn.LSTM and its like."""

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, 2, batch_first=True, dropout=0.0, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Tagger(nn.Module):
    """Both directions, projected."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 12, 2, batch_first=True, bidirectional=True, proj_size=WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Cells(nn.Module):
    """A loop over time by hand."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = [], [None, None]
        for step in x.unbind(1):
            for n, cell in enumerate(self.cells):
                states[n] = cell(step, states[n])
                step = states[n][0] if isinstance(cell, nn.LSTMCell) else states[n]
            outputs.append(step)
        return torch.stack(outputs, 1)


class Convolutions(nn.Module):
    """Causal dilated convolutions, optionally weight-normed."""

    def __init__(self, normed: Callable[[nn.Module], nn.Module], groups: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            normed(nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=2**n, groups=groups)) for n in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        for n, layer in enumerate(self.layers):
            x = x + F.glu(layer(F.pad(x, (2 * 2**n, 0))), 1)
        return x.mT


class FeedForward(nn.Module):
    """A stack of nn.Linear."""

    def __init__(self, normed: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(normed(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class CrossAttention(nn.Module):
    """Attention whose keys and values have widths of their own: separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, kdim=10, vdim=10, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = x + layer(x, memory, memory, attn_mask=mask, is_causal=True)[0]
        return x


class Own(nn.Module):
    """A user's own: it reads the weight of a child, and has matrices of two and of three
    dimensions that it multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, 12, bias=False)
        self.matrix = nn.Parameter(torch.randn(12, WIDTH) / 4)
        self.heads = nn.Parameter(torch.randn(4, WIDTH, WIDTH // 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x @ self.child.weight.t() @ self.matrix
        return x + torch.einsum("bti,hio->btho", torch.tanh(x), self.heads).flatten(2)


class Seq2Seq(nn.Module):
    """nn.Transformer: encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.output(
            self.transformer(
                self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
            )
        )


INPUT = batch(TOKENS)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:])


def _case(name: str, kinds: str, build: Callable[[], nn.Module], **more) -> Case:
    """A model that maps tokens to logits of the next one."""
    return Case(
        name,
        kinds,
        build,
        embedding=lambda model: model.embedding,
        run=lambda model: model(INPUT),
        loss=lambda model: _loss(model(INPUT), INPUT),
        **{"generate": lambda model: greedy(model, INPUT[:, :2]), **more},
    )


def _body(name: str, kinds: str, body: Callable[[], nn.Module], **more) -> Case:
    return _case(name, kinds, lambda: LanguageModel(body()), **more)


def _by_hook(layer: nn.Module) -> nn.Module:
    with filtered("ignore", FutureWarning):
        return nn.utils.weight_norm(layer)


def _plain(layer: nn.Module) -> nn.Module:
    return layer


NO_RNN = "torch.compile breaks its graph at an RNN"

CASES = [
    _case(
        "nn.TransformerEncoder",
        "MultiheadAttention (packed), Linear",
        lambda: TransformerLM(TOKENS, WIDTH, layers=2, feed_forward=32, dropout=0.0),
    ),
    Case(
        "nn.Transformer",
        "MultiheadAttention (packed), Linear",
        Seq2Seq,
        embedding=lambda model: model.embedding,
        run=lambda model: model(INPUT, INPUT),
        loss=lambda model: _loss(model(INPUT, INPUT), INPUT),
        generate=lambda model: greedy(lambda target: model(INPUT, target), INPUT[:, :1]),
    ),
    _body("nn.MultiheadAttention", "MultiheadAttention (kdim, vdim)", CrossAttention),
    _body("nn.Linear stack", "Linear", lambda: FeedForward(_plain)),
    _body("nn.LSTM", "LSTM", lambda: Recurrent(nn.LSTM), no_compile=NO_RNN),
    _body(
        "nn.LSTM, bidirectional",
        "LSTM (proj_size)",
        Tagger,
        no_compile=NO_RNN,
        generate=None,
        no_generation="it reads both directions",
    ),
    _body("nn.GRU", "GRU", lambda: Recurrent(nn.GRU), no_compile=NO_RNN),
    _body("nn.RNN", "RNN", lambda: Recurrent(nn.RNN), no_compile=NO_RNN),
    _body("nn.LSTMCell loop", "LSTMCell", lambda: Cells(nn.LSTMCell)),
    _body("nn.GRUCell loop", "GRUCell", lambda: Cells(nn.GRUCell)),
    _body("nn.RNNCell loop", "RNNCell", lambda: Cells(nn.RNNCell)),
    _body("nn.Conv1d stack", "Conv1d (groups, dilation)", lambda: Convolutions(_plain, 2)),
    _body(
        "nn.utils.weight_norm",
        "Conv1d (weight norm by hook)",
        lambda: Convolutions(_by_hook),
    ),
    _body(
        "parametrizations.weight_norm",
        "Linear (parametrized weight norm)",
        lambda: FeedForward(parametrizations.weight_norm),
    ),
    _body(
        "a module of your own",
        "raw Parameters, a child's weight (select=)",
        Own,
        select=lambda path, owner: path.startswith("body."),
    ),
]
