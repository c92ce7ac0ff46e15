"""Translates the test set with trained models and scores the plain text.

    python recipes/iwslt15_envi/score.py data/iwslt15_envi/models/veps-base

Prints the fairseq-generate command. Hypotheses are decoded to plain text and compared with the
raw references on disk by sacrebleu, whose signature says how. Writes MODEL/test.vi.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import sacrebleu
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from stages import read_lines, write_lines

from paramshare.cli import user_dir


@dataclass
class Score:
    """BLEU and chrF (0 to 100) with sacrebleu's signatures, hypotheses in the order of the test
    set, and words translated in a second."""

    bleu: float
    chrf: float
    signatures: tuple[str, str]
    hypotheses: list[str]
    words_per_second: float


def command(model: Path, data: Path, beam: int) -> list[str]:
    """The fairseq-generate command."""
    return [
        *(sys.executable, "-m", "fairseq_cli.generate", str(data / "bin")),
        *("--user-dir", str(user_dir()), "--task", "shared_translation"),
        *("--source-lang", "en", "--target-lang", "vi", "--gen-subset", "test"),
        *("--path", str(model / "checkpoint_best.pt"), "--beam", str(beam)),
        # Of its last batch fairseq translates a multiple of 8 sentences, unless it is told not to.
        *("--max-tokens", "4000", "--required-batch-size-multiple", "1"),
    ]


def score(model: Path, data: Path, beam: int = 4) -> Score:
    """Translates and scores; `data` is the folder of prepare.py. Raises RuntimeError with the end
    of fairseq's output when it fails."""
    done = subprocess.run(command(model, data, beam), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fairseq-generate failed:\n{done.stderr[-3000:]}")
    pieces = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.M))
    references = read_lines(data / "raw" / "test.vi")
    if {int(n) for n in pieces} != set(range(len(references))):
        raise RuntimeError(
            f"fairseq translated {len(pieces)} sentences for {len(references)} references: "
            f"{data / 'raw'} and {data / 'bin'} are not of one corpus; run prepare.py again"
        )
    decoder = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm" / "spm.model"))
    hypotheses = [decoder.decode(pieces[str(n)].split()) for n in range(len(references))]
    seconds = float(re.search(r"Translated .*? in ([\d.]+)s", done.stderr + done.stdout)[1])
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    result = Score(
        bleu.corpus_score(hypotheses, [references]).score,
        chrf.corpus_score(hypotheses, [references]).score,
        (str(bleu.get_signature()), str(chrf.get_signature())),
        hypotheses,
        sum(len(line.split()) for line in hypotheses) / seconds,
    )
    temporary = model / "test.vi.part"
    write_lines(temporary, hypotheses)
    temporary.replace(model / "test.vi")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders that train.py wrote")
    parser.add_argument("--data", type=Path, default=Path("data/iwslt15_envi"))
    parser.add_argument("--beam", type=int, default=4)
    args = parser.parse_args()
    for model in args.models:
        if not (model / "checkpoint_best.pt").exists():
            parser.error(f"{model} holds no checkpoint_best.pt; train it first (train.py)")
    for model in args.models:
        print(shlex.join(command(model, args.data, args.beam)), flush=True)
        result = score(model, args.data, args.beam)
        print(f"{model.name}: BLEU {result.bleu:.1f}  chrF {result.chrf:.1f}")
        print("  " + "\n  ".join(result.signatures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
