"""From plain text to SentencePiece pieces, and from pieces to fairseq's binary files."""

import collections
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import sentencepiece
from stages import UserError, read_lines, write_lines

LANGUAGES = ("en", "vi")
SPLITS = ("train", "dev", "test")
MAX_PIECES = 128  # a side, in training pairs
FAIRSEQ_SPECIALS = 4  # <s>, <pad>, </s>, <unk>
SPM_SPECIALS = 3  # <unk>, <s>, </s>


def train_model(raw: Path, folder: Path, vocab_size: int) -> dict[str, int]:
    """Writes spm.model and spm.vocab, one model for both languages, from raw/train.*.

    `vocab_size` counts the entries of fairseq's joint dictionary. Unigram; the text is left as it
    is but for runs of spaces, so that what is decoded can be compared with the raw references.
    """
    model = io.BytesIO()
    lines = [line for side in LANGUAGES for line in read_lines(raw / f"train.{side}")]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,  # not a file: the model would hold its temporary name
            model_type="unigram",
            vocab_size=vocab_size - FAIRSEQ_SPECIALS + SPM_SPECIALS,
            character_coverage=1.0,
            byte_fallback=False,
            normalization_rule_name="identity",
            max_sentence_length=1 << 16,  # bytes; longer ones would be left out
            num_threads=2,  # fixed: the sums of the training depend on it
            minloglevel=1,
        )
    except RuntimeError as error:
        raise UserError(_vocab_message(str(error), vocab_size)) from None
    (folder / "spm.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [processor.id_to_piece(i) for i in range(len(processor))]
    write_lines(folder / "spm.vocab", names)
    return {"pieces": len(names)}


def encode(raw: Path, model: Path, folder: Path) -> dict[str, object]:
    """Writes {train,dev,test}.{en,vi} in pieces, and dict.txt for fairseq.

    Training pairs with over MAX_PIECES on a side are dropped; dev and test stay whole, so that
    their lines are those of `raw`.
    """
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model / "spm.model"))
    counts = collections.Counter(
        {
            processor.id_to_piece(i): 0
            for i in range(len(processor))
            if not processor.is_control(i) and not processor.is_unknown(i)
        }
    )
    known = set(counts)
    figures: dict[str, object] = {}
    for split in SPLITS:
        sides = [
            processor.encode(read_lines(raw / f"{split}.{side}"), out_type=str)
            for side in LANGUAGES
        ]
        pairs = list(zip(*sides, strict=True))
        if split == "train":
            found = len(pairs)
            pairs = [pair for pair in pairs if max(map(len, pair)) <= MAX_PIECES]
            figures["too_long"] = found - len(pairs)
            for pair in pairs:
                for side in pair:
                    counts.update(side)
        for index, language in enumerate(LANGUAGES):
            write_lines(folder / f"{split}.{language}", [" ".join(pair[index]) for pair in pairs])
        tokens = [piece for pair in pairs for side in pair for piece in side]
        figures[split] = {
            "pairs": len(pairs),
            "pieces": len(tokens),
            "unknown": sum(piece not in known for piece in tokens),
        }
    # fairseq would build the dictionary from the pieces that it meets, and the ones that the
    # training text never needs would be missing. Most frequent first, as fairseq sorts them.
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    write_lines(folder / "dict.txt", [f"{piece} {count}" for piece, count in entries])
    return figures


def preprocess_command(pieces: Path, destination: Path) -> list[str]:
    """The `fairseq-preprocess` command; run as a module so that this Python's fairseq is used."""
    return [
        *(sys.executable, "-m", "fairseq_cli.preprocess"),
        *("--source-lang", "en", "--target-lang", "vi", "--joined-dictionary"),
        *("--srcdict", str(pieces / "dict.txt")),
        *("--trainpref", str(pieces / "train")),
        *("--validpref", str(pieces / "dev")),
        *("--testpref", str(pieces / "test")),
        *("--destdir", str(destination)),
        *("--workers", "2"),
    ]


def binarise(pieces: Path, folder: Path, vocab_size: int) -> dict[str, int]:
    """Runs the command and checks that the dictionary has `vocab_size` entries in all."""
    command = preprocess_command(pieces, folder)
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise UserError(
            f"fairseq-preprocess failed:\n{shlex.join(command)}\n{run.stderr.strip()[-2000:]}"
        )
    for language in LANGUAGES:
        entries = len(read_lines(folder / f"dict.{language}.txt")) + FAIRSEQ_SPECIALS
        if entries != vocab_size:
            raise UserError(
                f"fairseq wrote a dictionary of {entries} entries (dict.{language}.txt) for"
                f" {vocab_size}; this fairseq is not the one that the recipe was written for"
            )
    return {"entries": entries}


def _vocab_message(error: str, vocab_size: int) -> str:
    """SentencePiece counts its own specials; this gives its limits as the flag counts."""
    shift = FAIRSEQ_SPECIALS - SPM_SPECIALS
    if largest := re.search(r"<= (\d+)\.", error):
        cure = f"is too large for this text; at most {int(largest[1]) + shift} is possible"
    elif smallest := re.search(r"\d+ vs (\d+)", error):
        cure = f"is too small for the characters of this text; {int(smallest[1]) + shift} is needed"
    else:
        cure = f"was refused by SentencePiece: {error}"
    return f"--vocab-size {vocab_size} {cure}"
