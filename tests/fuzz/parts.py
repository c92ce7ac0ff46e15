"""Models built from pure data: a specification is drawn, printed, and made smaller.

A model looks tokens up, sends them through stages, each of one kind of layer in one kind of
container, and multiplies by an output layer. Every layer's output is cut or padded to the shape
of its input and added to it, so that any layer may follow any other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from warned import filtered

from paramshare import register_kind

Spec = dict[str, Any]


def fitted(y: Tensor, x: Tensor) -> Tensor:
    """`y` `(batch, length, width)` cut or padded to the shape of `x`."""
    y = y[:, : x.shape[1], : x.shape[2]]
    return F.pad(y, (0, x.shape[2] - y.shape[2], 0, x.shape[1] - y.shape[1]))


def widened(x: Tensor, width: int) -> Tensor:
    return fitted(x, x.new_empty(1, x.shape[1], width))


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer makes of `x` `(batch, length, width)`, in three dimensions."""
    if isinstance(layer, nn.MultiheadAttention):
        key, value = widened(x, layer.kdim), widened(x, layer.vdim)
        return _turned(layer, layer.batch_first, x, key, value)
    if isinstance(layer, nn.TransformerEncoderLayer):
        return _turned(layer, layer.self_attn.batch_first, x)
    if isinstance(layer, nn.TransformerDecoderLayer):
        return _turned(layer, layer.self_attn.batch_first, x, x.flip(1))
    if isinstance(layer, nn.RNNBase):
        return _turned(layer, layer.batch_first, x)
    if isinstance(layer, nn.RNNCellBase):
        state, outputs = None, []
        for step in x.unbind(1):
            state = layer(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)
    if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
        return layer(x.mT).mT
    if isinstance(layer, nn.Bilinear):
        return layer(x, x)
    if isinstance(layer, nn.Embedding):
        return layer(torch.arange(x.shape[1], device=x.device) % layer.num_embeddings)[None]
    return layer(x)


def _turned(layer: nn.Module, batch_first: bool, *inputs: Tensor) -> Tensor:
    """The output of a layer that may want the length first."""
    output = layer(*(x if batch_first else x.transpose(0, 1) for x in inputs))
    output = output[0] if isinstance(output, tuple) else output
    return output if batch_first else output.transpose(0, 1)


def step(layer: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(fitted(apply(layer, x), x))


class Step(nn.Module):
    """A layer with its residual, for containers that call their children."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return step(self.layer, x)


class Scaled(nn.Linear):
    """A linear layer that reads its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 0.5, self.weight, self.bias)


class Kernel(nn.Module):
    """A kernel whose last dimension is the output, and a registered kind."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, inputs, outputs) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel[0] + x.flip(1) @ self.kernel[1]


register_kind(Kernel, weights=("kernel",), out_last=True)


class Block(nn.Module):
    """Three layers that are given one input, and one that is given their product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, hidden) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scores = torch.tanh(self.query(x)) @ torch.tanh(self.key(x)).mT
        return self.down(torch.tanh(scores.softmax(-1) @ self.value(x)))


class Raw(nn.Module):
    """Parameters of its own, and the weight of a child that it reads."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, hidden)
        self.matrix = nn.Parameter(torch.randn(hidden, width) / 4)
        self.heads = nn.Parameter(torch.randn(2, width, hidden) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.child.weight.t()) @ self.matrix
        return torch.einsum("bti,hio->bto", x, self.heads)


MAKE = {
    "linear": nn.Linear,
    "scaled": Scaled,
    "block": Block,
    "attention": nn.MultiheadAttention,
    "encoder": nn.TransformerEncoderLayer,
    "decoder": nn.TransformerDecoderLayer,
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "lstm cell": nn.LSTMCell,
    "gru cell": nn.GRUCell,
    "rnn cell": nn.RNNCell,
    "conv": nn.Conv1d,
    "transposed": nn.ConvTranspose1d,
    "kernel": Kernel,
    "raw": Raw,
    "bilinear": nn.Bilinear,
    "positions": nn.Embedding,
}


def make_layer(stage: Spec) -> nn.Module:
    layer = MAKE[stage["kind"]](*stage["args"], **stage["options"])
    if stage["norm"] == "hook":
        with filtered("ignore", FutureWarning), torch.no_grad():
            nn.utils.weight_norm(layer, *stage["normed"])
    elif stage["norm"] == "parametrized":
        nn.utils.parametrizations.weight_norm(layer, *stage["normed"])
    elif stage["norm"] == "orthogonal":
        nn.utils.parametrizations.orthogonal(layer, stage["normed"][0])
    return layer


def make_stage(stage: Spec) -> nn.Module:
    layers = [make_layer(stage) for _ in range(stage["count"])]
    home = stage["home"]
    if home == "encoder":
        return nn.TransformerEncoder(layers[0], len(layers), enable_nested_tensor=False)
    if home == "single":
        return layers[0]
    if home == "sequential":
        return nn.Sequential(*map(Step, layers))
    if home == "steps":
        return nn.ModuleList(map(Step, layers))
    if home == "dict":
        return nn.ModuleDict({f"layer {n}": layer for n, layer in enumerate(layers)})
    if home == "again":
        return nn.ModuleList([*layers, layers[0]])
    if home == "nested":
        return nn.ModuleList(nn.ModuleList([layer, make_layer(stage)]) for layer in layers)
    if home == "wrapped":
        return nn.ModuleList([nn.Sequential(*map(Step, layers))])
    return nn.ModuleList(layers)


def run_stage(stage: nn.Module, x: Tensor) -> Tensor:
    if isinstance(stage, nn.TransformerEncoder):
        return fitted(_turned(stage, stage.layers[0].self_attn.batch_first, x), x)
    if isinstance(stage, nn.Sequential):
        return stage(x)
    if isinstance(stage, nn.ModuleList | nn.ModuleDict):
        for child in stage.children() if isinstance(stage, nn.ModuleDict) else stage:
            x = run_stage(child, x)
        return x
    return stage(x) if isinstance(stage, Step) else step(stage, x)


def fill(module: nn.Module, spec: Spec) -> None:
    """Gives `module` the parts of the specification."""
    tokens, width = spec["tokens"], spec["width"]
    features = spec["features"]
    module.add_module("embedding", nn.Embedding(tokens, features, **spec["embedding"]))
    if features != width:
        module.add_module("lift", nn.Linear(features, width))
    for n, stage in enumerate(spec["stages"]):
        module.add_module(f"stage{n}", make_stage(stage))
    if spec["output"]:
        module.add_module("output", nn.Linear(width, tokens, bias=spec["output"] == "bias"))


def run(module: nn.Module, tokens: Tensor) -> Tensor:
    parts = dict(module.named_children())
    x = parts["embedding"](tokens)
    x = parts["lift"](x) if "lift" in parts else x
    for name, part in parts.items():
        if name.startswith("stage"):
            for _ in range(module.times):  # type: ignore[arg-type]
                x = run_stage(part, x)
    return parts["output"](x) if "output" in parts else x


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.times = spec["times"]
        fill(self, spec)

    def forward(self, tokens: Tensor) -> Tensor:
        return run(self, tokens)


class InOrder(nn.Sequential):
    """The root is a container by itself, of all it has."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.times = spec["times"]
        fill(self, spec)

    def forward(self, tokens: Tensor) -> Tensor:
        return run(self, tokens)


class ByName(nn.ModuleDict):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.times = spec["times"]
        fill(self, spec)

    def forward(self, tokens: Tensor) -> Tensor:
        return run(self, tokens)


class Inside(nn.Module):
    """The model is a part of another, which has a stack of its own."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.left = Model(spec)
        self.heads = nn.ModuleList(nn.Linear(spec["features"], 4) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.left.embedding(tokens)
        return self.left(tokens).sum(-1, keepdim=True) + sum(head(x) for head in self.heads)


class Two(nn.Module):
    """Two models, of which some parts may be the same."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.left, self.right = Model(spec), Model(spec)
        if "embedding" in spec["common"]:
            self.right.embedding = self.left.embedding
        if "stage0" in spec["common"] and spec["stages"]:
            self.right.stage0 = self.left.stage0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.left(tokens) + self.right(tokens.flip(1))


ROOTS = {cls.__name__: cls for cls in (Model, InOrder, ByName, Inside, Two)}


def build(spec: Spec, device: str = "cpu") -> nn.Module:
    """The model of a specification, the same in every call."""
    torch.manual_seed(spec["seed"])
    with torch.device(device) if device != "cpu" else nullcontext():
        module = ROOTS[spec["root"]](spec).to(getattr(torch, spec["dtype"]))
    for kind in spec["oddities"]:
        ODDITIES[kind](module)
    return module.train(spec["training"])


# ---------------------------------------------------------------------- what else there may be


def _inner(module: nn.Module) -> Any:
    return module.left if hasattr(module, "left") else module


def _matrices(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(owner, name) of all matrices in stages."""
    return [
        (owner, name)
        for path, owner in module.named_modules()
        for name, p in owner._parameters.items()
        if "stage" in path and p is not None and p.dim() >= 2
    ]


def _tie_output(module: nn.Module) -> None:
    inner = _inner(module)
    if hasattr(inner, "output") and not hasattr(inner, "lift"):
        inner.output.weight = inner.embedding.weight


def _tie_layers(module: nn.Module) -> None:
    first: dict[torch.Size, nn.Parameter] = {}
    # Not across two models, of which one may be shared by itself.
    for owner, name in _matrices(_inner(module))[:4]:
        if not isinstance(owner, nn.RNNBase):
            p = owner._parameters[name]
            owner._parameters[name] = first.setdefault(p.shape, p)


def _tie_outside(module: nn.Module) -> None:
    matrices = _matrices(module)
    if matrices and not isinstance(module, Two):  # whose parts may be shared by themselves
        owner, name = matrices[0]
        weight = owner._parameters[name]
        if weight.dim() == 2:
            outside = nn.Linear(weight.shape[1], weight.shape[0])
            outside.weight = weight
            _inner(module).add_module("outside", outside)


def _alias(module: nn.Module) -> None:
    inner = _inner(module)
    if hasattr(inner, "stage0"):
        inner.alias = inner.stage0


def _freeze_all(module: nn.Module) -> None:
    module.requires_grad_(False)


def _freeze_table(module: nn.Module) -> None:
    _inner(module).embedding.requires_grad_(False)


def _freeze_layers(module: nn.Module) -> None:
    for owner, name in _matrices(module):
        owner._parameters[name].requires_grad_(False)


def _freeze_one(module: nn.Module) -> None:
    for owner, name in _matrices(module)[:1]:
        owner._parameters[name].requires_grad_(False)


def _freeze_vectors(module: nn.Module) -> None:
    for p in module.parameters():
        p.requires_grad_(p.dim() > 1)


@torch.no_grad()
def _zeros(module: nn.Module) -> None:
    for owner, name in _matrices(module)[::2]:
        owner._parameters[name].zero_()


@torch.no_grad()
def _ones(module: nn.Module) -> None:
    for owner, name in _matrices(module)[::2]:
        owner._parameters[name].fill_(1.0)


@torch.no_grad()
def _not_finite(module: nn.Module) -> None:
    for owner, name in _matrices(module)[:1]:
        owner._parameters[name].view(-1)[0] = float("nan")


@torch.no_grad()
def _not_finite_table(module: nn.Module) -> None:
    _inner(module).embedding.weight[0, 0] = float("inf")


@torch.no_grad()
def _equal_rows(module: nn.Module) -> None:
    _inner(module).embedding.weight.fill_(0.5)


def _gradient(module: nn.Module) -> None:
    for owner, name in _matrices(module)[:1]:
        p = owner._parameters[name]
        if p.requires_grad:
            p.grad = torch.zeros_like(p)


def _other_dtype(module: nn.Module) -> None:
    other = torch.float16
    for owner, name in _matrices(module)[:1]:
        owner._parameters[name] = nn.Parameter(owner._parameters[name].detach().to(other))


def _hooks(module: nn.Module) -> None:
    for part in list(module.modules())[:5]:
        part.register_forward_hook(same_output)
        part.register_forward_pre_hook(same_input)


def same_output(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that changes nothing."""


def same_input(module: nn.Module, args: Any) -> None:
    """A hook that changes nothing."""


ODDITIES = {
    "tie output": _tie_output,
    "tie layers": _tie_layers,
    "tie outside": _tie_outside,
    "alias": _alias,
    "freeze all": _freeze_all,
    "freeze table": _freeze_table,
    "freeze layers": _freeze_layers,
    "freeze one": _freeze_one,
    "freeze vectors": _freeze_vectors,
    "zeros": _zeros,
    "ones": _ones,
    "not finite": _not_finite,
    "not finite table": _not_finite_table,
    "equal rows": _equal_rows,
    "gradient": _gradient,
    "other dtype": _other_dtype,
    "hooks": _hooks,
}
