"""A derived weight that is read outside of a forward cannot be written into, in any way."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from zoo import batch, build

from paramshare import ShareError, materialize, share_from_embedding
from paramshare.readonly import ReadOnlyWeight


def read(**options) -> tuple[nn.Module, nn.Module]:
    """A shared module, and a layer of it whose `weight` is derived."""
    module = build("Recurring")
    share_from_embedding(module, module.embedding, **options)
    return module, module.layers[0].up


def _set_data(layer: nn.Module) -> None:
    layer.weight.data = torch.zeros_like(layer.weight)


def _add_to_data(layer: nn.Module) -> None:
    layer.weight.data += 1


def _add_to_weight(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight += 1


def _set_slice(layer: nn.Module) -> None:
    layer.weight.data[0] = 0


def _set_by_mask(layer: nn.Module) -> None:
    layer.weight.data[layer.weight.abs() < 1] = 0


def _into_numpy(layer: nn.Module) -> None:
    layer.weight.detach().numpy()[0] = 0


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "data =": _set_data,
    "data +=": _add_to_data,
    "weight +=": _add_to_weight,
    "data[0] =": _set_slice,
    "data[mask] =": _set_by_mask,
    "data.add_": lambda layer: layer.weight.data.add_(1),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.zeros(())),
    "data.t().mul_": lambda layer: layer.weight.data.t().mul_(0),
    "data[0].zero_": lambda layer: layer.weight.data[0].zero_(),
    "data.view().fill_": lambda layer: layer.weight.data.view(-1).fill_(0),
    "a row of unbind": lambda layer: layer.weight.data.unbind()[0].zero_(),
    "a part of split": lambda layer: layer.weight.data.split(2)[0].zero_(),
    "detach().zero_": lambda layer: layer.weight.detach().zero_(),
    "data.data.zero_": lambda layer: layer.weight.data.data.zero_(),
    "nn.init": lambda layer: nn.init.normal_(layer.weight),
    "nn.init of data": lambda layer: nn.init.xavier_uniform_(layer.weight.data),
    "out=": lambda layer: torch.zeros(layer.weight.shape, out=layer.weight.data),
    "foreach": lambda layer: torch._foreach_zero_([layer.weight.data]),
    "Tensor.zero_": lambda layer: Tensor.zero_(layer.weight.data),
    "setting it": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(2, 2))),
    "deleting it": lambda layer: delattr(layer, "weight"),
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "random pruning": lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
}


@pytest.mark.parametrize(
    ("training", "options"),
    [(True, {}), (False, {"execution": "factored"}), (False, {"virtual": False})],
    ids=["training", "factored", "EPS"],
)
@pytest.mark.parametrize("way", WRITES)
def test_writing_is_an_error_and_changes_nothing(way: str, training: bool, options: dict) -> None:
    if options.get("virtual") is False:
        options = {**options, "select": lambda path, owner: path.endswith("up.weight")}
    module, layer = read(**options)
    module.train(training)
    with torch.no_grad():
        expected = module(*batch())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ShareError, match="call paramshare.materialize"), torch.no_grad():
        WRITES[way](layer)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(module(*batch()), expected)
    materialize(module)  # the cure that the message names
    WRITES[way](layer)


def test_numpy_cannot_be_written_either() -> None:
    _, layer = read()
    for array in (layer.weight.detach().numpy(), numpy.asarray(layer.weight.data)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("name", ["NormedByHook", "Normed", "Recurrent", "Seq2Seq"])
def test_all_kinds_of_weights(name: str) -> None:
    """Weight norm by hook and parametrized, recurrent, and attention."""
    module = build(name)
    sharing = share_from_embedding(module, module.embedding)
    seen = 0
    for path in (path for group in sharing.plan.groups for path in group.slots):
        owner, _, weight = path.rpartition(".")
        part = module.get_submodule(owner)
        names = [weight] + [weight[:-2]] * (weight.endswith("_v") and hasattr(part, weight[:-2]))
        for each in names:
            assert isinstance(getattr(part, each), ReadOnlyWeight)
            with pytest.raises(ShareError, match="is read from the embedding"):
                getattr(part, each).data.zero_()
            seen += 1
    assert seen >= len(sharing.plan.groups)


def test_it_computes_as_any_tensor() -> None:
    module, layer = read()
    weight, x = layer.weight, torch.randn(3, layer.in_features, dtype=torch.float64)
    plain = weight.clone()
    assert type(plain) is Tensor
    assert type(weight @ weight.t()) is Tensor
    assert torch.equal(nn.functional.linear(x, weight), x @ plain.t())
    assert torch.equal(weight[1:, :2], plain[1:, :2])
    assert (weight.shape, weight.dtype, weight.requires_grad) == (
        plain.shape,
        torch.float64,
        True,
    )
    other = torch.zeros_like(plain)
    other.data.add_(weight.detach())  # it is read here
    other[:] = weight.data
    assert torch.equal(other, plain)
    plain.data += 1  # a copy is anybody's
    assert not torch.equal(plain, layer.weight)
    (gradient,) = torch.autograd.grad(layer.weight.square().sum(), module.paramshare.projection)
    assert gradient.abs().sum() > 0


def test_copies_and_files_of_it_are_ordinary() -> None:
    _, layer = read()
    weight = layer.weight.detach()
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    for again in (
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.load(file, weights_only=True)["weight"],
    ):
        assert type(again) is Tensor
        assert torch.equal(again, weight)
        again.zero_()
    assert layer.weight.any()


def test_a_forward_reads_ordinary_tensors() -> None:
    """Its kernels want these, and nothing is done twice for them."""
    seen = []
    module, layer = read(execution="materialized")
    layer.register_forward_pre_hook(lambda owner, _: seen.append(type(owner.weight)))
    module(*batch())
    assert seen == [Tensor] * 3
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*batch()), module(*batch()))


def test_layers_that_are_called_by_themselves_compute_the_same() -> None:
    """Step-by-step decoding does that, outside of any forward of the whole module."""
    module, _ = read(execution="materialized")
    whole = copy.deepcopy(module)
    for layer, plain in zip(module.layers, materialize(whole).layers, strict=True):
        for name in ("query", "up"):
            mine, theirs = getattr(layer, name), getattr(plain, name)
            x = torch.randn(2, 5, mine.in_features, dtype=torch.float64)
            torch.testing.assert_close(mine(x), theirs(x))
