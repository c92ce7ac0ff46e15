"""ShareBERT: a BERT encoder of ordinary layers, made small by `share_from_embedding`.

Ours by default. `released=True` is the model of the authors' released code, to the digit: tokens
are normalised before and after the lift, scores are divided by d^(2/3), weights are read token by
token from the last column of the virtual table backwards, the pooler has no tanh and the output
layer is not tied. Both read the weights of all layers from the same columns; biases and norms are
each layer's own. Works with `with torch.device("meta")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paramshare.errors import ShareError
from paramshare.layout import fit
from paramshare.marks import pools, sources
from paramshare.report import Sharing, count_parameters
from paramshare.sharing import share_from_embedding

# Sizes of the papers' models: embedding (F), hidden (H), intermediate (I), layers (L). Those of the
# light models are inferred from the operations that the paper reports for them.
_SIZES = {
    "small": (128, 2048, 4096, 12),
    "base": (384, 2048, 4096, 12),
    "large": (768, 2048, 4096, 6),
    "light-base": (384, 1024, 2048, 4),
    "light-small": (128, 768, 2048, 4),
    "eps": (768, 768, 3072, 12),
    "eps-wide": (1152, 2048, 4096, 12),
}
# The wide EPS model has no columns left for a pooler, and fits in the column layout only.
_EXTRAS: dict[str, dict[str, Any]] = {
    "eps": {"num_attention_heads": 12, "sharing": "eps"},
    "eps-wide": {"sharing": "eps", "layout": "column", "share_pooler": False},
}
PRESETS = tuple(_SIZES)
_LARGEST = 2**24  # size: damaged configurations must not overflow what is computed of them
SHARINGS = ("veps", "eps", "none")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ShareBertConfig:
    """Sizes and choices of a ShareBERT. `released=True` is as in the released code, which has its
    own depth, layout, blocks and table_gradient: leave these out."""

    vocab_size: int = _option(30528, "tokens of the table; 30522 of BERT, padded")
    embedding_size: int = _option(128, "features of the token table (F)")
    hidden_size: int = _option(2048, "width of the encoder (H)")
    intermediate_size: int = _option(4096, "width of the feed-forward layers (I)")
    num_hidden_layers: int = _option(12, "encoder layers")
    num_attention_heads: int = _option(16, "attention heads")
    max_position_embeddings: int = _option(128, "longest input")
    type_vocab_size: int = _option(2, "token types")
    hidden_dropout_prob: float = _option(0.1, "dropout of embeddings and of layers' outputs")
    attention_probs_dropout_prob: float = _option(0.1, "dropout of attention probabilities")
    layer_norm_eps: float = _option(1e-5, "epsilon of the layer norms")
    initializer_range: float = _option(0.02, "standard deviation of initial weights")
    pre_norm: bool = _option(True, "norms before attention and feed-forward, and a final one")
    sharing: str = _option("veps", f"where weights are read from: {', '.join(SHARINGS)}")
    depth: str = _option("all", "which layers read the same columns")
    layout: str = _option("aligned", "how columns are read as a matrix")
    blocks: int | None = _option(None, "aligned layout: at most this many rows in a column")
    table_gradient: float = _option(0.1, "share of the weights' gradient that reaches the table")
    whiten: bool = _option(False, "the table's rows are read as an orthonormal basis (VEPS)")
    share_pooler: bool = _option(True, "the pooler's weight is read from the table, too")
    released: bool = _option(False, "exactly the model of the released code")

    @classmethod
    def preset(cls, name: str, released: bool = False, **changes: Any) -> Any:
        """One of `PRESETS`: the papers' five VEPS models and two EPS models; `changes` are options.

        Raises ShareError for another name, and where `changes` do not go together with it.
        """
        if name not in _SIZES:
            raise ShareError(f"preset {name!r} is unknown: use one of {', '.join(PRESETS)}")
        names = ("embedding_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        sizes = dict(zip(names, _SIZES[name], strict=True))
        config = cls(**{**sizes, **_EXTRAS.get(name, {}), "released": released, **changes})
        config.check()
        return config

    def check(self) -> None:
        """Raises ShareError where an option makes no sense, or some do not go together."""
        for f in fields(ShareBertConfig):
            value, default = getattr(self, f.name), f.default
            kinds: Any = {float: int | float, type(None): int | None}.get(
                type(default), type(default)
            )
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise ShareError(f"{f.name}={value!r} cannot be: it is like {default!r}")
            if type(default) is int and not 1 <= value <= _LARGEST:
                raise ShareError(f"{f.name}={value!r} is out of range: use 1 to {_LARGEST:,}")
            if type(default) is float and not 0 <= value <= 1:
                raise ShareError(f"{f.name}={value!r} is out of range: use 0 to 1")
        if self.hidden_size % self.num_attention_heads:
            raise ShareError(
                f"hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.sharing not in SHARINGS:
            raise ShareError(f"sharing={self.sharing!r} is unknown: use {', '.join(SHARINGS)}")
        if self.whiten and (self.released or self.sharing != "veps"):
            raise ShareError(
                f"whiten=True needs sharing='veps' and released=False, not {self.sharing!r} and "
                f"{self.released}"
            )
        if self.released and self.sharing != "none":
            self._check_released()

    def _check_released(self) -> None:
        if self.sharing == "eps":
            raise ShareError("the released code has no EPS model: use released=False")
        for name in ("depth", "layout", "blocks", "table_gradient"):
            value, default = getattr(self, name), getattr(ShareBertConfig, name)
            if value != default:
                raise ShareError(f"released=True has its own {name}: leave {name}={value!r} out")
        h, i = self.hidden_size, self.intermediate_size
        square, wide = (fit("token", h, cols, self.vocab_size, None)[1] for cols in (h, i))
        needed = (5 if self.share_pooler else 4) * square + 2 * wide
        if needed > h:
            raise ShareError(
                f"released=True has as many columns as hidden_size={h}, and with "
                f"vocab_size={self.vocab_size} needs {needed}: use released=False, or other sizes"
            )

    def operations(self, tokens: int = 128) -> int:
        """Floating-point operations of the encoder for one sequence, two a multiply-add, as the
        paper counts them: products with weights and attention; no embeddings, lift or pooler, and
        nothing for the generation of weights."""
        h, i = self.hidden_size, self.intermediate_size
        products = tokens * (4 * h * h + 2 * h * i)
        return 2 * self.num_hidden_layers * (products + 2 * tokens * tokens * h)


class Embeddings(nn.Module):
    """Tokens (`embedding_size` features, lifted to `hidden_size`), positions and types."""

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__()
        features, width, eps = config.embedding_size, config.hidden_size, config.layer_norm_eps
        self.tokens = nn.Embedding(config.vocab_size, features)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.before_lift = nn.LayerNorm(features, eps) if config.released else nn.Identity()
        self.lift: nn.Module = nn.Linear(features, width, bias=config.released)
        if features == width and not config.released:
            self.lift = nn.Identity()
        self.after_lift = nn.LayerNorm(width, eps) if config.released else nn.Identity()
        self.norm = nn.Identity() if config.released else nn.LayerNorm(width, eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.after_lift(self.lift(self.before_lift(x)))
        length, longest = x.shape[1], self.positions.num_embeddings
        if position_ids is None:
            if length > longest:
                raise ShareError(f"the input has {length} tokens, the model's longest is {longest}")
            position_ids = torch.arange(length, device=x.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        return self.dropout(
            self.norm(x + self.positions(position_ids) + self.types(token_type_ids))
        )


@dataclass
class Batch:
    """What attention must know of a batch whose tokens may stand packed, without their padding."""

    size: int
    length: int
    mask: Tensor | None  # True where a token is, (size, 1, 1, length)
    tokens: Tensor | None  # packed: the places of the tokens in the flat batch

    def unpack(self, x: Tensor) -> Tensor:
        """`(size, length, width)` of the packed `(tokens, width)`, zero where padding is."""
        if self.tokens is None:
            return x
        flat = x.new_zeros(self.size * self.length, x.shape[-1])
        return flat.index_copy(0, self.tokens, x).view(self.size, self.length, -1)

    def first(self, x: Tensor) -> Tensor:
        """The first token of each row, `(size, width)`, wherever its padding stands."""
        if self.mask is None:
            return x[:, 0]
        return x[torch.arange(self.size, device=x.device), self.mask[:, 0, 0].int().argmax(1)]

    def pack(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else x.flatten(0, 1)[self.tokens]


class Layer(nn.Module):
    """One encoder layer. Weights come in the order in which the released code hands out columns."""

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__()
        width, wide, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.intermediate = nn.Linear(width, wide)
        self.output = nn.Linear(wide, width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.output_norm = nn.LayerNorm(width, eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.pre_norm = config.pre_norm
        # The released code divides by d^(2/3), not by the square root.
        self.scale = (width // self.heads) ** (-2 / 3 if config.released else -1 / 2)

    def forward(self, x: Tensor, batch: Batch, attentions: list[Tensor] | None) -> Tensor:
        if self.pre_norm:
            x = x + self._attend(self.attention_norm(x), batch, attentions)
            return x + self._feed_forward(self.output_norm(x))
        x = self.attention_norm(x + self._attend(x, batch, attentions))
        return self.output_norm(x + self._feed_forward(x))

    def _attend(self, x: Tensor, batch: Batch, attentions: list[Tensor] | None) -> Tensor:
        q, k, v = (
            batch.unpack(linear(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        dropout = self.attention_dropout if self.training else 0.0
        if attentions is None:
            x = F.scaled_dot_product_attention(q, k, v, batch.mask, dropout, scale=self.scale)
        else:  # the fused operation does not tell its probabilities
            scores = q @ k.mT * self.scale
            if batch.mask is not None:
                scores = scores.masked_fill(~batch.mask, torch.finfo(scores.dtype).min)
            attentions.append(scores.softmax(-1))
            x = F.dropout(attentions[-1], dropout) @ v
        return self.dropout(self.attention_output(batch.pack(x.transpose(1, 2).flatten(2))))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.output(F.gelu(self.intermediate(x))))


class ShareBert(nn.Module):
    """The encoder with its pooler. Raises ShareError where the configuration does not fit."""

    gradient_checkpointing = False  # transformers sets it, and the function that does it
    _gradient_checkpointing_func: Callable[..., Tensor] = staticmethod(  # type: ignore[assignment]
        partial(checkpoint, use_reentrant=False)
    )
    _sharing: Sharing | None = None

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__()
        config.check()
        self.released = config.released
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        width = config.hidden_size
        self.norm = nn.LayerNorm(width, config.layer_norm_eps) if config.pre_norm else None
        self.pooler = nn.Linear(width, width)
        initialise(self, config)
        if config.sharing != "none":
            self._sharing = self._share(config)

    @property
    def sharing(self) -> Sharing | None:
        """How the configuration shares the weights; None where it does not, or no more: they were
        materialized."""
        held = self._sharing is not None and any(p is self._sharing.pool for p in pools(self))
        return self._sharing if held else None

    def _share(self, config: ShareBertConfig) -> Sharing:
        def select(path: str, owner: nn.Module) -> bool:
            is_weight = isinstance(owner, nn.Linear) and path.endswith(".weight")
            pooler = path == "pooler.weight" and config.share_pooler
            return is_weight and (path.startswith("layers.") or pooler)

        released: dict[str, Any] = {
            "layout": "token",
            "projection_bias": True,
            "virtual_dim": config.hidden_size,
            "table_gradient": 1.0,
            "init": "paper",
        }
        ours: dict[str, Any] = {
            "layout": config.layout,
            "blocks": config.blocks,
            "table_gradient": config.table_gradient,
            "whiten": config.whiten,
        }
        return share_from_embedding(
            self,
            self.embeddings.tokens,
            virtual=config.sharing == "veps",
            select=select,
            depth=config.depth,
            **(released if config.released else ours),
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
        attentions: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states `(batch, length, hidden_size)` and the pooled first ones
        `(batch, hidden_size)`.

        attention_mask: `(batch, length)`, zero where padding is. inputs_embeds: `(batch, length,
        embedding_size)` instead of ids. hidden_states, attentions: lists that get what goes into
        the first layer and comes out of each, and the attention probabilities of each.

        Padding is left out of what the layers do, and the last hidden states are zero there; not in
        the released model, nor where lists are given or the call is compiled.
        """
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        packed = not self.released and hidden_states is None and attentions is None
        batch = _batch(x, attention_mask, packed)
        x = batch.pack(x)
        if hidden_states is not None:
            hidden_states.append(x)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training and attentions is None:
                x = self._gradient_checkpointing_func(layer, x, batch, attentions)
            else:
                x = layer(x, batch, attentions)
            if hidden_states is not None:
                hidden_states.append(x)
        x = batch.unpack(x if self.norm is None else self.norm(x))
        if self.released:
            return x, self.pooler(x[:, 0])
        return x, self.pooler(batch.first(x)).tanh()


class MaskedLMHead(nn.Module):
    """Logits of tokens. Ours comes down to the table's features first (ALBERT's head) and is tied
    to the table; the released one is as wide as the encoder, with an output layer of its own and a
    bias that it never adds."""

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__()
        width = config.hidden_size if config.released else config.embedding_size
        self.transform = nn.Linear(config.hidden_size, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.output = nn.Linear(width, config.vocab_size, bias=False) if config.released else None
        initialise(self, config)

    @torch.no_grad()
    def resize(self, tokens: int, spread: float) -> None:
        """For a table of so many tokens: the first ones keep what they have."""
        old = self.bias
        kept = min(tokens, len(old))
        self.bias = nn.Parameter(old.new_zeros(tokens), old.requires_grad)
        self.bias[:kept] = old[:kept]
        if self.output is not None:
            weight = self.output.weight
            rows = torch.randn(tokens, weight.shape[1]).to(weight) * spread
            rows[:kept] = weight[:kept]
            self.output.weight = nn.Parameter(rows, weight.requires_grad)
            self.output.out_features = tokens

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """`(..., vocab_size)` for hidden states `(..., hidden_size)`."""
        x = self.norm(F.gelu(self.transform(x)))
        return F.linear(x, table, self.bias) if self.output is None else self.output(x)


@torch.no_grad()
def initialise(module: nn.Module, config: ShareBertConfig) -> None:
    """Fills the parameters of all modules in `module` but for those of weights that are shared."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            if not sources(part):
                part.weight.normal_(0, config.initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()
    if not config.released and isinstance(module, ShareBert):
        lift = module.embeddings.lift
        if isinstance(lift, nn.Linear):
            # The tokens keep their spread through it. With that of the other weights, positions
            # would be many times as large as tokens when they meet, and training would begin
            # with learning to tell tokens apart.
            lift.weight.normal_(0, lift.in_features**-0.5)
    if config.released and isinstance(module, ShareBert):
        # The released initialisation does not touch the biases of shared weights, which stay as
        # torch.randn made them, the same in all layers.
        first, *others = module.layers
        for name in ("query", "key", "value", "intermediate", "output", "attention_output"):
            getattr(first, name).bias.normal_()
            for layer in others:
                getattr(layer, name).bias.copy_(getattr(first, name).bias)
        module.pooler.bias.normal_()


def _batch(x: Tensor, attention_mask: Tensor | None, packed: bool) -> Batch:
    size, length, _ = x.shape
    if attention_mask is None:
        return Batch(size, length, None, None)
    if attention_mask.shape != (size, length):
        raise ShareError(
            f"attention_mask is {tuple(attention_mask.shape)}, must be (batch, length), here "
            f"{(size, length)}"
        )
    mask = attention_mask.to(x.device) > 0
    tokens = None
    if packed and not torch.compiler.is_compiling():  # their number would break the graph
        tokens = mask.flatten().nonzero().squeeze(1)
        if tokens.numel() == mask.numel():
            return Batch(size, length, None, None)
    return Batch(size, length, mask[:, None, None, :], tokens)


def report(config: ShareBertConfig, tokens: int = 128) -> str:
    """A table: what the model of these sizes stores as ours, as the released one, and without
    sharing; and its operations. Nothing is allocated."""
    plain = ShareBertConfig(**{f.name: getattr(config, f.name) for f in fields(ShareBertConfig)})
    same = ("depth", "layout", "blocks", "table_gradient")
    variants: dict[str, dict[str, Any]] = {
        "ours": {"released": False},
        "released": {"released": True} | {name: getattr(ShareBertConfig, name) for name in same},
        "not shared": {"released": False, "sharing": "none"},
    }
    rows = [("", "encoder", "token table", "other", "with MLM head")]
    for name, change in variants.items():
        variant = replace(plain, **change)
        try:
            with torch.device("meta"):
                model, head = ShareBert(variant), MaskedLMHead(variant)
        except ShareError:
            if name != "released":
                raise
            rows.append((name, "-", "-", "-", "-"))
            continue
        stored, table = count_parameters(model), model.embeddings.tokens.weight.numel()
        numbers = (stored, table, stored - table, stored + count_parameters(head))
        rows.append((name, *(f"{number:,}" for number in numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    operations = f"encoder, {tokens} tokens: {config.operations(tokens) / 1e9:.3f} GFLOPs"
    return "\n".join([*lines, operations])
