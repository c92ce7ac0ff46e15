"""Recurrent modules whose weights are derived: what torch keeps of them between calls."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from warned import filtered
from zoo import batch, build, share

from paramshare import materialize
from paramshare.pool import Pool

MODULES = ["Recurrent", "Projected", "Gated", "Elman"]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The groups of each product that generates weights."""
    calls: list[list[int]] = []
    plain = Pool._generate

    def counted(pool: Pool, indices: list[int], frame):
        calls.append(indices)
        return plain(pool, indices, frame)

    monkeypatch.setattr(Pool, "_generate", counted)
    return calls


@pytest.mark.parametrize("name", [*MODULES, "Cells"])
def test_every_weight_is_derived_once_a_forward(name: str, generated) -> None:
    module = build(name)
    groups = len(share(module).plan.groups)
    generated.clear()
    module(*batch())
    assert generated == [list(range(groups))]


@pytest.mark.parametrize("name", MODULES)
def test_a_recurrent_module_by_itself_derives_each_weight_once(name: str, generated) -> None:
    module = build(name)
    groups = len(share(module).plan.groups)
    generated.clear()
    module.rnn(torch.randn(2, 3, 16, dtype=torch.float64))
    assert sorted(generated) == [[index] for index in range(groups)]


def test_setting_a_bias_reads_no_weight(generated) -> None:
    """FSDP does it while there is no table to read them from."""
    module = build("Recurrent")
    share(module)
    before = module(*batch())
    generated.clear()
    bias = nn.Parameter(module.rnn.bias_hh_l0 + 1)
    module.rnn.bias_hh_l0 = bias
    assert generated == []
    assert module.rnn.bias_hh_l0 is bias
    assert not torch.equal(module(*batch()), before)


@pytest.mark.parametrize("name", MODULES)
def test_a_step_on_the_table_alone_trains_both_matrices(name: str) -> None:
    """Copies that only look trained gave a loss that does not move."""
    module = build(name)
    sharing = share(module, table_gradient=1.0)
    inputs = batch()
    ids, _ = inputs
    before = module(*inputs)
    before.square().sum().backward()
    unused = torch.ones(len(module.embedding.weight), dtype=torch.bool)
    unused[ids.unique()] = False
    assert module.embedding.weight.grad[unused].abs().sum() > 0  # through the weights
    slots = [slot for group in sharing.plan.groups for slot in group.slots]
    weights = [getattr(module.rnn, slot.split(".")[1]) for slot in slots]
    torch.optim.SGD([module.embedding.weight], 0.01).step()
    for slot, weight in zip(slots, weights, strict=True):
        assert not torch.equal(getattr(module.rnn, slot.split(".")[1]), weight), slot
    after = module(*inputs)
    assert not torch.allclose(after, before)
    plain = build(name, seed=1)
    plain.load_state_dict(materialize(copy.deepcopy(module)).state_dict())
    torch.testing.assert_close(plain(*inputs), after)


@pytest.mark.parametrize("name", [*MODULES, "Cells", "NormedByHook", "Normed"])
def test_nothing_of_a_step_is_alive_after_it(name: str) -> None:
    module = build(name)
    share(module)
    alive = []
    read = Pool.weight

    def remembered(pool: Pool, index: int, training: bool) -> torch.Tensor:
        weight = read(pool, index, training)
        alive.append(weakref.ref(weight))
        return weight

    gc.disable()
    try:
        Pool.weight = remembered
        for _ in range(2):
            module(*batch()).sum().backward()
        assert alive
        assert not [ref for ref in alive if ref() is not None]
    finally:
        Pool.weight = read
        gc.enable()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("when", ["before", "after", "in eval mode"])
def test_copies(name: str, when: str) -> None:
    module = build(name)
    share(module)
    inputs = batch()
    if when == "after":
        module(*inputs).sum().backward()
    elif when == "in eval mode":
        with torch.no_grad():
            module.eval()(*inputs)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(*inputs), module(*inputs))
    with torch.no_grad():
        twin.embedding.weight.mul_(2)
        module.rnn.flatten_parameters()
    assert not torch.equal(twin(*inputs), module(*inputs))


def test_no_warnings_and_no_stored_list() -> None:
    module = build("Recurrent")
    share(module)
    with filtered("error"):
        for _ in range(3):
            module(*batch()).sum().backward()
    assert "_flat_weights" not in module.rnn.__dict__
    plain = materialize(module)
    assert all(a is b for a, b in zip(plain.rnn._flat_weights, plain.rnn.parameters(), strict=True))
    with torch.no_grad():
        plain.rnn.weight_hh_l0.zero_()
    assert not plain.rnn._flat_weights[1].any()


def test_the_warning_of_cudnns_kernel_is_ignored() -> None:
    """It copies weights that are not one piece of memory, and says so in every step."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        share(build("Gated"))
        warnings.warn(
            "RNN module weights are not part of single contiguous chunk of memory.", stacklevel=1
        )
        warnings.warn("something else", stacklevel=1)
    assert [str(w.message) for w in seen] == ["something else"]


@pytest.mark.parametrize("name", MODULES)
def test_functional_call_and_half_shared_modules(name: str) -> None:
    module = build(name)
    share(module, select=lambda path, owner: path.endswith("weight_hh_l0"))
    inputs = batch()
    expected = module(*inputs)
    state = {n: p.detach() * 2 for n, p in module.named_parameters()}
    swapped = torch.func.functional_call(module, state, inputs)
    assert not torch.allclose(swapped, expected)
    assert torch.equal(module(*inputs), expected)
    module.load_state_dict(state)
    torch.testing.assert_close(module(*inputs), swapped)
    assert isinstance(module.rnn, nn.RNNBase)


def test_an_unpickled_module_ignores_the_warning_too() -> None:
    module = build("Gated")
    share(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        pickle.loads(pickle.dumps(module))
        warnings.warn("RNN module weights are not part of single contiguous chunk", stacklevel=1)
    assert not seen


def test_a_recurrent_module_made_of_a_shared_ones_class() -> None:
    class Fixed(nn.LSTM):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*(sizes or (16, 12)))

    module = build("Gated")
    module.rnn = Fixed().double()
    share(module)
    made = type(module.rnn)()
    assert isinstance(made.weight_ih_l0, nn.Parameter)
    assert made(torch.randn(2, 3, 16))[0].shape == (2, 3, 12)
