"""A made-up tokenizer and data for the recipe bert_mlm, as its prepare.py makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import SPECIAL, WORDS, texts, write, write_jsonl


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """WordPiece of whole words and of letters, so that other words have several pieces."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = [*SPECIAL, *WORDS, *(f"##{letter}" for letter in WORDS[-26:]), "<mask>"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=24,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


@pytest.fixture(scope="session")
def data(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as prepare.py makes it, as far as it is read here."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, count) in enumerate((("train", 96), ("dev", 32), ("test", 32))):
        write_jsonl(folder / f"labelled/{split}.jsonl", texts(count, seed))
        lines = [row["text"] for row in texts(count, seed + 3)]
        write(folder / f"sentences/{split}.txt", "\n".join(lines) + "\n")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "blocks").mkdir()
    inner = np.random.default_rng(0).integers(len(SPECIAL), len(tokenizer) - 1, (20, 14))
    blocks = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 2)))
    for name in ("dev", "train-00000", "train-00001"):
        np.save(folder / f"blocks/{name}.npy", blocks.astype(np.uint16))
    pairs = "# a comment\ngood\tfine\t9\nbad\tking\t1.5\nunheard\tof\t4\nking\tqueen\t8\n"
    for name in ("wordsim353.tsv", "simlex999.txt"):
        write(folder / "words" / name, pairs)
    questions = ": opposites\nGood bad fine poor\nlovely ugly great awful\ngood bad unheard of\n"
    write(folder / "words/questions-words.txt", questions)
    return folder
