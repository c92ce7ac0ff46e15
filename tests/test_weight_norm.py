"""Weight-normed layers: the direction is derived, the gain is a Parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from close import assert_passes_close
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from warned import filtered
from zoo import batch, build, share

from paramshare import ShareError, materialize, save_model, share_from_embedding

NAMES = ["NormedByHook", "Normed"]


def gains(module: nn.Module) -> list[str]:
    return [n for n, _ in module.named_parameters() if n.endswith(("weight_g", "original0"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_gain_stays_and_the_direction_goes(name: str) -> None:
    module, plain = build(name), build(name)
    sharing = share(module)
    assert len(gains(module)) == 5
    names = {slot for group in sharing.plan.groups for slot in group.slots}
    assert names == {n for n, _ in plain.named_parameters() if n.endswith(("_v", "original1"))}
    before = {n: p.clone() for n, p in module.named_parameters() if n in gains(module)}
    expected = dict(plain.named_parameters())
    assert all(torch.equal(value, expected[n]) for n, value in before.items())
    module(*batch()).square().sum().backward()
    assert all(module.get_parameter(n).grad.abs().sum() > 0 for n in before)
    # The norm of every row is its gain, whatever is read from the table.
    layer = module.layers[0]
    gain = layer.weight_g if name == "NormedByHook" else layer.parametrizations.weight.original0
    torch.testing.assert_close(layer.weight.norm(dim=(1, 2)), gain.flatten())


@pytest.mark.parametrize("name", NAMES)
def test_select_never_offers_the_gain(name: str) -> None:
    module = build(name)
    share_from_embedding(module, module.embedding, select=lambda path, owner: "layers" in path)
    assert len(gains(module)) == 5


@pytest.mark.parametrize("after_forward", [False, True])
def test_deepcopy_of_hooks(after_forward: bool) -> None:
    """torch's own hook cannot: the weight that it sets is no leaf."""
    module = build("NormedByHook")
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    share(module)
    inputs = batch()
    if after_forward:
        module(*inputs).sum().backward()
    twin = copy.deepcopy(module)
    assert torch.equal(twin(*inputs), module(*inputs))
    with torch.no_grad():
        twin.embedding.weight.copy_(twin.embedding.weight.flip(0))
    assert not torch.equal(twin.layers[0].weight, module.layers[0].weight)


def _remove(layer: nn.Module) -> nn.Module:
    if hasattr(layer, "weight_g"):
        return nn.utils.remove_weight_norm(layer)
    return remove_parametrizations(layer, "weight")


@pytest.mark.parametrize("name", NAMES)
def test_removing_weight_norm_bakes_the_weight(name: str) -> None:
    module = build(name)
    share(module)
    inputs = batch()
    expected = module(*inputs)
    for n, layer in enumerate(module.layers):
        _remove(layer)
        assert type(layer) is nn.Conv1d
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.is_contiguous()
        assert len(gains(module)) == 4 - n
        torch.testing.assert_close(module(*inputs), expected)
    with torch.no_grad():  # what was baked is not read from the table any more
        weight = module.layers[0].weight.clone()
        module.embedding.weight.mul_(1.5)
        assert torch.equal(module.layers[0].weight, weight)
    materialize(module)  # the two that are left, and what was generated for all
    assert not any("paramshare" in n for n, _ in module.named_modules())
    for layer in module.heads:
        _remove(layer)


def test_removing_it_twice_is_torchs_error() -> None:
    module = build("NormedByHook")
    share(module)
    nn.utils.remove_weight_norm(module.layers[0])
    with pytest.raises(ValueError, match="weight_norm of 'weight' not found"):
        nn.utils.remove_weight_norm(module.layers[0])


def test_materialized_hooks_are_torchs_own() -> None:
    module, plain = build("NormedByHook"), build("NormedByHook")
    share(module)
    materialize(module)
    for ours, theirs in zip(module.layers, plain.layers, strict=True):
        assert [type(h) for h in ours._forward_pre_hooks.values()] == [
            type(h) for h in theirs._forward_pre_hooks.values()
        ]
    with torch.no_grad():
        before = module(*batch())
        module.layers[0].weight_v.copy_(module.layers[0].weight_v.flip(0))
        assert not torch.equal(module(*batch()), before)
    nn.utils.remove_weight_norm(module.layers[0])


def test_a_normed_weight_cannot_be_set() -> None:
    module = build("NormedByHook")
    share(module)
    for name in ("weight", "weight_v"):
        with pytest.raises(ShareError, match="read from the embedding and cannot be set"):
            setattr(module.layers[0], name, torch.zeros(32, 8, 3))


def test_other_hooks_stay() -> None:
    module = build("NormedByHook")
    seen = []
    module.layers[0].register_forward_pre_hook(lambda layer, inputs: seen.append(layer))
    with filtered("ignore", FutureWarning):
        nn.utils.weight_norm(module.layers[0], "bias", dim=None)
    share(module)
    module(*batch()).sum().backward()
    assert seen == [module.layers[0]]
    assert module.layers[0].bias_v.grad is not None
    nn.utils.remove_weight_norm(module.layers[0], "bias")
    assert module.layers[0].weight.shape == (32, 8, 3)


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_directions_without_a_spread(name: str, virtual: bool) -> None:
    """Of a layer that is initialised to a constant: they need some spread to be directions."""
    module = build(name)
    for n, parameter in module.named_parameters():
        if n.startswith("layers") and n.endswith(("weight_v", "original1")):
            nn.init.ones_(parameter)
    share_from_embedding(
        module,
        module.embedding,
        virtual,
        select=lambda path, owner: path.startswith("layers"),
    )
    assert module(*batch()).isfinite().all()


@pytest.mark.parametrize("names", [("weight_hh_l0",), ("weight_ih_l0", "weight_hh_l0")])
@pytest.mark.parametrize("undo", ["materialize", "remove"])
def test_recurrent_modules(names: tuple[str, ...], undo: str) -> None:
    """Which keep a list of their weights, that every assignment refreshes."""
    module = build("Gated")
    for name in names:
        with filtered("ignore", FutureWarning):
            nn.utils.weight_norm(module.rnn, name)
    share(module)
    inputs = batch()
    expected = module(*inputs)
    if undo == "materialize":
        materialize(module)
        assert isinstance(module.rnn.weight_hh_l0_v, nn.Parameter)
    for name in names:
        nn.utils.remove_weight_norm(module.rnn, name)
        assert isinstance(getattr(module.rnn, name), nn.Parameter)
        torch.testing.assert_close(module(*inputs), expected)
    assert not any(n.endswith(("_g", "_v")) for n, _ in module.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str) -> None:
    """The direction is a product of another dtype there than the gain, which torch refuses."""
    module = build(name, dtype=torch.float32)
    share(module)
    twin = build(name, dtype=torch.float32)
    twin.load_state_dict(materialize(copy.deepcopy(module)).state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = module(*batch()), twin(*batch())
    # Products are summed in float32; what is rounded are their results and the steps between.
    assert_passes_close(output, expected, terms=16)
    output.float().sum().backward()
    assert module.paramshare.projection.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_half_baked_model_is_not_saved(name: str, tmp_path) -> None:
    """No plain model is like it: the plan says that what was removed is read."""
    module = build(name)
    share(module)
    _remove(module.layers[0])
    with pytest.raises(ShareError, match="is not read from the embedding any more"):
        save_model(module, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    save_model(materialize(module), tmp_path / "model.safetensors")


def test_what_is_parametrized_after_sharing_stays_so() -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    module = build("NormedByHook")
    share(module)
    inputs = batch()
    register_parametrization(module.layers[0], "bias", Double())
    expected = module(*inputs)
    for undo in (
        lambda: nn.utils.remove_weight_norm(module.layers[0]),
        lambda: materialize(module),
    ):
        with pytest.raises(ShareError, match="something has changed this .* after it was shared"):
            undo()
        assert torch.equal(module(*inputs), expected)
    remove_parametrizations(module.layers[0], "bias")
    torch.testing.assert_close(materialize(module)(*inputs), expected)


class WithPadding(nn.Module):
    """Row 0 of the table is zero."""

    def __init__(self, tokens: int, norm, dim: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 8, padding_idx=0)
        self.layers = nn.ModuleList(norm(nn.Linear(8, 8), dim=dim) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize(
    ("tokens", "dim", "options", "zero"),
    [
        (20, 1, {"blocks": 1}, True),
        (7, 1, {"layout": "token"}, True),
        (9, 1, {}, True),
        (20, 1, {}, False),
        (20, 0, {"blocks": 1}, False),
        (20, None, {"blocks": 1}, False),
        (7, 1, {"layout": "column"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_direction_of_no_length_is_refused(norm, tokens, dim, options, zero) -> None:
    """It would be divided by its length, 0: NaN in every output."""
    module = WithPadding(tokens, norm, dim)
    ids = torch.arange(1, 7).view(2, 3)
    if zero:
        before = module(ids)
        with pytest.raises(ShareError, match="a norm of layers.0.* zeros: row 0 of embedding"):
            share_from_embedding(module, module.embedding, **options)
        assert torch.equal(module(ids), before)
        nn.init.normal_(module.embedding.weight)  # the cure that the message names
    share_from_embedding(module, module.embedding, **options)
    assert module(ids).isfinite().all()
