"""The gallery's page: page.html, filled. Whatever comes from a file is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cards import Card
from scoring import Scores

GENERATOR = "paramshare: gallery of captions"
TEMPLATE = Path(__file__).with_suffix(".html")
COLOURS = ("#6f7682", "#1273b0", "#b9560c", "#0a7a5c", "#a84486", "#8f6c0b")
_WORD = re.compile(r"([^\W_]+)")


def render(
    title: str,
    models: Sequence[str],
    scores: Sequence[Scores],
    cards: Sequence[Card],
    folder: Path,
    sheet: str,
) -> str:
    """The HTML. folder: of the page; sheet: the contact sheet's name in it."""
    from PIL import Image

    highest = max((value for card in cards for value in card.cider), default=0) or 1
    shown = []
    for card in cards:
        with Image.open(card.small) as picture:
            size = picture.size
        source = card.small.relative_to(folder).as_posix()
        shown.append(_card(card, models, source, size, highest))
    parts = {
        "generator": GENERATOR,
        "title": escape(title),
        "about": escape(_about(models, cards)),
        "sheet": escape(sheet),
        "table": _table(models, scores),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in _notes(scores)),
        "balance": _balance(models, cards) if len(models) > 1 else "",
        "orders": "".join(
            f'<option value="{column} {sign}">{escape(label)}</option>'
            for label, column, sign in _orders(models)
        ),
        "count": f"{len(cards):,} pictures",
        "cards": "\n".join(shown),
    }
    # In one pass, so that nothing in a caption is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], TEMPLATE.read_text("utf-8"))


def _about(models: Sequence[str], cards: Sequence[Card]) -> str:
    references = sum(len(card.references) for card in cards)
    about = f"{len(cards):,} pictures, {references:,} references"
    if len(models) == 1:
        return f"{about}; the highest CIDEr of {models[0]} first"
    return f"{about}; first what {models[-1]} gains most over {models[0]} in CIDEr"


def _table(models: Sequence[str], scores: Sequence[Scores]) -> str:
    names = list(dict.fromkeys(name for found in scores for name in found.table))
    lines = ['<thead><tr><th scope="col">Model</th>']
    lines += [f'<th scope="col">{escape(name)}</th>' for name in names]
    lines.append("</tr></thead><tbody>")
    best = {name: max(f.table[name] for f in scores if name in f.table) for name in names}
    for number, (model, found) in enumerate(zip(models, scores, strict=True)):
        lines.append(f'<tr><th scope="row">{_model(model, number)}</th>')
        for name in names:
            value = found.table.get(name)
            text = "–" if value is None else f"{value:.1f}"
            first = len(models) > 1 and text == f"{best[name]:.1f}"
            lines.append(f"<td>{f'<strong>{text}</strong>' if first else text}</td>")
        lines.append("</tr>")
    return "".join([*lines, "</tbody>"])


def _notes(scores: Sequence[Scores]) -> list[str]:
    reasons = dict.fromkeys(item for found in scores for item in found.left_out.items())
    return [
        f"Tokens: {scores[0].tokenisation}.",
        *(f"Left out: {scorer}: {reason}." for scorer, reason in reasons),
        "Words in bold are in a reference.",
    ]


def _balance(models: Sequence[str], cards: Sequence[Card]) -> str:
    """On how many pictures which of the two is ahead, as a bar with its numbers below."""
    higher = sum(card.gain > 0 for card in cards)
    lower = sum(card.gain < 0 for card in cards)
    parts = [
        ("up", f"{models[-1]} is ahead", higher),
        ("even", "even", len(cards) - higher - lower),
        ("down", f"{models[0]} is ahead", lower),
    ]
    bar = "".join(f'<span class="{name}" style="flex:{n}"></span>' for name, _, n in parts if n)
    key = "".join(
        f'<li class="{name}"><b>{n:,}</b> {escape(label)}</li>' for name, label, n in parts
    )
    return f'<div class="bar" aria-hidden="true">{bar}</div><ul class="key">{key}</ul>'


def _orders(models: Sequence[str]) -> list[tuple[str, int, int]]:
    """Label, column of a card's values, and direction: what the page can be sorted by."""
    orders = []
    if len(models) > 1:
        orders += [
            (f"{models[-1]} gains most over {models[0]}", 0, -1),
            (f"{models[-1]} loses most to {models[0]}", 0, 1),
        ]
    for number, model in enumerate(models, 1):
        orders += [
            (f"CIDEr of {model}, highest first", number, -1),
            (f"CIDEr of {model}, lowest first", number, 1),
        ]
    return [*orders, ("number of the picture", len(models) + 1, 1)]


def _card(
    card: Card, models: Sequence[str], source: str, size: tuple[int, int], highest: float
) -> str:
    values = [card.gain, *card.cider, card.picture]
    file = re.sub("([/_-])", r"\1<wbr>", escape(card.file))  # where its line may be broken
    known = {word for text in card.references for word in _WORD.findall(text.lower())}
    gain = ""
    if len(models) > 1:
        direction = "up" if card.gain > 0 else "down" if card.gain < 0 else "even"
        gain = f'<span class="gain {direction}">{signed(card.gain)}</span>'
    said = "".join(
        f"<dt>{_model(model, number)}"
        f'<span class="cider"><span class="sr">CIDEr </span>{value:.1f}</span>'
        f'<span class="meter" aria-hidden="true"><i style="width:{100 * value / highest:.1f}%;'
        f'background:{_colour(number)}"></i></span></dt>'
        f'<dd class="text" dir="auto">{_marked(caption, known)}</dd>'
        for number, (model, caption, value) in enumerate(
            zip(models, card.captions, card.cider, strict=True)
        )
    )
    references = "".join(
        f'<li class="text" dir="auto">{escape(text)}</li>' for text in card.references
    )
    numbers = " ".join(
        f"{value:.6g}" if isinstance(value, float) else str(value) for value in values
    )
    return (
        f'<article class="card" data-values="{numbers}">'
        f'<div class="frame"><img src="{escape(source)}" width="{size[0]}" height="{size[1]}"'
        f' loading="lazy" alt="{escape(card.references[0])}"></div>'
        f'<h2><span class="text file">{file}</span>{gain}</h2>'
        f'<dl>{said}</dl><ul class="references" aria-label="References">{references}</ul></article>'
    )


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−") if value else "0.0"


def _model(name: str, number: int) -> str:
    return f'<span class="model"><i style="background:{_colour(number)}"></i>{escape(name)}</span>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _marked(caption: str, known: set[str]) -> str:
    """The caption, its words in a reference in bold."""
    if not caption.strip():
        return "<em>nothing</em>"
    pieces = _WORD.split(caption)
    return "".join(
        f"<b>{escape(piece)}</b>" if piece.lower() in known else escape(piece) for piece in pieces
    )
