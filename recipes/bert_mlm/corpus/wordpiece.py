"""Trains the WordPiece tokenizer, with the ids that fairseq's Dictionary gives.

fairseq has <s>, <pad>, </s>, <unk> first, and its task masked_lm appends <mask>. Rows of a shared
model's table are its weights, so a token must have the same row in both.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from stages import UserError, text_digest, write_lines
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

FIRST = ("<s>", "<pad>", "</s>", "<unk>")
LAST = "<mask>"
CHARACTERS = 2000  # the most frequent ones; others are unknown


def train(
    lines: Callable[[], Iterable[str]], folder: Path, vocab_size: int, length: int
) -> dict[str, int]:
    """Writes the tokenizer, and vocab.txt in the order of the ids."""
    names = [*_vocabulary(lines, vocab_size - 1), LAST]
    if len(names) < vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} is too large for this text; at most"
            f" {len(names) // 8 * 8} is possible, or give more text"
        )
    if len(names) > vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} is too small for the characters of this text;"
            f" {-(-len(names) // 8) * 8} is needed"
        )
    vocab = {name: id for id, name in enumerate(names)}
    tokenizer = _tokenizer(vocab)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[(token, vocab[token]) for token in ("<s>", "</s>")],
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=LAST,
    )
    whole.save_pretrained(folder)
    write_lines(folder / "vocab.txt", names)
    return {"pieces": len(whole)}


def _vocabulary(lines: Callable[[], Iterable[str]], size: int) -> list[str]:
    """FIRST, single characters, and the pieces that are made of them, most frequent first.

    In two passes: the trainer numbers what characters become inside of words ("##a") in an order
    that differs from run to run, and the numbers decide between equally frequent pieces. So the
    first pass only finds them, and they get their numbers here.
    """
    found = _trained(lines(), list(FIRST), vocab_size=0, limit_alphabet=CHARACTERS)
    given = [*FIRST, *sorted(found.keys() - set(FIRST))]
    vocab = _trained(lines(), given, vocab_size=size, limit_alphabet=0)
    return sorted(vocab, key=vocab.__getitem__)


def _trained(lines: Iterable[str], given: list[str], **options: int) -> dict[str, int]:
    tokenizer = _tokenizer({})
    trainer = trainers.WordPieceTrainer(special_tokens=given, show_progress=False, **options)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.get_vocab()


def _tokenizer(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def load(folder: Path) -> PreTrainedTokenizerBase:
    """UserError if the folder holds none that can be used."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} holds no tokenizer of transformers: {error}") from None
    ends(tokenizer)
    return tokenizer


def copy(given: Path, folder: Path) -> dict[str, int]:
    """The tokenizer of the folder `given`, without the model that may lie beside it."""
    tokenizer = load(given)
    tokenizer.save_pretrained(folder)
    write_lines(folder / "vocab.txt", pieces(tokenizer))
    return {"pieces": len(tokenizer)}


def digest(given: Path) -> str:
    """Of what `copy` writes."""
    with tempfile.TemporaryDirectory() as folder:
        copy(given, Path(folder))
        return text_digest(Path(folder))


def ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that a block starts and ends with; UserError if there are none."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    first = tokenizer.bos_token_id if first is None else first
    last = tokenizer.eos_token_id if last is None else last
    if first is None or last is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has no tokens for the two ends of a text"
            " (cls or bos, sep or eos)"
        )
    return first, last


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """In the order of the ids."""
    return [str(tokenizer.convert_ids_to_tokens(id)) for id in range(len(tokenizer))]


def check_fairseq_order(tokenizer: PreTrainedTokenizerBase) -> None:
    names = pieces(tokenizer)
    if (*names[: len(FIRST)], names[-1]) != (*FIRST, LAST):
        raise UserError(
            f"--fairseq: the tokenizer of {tokenizer.name_or_path} has other ids than fairseq,"
            f" where {' '.join(FIRST)} come first and {LAST} last; let this script train one"
        )
