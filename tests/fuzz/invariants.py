"""What must hold of a shared model, whatever it is made of. Each check raises AssertionError."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fuzz.derivation import assert_near, derive, loss
from fuzz.parts import build
from fuzz.sharing import share_all
from paramshare import (
    ShareError,
    Sharing,
    SharingPlan,
    int8,
    load_model,
    materialize,
    prepare_for_inference,
    quantize,
    save_model,
)
from paramshare.derived import refresh
from paramshare.marks import sources
from paramshare.plan import possible_executions
from paramshare.sharing import named_pools
from paramshare.slots import is_linear

Case = dict[str, Any]


class Subject:
    """A shared model, and what belongs to it."""

    def __init__(self, case: Case, module: nn.Module, folder: Path) -> None:
        self.case = case
        self.module = module
        self.folder = folder
        generator = torch.Generator().manual_seed(case["model"]["seed"])
        most = case["model"]["tokens"]
        self.tokens = torch.randint(0, most, (2, 5), generator=generator)
        self.others = torch.randint(0, most, (3, 4), generator=generator)

    def plain(self, device: str = "cpu", training: bool | None = None) -> nn.Module:
        """The same model, not shared, with the values that it had before."""
        module = build(self.case["model"], device)
        return module.train(self.module.training if training is None else training)

    def shared(self, device: str = "cpu") -> nn.Module | None:
        """Another, shared by the same calls, with other values. None where that cannot be, since
        the spread of a kind of layer that has no values is not known."""
        spec = {**self.case["model"], "seed": self.case["model"]["seed"] + 1}
        module = build(spec, device)
        messages = share_all(module, self.case["calls"])
        if device == "meta" and any("is not known" in message for message in messages):
            return None
        return module.train(self.module.training)

    def devices(self) -> tuple[str, ...]:
        """Those on which torch builds the plain model as on a CPU: its orthogonal parametrization
        has a buffer less on the meta device, or cannot be made there at all."""
        try:
            alike = self.plain("meta").state_dict().keys() == self.plain().state_dict().keys()
        except RuntimeError as error:
            if "cannot be called on meta tensors" not in str(error):
                raise
            alike = False
        return ("cpu", "meta") if alike else ("cpu",)

    def copied(self) -> nn.Module:
        values_of(self.module, self.tokens)  # the old weight norm leaves a graph, torch copies none
        return copy.deepcopy(self.module)


def values_of(module: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return module(tokens)


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    same = torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(), expected.nan_to_num()
    )
    off = "" if same else f"{float((found - expected).abs().max()):.3g}"
    assert same, f"{what}: not the same bits, off by {off}"


def forward(subject: Subject) -> None:
    """In every mode, and again, what was put together by index."""
    module = subject.module
    for training in (True, False):
        module.train(training)
        for tokens in (subject.tokens, subject.others):
            expected = derive(subject.plain(training=training).double(), module, tokens)
            expected.check(module(tokens), f"output, training={training}")
            if training:
                continue
            with torch.no_grad():
                expected.check(module(tokens), "output, no_grad")
                expected.check(module(tokens), "output, no_grad, again")
            with torch.inference_mode():
                expected.check(module(tokens), "output, inference_mode")


def gradients(subject: Subject) -> None:
    for training in (True, False):
        module = subject.module.train(training)
        module.zero_grad()
        expected = derive(subject.plain(training=training).double(), module, subject.tokens)
        output = module(subject.tokens)
        if not output.requires_grad:
            assert not expected.gradients, "nothing trains"
            return
        loss(output).backward()
        for name, p in module.named_parameters():
            if p.requires_grad:
                found = torch.zeros_like(p) if p.grad is None else p.grad
                bound = expected.gradient_bounds[name]
                assert_near(found, expected.gradients[name], bound, f"gradient of {name}")
            else:
                assert p.grad is None, f"{name} is frozen and has a gradient"
        module.zero_grad()


def materialized(subject: Subject) -> None:
    """A plain model with the names, classes and order of one that was never shared."""
    module, plain = subject.copied(), subject.plain()
    expected = derive(subject.plain().double(), subject.module, subject.tokens)
    assert materialize(module) is module
    for path, part in plain.named_modules():
        found_names = sorted(vars(module.get_submodule(path)))
        assert found_names == sorted(vars(part)), f"attributes of {path} are {found_names}"
    expected.check(module(subject.tokens), "materialized")
    names = [(n, p.shape) for n, p in plain.named_parameters(remove_duplicate=False)]
    found = [(n, p.shape) for n, p in module.named_parameters(remove_duplicate=False)]
    assert found == names, f"parameters are {found}, not {names}"
    # Of a parametrized module the class is another in each.
    classes = [
        (n, type(m).__bases__[0] if is_parametrized(m) else type(m))
        for n, m in plain.named_modules()
    ]
    found_classes = [
        (n, type(m).__bases__[0] if is_parametrized(m) else type(m))
        for n, m in module.named_modules()
    ]
    assert found_classes == classes, f"classes are {found_classes}, not {classes}"
    left = [key for m in module.modules() for key in m.__dict__ if "paramshare" in key]
    assert not left, f"left behind: {left}"
    plain.load_state_dict(module.state_dict())
    assert_equal(values_of(plain, subject.tokens), values_of(module, subject.tokens), "loaded")


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _torch_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies(subject: Subject) -> None:
    """They give the same bits, and are tied to their own table."""
    module, tokens = subject.module, subject.tokens
    before = values_of(module, tokens)
    makers: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy]
    if not any(map(is_parametrized, module.modules())):  # torch pickles none of these
        makers += [_pickled, _torch_saved]
    for make in makers:
        twin = make(module)
        name = make.__name__
        assert_equal(values_of(twin, tokens), before, name)
        assert list(twin.state_dict()) == list(module.state_dict()), name
        with torch.no_grad():
            for (_, pool), (_, own) in zip(named_pools(twin), named_pools(module), strict=True):
                assert pool.embedding is not own.embedding, name
                for p in [*pool.parameters(), pool.embedding.weight]:
                    p.mul_(1.5).add_(0.25)
        moved = materialize(copy.deepcopy(twin))
        plain = values_of(moved, tokens)
        again = values_of(twin, tokens)
        bound = 1e-3 if again.dtype == torch.float32 else 1e-9
        if plain.isfinite().all():
            assert_near(again, plain, bound * (1 + float(plain.abs().max())), f"{name}, written")
        assert_equal(values_of(module, tokens), before, f"the original of a {name}")


def a_step(subject: Subject) -> None:
    """Changes the outputs, and not those of a copy."""
    module = subject.copied()
    other = copy.deepcopy(module)
    tokens = subject.tokens
    before = values_of(module, tokens)
    trained = [p for p in module.parameters() if p.requires_grad]
    output = module(tokens)
    if not output.requires_grad:  # what trains may have no part in it
        return
    optimizer = torch.optim.SGD(trained, 0.5)
    loss(output).backward()
    moves = any(p.grad is not None and bool(p.grad.abs().max() > 1e-6) for p in trained)
    optimizer.step()
    after = values_of(module, tokens)
    if moves and before.isfinite().all():
        assert not torch.equal(after, before), "a step changed nothing"
    assert_equal(values_of(other, tokens), before, "the copy of what was trained")
    if after.isfinite().all():
        expected = derive(subject.plain().double(), module, tokens)
        expected.check(after, "after a step")


def files(subject: Subject) -> None:
    """Into a plain model, a shared one, and both on the meta device: the same bits."""
    path = subject.folder / "model.safetensors"
    save_model(subject.module, path)
    state = subject.module.state_dict()
    expected = values_of(subject.module, subject.tokens)
    for device in subject.devices():
        for make in (subject.plain, subject.shared):
            what = f"loaded into a {make.__name__} model on {device}"
            other = make(device)
            if other is None:
                continue
            load_model(other, path)
            assert list(other.state_dict()) == list(state), what
            for name, tensor in other.state_dict().items():
                assert_equal(tensor, state[name], f"{what}: {name}")
            if device == "meta":
                _allocate(other)
            assert_equal(values_of(other, subject.tokens), expected, what)
            if device == "cpu":
                mine = {n: p.requires_grad for n, p in subject.module.named_parameters()}
                assert {n: p.requires_grad for n, p in other.named_parameters()} == mine, what


def _allocate(module: nn.Module) -> None:
    """Takes its tensors out of the mapped file: sums in memory that is aligned less may round
    otherwise."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def states(subject: Subject) -> None:
    """A state fits what is shared alike; other dtypes give nearly the same; reports can be read."""
    module, tokens = subject.copied(), subject.tokens
    expected = values_of(module, tokens)
    other = subject.shared()
    assert other is not None
    other.load_state_dict(module.state_dict())
    assert_equal(values_of(other, tokens), expected, "a loaded state")
    for _, pool in named_pools(module):
        plan = SharingPlan.from_dict(json.loads(json.dumps(pool.plan.to_dict())))
        assert plan == pool.plan
        sharing = Sharing(module, pool, 1)
        shown = str(sharing)
        assert all(group.name in shown for group in plan.groups), shown
        constants = [pool.scale for _, pool in named_pools(module) if pool.scale is not None]
        stored = [*module.parameters(), *constants]
        assert sharing.stored_parameters == sum({id(t): t.numel() for t in stored}.values())
    narrow = module.float()
    derived = derive(subject.plain().double(), narrow, tokens)
    derived.check(values_of(narrow, tokens), "in float32")
    wide = narrow.double()
    derived.check(values_of(wide, tokens), "in float64 again")


def shared_again(subject: Subject) -> None:
    """What was materialized is a plain model: the same calls share it, or are refused."""
    module = subject.plain()
    first = share_all(module, subject.case["calls"])
    values_of(module, subject.tokens)
    again = share_all(materialize(module), subject.case["calls"])
    # Layers are tied no more, and a weight that was read from equal rows has no spread.
    if not {"tie layers", "equal rows"} & {*subject.case["model"]["oddities"]}:
        assert [bool(m) for m in again] == [bool(m) for m in first], f"{first} became {again}"
    derive(subject.plain().double(), module, subject.tokens).check(
        values_of(module, subject.tokens), "shared again"
    )


def quantized(subject: Subject) -> None:
    """Near the original, exactly what the rounded numbers say, and the same from a file."""
    module, tokens = subject.copied().eval(), subject.tokens
    before = values_of(module, tokens)
    try:
        quantize(module)
    except ShareError as error:
        finite = all(p.half().isfinite().all() for p in module.parameters())
        if finite and "stores no matrices" not in str(error):
            raise
        return
    found = values_of(module, tokens)
    cosine = nn.functional.cosine_similarity(found.flatten(), before.flatten(), 0)
    small = float(before.norm()) < 1e-6 or not before.isfinite().all()
    # A layer norm of equal rows makes rounding as large as everything else.
    small = small or "equal rows" in subject.case["model"]["oddities"]
    assert small or cosine > 0.9, f"cosine {float(cosine):.4f} of quantised outputs"
    on_cpu, int8._ON_CPU = int8._ON_CPU, False
    try:
        expected = derive(subject.plain(training=False).double(), module, tokens)
        expected.check(values_of(module, tokens), "quantised")
    finally:
        int8._ON_CPU = on_cpu
    assert_equal(values_of(copy.deepcopy(module), tokens), found, "a copy of a quantised one")
    path = subject.folder / "int8.safetensors"
    save_model(module, path)
    for device in subject.devices():
        other = subject.plain(device, training=False)
        load_model(other, path)
        if device == "meta":
            _allocate(other)
        assert_equal(values_of(other, tokens), found, f"quantised, loaded on {device}")


def prepared(subject: Subject) -> None:
    """As it was chosen, by whatever budget, and computes the same."""
    module, tokens = subject.copied(), subject.tokens
    expected = derive(subject.plain(training=False).double(), module, tokens)
    chosen = prepare_for_inference(module, tokens=tokens)
    assert not module.training
    _assert_executions(module, chosen.executions)
    expected.check(values_of(module, tokens), "prepared")
    expected.check(values_of(module, tokens), "prepared, again")
    other = subject.copied()
    least = chosen.stored_bytes + (chosen.peak_bytes - chosen.stored_bytes) * 2 // 3
    try:
        less = prepare_for_inference(other, least, tokens=tokens)
    except ShareError as error:
        if "too small" not in str(error):
            raise
        return
    assert less.peak_bytes <= least, f"{less.peak_bytes} bytes of {least}"
    _assert_executions(other, less.executions)
    expected.check(values_of(other, tokens), "prepared within a budget")


def _assert_executions(module: nn.Module, executions: dict[str, str]) -> None:
    found = {
        f"{path}.{group.name}" if path else group.name: group.execution
        for path, pool in named_pools(module)
        for group in pool.plan.groups
    }
    assert found == executions, f"executions are {found}, chosen {executions}"


def executions(subject: Subject) -> None:
    """Applied in any way that is possible, weights give the same, and the same gradients."""
    module, tokens = subject.copied(), subject.tokens
    for _, pool in named_pools(module):
        groups = []
        for index, group in enumerate(pool.plan.groups):
            owners = [
                is_linear(owner, name)
                for owner in module.modules()
                for name, source in sources(owner).items()
                if source.pool is pool and source.group == index
            ]
            possible = possible_executions(group.layout, pool.plan.virtual)
            last = possible[1 + index % 2 :][:1] or possible[-1:]
            execution = last[0] if all(owners) and group.execution == "materialized" else None
            groups.append(replace(group, execution=execution or group.execution))
        pool.plan = replace(pool.plan, groups=tuple(groups))
    for owner in module.modules():
        if sources(owner):
            refresh(owner)
    expected = derive(subject.plain().double(), module, tokens)
    output = module(tokens)
    expected.check(output, "other executions")
    if output.requires_grad:
        loss(output).backward()
        for name, p in module.named_parameters():
            if p.requires_grad and p.grad is not None:
                bound = expected.gradient_bounds[name]
                assert_near(p.grad, expected.gradients[name], bound, f"gradient of {name}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        *(forward, gradients, materialized, copies, a_step, files, states),
        *(shared_again, quantized, prepared, executions),
    )
}
