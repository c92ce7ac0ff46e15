"""Translates the test set with trained models and scores the plain text.

    python recipes/iwslt15_envi/score.py data/iwslt15_envi/models/transformer-veps-base
    python recipes/iwslt15_envi/score.py data/iwslt15_envi/models/transformer-veps-base --test DIR

A model is a folder of train.py, whose checkpoint_best.pt is taken, or a checkpoint of any name.
Prints the fairseq-interactive command. Hypotheses are decoded to plain text and compared with raw
references by sacrebleu, whose signature says how: those of the data, or tst2013 of a folder of
IWSLT15 files, made plain text as prepare.py does it. Writes test.vi or tst2013.vi beside the
checkpoint.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sacrebleu
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import iwslt15
import train
from checkpoints import check_whole
from clean import Pair
from stages import UserError, read_lines, write_lines

OWN, TALKS = "test", iwslt15.SPLITS["test"]  # the test sets


@dataclass
class Score:
    """BLEU and chrF (0 to 100) with sacrebleu's signatures, hypotheses in the order of the test
    set, and words translated in a second."""

    bleu: float
    chrf: float
    signatures: tuple[str, str]
    hypotheses: list[str]
    words_per_second: float


def checkpoint(model: Path) -> Path:
    """Of a folder of train.py the best; a checkpoint is itself."""
    return model / "checkpoint_best.pt" if model.is_dir() else model


def command(model: Path, data: Path, beam: int, kind: str = "baseline") -> list[str]:
    """The fairseq-interactive command, which reads pieces; kind: of train.MODELS: "fairseq" does
    without the plugin."""
    return [
        *(sys.executable, "-m", "fairseq_cli.interactive", str(data / "bin")),
        *(*train.plugin(kind), "--source-lang", "en", "--target-lang", "vi"),
        *("--path", str(checkpoint(model)), "--beam", str(beam)),
        # Else a model that has not learnt to stop repeats itself up to fairseq's limit, 200 pieces.
        *("--max-len-a", "1.2", "--max-len-b", "10"),
        *("--max-tokens", "4000", "--buffer-size", "100000"),
    ]


def read_test(data: Path, talks: Path | None = None) -> tuple[str, list[Pair]]:
    """Name and pairs of the data's test set, or of that in a folder of IWSLT15 files."""
    if talks is not None:
        for path in (talks / f"{TALKS}.{side}" for side in ("en", "vi")):
            if not path.is_file():
                raise UserError(f"--test {talks}: there is no {path.name}")
        return TALKS, iwslt15.read_split(talks, TALKS)
    english, vietnamese = (read_lines(data / "raw" / f"test.{side}") for side in ("en", "vi"))
    return OWN, [Pair(*pair) for pair in zip(english, vietnamese, strict=True)]


def score(
    model: Path,
    data: Path,
    beam: int = 4,
    talks: Path | None = None,
    kind: str = "baseline",
    threads: int | None = None,
) -> Score:
    """Translates and scores; `data` is the folder of prepare.py. Raises UserError where the
    checkpoint is damaged, and with the end of fairseq's output when it fails."""
    check_whole(checkpoint(model))
    name, pairs = read_test(data, talks)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm" / "spm.model"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{name}.en"
        encoded = pieces.encode([pair.en for pair in pairs], out_type=str)
        write_lines(source, [" ".join(line) for line in encoded])
        run = [*command(model, data, beam, kind), "--input", str(source)]
        done = subprocess.run(
            run, capture_output=True, text=True, env=train.environment(kind, threads)
        )
    if done.returncode:
        raise UserError(f"fairseq-interactive failed:\n{done.stderr[-3000:]}")
    found = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.M))
    hypotheses = [pieces.decode(found[str(n)].split()) for n in range(len(pairs))]
    seconds = float(re.search(r"translation time: ([\d.]+)", done.stderr + done.stdout)[1])
    references = [[pair.vi for pair in pairs]]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    result = Score(
        bleu.corpus_score(hypotheses, references).score,
        chrf.corpus_score(hypotheses, references).score,
        (str(bleu.get_signature()), str(chrf.get_signature())),
        hypotheses,
        sum(len(line.split()) for line in hypotheses) / seconds,
    )
    written = checkpoint(model).with_name(f"{name}.vi")
    temporary = written.with_suffix(".vi.part")
    write_lines(temporary, hypotheses)
    temporary.replace(written)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders of train.py, or checkpoints")
    parser.add_argument("--data", type=Path, default=Path("data/iwslt15_envi"))
    parser.add_argument(
        "--test", type=Path, metavar="DIR", help="with IWSLT15's tst2013.en and .vi"
    )
    parser.add_argument("--beam", type=int, default=4)
    args = parser.parse_args()
    for model in args.models:
        if not checkpoint(model).is_file():
            parser.error(f"there is no {checkpoint(model)}; train it first (train.py)")
    for model in args.models:
        print(shlex.join(command(model, args.data, args.beam)), flush=True)
        try:
            result = score(model, args.data, args.beam, args.test)
        except UserError as error:
            parser.error(str(error))
        print(f"{model.name}: BLEU {result.bleu:.1f}  chrF {result.chrf:.1f}")
        print("  " + "\n  ".join(result.signatures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
