"""The gallery's contact sheet, one PNG: the largest gains and losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cards import Card
from page import COLOURS, signed
from scoring import Scores

CARDS, COLUMNS = 16, 4
WIDTH, PICTURE, MARGIN, GAP = 340, 230, 36, 20  # pixels; PICTURE: its height
INK, SOFT, LINE, PAPER = "#1d2127", "#5d6570", "#dfdcd5", "#f5f4f1"
UP, DOWN = "#0a6e50", "#b0361f"
Line = tuple[str, Any, str]  # text, font, colour


def draw(
    title: str, models: Sequence[str], scores: Sequence[Scores], cards: Sequence[Card], path: Path
) -> None:
    """Writes it. cards: the largest gain first."""
    from PIL import Image, ImageDraw

    fonts = _fonts()
    half = CARDS // 2
    chosen = cards if len(cards) <= CARDS else [*cards[:half], *cards[-half:]]
    head: list[Line] = [(title, fonts["title"], INK), (_what(models, cards), fonts["text"], SOFT)]
    for number, (model, found) in enumerate(zip(models, scores, strict=True)):
        values = "   ".join(f"{name} {value:.1f}" for name, value in found.table.items())
        head.append((f"{model}:   {values}", fonts["text"], _colour(number)))
    head.append((f"tokens: {scores[0].tokenisation}", fonts["text"], SOFT))
    texts = [_lines(card, models, fonts) for card in chosen]
    rows = [
        range(start, min(start + COLUMNS, len(chosen))) for start in range(0, len(chosen), COLUMNS)
    ]
    heights = [PICTURE + 24 + max(_height(texts[n]) for n in row) for row in rows]
    width = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    top = MARGIN + _height(head) + GAP
    image = Image.new("RGB", (width, top + sum(heights) + GAP * (len(rows) - 1) + MARGIN), PAPER)
    canvas = ImageDraw.Draw(image)
    _write(
        canvas,
        MARGIN,
        MARGIN,
        [(_cut(text, font, width - 2 * MARGIN), font, c) for text, font, c in head],
    )
    for row, height in zip(rows, heights, strict=True):
        for column, number in enumerate(row):
            left = MARGIN + column * (WIDTH + GAP)
            box = (left, top, left + WIDTH, top + height)
            canvas.rounded_rectangle(box, 12, "white", LINE)
            with Image.open(chosen[number].small) as picture:
                small = picture.convert("RGBA")
            small.thumbnail((WIDTH - 24, PICTURE - 24))
            corner = (left + (WIDTH - small.width) // 2, top + (PICTURE - small.height) // 2)
            image.paste(small, corner, small)
            _write(canvas, left + 14, top + PICTURE, texts[number])
        top += height + GAP
    image.save(path)


def _what(models: Sequence[str], cards: Sequence[Card]) -> str:
    what = "CIDEr" if len(models) == 1 else f"CIDEr of {models[-1]} less that of {models[0]}"
    if len(cards) <= CARDS:
        return f"{len(cards)} pictures, by {what}"
    return f"{CARDS // 2} highest and {CARDS // 2} lowest of {len(cards):,} pictures, by {what}"


def _lines(card: Card, models: Sequence[str], fonts: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    if len(models) > 1:
        colour = UP if card.gain > 0 else DOWN if card.gain < 0 else SOFT
        lines.append((signed(card.gain), fonts["bold"], colour))
    for number, (model, caption) in enumerate(zip(models, card.captions, strict=True)):
        name = _cut(model, fonts["small"], WIDTH - 110)
        lines.append((f"{name}   {card.cider[number]:.1f}", fonts["small"], _colour(number)))
        lines += [(text, fonts["text"], INK) for text in _wrap(caption or "–", fonts["text"], 3)]
    for reference in card.references[:2]:
        quoted = _wrap(f"“{reference}”", fonts["small"], 2)
        lines += [(text, fonts["small"], SOFT) for text in quoted]
    if len(card.references) > 2:
        lines.append((f"and {len(card.references) - 2} references more", fonts["small"], SOFT))
    return lines


def _fonts() -> dict[str, Any]:
    """matplotlib's own, which have more letters than Pillow's."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    sizes = {"title": ("-Bold", 30), "bold": ("-Bold", 19), "text": ("", 16), "small": ("", 13)}
    return {
        name: ImageFont.truetype(folder / f"DejaVuSans{kind}.ttf", size)
        for name, (kind, size) in sizes.items()
    }


def _wrap(text: str, font: Any, most: int) -> list[str]:
    """Lines as wide as a card, `most` at most; the last one is cut."""
    lines = [""]
    words = text.split()
    for number, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= WIDTH - 28 or not lines[-1]:
            lines[-1] = longer
        elif len(lines) == most:
            lines[-1] = " ".join([lines[-1], *words[number:]])
            break
        else:
            lines.append(word)
    return [_cut(line, font, WIDTH - 28) for line in lines]


def _cut(text: str, font: Any, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _height(lines: Sequence[Line]) -> int:
    return sum(round(1.5 * font.size) for _, font, _ in lines)


def _write(canvas: Any, left: float, top: float, lines: Sequence[Line]) -> None:
    for text, font, colour in lines:
        canvas.text((left, top), text, colour, font)
        top += round(1.5 * font.size)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
