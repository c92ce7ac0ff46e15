"""What needs Java: PTB's tokens, METEOR and SPICE, by the jars that come with pycocoevalcap.

Its own classes for them do the same, but write into the installed package, shift all captions after
one with a line break, print, read numbers in the user's locale, and never end once Java has died.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

# Whatever the user's locale, text is UTF-8 and numbers have a point.
JAVA = ("java", "-Dfile.encoding=UTF-8", "-Duser.language=en", "-Duser.country=US")
PTB = "edu.stanford.nlp.process.PTBTokenizer"
FETCH_SPICE = "python -m pycocoevalcap.spice.get_stanford_models"
Captions = Mapping[int, Sequence[str]]  # by picture


class JavaFailed(Exception):
    """The message is the reason."""


@cache
def missing() -> str | None:
    """Why Java cannot be used, or None. Asked once, so that all captions are treated alike."""
    try:
        run = subprocess.run(["java", "-version"], capture_output=True, text=True)
    except OSError:
        return "java is not installed"
    return f"java -version ends with {_reason(run)}" if run.returncode else None


def tokenise(captions: Sequence[str]) -> list[str]:
    """PTB's tokens in lower case, without punctuation, separated by spaces. Raises JavaFailed."""
    from pycocoevalcap.tokenizer import ptbtokenizer as ptb

    jar = Path(ptb.__file__).with_name(ptb.STANFORD_CORENLP_3_4_1_JAR)
    text = "".join(" ".join(caption.split()) + "\n" for caption in captions)
    *lines, _ = _run("-cp", jar, PTB, "-preserveLines", "-lowerCase", text=text).split("\n")
    if len(lines) != len(captions):
        raise JavaFailed(f"{len(lines):,} lines of tokens came back for {len(captions):,} captions")
    dropped = {*ptb.PUNCTUATIONS, ""}
    # Not at all white space: PTB has tokens with a no-break space, such as 1 1/2.
    return [" ".join(w for w in line.rstrip().split(" ") if w not in dropped) for line in lines]


def meteor(references: Captions, captions: Captions) -> float:
    """0 to 1; of tokens. Raises JavaFailed."""
    import pycocoevalcap.meteor.meteor as module

    jar = Path(module.__file__).with_name(module.METEOR_JAR)
    command = [*JAVA, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            ) as process:
                asking, answers = process.stdin, process.stdout
                assert asking is not None
                assert answers is not None

                def ask(*parts: str) -> str:
                    print(*parts, sep=" ||| ", file=asking, flush=True)
                    return answers.readline().strip()

                counts = []
                for picture, (caption,) in captions.items():
                    texts = [*references[picture], caption]
                    counts.append(ask("SCORE", *(text.replace("|||", "") for text in texts)))
                    float(counts[-1].partition(" ")[0])  # a process that died answers nothing
                ask("EVAL", *counts)  # reads the first answer, of as many and one for all
                for _ in counts[1:]:
                    answers.readline()
                return float(answers.readline())
        except (OSError, ValueError):
            errors.seek(0)
            said = errors.read().strip().splitlines() or ["it said nothing"]
            raise JavaFailed(f"its Java process broke off: {said[-1]}") from None


def spice_missing() -> str | None:
    """Why SPICE cannot be used where Java can, or None: its models are a download of its own."""
    from pycocoevalcap.spice import get_stanford_models as models

    folder = Path(models.SPICEDIR, models.SPICELIB)
    if all((folder / f"{models.JAR}{part}.jar").is_file() for part in ("", "-models")):
        return None
    return f"its models of CoreNLP are not there; {FETCH_SPICE} downloads them"


def spice(references: Captions, captions: Captions) -> float:
    """0 to 1; of tokens. Raises JavaFailed."""
    import pycocoevalcap.spice.spice as module

    jar = Path(module.__file__).with_name(module.SPICE_JAR)
    items = [
        {"image_id": picture, "test": caption, "refs": list(references[picture])}
        for picture, (caption,) in captions.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked.json"), Path(folder, "answered.json")
        asked.write_text(json.dumps(items), "utf-8")
        _run("-Xmx8G", "-jar", jar, asked, "-out", answered, "-subset", "-silent")
        try:
            found = json.loads(answered.read_text("utf-8"))
            scores = [float(item["scores"]["All"]["f"]) for item in found]
        except (OSError, ValueError, TypeError, KeyError):
            raise JavaFailed("it wrote no scores") from None
    if len(scores) != len(captions):
        raise JavaFailed(f"it scored {len(scores):,} of {len(captions):,} captions")
    return sum(scores) / len(scores)


def _run(*arguments: object, text: str = "") -> str:
    """What Java prints. Raises JavaFailed."""
    command = [*JAVA, *map(str, arguments)]
    try:
        run = subprocess.run(command, input=text, capture_output=True, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise JavaFailed(str(error)) from None
    if run.returncode:
        raise JavaFailed(_reason(run))
    return run.stdout


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    said = run.stderr.strip().splitlines() or ["it said nothing"]
    return f"status {run.returncode}: {said[-1]}"
