"""The plan in a state_dict: what fits in shape and was read otherwise is refused."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from zoo import batch, build

from paramshare import ShareError, share_from_embedding

# Each pair stores tensors of the same names and shapes, which are read otherwise.
PAIRS = {
    "depth": ({"depth": "cycle:2"}, {"depth": "sequence:2"}),
    "depth reversed": ({"depth": "cycle:2"}, {"depth": "cycle-rev:2"}),
    "layout": ({"layout": "column"}, {"layout": "token"}),
    "virtual_dim": (
        {"layout": "aligned", "virtual_dim": 96},
        {"layout": "column", "virtual_dim": 96},
    ),
    "EPS": (
        {"virtual": False, "layout": "aligned"},
        {"virtual": False, "layout": "token"},
    ),
    "blocks": ({"virtual_dim": 96, "blocks": 3}, {"virtual_dim": 96, "blocks": 2}),
}


class Stack(nn.Module):
    """Four layers that are called, so that all executions are possible."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def made(options: dict, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = Stack().double()
    share_from_embedding(module, module.embedding, **options)
    return module


def _torch_saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
    "strict": lambda module, state: module.load_state_dict(state),
    "not strict": lambda module, state: module.load_state_dict(state, strict=False),
    "assigned": lambda module, state: module.load_state_dict(state, assign=True),
    "torch.save": lambda module, state: module.load_state_dict(_torch_saved(state)),
    "safetensors": lambda module, state: module.load_state_dict(load(save(state))),
    "from inside": lambda module, state: nn.ModuleDict({"a": module}).load_state_dict(
        {f"a.{key}": value for key, value in state.items()}
    ),
    "in half precision": lambda module, state: module.load_state_dict(
        {key: value.half() for key, value in state.items()}
    ),
    "averaged": lambda module, state: module.load_state_dict(
        {key: (value.float() * 0.9 + value.float() * 0.1) for key, value in state.items()}
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_another_plan_of_equal_shapes_is_refused(pair: str, way: str) -> None:
    one, other = PAIRS[pair]
    state = made(one).state_dict()
    module = made(other, seed=1)
    before = copy.deepcopy(module.state_dict())
    without = {key for key in state if not key.endswith("_extra_state")}
    assert {(k, state[k].shape) for k in without} == {(k, before[k].shape) for k in without}
    with pytest.raises(ShareError, match="shared otherwise: its plan differs in "):
        WAYS[way](module, state)
    after = module.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)  # nothing was written
    WAYS[way](made(one, seed=1), state)


def test_equal_plans_load_whatever_a_run_changes() -> None:
    """How weights are applied, their first spread and the gradient's share say nothing of where
    numbers stand."""
    module = made({"execution": "materialized"})
    other = made({"execution": "factored", "init": "paper", "table_gradient": 1.0}, seed=1)
    other.load_state_dict(module.state_dict())
    tokens = batch()[0]
    torch.testing.assert_close(other(tokens), module(tokens))


def test_states_from_before_load() -> None:
    """Those without a plan, and those of fairseq checkpoints, where it was not compressed."""
    module = made({})
    state = module.state_dict()
    plan = state.pop("paramshare._extra_state")
    assert plan.numel() < 2000
    made({}, seed=1).load_state_dict(state)
    earlier = module.paramshare.plan.to_dict()
    del earlier["whiten"]
    text = json.dumps({**earlier, "version": 1}).encode()
    state["paramshare.plan_version_1"] = torch.tensor(list(text))
    again = made({"whiten": True}, seed=1)
    again.load_state_dict(state)
    assert not again.paramshare.plan.whiten
    assert torch.equal(again(batch()[0]), module(batch()[0]))
    with pytest.raises(ShareError, match="shared otherwise: its plan differs in "):
        made({"blocks": 2}).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: plan[:-5],
        lambda plan: plan[:0],
        lambda plan: plan + 300,
        lambda plan: -plan,
        lambda plan: plan.flip(0),
        lambda plan: plan.double() * float("nan"),
        lambda plan: torch.tensor(list(b"{}")),
        lambda plan: torch.tensor(list(b"[" * 100_000)),
        lambda plan: plan.view(1, -1),
        lambda plan: plan.to("meta"),
        lambda plan: "a text",
    ],
)
def test_a_damaged_plan(damage: Callable) -> None:
    module = made({})
    state = module.state_dict()
    state["paramshare._extra_state"] = damage(state["paramshare._extra_state"])
    with pytest.raises(ShareError, match="the sharing plan in this state is damaged: "):
        module.load_state_dict(state)


def test_a_pool_by_itself_is_checked_as_well() -> None:
    one, other = (made(options) for options in PAIRS["depth"])
    with pytest.raises(ShareError, match="its plan differs in "):
        other.paramshare.load_state_dict(one.paramshare.state_dict())


def test_a_container_keeps_the_plan_beside_its_table() -> None:
    """There the pool is under the embedding."""
    embedding = nn.Embedding(60, 16)
    module = nn.Sequential(embedding, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    share_from_embedding(module, embedding)
    state = module.state_dict()
    assert "0.paramshare._extra_state" in state
    other = copy.deepcopy(module)
    other.load_state_dict(state)
    state["0.paramshare._extra_state"] = state["0.paramshare._extra_state"][:3]
    with pytest.raises(ShareError, match="the sharing plan in this state is damaged: "):
        other.load_state_dict(state)


def test_an_empty_weight_is_for_plain_modules_only() -> None:
    """Files have one, so that a module that is not shared does not load them silently."""
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    name = "encoder.layers.0.linear1.weight"
    state = {**module.state_dict(), name: torch.empty(0)}
    module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        build("Encoder").load_state_dict(state, strict=False)
