"""The translation plugin in process; test_translation_commands.py has fairseq's command lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import python
from translators import FCONV, LSTM, SIZES, build, inputs

pytest.importorskip("fairseq")

from argparse import Namespace

from fairseq import utils
from fairseq.trainer import _catalog_shared_params

from paramshare import ShareError, materialize
from paramshare.cli import user_dir
from paramshare.sharing import named_pools
from paramshare.tasks.sharing import ShareConfig, share_again, share_model


def test_one_table_one_allocation(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, model = build(corpus / "joined", "--share-all-embeddings")
    ((path, pool),) = named_pools(model)
    assert path == ""
    assert len(pool.plan.groups) == 16
    assert pool.plan.table_gradient == 0.1
    _, plain = build(corpus / "joined", "--share-all-embeddings", "--share", "none")
    assert list(named_pools(plain)) == []
    stored, dense = (sum(p.numel() for p in m.parameters()) for m in (model, plain))
    assert f"stored {stored:,} | dense {dense:,} | ratio {dense / stored:.2f}" in caplog.text
    assert "encoder.layers.*.self_attn.q_proj.weight" in caplog.text


def test_two_tables_two_projections(corpus: Path) -> None:
    _, model = build(corpus / "separate")
    pools = dict(named_pools(model))
    assert list(pools) == ["encoder", "decoder"]
    assert pools["encoder"].embedding is model.encoder.embed_tokens
    assert pools["decoder"].embedding is model.decoder.embed_tokens


def test_eps_runs_where_it_fits_and_names_the_options_where_not(corpus: Path) -> None:
    message = r"--share eps of encoder .*needs \d+ columns, the table has 32.*--share none trains"
    with pytest.raises(ShareError, match=message):
        build(corpus / "separate", "--share", "eps")
    narrow = [arg.replace("ffn-embed-dim=48", "ffn-embed-dim=4") for arg in SIZES]
    data = corpus / "joined"
    model = ["--arch", "transformer_iwslt_de_en", *narrow]
    with pytest.raises(ShareError, match=r"--share eps of the model .*: \d+ are missing"):
        build(data, "--share", "eps", "--share-all-embeddings", model=model)


def test_options_reach_the_call(corpus: Path) -> None:
    _, model = build(
        *(corpus / "joined", "--share-all-embeddings", "--share-depth", "none"),
        *("--share-layout", "column", "--share-virtual-dim", "3000", "--share-init", "paper"),
        *("--share-table-gradient", "0.5", "--share-execution", "materialized"),
    )
    plan = model.paramshare.plan
    assert len(plan.groups) == 32
    assert {group.layout for group in plan.groups} == {"column"}
    assert (plan.columns, plan.init, plan.table_gradient) == (3000, "paper", 0.5)
    _, model = build(corpus / "joined", "--share-all-embeddings", "--share-blocks", "1")
    assert {group.blocks for group in model.paramshare.plan.groups} == {1}


def test_attention_is_materialized_since_it_reads_its_projections(corpus: Path) -> None:
    _, model = build(corpus / "joined", "--share-all-embeddings", "--share-execution", "factored")
    executions = {g.name.split(".")[-2]: g.execution for g in model.paramshare.plan.groups}
    assert executions == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), "materialized"),
        **dict.fromkeys(("fc1", "fc2"), "factored"),
    }


@pytest.mark.parametrize("execution", ["auto", "factored"])
@pytest.mark.parametrize("data", ["joined", "separate"])
def test_training_and_step_by_step_decoding_equal_the_materialized_model(
    corpus: Path, data: str, execution: str
) -> None:
    more = ["--share-all-embeddings"] if data == "joined" else []
    task, model = build(corpus / data, "--share-execution", execution, *more)
    model.double()
    batch = inputs()
    expected = model.train()(**batch)[0]
    _, plain = build(corpus / data, "--share-execution", execution, *more)
    plain.double().load_state_dict(model.state_dict())
    materialize(plain)
    torch.testing.assert_close(plain(**batch)[0], expected)
    for m in (model, plain):
        m.eval()
    torch.testing.assert_close(model(**batch)[0], expected)

    sample = {"net_input": batch, "id": torch.arange(2)}
    generator = task.build_generator([model], Namespace(beam=3, max_len_b=6))
    found = generator.generate([model], sample)
    generator = task.build_generator([plain], Namespace(beam=3, max_len_b=6))
    wanted = generator.generate([plain], sample)
    for a, b in zip(found, wanted, strict=True):
        assert [h["tokens"].tolist() for h in a] == [h["tokens"].tolist() for h in b]


def test_decoding_generates_weights_once(corpus: Path) -> None:
    task, model = build(corpus / "joined", "--share-all-embeddings")
    model.eval()
    pool = model.paramshare
    count, original = [], pool._generate

    def counting(indices, frame):
        count.extend(indices)
        return original(indices, frame)

    pool._generate = counting
    sample = {"net_input": inputs(), "id": torch.arange(2)}
    generator = task.build_generator([model], Namespace(beam=3, max_len_b=12, min_len=10))
    for _ in range(2):
        with torch.no_grad():
            generator.generate([model], sample)
    assert sorted(count) == list(range(16))


def test_trainer_finds_only_real_ties(corpus: Path) -> None:
    _, model = build(corpus / "joined", "--share-all-embeddings")
    shared = [names for names in _catalog_shared_params(model) if len(names) > 1]
    _, plain = build(corpus / "joined", "--share-all-embeddings", "--share", "none")
    assert shared == [names for names in _catalog_shared_params(plain) if len(names) > 1]


def test_one_table_needs_one_dictionary(corpus: Path) -> None:
    with pytest.raises(
        ShareError, match=r"48 and 48 different types.*--joined-dictionary \(a flag"
    ):
        build(corpus / "separate", "--share-all-embeddings")


def test_a_model_without_a_table_on_both_sides() -> None:
    with pytest.raises(
        ShareError, match=r"^Linear has no encoder with a token table.*another --arch, or --share"
    ):
        share_model(torch.nn.Linear(2, 2), ShareConfig())


@pytest.mark.parametrize(
    ("data", "model", "roots"),
    [
        ("separate", LSTM, ["encoder", "decoder"]),
        ("joined", [*LSTM, "--share-all-embeddings"], [""]),
        ("separate", FCONV, ["encoder", "decoder"]),
        ("joined", [*FCONV, "--share-input-output-embed"], ["encoder", "decoder"]),
    ],
)
def test_recurrent_and_convolutional_models(
    corpus: Path, data: str, model: list[str], roots: list[str]
) -> None:
    """They compute and decode what their materialized twins do, under a map of depths too."""
    task, shared = build(corpus / data, "--share-depth", "sequence:2", model=model)
    pools = dict(named_pools(shared))
    assert list(pools) == roots
    for path, pool in pools.items():
        assert pool.embedding is shared.get_submodule(path or "encoder").embed_tokens
        uses = [len(group.slots) for group in pool.plan.groups if "attention" not in group.name]
        assert set(uses) <= {1, 2}
        assert 2 in uses
    plain = build(corpus / data, "--share-depth", "sequence:2", model=model)[1]
    plain.load_state_dict(shared.state_dict())
    materialize(plain)
    torch.testing.assert_close(shared(**inputs())[0], plain(**inputs())[0])
    sample = {"net_input": inputs(), "id": torch.arange(2)}
    found = []
    for m in (shared, plain):
        generator = task.build_generator([m], Namespace(beam=3, max_len_b=6))
        hypotheses = generator.generate([m], sample)
        found.append([[h["tokens"].tolist() for h in some] for some in hypotheses])
    assert found[0] == found[1]


TRANSFORMER = ["--arch", "transformer", *SIZES, "--dropout", "0", "--share-all-embeddings"]


@pytest.mark.parametrize("model", [TRANSFORMER, [*LSTM, "--share-all-embeddings"], FCONV])
def test_factorised_tables(corpus: Path, model: list[str]) -> None:
    """Of models that tie their output to the table, by a layer's weight or by reading it."""
    task, shared = build(corpus / "joined", "--share-embedding-dim", "8", model=model)
    lifts = [n for n, _ in shared.named_parameters() if n.endswith("lift.weight")]
    assert len(lifts) == len(dict(named_pools(shared)))
    plain = build(corpus / "joined", "--share-embedding-dim", "8", model=model)[1]
    plain.load_state_dict(shared.state_dict())
    materialize(plain)
    assert not [n for n, _ in plain.named_parameters() if "lift" in n]
    torch.testing.assert_close(shared(**inputs())[0], plain(**inputs())[0])
    generated = [
        task.build_generator([m], Namespace(beam=2, max_len_b=5)).generate(
            [m], {"net_input": inputs(), "id": torch.arange(2)}
        )
        for m in (shared, plain)
    ]
    tokens = [[[h["tokens"].tolist() for h in some] for some in one] for one in generated]
    assert tokens[0] == tokens[1]
    shared.make_generation_fast_()
    torch.testing.assert_close(shared(**inputs())[0], plain(**inputs())[0])


@pytest.mark.parametrize(
    ("depth", "uses"),
    [
        ("all", [4]),
        ("none", [1, 1, 1, 1]),
        ("sandwich", [1, 2, 1]),
        ("sequence:2", [2, 2]),
        ("cycle:4", [1, 1, 1, 1]),
        ("cycle-rev:2", [2, 2]),
    ],
)
def test_every_map_of_depths_is_an_option(corpus: Path, depth: str, uses: list[int]) -> None:
    _, model = build(corpus / "separate", "--share-depth", depth, model=FCONV)
    assert [len(group.slots) for group in model.encoder.paramshare.plan.groups] == uses


def test_a_map_of_depths_that_does_not_exist_or_does_not_fit(corpus: Path) -> None:
    for share in ("veps", "none"):
        with pytest.raises(ShareError, match="^--share-depth twice is unknown: use one of 'all', "):
            build(corpus / "separate", "--share-depth", "twice", "--share", share)
    with pytest.raises(
        ShareError, match=r"^--share veps of encoder .* 3 distinct layers do not divide 4 layers"
    ):
        build(corpus / "separate", "--share-depth", "cycle:3", model=FCONV)


def test_errors_speak_of_options(corpus: Path) -> None:
    with pytest.raises(ShareError) as few:
        build(corpus / "joined", "--share", "eps", "--share-depth", "none", model=FCONV)
    wanted = "are missing; use --share veps, share fewer weights (--share-depth 'all')"
    assert wanted in str(few.value)
    with pytest.raises(ShareError, match="--share-blocks 2 belongs to --share-layout 'aligned'"):
        build(corpus / "joined", "--share-blocks", "2", "--share-layout", "column", model=FCONV)


def test_a_model_of_other_layers_than_the_plans(corpus: Path) -> None:
    task, _ = build(corpus / "joined", model=FCONV)
    fewer = [a.replace("* 4", "* 3") for a in FCONV]
    with pytest.raises(ShareError, match="plan does not fit the model.*--encoder-layers-to-keep"):
        share_again(build(corpus / "joined", "--share", "none", model=fewer)[1], task.plans)


def test_a_checkpoint_of_other_options_is_refused(corpus: Path) -> None:
    one = ["--share-all-embeddings"]
    _, model = build(corpus / "joined", *one)
    state = model.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    _, same = build(corpus / "joined", *one, "--share-execution", "materialized")
    same.load_state_dict(state)
    assert torch.equal(same(**inputs())[0], model(**inputs())[0])
    _, other = build(corpus / "joined", *one, "--share-blocks", "1")
    with pytest.raises(ShareError, match="shared otherwise: its plan differs in columns"):
        other.load_state_dict(state)
    _, plain = build(corpus / "joined", *one, "--share", "none")
    with pytest.raises(RuntimeError, match="Missing key.*paramshare.projection"):
        model.load_state_dict(plain.state_dict())


def test_moving_averages(corpus: Path) -> None:
    """fairseq's EMA goes over the state_dict, where the plan lies."""
    from fairseq.dataclass.configs import EMAConfig
    from fairseq.models.ema.ema import EMA

    _, model = build(corpus / "joined", "--share-all-embeddings")
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    start = model.paramshare.projection.detach().clone()
    with torch.no_grad():
        model.paramshare.projection.add_(1.0)
    average.step(model, 1)
    torch.testing.assert_close(average.model.paramshare.projection, start + 0.5)
    model.load_state_dict(average.model.state_dict())
    assert torch.equal(model.paramshare.projection, average.model.paramshare.projection)


def test_importing_twice_is_harmless() -> None:
    """By path, as --user-dir does, and as a package, in one process."""
    for _ in range(2):
        utils.import_user_module(Namespace(user_dir=str(user_dir())))
    code = (
        "from argparse import Namespace; from fairseq import utils, tasks\n"
        f"utils.import_user_module(Namespace(user_dir={str(user_dir())!r}))\n"
        "import paramshare.tasks.translation\n"
        "print('shared_translation' in tasks.TASK_REGISTRY)"
    )
    done = python("-c", code)
    assert done.stdout == "True\n", done.stderr
