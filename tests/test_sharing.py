from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from warned import filtered
from zoo import TOKENS, Block, Narrow, batch, build, share

import paramshare
from paramshare import ShareError, materialize, share_from_embedding
from paramshare.marks import sources
from paramshare.models import TransformerLM
from paramshare.sharing import empty_weights


def paths(sharing: paramshare.Sharing) -> list[str]:
    return [path for group in sharing.plan.groups for path in group.slots]


# ---------------------------------------------------------------------- what is selected


def test_default_takes_the_stacks_of_layers_only() -> None:
    module = build("Narrow")
    sharing = share_from_embedding(module, module.embedding)
    names = ("query", "key", "value", "up", "down")
    assert paths(sharing) == [f"blocks.{i}.{name}.weight" for name in names for i in range(3)]
    assert [group.name for group in sharing.plan.groups] == [
        f"blocks.*.{name}.weight" for name in names
    ]
    for outside in (module.lift, module.output):
        assert isinstance(outside.weight, nn.Parameter)


def test_biases_and_norms_stay_with_their_layers() -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    names = dict(module.named_parameters())
    assert {f"blocks.{i}.up.bias" for i in range(3)} <= names.keys()
    assert names["blocks.0.norm.weight"] is not names["blocks.1.norm.weight"]


def test_encoder_and_decoder_are_groups_of_their_own() -> None:
    module = build("Seq2Seq")
    sharing = share_from_embedding(module, module.embedding)
    assert [group.name for group in sharing.plan.groups] == [
        f"transformer.{stack}.layers.*.{weight}"
        for stack, weights in {
            "encoder": ["self_attn.in_proj_weight", "self_attn.out_proj.weight"],
            "decoder": [
                *("self_attn.in_proj_weight", "self_attn.out_proj.weight"),
                *("multihead_attn.in_proj_weight", "multihead_attn.out_proj.weight"),
            ],
        }.items()
        for weight in [*weights, "linear1.weight", "linear2.weight"]
    ]


def test_separate_projections_of_attention() -> None:
    module = build("CrossAttention")
    sharing = share_from_embedding(module, module.embedding)
    assert [(g.name, g.rows, g.cols) for g in sharing.plan.groups] == [
        ("layers.*.q_proj_weight", 16, 16),
        ("layers.*.k_proj_weight", 16, 10),
        ("layers.*.v_proj_weight", 16, 10),
        ("layers.*.out_proj.weight", 16, 16),
    ]


def test_one_layer_in_a_list_counts() -> None:
    module = build("Recurring")
    assert len(share_from_embedding(module, module.embedding).plan.groups) == 5


def test_a_stack_inside_a_list_of_one() -> None:
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, 16)
            self.parts = nn.ModuleList([nn.ModuleList(Block(16, 24) for _ in range(3))])

    module = Wrapped()
    sharing = share_from_embedding(module, module.embedding)
    assert sharing.plan.groups[0].name == "parts.0.*.query.weight"


def test_layers_of_unequal_shape_group_with_their_equals() -> None:
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, 16)
            self.layers = nn.ModuleList(nn.Linear(n, n) for n in (4, 6, 4))

    module = Uneven()
    sharing = share_from_embedding(module, module.embedding)
    assert {g.name: g.slots for g in sharing.plan.groups} == {
        "layers.*.weight [4x4]": ("layers.0.weight", "layers.2.weight"),
        "layers.*.weight [6x6]": ("layers.1.weight",),
    }


def test_depth_none_and_callable() -> None:
    module = build("Narrow")
    sharing = share_from_embedding(module, module.embedding, depth="none")
    assert len(sharing.plan.groups) == 15
    module = build("Narrow")
    sharing = share_from_embedding(
        module, module.embedding, depth=lambda path: path.replace(".2.", ".0.")
    )
    assert sharing.plan.groups[0].slots == ("blocks.0.query.weight", "blocks.2.query.weight")
    assert len(sharing.plan.groups) == 10
    module = build("Narrow")
    with pytest.raises(ShareError, match=r"query.weight \(16 x 16\) and blocks.0.up.weight \(24 x"):
        share_from_embedding(module, module.embedding, depth=lambda path: "all the same")


def test_a_weight_that_two_modules_hold_stays_common() -> None:
    module = build("Narrow")
    module.blocks[1].query.weight = module.blocks[0].query.weight
    sharing = share_from_embedding(module, module.embedding, depth="none")
    assert sharing.plan.groups[0].slots == ("blocks.0.query.weight", "blocks.1.query.weight")
    assert torch.equal(module.blocks[0].query.weight, module.blocks[1].query.weight)


def test_select_reaches_any_matrix_but_the_table() -> None:
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, 6)
            self.mix = nn.Parameter(torch.randn(5, 6))
            self.kernel = nn.Parameter(torch.randn(3, 2, 4))
            self.head = nn.Linear(6, TOKENS, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens) @ self.mix.T @ self.mix)

    module = Own()
    sharing = share_from_embedding(module, module.embedding, select=lambda path, owner: True)
    assert paths(sharing) == ["mix", "kernel"]
    assert module.kernel.shape == (3, 2, 4)
    assert module.head.weight is module.embedding.weight
    module(torch.tensor([1, 2])).sum().backward()
    assert module.paramshare.projection.grad.abs().sum() > 0
    materialize(module)
    assert module.kernel.shape == (3, 2, 4)
    assert [name for name, _ in module.named_parameters()][:2] == ["mix", "kernel"]


def test_select_gets_path_and_owner() -> None:
    module = build("Narrow")
    seen = []
    sharing = share_from_embedding(
        module,
        module.embedding,
        select=lambda path, owner: seen.append((path, owner)) or path == "output.weight",
    )
    assert paths(sharing) == ["output.weight"]
    assert ("lift.weight", module.lift) in seen


# ---------------------------------------------------------------------- what is stored


def test_counts_of_a_transformer_by_hand() -> None:
    """Table + projection + 9H + I of each layer (paper.md 3.1) + positions and last norm."""
    module = TransformerLM(1000, 64, 4, heads=4, feed_forward=128, length=50)
    dense = 1000 * 64 + 50 * 64 + 4 * (4 * 64 * 64 + 2 * 64 * 128 + 9 * 64 + 128) + 2 * 64
    assert sum(p.numel() for p in module.parameters()) == dense
    sharing = share_from_embedding(module, module.embedding)
    columns = 13 + 5 + 9 + 10  # 15 rows of 64 a column, 7 of 128
    assert sharing.plan.columns == columns
    stored = 1000 * 64 + 64 * columns + 50 * 64 + 4 * (9 * 64 + 128) + 2 * 64
    assert sharing.stored_parameters == stored == sum(p.numel() for p in module.parameters())
    assert sharing.dense_parameters == dense
    assert sharing.compression == pytest.approx(dense / stored)


def test_fairseq_sized_transformer_meets_its_target() -> None:
    """3+3 layers, width 256, 4,000 types: 4,977,664 stored before, at most 1,150,000 after."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4000, 256)
            self.transformer = nn.Transformer(256, 4, 3, 3, 512)

    module = Model()
    for stack in (module.transformer.encoder, module.transformer.decoder):
        stack.norm = None  # fairseq's post-norm stacks have none
    sharing = share_from_embedding(module, module.embedding)
    assert sharing.dense_parameters == 4_977_664
    assert sharing.stored_parameters <= 1_150_000


# ---------------------------------------------------------------------- init and gradients


@pytest.mark.parametrize("name", ["Encoder", "Narrow", "CrossAttention"])
@pytest.mark.parametrize("layout", ["aligned", "column", "token"])
def test_match_keeps_the_spread_of_every_layer(name: str, layout: str) -> None:
    module = build(name)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2 and parameter is not module.embedding.weight:
                parameter.mul_(1 + torch.rand(()))  # every weight another spread
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    sharing = share_from_embedding(module, module.embedding, layout=layout, depth="none")
    for path in paths(sharing):
        owner, _, weight = path.rpartition(".")
        after = getattr(module.get_submodule(owner), weight)
        torch.testing.assert_close(after.std(correction=0), before[path].std(correction=0))


def test_match_with_eps_is_a_constant_that_is_kept() -> None:
    module = build("Recurring")
    few = {"virtual": False, "select": lambda path, owner: path.endswith("up.weight")}
    spread = module.layers[0].up.weight.std(correction=0).item()
    share_from_embedding(module, module.embedding, **few)
    assert module.layers[0].up.weight.std(correction=0).item() == pytest.approx(spread)
    constant = module.paramshare.scale.clone()
    with torch.no_grad():
        module.embedding.weight.mul_(2)  # trained, say
    assert module.layers[0].up.weight.std(correction=0).item() == pytest.approx(2 * spread)
    other = build("Recurring", seed=5)
    share_from_embedding(other, other.embedding, **few)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.paramshare.scale, constant)


def test_zero_initialised_weights() -> None:
    module = build("Recurring")
    nn.init.zeros_(module.layers[0].down.weight)
    share_from_embedding(module, module.embedding)
    assert module.layers[0].down.weight.abs().max() == 0  # as its own init wants it
    module(*batch()).square().sum().backward()
    grad = module.paramshare.projection.grad
    assert grad[:, -1].abs().sum() > 0  # and it can leave zero
    module = build("Recurring")
    nn.init.zeros_(module.layers[0].up.weight)
    few = {"virtual": False, "select": lambda path, owner: path.endswith("up.weight")}
    share_from_embedding(module, module.embedding, **few)
    assert module.paramshare.scale.item() > 0  # a constant of zero would stay zero


def test_paper_init_leaves_the_raw_spread() -> None:
    module = TransformerLM(2000, 128, 2, feed_forward=128)
    nn.init.normal_(module.embedding.weight, std=0.02)
    share_from_embedding(module, module.embedding, init="paper")
    weight = module.encoder.layers[0].linear1.weight
    assert weight.std().item() == pytest.approx(0.0004 * 128**0.5, rel=0.05)  # paper.md 1.3


@pytest.mark.parametrize("execution", ["materialized", "factored", "blockwise"])
def test_table_gradient_scales_the_weights_share_only(execution: str) -> None:
    """Forward unchanged; through the weights a part of the gradient, through tokens all of it."""
    tokens, padding = batch()
    gradients, outputs = {}, {}
    for part in (0.0, 0.25, 1.0):
        module = build("Narrow")
        torch.manual_seed(1)
        share_from_embedding(module, module.embedding, table_gradient=part, execution=execution)
        outputs[part] = module(tokens, padding)
        outputs[part].square().sum().backward()
        gradients[part] = module.embedding.weight.grad
    assert torch.equal(outputs[0.0], outputs[1.0])
    through_tokens = gradients[0.0]
    unused = torch.ones(TOKENS, dtype=torch.bool)
    unused[tokens.unique()] = False
    assert through_tokens[unused].abs().max() == 0
    assert through_tokens.abs().max() > 0
    through_weights = gradients[1.0] - through_tokens
    assert through_weights[unused].abs().max() > 0
    torch.testing.assert_close(gradients[0.25], through_tokens + 0.25 * through_weights)


def test_out_proj_alone_trains_the_table() -> None:
    module = build("Encoder")
    share_from_embedding(
        module, module.embedding, select=lambda path, owner: path.endswith("out_proj.weight")
    )
    attention = module.encoder.layers[0].self_attn
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    attention(x, x, x)[0].square().sum().backward()
    assert module.embedding.weight.grad.abs().sum() > 0


def test_the_padding_row_is_read_like_any_other() -> None:
    module = build("Narrow")
    module.embedding = nn.Embedding(TOKENS, 3, padding_idx=0).double()
    share_from_embedding(module, module.embedding)
    module(*batch()).square().sum().backward()
    assert module.embedding.weight.grad[0].abs().sum() > 0


def test_a_zeroed_projection_gives_zero() -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    nn.init.zeros_(module.paramshare.projection)
    assert module.blocks[0].up.weight.abs().max() == 0


# ---------------------------------------------------------------------- several calls


class TwoTables(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = Narrow(16), Narrow(16)
        if tie:
            self.decoder.embedding = self.encoder.embedding

    def forward(self, tokens):
        return self.encoder(tokens) + self.decoder(tokens)


def up_only(path: str, owner: nn.Module) -> bool:
    return path.endswith("up.weight")


def test_two_tables_two_projections() -> None:
    module = TwoTables().double()
    for part in (module.encoder, module.decoder):
        share_from_embedding(part, part.embedding)
    names = {name for name, _ in module.named_parameters() if "projection" in name}
    assert names == {"encoder.paramshare.projection", "decoder.paramshare.projection"}
    tokens, _ = batch()
    expected = module(tokens)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(materialize(twin)(tokens), expected)
    assert not hasattr(twin.encoder, "paramshare")


def test_eps_columns_run_on_over_calls_on_one_table() -> None:
    module = TwoTables(tie=True).double()
    table = module.encoder.embedding
    first = share_from_embedding(module.encoder, table, virtual=False, select=up_only)
    second = share_from_embedding(module.decoder, table, virtual=False, select=up_only)
    assert first.plan.groups[0].columns == 8
    assert [p.plan.groups[0].start for p in (first, second)] == [0, 8]
    with pytest.raises(ShareError, match="needs 6 columns, .* of which earlier calls use 16: 6 ar"):
        share_from_embedding(
            module.decoder, table, virtual=False, select=lambda p, o: p.endswith("query.weight")
        )
    materialize(module.decoder)  # gives its columns back
    again = share_from_embedding(module.decoder, table, virtual=False, select=up_only)
    assert again.plan.groups[0].start == 8
    virtual = share_from_embedding(
        module.decoder, table, select=lambda p, o: p.endswith("query.weight")
    )
    assert virtual.plan.groups[0].start == 0  # its own projection, its own columns


def test_eps_columns_run_on_over_embeddings_tied_by_their_weight() -> None:
    module = TwoTables()
    module.decoder.embedding.weight = module.encoder.embedding.weight
    share_from_embedding(module.encoder, module.encoder.embedding, virtual=False, select=up_only)
    sharing = share_from_embedding(
        module,
        module.decoder.embedding,
        virtual=False,
        select=lambda p, o: p.startswith("decoder") and p.endswith("up.weight"),
    )
    assert sharing.plan.groups[0].start == 8


def test_eps_columns_of_embeddings_tied_across_separate_calls() -> None:
    module = TwoTables()
    module.decoder.embedding.weight = module.encoder.embedding.weight
    for start, part in ((0, module.encoder), (8, module.decoder)):
        sharing = share_from_embedding(part, part.embedding, virtual=False, select=up_only)
        assert sharing.plan.groups[0].start == start


def test_eps_columns_of_the_token_layout_run_backwards_over_calls() -> None:
    module = TwoTables(tie=True)
    starts = []
    for part in (module.encoder, module.decoder):
        sharing = share_from_embedding(
            part, part.embedding, virtual=False, select=up_only, layout="token"
        )
        starts.append(sharing.plan.groups[0].start)
    assert starts == [9, 2]  # 7 columns each of 16


def test_a_table_is_free_again_when_its_model_is_gone() -> None:
    module = Narrow(16)
    table = module.embedding
    for _ in range(3):
        sharing = share_from_embedding(module, table, virtual=False, select=up_only)
        assert sharing.plan.groups[0].start == 0
        del module, sharing
        module = Narrow(16)
        module.embedding = table


def test_keys_that_only_look_alike_are_groups_of_their_own() -> None:
    module = build("Narrow")
    sharing = share_from_embedding(
        module,
        module.embedding,
        select=up_only,
        depth=lambda path: 1 if ".0." in path else "1",
    )
    assert [len(group.slots) for group in sharing.plan.groups] == [1, 2]


@pytest.mark.parametrize("read", ["embedding.lift.weight", "output.weight"])
def test_a_later_call_leaves_what_an_earlier_one_reads(read: str) -> None:
    """The lift of a narrowed table, and a table."""
    module = build("Seq2Seq")
    if read == "output.weight":
        share_from_embedding(module, module.output)
    else:
        share_from_embedding(module, module.embedding, embedding_dim=6)
    before = snapshot(module)
    with pytest.raises(ShareError, match=f"{read} is what weights .* are read from"):
        share_from_embedding(module, module.embedding, select=lambda path, owner: path == read)
    assert snapshot(module) == before


def test_two_calls_on_one_module() -> None:
    module = build("Narrow")
    tokens, padding = batch()
    share_from_embedding(module, module.embedding, select=up_only)
    share_from_embedding(
        module, module.embedding, select=lambda path, owner: path.endswith("down.weight")
    )
    names = [name for name, _ in module.named_parameters() if "projection" in name]
    assert names == ["paramshare.projection", "paramshare_2.projection"]
    expected = module(tokens, padding)
    expected.sum().backward()
    assert all(module.get_parameter(name).grad.abs().sum() > 0 for name in names)
    torch.testing.assert_close(materialize(module)(tokens, padding), expected)


# ---------------------------------------------------------------------- errors change nothing


def snapshot(module: nn.Module) -> list:
    return [
        (name, type(part), id(part), sorted(part.__dict__), list(part._modules))
        for name, part in module.named_modules()
    ] + [(n, id(p), *_content(p)) for n, p in module.named_parameters()]


def _content(parameter: nn.Parameter) -> tuple:
    if isinstance(parameter, UninitializedParameter):
        return ()
    return parameter.data_ptr(), parameter._version


def _gradient(module):
    module(*batch()).sum().backward()


def _tie(module):
    module.output.weight = module.blocks[0].up.weight


def _lazy(module):
    module.blocks[2].down = nn.LazyLinear(16)


def _fill(path: str, row: int | slice, value: float) -> Callable[[nn.Module], object]:
    def fill(module: nn.Module) -> None:
        with torch.no_grad():
            module.get_parameter(path)[row] = value

    return fill


class Stateful:
    state: dict = {}


BAD = {
    "NaN in a row of the table": (
        {},
        _fill("embedding.weight", 17, float("nan")),
        "embedding has values that are not finite in row 17: ",
    ),
    "infinities in many rows": (
        {},
        _fill("embedding.weight", slice(3, 12), float("inf")),
        "not finite in rows 3, 4, 5, 6, 7 and 4 more: ",
    ),
    "NaN in a weight": (
        {},
        _fill("blocks.1.up.weight", 2, float("nan")),
        "blocks.1.up.weight has values that are not finite in row 2: ",
    ),
    "a table of zeros": (
        {},
        _fill("embedding.weight", slice(None), 0.0),
        "blocks.0.query.weight would be zero, .* rows 0, 1, 2, 3, 4 and 55 more of embedding",
    ),
    "zeros where a weight reads": (
        {"blocks": 1},
        _fill("embedding.weight", slice(0, 16), 0.0),
        "blocks.0.query.weight would be zero, .* rows 0, 1, 2, 3, 4 and 11 more of embedding",
    ),
    "zeros, and no spread to give": (
        {"init": "paper", "blocks": 1},
        _fill("embedding.weight", slice(0, 16), 0.0),
        "would be zero",
    ),
    "true as a number": ({"blocks": True}, None, "blocks=True is a bool"),
    "true as a share": ({"table_gradient": True}, None, "table_gradient=True is a bool"),
    "too many columns": ({"virtual_dim": 10**12}, None, f"virtual_dim={10**12} is out of range"),
    "far too many": ({"virtual_dim": 10**400}, None, "is out of range: "),
    **{
        f"{n}, no optimizers": ({"optimizers": value}, None, f"a {name} in it, which is no torch")
        for n, (value, name) in enumerate(
            [
                *((3, "int"), ("adam", "str"), ([None], "NoneType"), ([[]], "list")),
                *((torch.optim.SGD, "type"), ({"a": 1}, "str"), ([nn.Linear(1, 1)], "Linear")),
                *((Stateful(), "Stateful"), ([torch.zeros(2)], "Tensor")),
            ]
        )
    },
    "too few columns": ({"virtual": False}, None, "columns, the table has 3"),
    "nothing selected": ({"select": lambda path, owner: False}, None, r"select\(\) chose no"),
    "a gradient is set": ({}, _gradient, r"query.weight has a .grad already"),
    "sparse": ({}, lambda m: setattr(m.embedding, "sparse", True), "sparse=True"),
    "max_norm": ({}, lambda m: setattr(m.embedding, "max_norm", 1.0), "max_norm=1.0"),
    "half the module in another dtype": (
        {},
        lambda m: m.blocks[1].up.float(),
        "blocks.1.up.weight is torch.float32 on cpu, the table is torch.float64",
    ),
    "no shape yet": ({}, _lazy, "blocks.2.down.weight has no shape yet"),
    "a tie to a weight that stays": (
        {},
        _tie,
        "blocks.0.up.weight is tied to output.weight, which is not selected",
    ),
    "frozen weights": (
        {},
        lambda m: m.blocks[1].requires_grad_(False),
        "blocks.1.query.weight is frozen .* 5 of 15 weights",
    ),
    "options of the wrong kind": ({"blocks": 1.5}, None, "blocks=1.5 is a float"),
    "a number as text": ({"virtual_dim": "99"}, None, "virtual_dim='99' is a str"),
    "no number": ({"table_gradient": None}, None, "table_gradient=None is a NoneType"),
    "select is a name": ({"select": "up"}, None, "select='up' must be a callable"),
    "a key that cannot be one": ({"depth": lambda path: [path]}, None, "must be hashable"),
    "frozen table": (
        {"virtual": False, "select": lambda p, o: p == "output.weight"},
        lambda m: m.embedding.requires_grad_(False),
        "the table is frozen",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_leaves_the_module_as_it_was(case: str) -> None:
    options, spoil, message = BAD[case]
    module = build("Narrow")
    if spoil is not None:
        spoil(module)
    before, random = snapshot(module), torch.random.get_rng_state()
    with pytest.raises(ShareError, match=message):
        share_from_embedding(module, module.embedding, **options)
    assert snapshot(module) == before
    assert torch.equal(torch.random.get_rng_state(), random)


def test_sharing_twice() -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    before = snapshot(module)
    with pytest.raises(ShareError, match="blocks.0.query.weight is shared already"):
        share_from_embedding(module, module.embedding)
    assert snapshot(module) == before


def test_embedding_outside_of_the_module() -> None:
    module = build("Narrow")
    with pytest.raises(ShareError, match="not inside this ModuleList"):
        share_from_embedding(module.blocks, module.embedding)
    with pytest.raises(ShareError, match="a LayerNorm has no 2-D weight"):
        share_from_embedding(module, module.blocks[0].norm)
    with pytest.raises(ShareError, match="embedding must be a torch.nn.Module, not a Parameter"):
        share_from_embedding(module, module.embedding.weight)


def test_no_stack_of_layers() -> None:
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.output = nn.Linear(4, 2)

    module = Plain()
    with pytest.raises(ShareError, match=r"no ModuleList or Sequential.*select=lambda"):
        share_from_embedding(module, module.embedding)


def test_wrapped_modules_are_refused() -> None:
    module = build("Narrow")
    for wrapped in (nn.DataParallel(module), torch.compile(module)):
        with pytest.raises(ShareError, match=r"already wrapped \((DataParallel|OptimizedModule)"):
            share_from_embedding(wrapped, module.embedding)


def test_a_derived_weight_cannot_be_set() -> None:
    module = build("Narrow")
    share_from_embedding(module, module.embedding)
    layer = module.blocks[0].up
    for value in (nn.Parameter(torch.zeros(24, 16)), torch.zeros(24, 16)):
        with pytest.raises(ShareError, match="materialize on the shared module first"):
            layer.weight = value
    layer.bias = nn.Parameter(torch.zeros(24))
    materialize(module)
    layer.weight = nn.Parameter(torch.zeros(24, 16))


def test_materialize_what_is_not_shared() -> None:
    module = build("Narrow")
    with pytest.raises(ShareError, match="nothing in this Narrow is shared"):
        materialize(module)
    share_from_embedding(module, module.embedding)
    with pytest.raises(ShareError, match="a part of a shared module"):
        materialize(module.blocks)


# ---------------------------------------------------------------------- meta


def test_shared_on_meta_then_allocated() -> None:
    with torch.device("meta"):
        module = TransformerLM(500, 32, 2, feed_forward=64)
    sharing = share_from_embedding(module, module.embedding)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    module.output.weight = module.embedding.weight  # torch's to_empty unties
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    kaiming = (3 * 32) ** -0.5  # nn.Linear's own
    assert module.encoder.layers[0].linear1.weight.std().item() == pytest.approx(kaiming, rel=0.01)
    xavier = (2 / (4 * 32)) ** 0.5  # nn.MultiheadAttention's, over the packed matrix
    weight = module.encoder.layers[0].self_attn.in_proj_weight
    assert weight.std().item() == pytest.approx(xavier, rel=0.01)
    assert sharing.dense_parameters > sharing.stored_parameters


# ---------------------------------------------------------------------- initialising again


def _by_data(module: nn.Module) -> None:
    for name in sources(module):
        getattr(module, name).data.normal_(0, 0.02)


def _by_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias) if module.bias is not None else None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("Narrow", _by_data),
        ("Narrow", _by_init),
        ("Cells", _by_data),
        ("Convolutional", _by_data),
        ("NormedByHook", _by_data),
        ("Encoder", _by_data),
        ("Encoder", _by_init),
        ("Seq2Seq", _by_init),
    ],
)
def test_initialising_again_warns(name: str, init, training: bool) -> None:
    module = build(name)
    share(module)
    module.train(training)
    inputs = batch()
    with torch.no_grad():
        expected = module(*inputs)
        with pytest.warns(
            UserWarning, match="is read from the embedding, and what is written into"
        ):
            module.apply(init)
    bias = next((p for n, p in module.named_parameters() if n.endswith("up.bias")), None)
    assert bias is None or init is _by_data or not bias.any()  # what is a Parameter was written
    if init is _by_data:
        torch.testing.assert_close(module(*inputs), expected)


@pytest.mark.parametrize(
    "name", ["Narrow", "Recurrent", "Cells", "Convolutional", "CrossAttention"]
)
def test_reset_parameters_warns(name: str) -> None:
    module = build(name)
    sharing = share(module)
    for slot in sharing.plan.groups[0].slots[:1]:
        owner = module.get_submodule(slot.rpartition(".")[0])
        reset = getattr(owner, "reset_parameters", None) or owner._reset_parameters
        with pytest.warns(UserWarning, match="no effect: initialise before sharing") as seen:
            reset()
        assert len({str(w.message) for w in seen}) == len(seen)


def test_applying_what_writes_nothing_is_silent() -> None:
    for name in ("Encoder", "Recurrent", "Cells", "Normed"):
        module = build(name)
        share(module)
        with filtered("error"):
            module.apply(lambda m: [getattr(m, n, None) for n in ("weight", "weight_hh")])
            module.apply(lambda m: m.register_buffer("mark", None))
        materialize(module)
        with filtered("error"):
            module.apply(_by_init)


def test_reading_under_autocast_is_no_writing() -> None:
    module = build("Narrow", dtype=torch.float32)
    share(module)
    with torch.autocast("cpu", torch.bfloat16), filtered("error"):
        module.apply(lambda m: getattr(m, "weight", None))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("options", [{}, {"projection_bias": True, "blocks": 2}], ids=str)
def test_all_executions_agree(dtype: torch.dtype, bound: float, options: dict) -> None:
    """Outputs and gradients, relative to the largest number: some gradients are zero but for
    rounding (a bias of keys moves all scores alike)."""
    found = {}
    for execution in ("materialized", "factored", "blockwise"):
        module = build("Narrow", dtype=dtype)
        torch.manual_seed(1)
        sharing = share_from_embedding(module, module.embedding, execution=execution, **options)
        assert {group.execution for group in sharing.plan.groups} == {execution}
        output = module(*batch())
        output.square().sum().backward()
        with torch.no_grad():
            inference = module.eval()(*batch())
        gradients = torch.cat([p.grad.flatten() for p in module.parameters()])
        found[execution] = [output, inference, gradients]
    for execution in ("factored", "blockwise"):
        for ours, expected in zip(found[execution], found["materialized"], strict=True):
            assert (ours - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"virtual": False}, {"embedding_dim": 6}])
def test_empty_weights_stop_who_would_load_them_into_a_plain_module(options) -> None:
    module = TwoTables()
    for part in (module.encoder, module.decoder):
        share_from_embedding(part, part.embedding, select=up_only, **options)
    empty = empty_weights(module)
    assert {name: tuple(tensor.shape) for name, tensor in empty.items()} == {
        f"{side}.blocks.{index}.up.weight": (0,)
        for side in ("encoder", "decoder")
        for index in range(len(module.encoder.blocks))
    }
    plain = TwoTables()
    assert all(isinstance(plain.get_parameter(name), nn.Parameter) for name in empty)
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder\.blocks\.0\.up\.weight"):
        plain.load_state_dict(empty, strict=False)
    assert empty_weights(plain) == {}
