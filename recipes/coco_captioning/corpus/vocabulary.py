"""dict.txt for fairseq: the words that are frequent enough, or the pieces of SentencePiece."""

import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stages import UserError, write_lines

from paramshare.tasks.caption_text import CaptionText, words

SPM_SPECIALS = 3  # <unk>, <s>, </s>, which fairseq has itself


def of_words(captions: Iterable[str], min_count: int, folder: Path) -> CaptionText:
    """Writes dict.txt, of words that occur `min_count` times."""
    text = CaptionText()
    counts = Counter(word for caption in captions for word in text.split(caption))
    kept = {word: count for word, count in counts.items() if count >= min_count}
    if not kept:
        most = max(counts.values(), default=0)
        raise UserError(
            f"--min-count {min_count}: no word of the captions occurs over {most} times"
        )
    _write(folder, kept)
    return text


def of_pieces(captions: list[str], pieces: int, folder: Path) -> CaptionText:
    """Writes pieces.model and dict.txt, of all its `pieces`. Unigram."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(" ".join(words(caption)) for caption in captions),
            model_writer=model,
            model_type="unigram",
            vocab_size=pieces + SPM_SPECIALS,
            character_coverage=1.0,
            normalization_rule_name="identity",  # the words are as they shall be
            max_sentence_length=1 << 16,  # bytes; longer ones would be left out
            num_threads=2,  # fixed: the sums of the training depend on it
            minloglevel=1,
        )
    except RuntimeError as error:
        raise UserError(_message(str(error), pieces)) from None
    text = CaptionText(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = map(processor.id_to_piece, range(SPM_SPECIALS, len(processor)))
    counts = Counter(dict.fromkeys(names, 0))
    counts.update(piece for caption in captions for piece in text.split(caption))
    (folder / "pieces.model").write_bytes(model.getvalue())
    _write(folder, counts)
    return text


def _write(folder: Path, counts: dict[str, int]) -> None:
    """Most frequent first, as fairseq sorts them."""
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    write_lines(folder / "dict.txt", [f"{token} {count}" for token, count in entries])


def _message(error: str, pieces: int) -> str:
    """SentencePiece counts its specials; this gives its limits as the option counts."""
    if largest := re.search(r"<= (\d+)\.", error):
        cure = f"is too large for these captions; at most {int(largest[1]) - SPM_SPECIALS}"
        return f"--pieces {pieces} {cure} are possible"
    if smallest := re.search(r"\d+ vs (\d+)", error):
        cure = f"is too small for their characters; {int(smallest[1]) - SPM_SPECIALS} are needed"
        return f"--pieces {pieces} {cure}"
    return f"--pieces {pieces} was refused by SentencePiece: {error}"
