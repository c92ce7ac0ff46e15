from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path

import pytest
import torch
from commands import python
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_sharing import TwoTables, snapshot, up_only
from torch import nn
from zoo import ZOO, batch, build, share

from paramshare import (
    ShareError,
    load_model,
    materialize,
    quantize,
    save_model,
    share_from_embedding,
)
from paramshare.models import TransformerLM
from paramshare.pool import columns_taken
from paramshare.sharing import named_pools


@pytest.mark.parametrize("layout", ["aligned", "column", "token"])
@pytest.mark.parametrize("name", ZOO)
def test_round_trip_into_shared_and_plain(tmp_path, name: str, layout: str) -> None:
    path = tmp_path / "model.safetensors"
    module = build(name)
    options = {"layout": layout, "projection_bias": True}
    sharing = share(module, **options)
    save_model(module, path)
    inputs = batch()
    expected = module(*inputs)
    with safe_open(path, "pt") as file:
        names = [key for key in file.keys() if not key.endswith("._extra_state")]  # noqa: SIM118
        numbers = sum(file.get_tensor(key).numel() for key in names)
    assert numbers == sharing.stored_parameters
    for shared_first in (True, False):
        other = build(name, seed=3)
        if shared_first:
            share(other, **options)
        load_model(other, path)
        assert torch.equal(other(*inputs), expected)
        assert list(other.state_dict()) == list(module.state_dict())


def test_round_trip_of_eps(tmp_path) -> None:
    module = build("Chain")
    sharing = share_from_embedding(module, module.embedding, virtual=False)
    save_model(module, tmp_path / "m.safetensors")
    other = build("Chain", seed=2)
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other(batch()[0]), module(batch()[0]))
    ((root, pool),) = named_pools(other)
    assert root == ""
    assert torch.equal(pool.scale, sharing.pool.scale)


def test_a_model_of_two_tables(tmp_path) -> None:
    module = TwoTables(tie=True).double()
    for part in (module.encoder, module.decoder):
        share_from_embedding(part, part.embedding, virtual=False, select=up_only)
    save_model(module, tmp_path / "m.safetensors")
    other = TwoTables(tie=True).double()
    load_model(other, tmp_path / "m.safetensors")
    tokens, _ = batch()
    assert torch.equal(other(tokens), module(tokens))
    assert other.decoder.embedding is other.encoder.embedding


def test_two_calls_on_one_module(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Narrow")
    for ending in ("up.weight", "down.weight"):
        share_from_embedding(module, module.embedding, select=lambda p, o: p.endswith(ending))  # noqa: B023
    save_model(module, path)
    other = build("Narrow", seed=1)
    load_model(other, path)
    assert list(other.state_dict()) == list(module.state_dict())
    assert torch.equal(other(*batch()), module(*batch()))

    def twice(tensors, metadata):
        content = json.loads(metadata["paramshare"])
        content["sharings"][1] = content["sharings"][0]
        metadata["paramshare"] = json.dumps(content)

    _rewrite(path, twice)
    other = build("Narrow", seed=1)
    before = snapshot(other)
    with pytest.raises(ShareError, match=r"blocks\.0\.up\.weight is shared by two plans"):
        load_model(other, path)
    assert snapshot(other) == before


def test_a_plain_module(tmp_path) -> None:
    module = build("Encoder")
    save_model(module, tmp_path / "m.safetensors")
    other = build("Encoder", seed=1)
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other(batch()[0]), module(batch()[0]))


def test_plain_safetensors_takes_the_state_dict(tmp_path) -> None:
    """A tied output is the only thing it minds, shared or not; of ours nothing shares memory."""
    for name, virtual in (("Seq2Seq", True), ("Chain", False)):
        module = build(name)
        share_from_embedding(module, module.embedding, virtual=virtual)
        save_file(module.state_dict(), tmp_path / "m.safetensors")
        other = build(name, seed=4)
        share_from_embedding(other, other.embedding, virtual=virtual)
        other.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
        assert torch.equal(other(*batch()), module(*batch()))


def test_meta_modules_take_the_file_as_it_is(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = TransformerLM(300, 32, 3, feed_forward=64).eval()
    share_from_embedding(module, module.embedding)
    save_model(module, path)
    tokens = torch.randint(0, 300, (2, 9))
    for shared_first in (True, False):
        with torch.device("meta"):
            other = TransformerLM(300, 32, 3, feed_forward=64).eval()
        if shared_first:
            share_from_embedding(other, other.embedding)
        load_model(other, path)
        assert not any(t.is_meta for t in other.state_dict().values())
        assert other.output.weight is other.embedding.weight
        assert torch.equal(other(tokens), module(tokens))
        trained = other.train()(tokens).sum()
        trained.backward()
        assert other.paramshare.projection.grad.abs().sum() > 0


def test_meta_modules_get_the_files_memory(tmp_path) -> None:
    """Assigned, not copied: every tensor lies in the one mapping of the file."""
    path = tmp_path / "m.safetensors"
    small = TransformerLM(2000, 16, 2, feed_forward=32)
    share_from_embedding(small, small.embedding)
    save_model(small, path)
    with torch.device("meta"):
        other = TransformerLM(2000, 16, 2, feed_forward=32)
    load_model(other, path)
    loaded = chain(other.parameters(), other.buffers())
    pointers = [tensor.untyped_storage().data_ptr() for tensor in loaded]
    assert max(pointers) - min(pointers) < path.stat().st_size


FRESH = """
import re, sys
import torch
from torch import nn
import paramshare

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8000, 16)
        self.lift = nn.Linear(16, 1000)
        self.layers = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(60))

    def forward(self, tokens):
        x = self.lift(self.embedding(tokens))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

def peak():  # not ru_maxrss, in which the process that started this one counts, too
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

torch.set_grad_enabled(False)
torch.randn(99, 99) @ torch.randn(99, 99)
nn.Embedding(1, 1, device="meta")  # torch imports its compiler for that
before = peak()
with torch.device("meta"):
    module = Wide().eval()
paramshare.share_from_embedding(module, module.embedding)
if len(sys.argv) > 1:
    paramshare.load_model(module, sys.argv[1])
    module(torch.zeros(1, 128, dtype=torch.long))
    print(peak() - before)
else:
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.uniform_(-0.1, 0.1)
    paramshare.save_model(module, "small.safetensors")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_fresh_process_never_holds_the_dense_model(tmp_path) -> None:
    """240 MB of weights, of which one would be 4 MB, from a file of less than 1 MB."""
    assert python("-c", FRESH, cwd=tmp_path).returncode == 0
    size = (tmp_path / "small.safetensors").stat().st_size
    assert size < 1e6
    done = python("-c", FRESH, "small.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Activations are 3 MB, the rest is what torch takes to run.
    assert 1e6 < int(done.stdout) < size + 30e6


def test_buffers_that_no_file_holds(tmp_path) -> None:
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = TransformerLM(300, 32, 2, feed_forward=64)
            self.register_buffer("positions", torch.arange(9), persistent=False)

    module = Positions()
    share_from_embedding(module, module.lm.embedding)
    save_model(module, tmp_path / "m.safetensors")
    with torch.device("meta"):
        other = Positions()
    before = snapshot(other)
    with pytest.raises(ShareError, match=r"no file holds the buffer positions .* set it before"):
        load_model(other, tmp_path / "m.safetensors")
    assert snapshot(other) == before
    other.positions = torch.arange(9)
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other.positions, module.positions)


def test_another_plan_is_an_error_that_names_the_difference(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    save_model(module, path)
    for options, message in (
        ({"layout": "column"}, "columns 34 against 29"),
        ({"depth": "none"}, "5 groups against 15"),
        ({"blocks": 1}, "against"),
        ({"projection_bias": True}, "projection_bias False against True"),
    ):
        other = build("Narrow", seed=1)
        share_from_embedding(other, other.embedding, **options)
        before = snapshot(other)
        with pytest.raises(
            ShareError, match=f"m.safetensors: the file's plan is not the module's: .*{message}"
        ):
            load_model(other, path)
        assert snapshot(other) == before


def test_execution_table_gradient_and_init_may_differ(tmp_path) -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    save_model(module, tmp_path / "m.safetensors")
    other = build("Narrow", seed=1)
    share_from_embedding(
        other, other.embedding, execution="materialized", table_gradient=0.5, init="paper"
    )
    load_model(other, tmp_path / "m.safetensors")
    torch.testing.assert_close(other(*batch()), module(*batch()))


def _truncate(path, module):
    path.write_bytes(path.read_bytes()[:-100])


def _foreign(path, module):
    save_file({"x": torch.ones(2)}, path)


def _rewrite(path, change):
    """Into a file without a digest, as older ones are: what it is to notice, others notice, too."""
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    content = json.loads(metadata["paramshare"])
    del content["sha256"]
    metadata["paramshare"] = json.dumps(content)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def _no_projection(path, module):
    _rewrite(path, lambda tensors, metadata: tensors.pop("paramshare.projection"))


def _extra(path, module):
    _rewrite(path, lambda tensors, metadata: tensors.update(surprise=torch.ones(1)))


def _reshaped(path, module):
    _rewrite(path, lambda tensors, metadata: tensors.update({"lift.bias": torch.ones(3)}))


def _other_version(path, module):
    def change(tensors, metadata):
        content = json.loads(metadata["paramshare"])
        content["sharings"][0]["plan"]["version"] = 9
        metadata["paramshare"] = json.dumps(content)

    _rewrite(path, change)


def _meta(**change):
    def spoil(path, module):
        def rewrite(tensors, metadata):
            content = json.loads(metadata["paramshare"])
            plan = content["sharings"][0]["plan"]
            plan["groups"][1].update(change)
            plan.update({k: v for k, v in change.items() if k in plan})
            metadata["paramshare"] = json.dumps(content)

        _rewrite(path, rewrite)

    return spoil


def _plan(**change):
    def spoil(path, module):
        def rewrite(tensors, metadata):
            content = json.loads(metadata["paramshare"])
            content["sharings"][0]["plan"].update(change)
            metadata["paramshare"] = json.dumps(content)

        _rewrite(path, rewrite)

    return spoil


def _content(**change):
    def spoil(path, module):
        def rewrite(tensors, metadata):
            content = json.loads(metadata["paramshare"])
            metadata["paramshare"] = json.dumps({**content, **change})

        _rewrite(path, rewrite)

    return spoil


def _integers(path, module):
    _rewrite(path, lambda tensors, _: tensors.update({"lift.bias": torch.zeros(16).long()}))


def _truths(path, module):
    _rewrite(path, lambda tensors, _: tensors.update({"lift.bias": torch.zeros(16).bool()}))


def _text(text):
    def spoil(path, module):
        _rewrite(path, lambda tensors, metadata: metadata.update(paramshare=text))

    return spoil


def _remove(path, module):
    path.unlink()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncate, "cannot be read"),
        (_remove, "cannot be read"),
        (_foreign, "no sharing plan in it"),
        (_no_projection, "projection.* is missing in the file"),
        (_extra, "surprise of the file is not in the module"),
        (_reshaped, r"lift.bias is \(3,\) in the file, \(16,\) in the module"),
        (_other_version, "plan of version 9"),
        (_text("no json"), "damaged sharing plan"),
        (_text("[1]"), "damaged sharing plan"),
        (_text('{"sharings": [{"root": "", "plan": "x"}], "tied": {}}'), "no sharing plan: a str"),
        (_text('{"sharings": [], "tied": {"a": "ghost"}}'), "a tied tensor is missing"),
        (_text('{"sharings": {}, "tied": {}}'), "no sharing plans: a dict, not a list"),
        (_text('{"sharings": "x", "tied": {}}'), "no sharing plans: a str, not a list"),
        (_text('{"sharings": [[]], "tied": {}}'), "an entry is not a root and a plan"),
        (_text('{"sharings": [{"root": 3, "plan": {}}], "tied": {}}'), "of no path, but a int"),
        (_text('{"sharings": [], "tied": {}, "sha257": "x"}'), "unknown entries .*sha257"),
        (_text('{"sharings": []}'), "damaged sharing plan"),
        (_content(tied=[]), "its ties are no object"),
        (_content(tied={"lift.bias": "output.bias"}), "a tied tensor is missing"),
        (_content(tied={"a": "b", "b": "a"}), "a tied tensor is missing"),
        (_content(tied={"a": 3}), "no list of names"),
        (_content(int8="lift"), "no list of names"),
        (_content(int8=["lift.weight"]), "does not fit the module"),
        (_content(int8=["lift", "lift"]), "does not fit the module"),
        (_content(empty=["ghost"]), "damaged sharing plan"),
        (_content(empty=["lift.bias"]), "lift.bias is not empty"),
        (_integers, r"lift\.bias is torch.int64 in the file, torch.float64 in the module"),
        (_truths, r"lift\.bias is torch.bool in the file, torch.float64 in the module"),
        (_plan(table="blocks"), "the table blocks is a ModuleList without a 2-D weight|against"),
        (_plan(table="lift"), "the table lift is 16 x 3, the plan's is 60 x 3|against"),
        (_plan(table=""), "or its table no path"),
        (_meta(start=math.nan), "NaN is no number of JSON"),
        (_meta(start=7.0), "group 2: start is 7.0, not of type int"),
        (_meta(start=True), "group 2: start is True, not of type int"),
        (_meta(columns=True), "columns is True, not of type int"),
        (_meta(rows=10**400), r"rows is 1000.*\.\.\..*000, not of type int"),
        (_meta(rows=10**12), "does not fit its columns"),
        (_meta(slots="blocks"), "its slots are a str, not a list"),
        (_meta(slots=["blocks.0.query.weight"]), "one of its weights stands there twice"),
        (_plan(tokens=60.0), "tokens is 60.0, not of type int"),
        (_plan(virtual=1), "virtual is 1, not of type bool"),
        (
            _plan(columns=10**12),
            "the projection of the module itself, 3 x 10{12}, is missing|against",
        ),
        (_meta(start=-3), "does not fit its columns"),
        (_meta(start=0), "does not fit its columns"),
        (_meta(start=4000), "its groups need 4006 columns"),
        (_meta(blocks=0), "no sharing plan"),
        (_meta(layout="diag"), "does not fit its columns|unknown layout"),
        (_meta(execution="x"), "unknown layout or execution"),
        (_meta(spread="wide"), "group 2: spread is 'wide', not of type float"),
        (_meta(columns=5), "does not fit"),
        (_meta(table_gradient="a"), "no sharing plan"),
        (_meta(surprise=1), "no sharing plan"),
    ],
)
def test_bad_files_change_nothing(tmp_path, spoil, message: str, shared: bool) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    save_model(module, path)
    spoil(path, module)
    other = build("Narrow", seed=1)
    if shared:
        share_from_embedding(other, other.embedding)
    before = snapshot(other)
    values = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(ShareError, match=message):
        load_model(other, path)
    assert snapshot(other) == before
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), values, strict=True))


def test_damage_that_fits_is_noticed_by_the_digest(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    save_model(module, path)
    whole = path.read_bytes()
    other = build("Narrow", seed=1)
    before = snapshot(other)
    # The slots of two groups, two biases, one bit of the table.
    damaged = (
        whole.replace(b"blocks.0.query.w", b"blocks.0.xxxxx.w")
        .replace(b"blocks.0.value.w", b"blocks.0.query.w")
        .replace(b"blocks.0.xxxxx.w", b"blocks.0.value.w"),
        whole.replace(b'"blocks.0.up.bias":', b'"blocks.0.xx.bias":')
        .replace(b'"blocks.1.up.bias":', b'"blocks.0.up.bias":')
        .replace(b'"blocks.0.xx.bias":', b'"blocks.1.up.bias":'),
        whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    )
    for content in damaged:
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(ShareError, match="m.safetensors is damaged, or something else than"):
            load_model(other, path)
        assert snapshot(other) == before


def test_older_files(tmp_path) -> None:
    """Without a digest, and without what is there beside the stored tensors."""
    path = tmp_path / "m.safetensors"
    module = build("Seq2Seq")
    share_from_embedding(module, module.embedding, embedding_dim=6)
    save_model(module, path)

    def older(tensors, metadata):
        content = json.loads(metadata["paramshare"])
        for name in [*content.pop("empty"), *(n for n in tensors if n.endswith("_extra_state"))]:
            del tensors[name]
        metadata["paramshare"] = json.dumps(content)

    _rewrite(path, older)
    for shared_first in (False, True):
        other = build("Seq2Seq", seed=1)
        if shared_first:
            share_from_embedding(other, other.embedding, embedding_dim=6)
        load_model(other, path)
        assert torch.equal(other(*batch()), module(*batch()))


def test_other_loaders_take_no_file_for_that_of_a_plain_module(tmp_path) -> None:
    """Of a shared, a factorised, an int8 and a plain int8 module."""
    path = tmp_path / "m.safetensors"
    for options, to_int8, name in (
        ({}, False, "blocks.0.query.weight"),
        ({"embedding_dim": 2}, False, "blocks.0.query.weight"),
        ({}, True, "blocks.0.query.weight"),
        (None, True, "embedding.weight"),
    ):
        module = build("Narrow")
        if options is not None:
            share_from_embedding(module, module.embedding, **options)
        save_model(quantize(module) if to_int8 else module, path)
        plain = build("Narrow", seed=1)
        with pytest.raises(RuntimeError, match=rf"size mismatch for {name}: .*torch.Size\(\[0\]\)"):
            plain.load_state_dict(load_file(path), strict=False)
        load_model(plain, path)
        with torch.no_grad():
            assert torch.equal(plain.eval()(*batch()), module.eval()(*batch()))


def test_two_plans_that_read_the_same_columns(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Chain")
    for ending in ("0.weight", "1.weight"):
        share_from_embedding(
            module,
            module.embedding,
            virtual=False,
            select=lambda p, o: p.endswith(ending),  # noqa: B023
        )
    save_model(module, path)
    load_model(build("Chain"), path)

    def same_columns(tensors, metadata):
        content = json.loads(metadata["paramshare"])
        first, second = (entry["plan"]["groups"][0] for entry in content["sharings"])
        second["start"] = first["start"] + first["columns"] - 1
        metadata["paramshare"] = json.dumps(content)

    _rewrite(path, same_columns)
    other = build("Chain")
    before = snapshot(other)
    with pytest.raises(ShareError, match="read the same columns") as raised:
        load_model(other, path)
    assert snapshot(other) == before
    # The table is free again, though the error is still at hand.
    assert columns_taken(other.embedding.weight) == []
    del raised


def test_a_container_that_reads_a_factorised_table(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Chain")
    for ending in ("0.weight", "1.weight"):
        share_from_embedding(
            module,
            module.embedding,
            select=lambda p, o: p.endswith(ending),  # noqa: B023
            embedding_dim=6 if ending == "0.weight" else None,
        )
    save_model(module, path)
    other = build("Chain", seed=1)
    load_model(other, path)
    assert torch.equal(other(batch()[0]), module(batch()[0]))


def test_no_module_or_no_path(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Chain")
    before = snapshot(module)
    for call in (save_model, load_model):
        with pytest.raises(ShareError, match=r"must be a torch\.nn\.Module, not a NoneType"):
            call(None, path)
        with pytest.raises(ShareError, match="path must be one of a file, not a NoneType"):
            call(module, None)
        with pytest.raises(ShareError, match="weight has no shape yet"):
            call(nn.LazyLinear(3), path)
        with pytest.raises(ShareError, match="cannot be (read|written)"):
            call(module, tmp_path)
    assert snapshot(module) == before
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_does_not_fit_a_plain_module(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    save_model(module, path)
    wider = ZOO["Narrow"](3, 20).double()
    before = snapshot(wider)
    with pytest.raises(ShareError, match="blocks.0.query.weight"):
        load_model(wider, path)
    assert snapshot(wider) == before
    with pytest.raises(ShareError, match="the table embedding is 60 x 16, the plan's is 60 x 3"):
        load_model(build("Recurring"), path)
    with pytest.raises(ShareError, match="the table embedding is not in the module"):
        load_model(nn.Linear(3, 4), path)


def test_a_module_reachable_by_two_paths(tmp_path) -> None:
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(60, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.first = self.layers[0]

        def forward(self, x):
            return self.first(self.embedding(x))

    module = Aliased()
    share_from_embedding(module, module.embedding)
    save_model(module, tmp_path / "m.safetensors")
    other = Aliased()
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other(batch()[0]), module(batch()[0]))


def test_a_part_cannot_be_saved_or_loaded(tmp_path) -> None:
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    save_model(module, tmp_path / "m.safetensors")
    with pytest.raises(ShareError, match="a part of a shared module"):
        save_model(module.encoder, tmp_path / "part.safetensors")
    with pytest.raises(ShareError, match="a part of a shared module"):
        load_model(module.encoder, tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_double_file_into_a_float_meta_module(tmp_path) -> None:
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    save_model(module, tmp_path / "m.safetensors")
    with torch.device("meta"):
        other = ZOO["Encoder"]()
    load_model(other, tmp_path / "m.safetensors")
    assert {p.dtype for p in other.parameters()} == {torch.float32}


def test_frozen_modules_stay_frozen(tmp_path) -> None:
    module = build("Encoder")
    share_from_embedding(module, module.embedding)
    save_model(module, tmp_path / "m.safetensors")
    other = build("Encoder").requires_grad_(False)
    load_model(other, tmp_path / "m.safetensors")
    assert not any(p.requires_grad for p in other.parameters())
    materialize(other)
    assert not any(p.requires_grad for p in other.parameters())


def test_saving_leaves_no_half_file(tmp_path) -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    with pytest.raises(ShareError, match="cannot be written"):
        save_model(module, tmp_path / "nowhere" / "m.safetensors")
    (tmp_path / "file").write_text("")
    for bad in ("file/m.safetensors", "n" * 300, ""):
        with pytest.raises(ShareError, match="cannot be written"):
            save_model(module, tmp_path / bad)
    (tmp_path / "file").unlink()
    path = tmp_path / "m.safetensors"
    save_model(module, path)
    size = path.stat().st_size
    save_model(module, path)
    assert path.stat().st_size == size
    assert list(tmp_path.iterdir()) == [path]


def test_materialized_models_save_too(tmp_path) -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    materialize(module)
    save_model(module, tmp_path / "m.safetensors")
    other = build("Narrow", seed=1)
    load_model(other, tmp_path / "m.safetensors")
    assert isinstance(other.blocks[0].up.weight, nn.Parameter)
    assert torch.equal(other(*batch()), module(*batch()))


def test_a_layer_that_was_replaced_is_not_saved(tmp_path) -> None:
    module = build("Narrow")
    share(module)
    module.blocks[1].up = nn.Linear(16, 24).double()
    with pytest.raises(ShareError, match=r"blocks\.1\.up\.weight is not read from the embedding"):
        save_model(module, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
