"""Small models of every shape that sharing has to deal with. All run in float64."""

from __future__ import annotations

import seeds
import torch
from torch import Tensor, nn
from warned import filtered

from paramshare import Sharing, share_from_embedding

TOKENS = 60


class Encoder(nn.Module):
    """nn.TransformerEncoder, which has a fast path; output tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.output = nn.Linear(16, TOKENS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.output(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))


class Seq2Seq(nn.Module):
    """nn.Transformer: encoder and decoder stacks, cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.output = nn.Linear(16, TOKENS)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        return self.output(
            self.transformer(
                x, x[:, :-1], src_key_padding_mask=padding, memory_key_padding_mask=padding
            )
        )


class Block(nn.Module):
    """Attention by hand and a feed-forward of plain nn.Linears, which are called."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        if padding is not None:
            scores = scores.masked_fill(padding[:, None], -1e9)
        x = x + scores.softmax(-1) @ self.value(x)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Narrow(nn.Module):
    """A narrow table under wide layers: factored execution needs fewer operations there."""

    def __init__(self, features: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, features)
        self.lift = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width, 24) for _ in range(3))
        self.output = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.lift(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, padding)
        return self.output(x)


class CrossAttention(nn.Module):
    """Attention with kdim and vdim of their own: three separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.memory = nn.Linear(16, 10)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(16, 4, kdim=10, vdim=10, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        memory = self.memory(x)
        for layer in self.layers:
            x = x + layer(x, memory, memory, key_padding_mask=padding)[0]
        return x


class Recurring(nn.Module):
    """ALBERT: one layer in a list, used at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layers = nn.ModuleList([Block(16, 24)])

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.layers[0](x, padding)
        return x


class Chain(nn.Sequential):
    """An nn.Sequential of everything, table included."""

    def __init__(self) -> None:
        stack = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        super().__init__(nn.Embedding(TOKENS, 16), stack, nn.Tanh(), nn.Linear(16, 4))

    @property
    def embedding(self) -> nn.Module:
        return self[0]

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return super().forward(tokens)


class Recurrent(nn.Module):
    """A stack inside of one module: two layers, both directions, projected, dropout between."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True, **options}
        self.rnn = kind(16, 12, **options)
        width = options.get("proj_size") or 12
        self.output = nn.Linear(width * (2 if options["bidirectional"] else 1), 5)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if padding is None:
            return self.output(self.rnn(x)[0])
        packed = nn.utils.rnn.pack_padded_sequence(
            x, (~padding).sum(1), batch_first=True, enforce_sorted=False
        )
        x, _ = nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        return self.output(x)


class Projected(Recurrent):
    """An LSTM with proj_size: a third matrix a layer."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM, proj_size=7)


class Gated(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU, bidirectional=False, bias=False)


class Elman(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.RNN, num_layers=1, nonlinearity="relu")


class Cells(nn.Module):
    """A decoder that steps through its cells by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.cells = nn.ModuleList(nn.LSTMCell(16, 16) for _ in range(2))
        self.gru = nn.GRUCell(16, 12)
        self.rnn = nn.RNNCell(12, 16)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        outputs, states = [], [None] * 4
        for x in self.embedding(tokens).unbind(1):
            for n, cell in enumerate(self.cells):
                states[n] = cell(x, states[n])
                x = states[n][0]
            states[2] = self.gru(x, states[2])
            states[3] = self.rnn(states[2], states[3])
            outputs.append(states[3])
        return torch.stack(outputs, 1)


class Convolutional(nn.Module):
    """A stack of gated convolutions: groups, dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.layers = nn.ModuleList(
            self.normed(nn.Conv1d(16, 32, 3, padding=2**n, dilation=2**n, groups=2))
            for n in range(3)
        )
        self.heads = nn.ModuleList(self.normed(nn.Linear(16, 16)) for _ in range(2))

    @staticmethod
    def normed(layer: nn.Module) -> nn.Module:
        return layer

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens).mT
        for layer in self.layers:
            x = x + nn.functional.glu(layer(x), dim=1)
        x = x.mT
        for head in self.heads:
            x = x + torch.tanh(head(x))
        return x @ self.embedding.weight.mT


class Normed(Convolutional):
    """Weight norm as a parametrization."""

    @staticmethod
    def normed(layer: nn.Module) -> nn.Module:
        return nn.utils.parametrizations.weight_norm(layer)


class NormedByHook(Convolutional):
    """Weight norm as a hook, as fairseq's fconv has it."""

    @staticmethod
    def normed(layer: nn.Module) -> nn.Module:
        with filtered("ignore", FutureWarning):
            return nn.utils.weight_norm(layer)


class Raw(nn.Module):
    """A user's own: reads the weight of a child, multiplies by Parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.child = nn.Linear(16, 12, bias=False)
        self.matrix = nn.Parameter(torch.randn(12, 16) / 4)
        self.heads = nn.Parameter(torch.randn(3, 16, 4) / 4)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) @ self.child.weight.t() @ self.matrix
        return torch.einsum("bti,hio->bhto", torch.tanh(x), self.heads)


ZOO = {
    cls.__name__: cls
    for cls in (
        Encoder,
        Seq2Seq,
        Narrow,
        CrossAttention,
        Recurring,
        Chain,
        Recurrent,
        Projected,
        Gated,
        Elman,
        Cells,
        Convolutional,
        Normed,
        NormedByHook,
        Raw,
    )
}


# What is shared where nothing is by default.
SELECT = {"Raw": lambda path, owner: path in ("child.weight", "matrix", "heads")}


def share(module: nn.Module, **options) -> Sharing:
    options = {"select": SELECT.get(type(module).__name__), **options}
    return share_from_embedding(module, module.embedding, **options)


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return ZOO[name]().to(dtype)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens `(3, 7)` and their padding mask (True where padded), one row without padding."""
    tokens = torch.randint(1, TOKENS, (3, 7), generator=seeds.generator(seed))
    padding = torch.arange(7) >= torch.tensor([7, 5, 6])[:, None]
    return tokens, padding
