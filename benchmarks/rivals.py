"""What is compared: encoders of one shape that compute the same from a table and a projection, and
some that do not, for their speed alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from encoders import Encoder, Shape, fill, repeat, skeleton
from torch import Tensor, nn
from torch.nn.utils import parametrize

import paramshare
from paramshare.layout import read
from paramshare.plan import Group
from paramshare.pool import Pool
from paramshare.report import count_parameters


def ours(shape: Shape, execution: str, blocks: int | None = None) -> Encoder:
    """Shared on the meta device: no dense weight is ever there."""
    model = skeleton(shape)
    sharing = paramshare.share_from_embedding(
        model, model.embedding, execution=execution, blocks=blocks
    )
    fill(model)
    sharing.pool.reset_parameters()
    return model


def dense(shape: Shape, blocks: int | None = None) -> Encoder:
    """Ordinary weights, each layer its own."""
    return paramshare.materialize(ours(shape, "materialized", blocks))


def reused(shape: Shape) -> Encoder:
    """One ordinary layer at every depth."""
    return repeat(dense(shape.one_layer()), shape.depth)


class Derived(nn.Module):
    """A parametrization: the weight of a group from the columns of the projection."""

    def __init__(self, table: nn.Parameter, group: Group) -> None:
        super().__init__()
        self.table, self.group = table, group

    def forward(self, projection: Tensor) -> Tensor:
        """`(rows, cols)` of `(features, columns)`."""
        return copied((self.table @ projection).t(), self.group)


def copied(columns: Tensor, group: Group) -> Tensor:
    """The weight that stands in its `(columns, tokens)`, as memory of its own."""
    return read(columns, group.rows, group.cols, group.layout, group.blocks).contiguous()


def parametrized(shape: Shape) -> Encoder:
    """One layer at every depth, whose weights torch derives whenever one is read."""
    model, pool = _with_pool(shape.one_layer())
    for path, group in _paths(pool):
        linear = model.get_submodule(path)
        linear.weight = nn.Parameter(_columns(pool.projection.detach(), group))
        # unsafe: the weight has another shape than what it is derived from.
        derived = Derived(model.embedding.weight, group)
        parametrize.register_parametrization(linear, "weight", derived, unsafe=True)
    return repeat(model, shape.depth)


class Cached(nn.Module):
    """A parametrized model, each of whose weights is derived once a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with parametrize.cached():
            return self.model(tokens)


class Virtual(nn.Module):
    """The virtual table of the pass that is running."""

    def __init__(self, table: nn.Parameter, projection: nn.Parameter) -> None:
        super().__init__()
        self.table, self.projection = table, projection

    def make(self, *call: object) -> None:
        """`(tokens, columns)`, before each pass."""
        self.made = self.table @ self.projection


class Copying(nn.Module):
    """A linear layer that copies its weight out of the virtual table at each use."""

    def __init__(self, virtual: Virtual, group: Group, bias: nn.Parameter) -> None:
        super().__init__()
        self.virtual, self.group, self.bias = virtual, group, bias

    def forward(self, x: Tensor) -> Tensor:
        weight = copied(_columns(self.virtual.made, self.group).t(), self.group)
        return nn.functional.linear(x, weight, self.bias)


def released(shape: Shape) -> Encoder:
    """What ShareBERT's released code does: one virtual table a forward pass, a copy a use. There
    the table has columns that nothing reads, too, which we leave out."""
    model, pool = _with_pool(shape.one_layer())
    virtual = Virtual(model.embedding.weight, pool.projection)
    for path, group in _paths(pool):
        model.set_submodule(path, Copying(virtual, group, model.get_submodule(path).bias))
    model.register_forward_pre_hook(virtual.make)
    return repeat(model, shape.depth)


class LowRank(nn.Module):
    """`x @ A @ B + bias`."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def low_rank(shape: Shape) -> Encoder:
    """One layer at every depth, of the highest rank that needs no more numbers than we store."""
    one = ours(shape.one_layer(), "materialized")
    (pool,) = (part for part in one.modules() if isinstance(part, Pool))
    model = Encoder(shape.one_layer())
    linears = [part for part in model.layers[0].children() if isinstance(part, nn.Linear)]
    rank = count_parameters(pool) // sum(p.in_features + p.out_features for p in linears)
    for name, part in list(model.layers[0].named_children()):
        if isinstance(part, nn.Linear):
            setattr(model.layers[0], name, LowRank(part, max(1, rank)))
    return repeat(model, shape.depth)


def of_transformers(name: str, shape: Shape) -> nn.Module:
    """BERT-base or ALBERT-base of transformers, with that vocabulary and random weights."""
    import transformers

    base = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    config = getattr(transformers, f"{name}Config")(vocab_size=shape.vocabulary, **base)
    return getattr(transformers, f"{name}Model")(config, add_pooling_layer=False)


def _with_pool(shape: Shape) -> tuple[Encoder, Pool]:
    """An ordinary encoder, and the pool from which its weights were read."""
    model = ours(shape, "materialized")
    (pool,) = (part for part in model.modules() if isinstance(part, Pool))
    return paramshare.materialize(model), pool


def _paths(pool: Pool) -> list[tuple[str, Group]]:
    """Those of the linear layers, each with the group of its weight."""
    return [(path.removesuffix(".weight"), g) for g in pool.plan.groups for path in g.slots]


def _columns(matrix: Tensor, group: Group) -> Tensor:
    """The group's of all that are read."""
    return matrix[:, group.start : group.start + group.columns]


EXECUTIONS = ("auto", "factored", "blockwise", "materialized")
OURS: dict[str, Callable[[Shape], nn.Module]] = {
    execution: partial(ours, execution=execution) for execution in EXECUTIONS
}
RIVALS: dict[str, Callable[[Shape], nn.Module]] = {
    **OURS,
    "reused": reused,
    "dense": dense,
    "released": released,
    "parametrize": parametrized,
    "parametrize cached": lambda shape: Cached(parametrized(shape)),
    "low-rank": low_rank,
    "ALBERT-base": partial(of_transformers, "Albert"),
    "BERT-base": partial(of_transformers, "Bert"),
}
OTHER_FUNCTIONS = ("low-rank", "ALBERT-base", "BERT-base")


def check_same(outputs: dict[str, Tensor]) -> None:
    """Asserts that the outputs are those of the ordinary weights, where they should be."""
    expected = outputs["reused"]
    for name, output in outputs.items():
        if name not in OTHER_FUNCTIONS:
            error = float((output - expected).norm() / expected.norm())
            assert error < 1e-5, f"{name} is off by {error}"


@torch.no_grad()
def build(shape: Shape, names: list[str]) -> dict[str, nn.Module]:
    """The named rivals, ready for inference."""
    return {name: RIVALS[name](shape).eval() for name in names}
