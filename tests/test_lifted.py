"""The factorised embedding."""

from __future__ import annotations

import copy

import pytest
import torch
from close import assert_passes_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import batch, build, share

from paramshare import ShareError, load_model, materialize, save_model, share_from_embedding
from paramshare.lifted import LiftedTable, factorise
from paramshare.models import TransformerLM


def truncated(weight: Tensor, features: int) -> Tensor:
    """The nearest matrix of that rank, by torch's own decomposition."""
    u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    return ((u[:, :features] * s[:features]) @ vh[:features]).to(weight.dtype)


@given(st.integers(2, 40), st.integers(2, 20), st.data())
@settings(max_examples=40, deadline=None)
def test_factorise_is_the_truncated_decomposition(tokens: int, width: int, data) -> None:
    features = data.draw(st.integers(1, width - 1))
    torch.manual_seed(0)
    weight = torch.randn(tokens, width, dtype=torch.float64)
    table, lift = factorise(weight, features)
    assert (table.shape, lift.shape) == ((tokens, features), (width, features))
    torch.testing.assert_close(table @ lift.t(), truncated(weight, features), rtol=0, atol=1e-9)
    torch.testing.assert_close(lift.t() @ lift, torch.eye(features, dtype=lift.dtype))


def test_the_columns_of_the_table_carry_alike() -> None:
    """Weights are read from single columns: none may be a hundred times another."""
    weight = torch.randn(500, 32) * torch.logspace(0, -3, 32)
    table, _ = factorise(weight, 16)
    spreads = table.std(dim=0)
    assert spreads.max() < 10 * spreads.min()
    plain = (truncated(weight, 16) @ torch.linalg.svd(weight)[2].t()).std(dim=0)
    assert plain[0] > 25 * plain[15]  # without the rotation


def test_lifted_table_is_like_the_tensor() -> None:
    left, right = torch.randn(9, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    lifted, dense = LiftedTable(left, right), left @ right
    x, y, ids = torch.randn(2, 4, 5), torch.randn(9), torch.tensor([[1, 8], [0, 0]])
    pairs = [
        (F.linear(x, lifted, y), F.linear(x, dense, y)),
        (F.linear(x, weight=lifted), F.linear(x, dense)),
        (
            F.linear(torch.randn(2, 9).fill_(0.5), lifted.t()),
            F.linear(torch.full((2, 9), 0.5), dense.t()),
        ),
        (F.embedding(ids, lifted), F.embedding(ids, dense)),
        (x @ lifted.t(), x @ dense.t()),
        (x @ lifted.T, x @ dense.T),
        (x @ lifted.mT, x @ dense.mT),
        (torch.matmul(x, lifted.transpose(0, 1)), x @ dense.t()),
        (torch.mm(x[0], lifted.transpose(-1, -2)), x[0] @ dense.t()),
        (lifted @ x[0].t(), dense @ x[0].t()),
        (torch.matmul(lifted, x[0].t()), dense @ x[0].t()),
        (lifted.t() @ y, dense.t() @ y),
        (lifted[ids], dense[ids]),
        (lifted[2], dense[2]),
        (lifted[1:4, 2], dense[1:4, 2]),
        (torch.mul(lifted, 2), dense * 2),
        (torch.cat([lifted, dense]), torch.cat([dense, dense])),
        (lifted.sum(), dense.sum()),
        (lifted.detach().abs(), dense.abs()),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
        assert torch.is_tensor(ours)
    assert lifted.shape == dense.shape == lifted.size()
    assert (lifted.size(1), lifted.dim(), len(lifted)) == (5, 2, 9)
    assert (lifted.dtype, lifted.device, lifted.requires_grad) == (dense.dtype, dense.device, True)
    with pytest.warns(UserWarning, match="normal_.. of a factorised embedding's weight has no"):
        nn.init.normal_(lifted)


class Allocations(TorchDispatchMode):
    """The shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.shapes.add(tuple(value.shape))
        return result


class ReadsTheTable(nn.Module):
    """The ways in which models use their table as the output layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.how = how
        if how == "tied layer":
            self.output = nn.Linear(12, 50)
            self.output.weight = self.embedding.weight
        elif how == "own Parameter":
            self.weight = self.embedding.weight
        elif how == "second embedding":
            self.other = nn.Embedding(50, 12)
            self.other.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.how == "tied layer":
            return self.output(x)
        if self.how == "own Parameter":
            return F.linear(x, self.weight)
        if self.how == "second embedding":
            return x + self.other(tokens)
        if self.how == "functional":
            return F.linear(x, self.embedding.weight)
        return x @ self.embedding.weight.t()


HOWS = ["tied layer", "own Parameter", "second embedding", "functional", "product"]


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_wherever_the_table_is_used(how: str, virtual: bool, tmp_path) -> None:
    torch.manual_seed(0)
    module = ReadsTheTable(how)
    low_rank, plain = copy.deepcopy(module), ReadsTheTable(how)
    with torch.no_grad():
        low_rank.embedding.weight.copy_(truncated(module.embedding.weight, 4))
    dense = sum(p.numel() for p in module.parameters())
    sharing = share_from_embedding(module, module.embedding, virtual, embedding_dim=4)
    columns = sharing.plan.columns if virtual else 0
    assert sharing.stored_parameters == sum(
        [dense - 50 * 12 - 2 * 144, 50 * 4 + 4 * 12, 4 * columns, 0 if virtual else 1]
    )
    tokens = torch.tensor([[3, 1, 7, 49], [0, 2, 2, 11]])
    # The values: those of the model with the nearest table of that rank and our weights.
    twin = materialize(copy.deepcopy(module))
    torch.testing.assert_close(twin.embedding.weight, low_rank.embedding.weight, rtol=0, atol=1e-5)
    assert [n for n, _ in twin.named_parameters(remove_duplicate=False)] == [
        n for n, _ in plain.named_parameters(remove_duplicate=False)
    ]
    assert len(list(twin.parameters())) == len(list(plain.parameters()))  # ties are ties again
    with Allocations() as seen:
        output = module(tokens)
        output.square().sum().backward()
    assert not {(50, 12), (12, 50)} & seen.shapes
    expected = twin(tokens)
    assert_passes_close(output, expected)
    # The factors' gradients: of the wide table's, by the chain rule, beside what the weights give.
    wide = {}
    share_free = copy.deepcopy(twin)
    share_free(tokens).square().sum().backward()
    wide = share_free.embedding.weight.grad
    lift = module.embedding.lift.weight
    assert_passes_close(lift.grad, wide.t() @ module.embedding.table.weight)
    save_model(module, tmp_path / "model.safetensors")
    for make in (lambda: ReadsTheTable(how), lambda: _meta(how)):
        other = make()
        load_model(other, tmp_path / "model.safetensors")
        assert torch.equal(other(tokens), output)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(tokens), output)


def _meta(how: str) -> nn.Module:
    with torch.device("meta"):
        return ReadsTheTable(how)


@pytest.mark.parametrize(
    "name", ["Encoder", "Seq2Seq", "Recurrent", "Cells", "NormedByHook", "Chain"]
)
def test_every_kind_of_model(name: str) -> None:
    module = build(name)
    sharing = share(module, embedding_dim=5)
    inputs = batch()
    output = module(*inputs)
    output.square().sum().backward()
    assert module.embedding.table.weight.grad.abs().sum() > 0
    torch.testing.assert_close(materialize(copy.deepcopy(module))(*inputs), output)
    again = build(name, seed=1)
    share(again, embedding_dim=5)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(*inputs), output)
    assert type(module.embedding) is not nn.Embedding
    assert isinstance(module.embedding, nn.Embedding)
    assert "lifted to 16" in str(sharing)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.embedding.lift.weight.mul_(2)
    assert torch.equal(module(*inputs), output)


def test_narrow_tables_make_factored_execution_win() -> None:
    module = build("Narrow")
    with pytest.raises(ShareError, match="embedding_dim=3 is out of range.* use 1 to 2"):
        share(module, embedding_dim=3)
    module = build("Recurring")
    assert {g.execution for g in share(build("Recurring")).plan.groups} == {"materialized"}
    sharing = share(module, embedding_dim=2)
    assert "factored" in {group.execution for group in sharing.plan.groups}


def test_padding_stays_out_of_the_lookups_gradient() -> None:
    module = ReadsTheTable("functional")
    share_from_embedding(module, module.embedding, embedding_dim=4, table_gradient=0.0)
    module.embedding(torch.tensor([1, 1, 5])).sum().backward()
    gradient = module.embedding.table.weight.grad
    assert gradient[1].abs().sum() == 0
    assert gradient[5].abs().sum() > 0


@pytest.mark.parametrize("padding", [None, 3, -2])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_of_lookups_are_those_of_the_product(padding, by_frequency: bool) -> None:
    torch.manual_seed(0)
    factors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 2), (2, 5))]
    ids = torch.tensor([[3, 1, 3], [0, 5, 3]])
    found = []
    for weight in (LiftedTable(*factors), factors[0] @ factors[1]):
        output = F.embedding(ids, weight, padding, scale_grad_by_freq=by_frequency)
        found.append([output, *torch.autograd.grad(output.square().sum(), factors)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_second_call_reads_the_narrow_table() -> None:
    torch.manual_seed(0)
    module = build("Seq2Seq")
    inputs = batch()
    encoder = lambda path, owner: "encoder" in path and path.endswith("linear1.weight")  # noqa: E731
    decoder = lambda path, owner: "decoder" in path and path.endswith("linear1.weight")  # noqa: E731
    share_from_embedding(module, module.embedding, embedding_dim=5, select=encoder)
    second = share_from_embedding(module, module.embedding, select=decoder)
    assert second.plan.features == 5
    assert second.plan.table == "embedding.table"
    output = module(*inputs)
    with pytest.raises(ShareError, match="out of range: the table is 60 x 5"):
        share_from_embedding(module, module.embedding, embedding_dim=7)
    twin = materialize(copy.deepcopy(module))
    torch.testing.assert_close(twin(*inputs), output)
    assert type(twin.embedding) is nn.Embedding


def test_two_plans_in_one_file(tmp_path) -> None:
    module, other = build("Seq2Seq"), build("Seq2Seq", seed=1)
    pick = lambda what: lambda path, owner: what in path and path.endswith("linear1.weight")  # noqa: E731
    share_from_embedding(module, module.embedding, embedding_dim=5, select=pick("encoder"))
    share_from_embedding(module, module.embedding, select=pick("decoder"))
    save_model(module, tmp_path / "model.safetensors")
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other(*batch()), module(*batch()))


@pytest.mark.parametrize("wrong", [0, 16, 17, 2.5, True, "8"])
def test_wrong_sizes_change_nothing(wrong) -> None:
    module = build("Encoder")
    before = {name: id(p) for name, p in module.named_parameters()}
    with pytest.raises(ShareError, match="embedding_dim="):
        share(module, embedding_dim=wrong)
    assert {name: id(p) for name, p in module.named_parameters()} == before


def test_what_would_be_lost_is_refused() -> None:
    module = build("Encoder")
    module.embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ShareError, match=r"the table has a \.grad already"):
        share(module, embedding_dim=4)
    module = build("Encoder")
    module.embedding.lift = nn.Identity()
    with pytest.raises(ShareError, match="embedding has a 'lift' already"):
        share(module, embedding_dim=4)
    module = build("Encoder")
    optimizer = torch.optim.Adam(module.parameters())
    module(*batch()).sum().backward()
    optimizer.step()
    module.zero_grad()
    with pytest.raises(ShareError, match="already has the state of"):
        share(module, embedding_dim=4, optimizers=optimizer)


def test_an_unused_optimizer_gets_the_factors() -> None:
    module = build("Encoder")
    optimizer = torch.optim.Adam(module.named_parameters())
    share(module, embedding_dim=4, optimizers=optimizer)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in module.parameters()}
    assert {"embedding.table.weight", "embedding.lift.weight"} <= set(group["param_names"])
    assert len(group["param_names"]) == len(group["params"])


def test_on_meta() -> None:
    with torch.device("meta"):
        module = TransformerLM(500, 32, 2, feed_forward=64)
    sharing = share_from_embedding(module, module.embedding, embedding_dim=8)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert module(torch.randint(0, 500, (2, 5))).shape == (2, 5, 500)
    assert sharing.stored_parameters == sum(p.numel() for p in module.parameters())


def test_frozen_stays_frozen() -> None:
    module = build("Encoder").requires_grad_(False)
    share(module, embedding_dim=4)
    assert not any(p.requires_grad for p in module.parameters())
    assert not any(p.requires_grad for p in materialize(module).parameters())


def test_bert_base() -> None:
    """Counts by arithmetic, no E x H tensor in a forward pass, logits of the truncated table."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig()).eval()
    tokens, width, hidden, features, positions = 30522, 768, 3072, 128, 512
    with torch.no_grad():  # a table with directions that matter, as a trained one has
        model.bert.embeddings.word_embeddings.weight.mul_(torch.logspace(1, -2, width))
    wide = model.bert.embeddings.word_embeddings.weight.detach().clone()
    sharing = share_from_embedding(model, model.get_input_embeddings(), embedding_dim=features)

    # Columns of 30,522 numbers: 39 rows of 768 numbers, 9 rows of 3,072, and no row is split.
    columns = 4 * -(-width // (tokens // width)) + -(-hidden // (tokens // width))
    columns += -(-width // (tokens // hidden))
    vectors = 12 * (4 * width + hidden + width + 4 * width)  # biases, LayerNorms
    around = (positions + 2) * width + 2 * width  # positions, types, LayerNorm
    head = width * width + width + 2 * width + tokens  # dense, LayerNorm, bias of the output
    expected = tokens * features + features * width + features * columns + vectors + around + head
    print(f"\n{sharing}\nby arithmetic: {expected:,}")
    assert sharing.plan.columns == columns
    assert sharing.stored_parameters == expected == sum(p.numel() for p in model.parameters())

    ids = torch.randint(0, tokens, (1, 5))
    with Allocations() as seen:
        output = model(ids).logits
    assert not {(tokens, width), (width, tokens)} & seen.shapes
    assert {(tokens, features), (tokens, columns), (columns, tokens)} & seen.shapes  # it looks

    with torch.no_grad():
        low_rank = truncated(wide, features)
        hidden_states = model.cls.predictions.transform(model.bert(ids).last_hidden_state)
        expected_logits = hidden_states @ low_rank.t() + model.cls.predictions.bias
        assert_passes_close(output, expected_logits)
        looked_up = model.get_input_embeddings()(ids)
        torch.testing.assert_close(looked_up, low_rank[ids], rtol=1e-4, atol=1e-4)
    assert model.get_input_embeddings().weight.shape == (tokens, width)


# ---------------------------------------------------------------------- several calls


class Outer(nn.Module):
    """Reads the table of a module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(2))
        self.inner = build("Encoder").float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def outer(seed: int = 0, shared: bool = False) -> Outer:
    torch.manual_seed(seed)
    module = Outer()
    if shared:
        inner = module.inner
        pick = lambda what: lambda path, owner: what in path  # noqa: E731
        share_from_embedding(inner, inner.embedding, embedding_dim=8, select=pick("self_attn"))
        share_from_embedding(inner, inner.embedding, select=pick("linear"))
        for name in ("layers.0.weight", "layers.1.weight"):
            share_from_embedding(module, inner.embedding, select=lambda p, o, name=name: p == name)
    return module


def test_an_outer_module_reads_an_inner_ones_narrow_table(tmp_path) -> None:
    module, tokens = outer(shared=True), batch()[0]
    expected = module(tokens)
    with pytest.raises(ShareError, match="weights outside of this Encoder are read from its fact"):
        materialize(module.inner)
    assert torch.equal(module(tokens), expected)
    save_model(module, tmp_path / "model.safetensors")
    other = outer(seed=1)
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other(tokens), expected)
    assert list(other.state_dict()) == list(module.state_dict())
    assert_passes_close(materialize(other)(tokens), expected)


@pytest.mark.parametrize("virtual", [True, False])
def test_a_table_that_is_read_already_cannot_be_narrowed(virtual: bool) -> None:
    module = build("Chain")
    pick = lambda n: lambda path, owner: path == f"1.{n}.weight"  # noqa: E731
    share_from_embedding(module, module.embedding, virtual, select=pick(0))
    expected = module(*batch())
    with pytest.raises(
        ShareError, match="0 is read by an earlier call already: give embedding_dim"
    ):
        share_from_embedding(module, module.embedding, embedding_dim=8, select=pick(1))
    assert torch.equal(module(*batch()), expected)


# ---------------------------------------------------------------------- unusual uses


def lifted() -> tuple[LiftedTable, Tensor]:
    left, right = torch.randn(9, 3), torch.randn(3, 5)
    return LiftedTable(left, right), left @ right


def test_arithmetic() -> None:
    ours, theirs = lifted()
    for operation in (
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: w / 3,
        lambda w: 2 / w,
        lambda w: w**2,
        lambda w: -w,
        lambda w: abs(w),
        lambda w: w > 0,
        lambda w: w * torch.arange(5.0),
        lambda w: torch.arange(5.0) * w,
        lambda w: w + w,
        lambda w: w[w > 0],
        lambda w: torch.stack(list(w)),
        lambda w: F.embedding(torch.tensor([1, 2]), w, max_norm=0.5),
    ):
        torch.testing.assert_close(operation(ours), operation(theirs.clone()))
    for scaled in (ours * 3, 3 * ours):
        assert isinstance(scaled, LiftedTable)
        torch.testing.assert_close(scaled.dense(), theirs * 3)


def test_writing_warns_or_is_refused() -> None:
    ours, _ = lifted()
    before = ours.left.clone(), ours.right.clone()
    for write in (
        lambda: ours.data.copy_(torch.zeros(9, 5)),
        lambda: ours.normal_(),
        lambda: nn.init.xavier_uniform_(ours),
        lambda: nn.init.trunc_normal_(ours),
        lambda: nn.init.constant_(ours, 0.0),
    ):
        with pytest.warns(UserWarning, match="of a factorised embedding's weight has no effect"):
            write()
    for name in ("data", "requires_grad", "anything"):
        with pytest.raises(ShareError, match=f"^{name} of a factorised embedding's weight cannot"):
            setattr(ours, name, torch.zeros(9, 5))
    for rows in (ours, ours.data):
        with pytest.raises(ShareError, match="rows of a factorised embedding's weight cannot be"):
            rows[2] = 1.0
    with pytest.warns(UserWarning, match=r"requires_grad_\(\) of a factorised"):
        ours.requires_grad_(False)
    assert torch.equal(ours.left, before[0])
    assert torch.equal(ours.right, before[1])


class Looks(ReadsTheTable):
    """Looks its tokens up by an operation that builds the table."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.index_select(self.embedding.weight, 0, tokens.flatten())
        return self.layers[1](self.layers[0](x))


def test_operations_that_build_the_table_compile() -> None:
    module = Looks("product")
    share_from_embedding(module, module.embedding, embedding_dim=4)
    tokens = torch.tensor([[1, 2], [3, 4]])
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), module(tokens))


def test_a_table_that_is_not_finite() -> None:
    module = build("Encoder")
    with torch.no_grad():
        module.embedding.weight[3, 2] = float("nan")
    with pytest.raises(ShareError, match="embedding has values that are not finite in row 3"):
        share(module, embedding_dim=4)
    assert module.embedding.weight.shape == (60, 16)
