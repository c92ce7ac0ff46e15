"""JSON records: what is damaged, missing or there twice is said with its place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any

from stages import UserError

NUMBER = int | float
Kinds = Mapping[str, type | UnionType | GenericAlias]


class Record(dict[str, Any]):
    """An object. `record[name]` of a name that it lacks raises UserError."""

    def __init__(self, content: dict[str, Any], place: str) -> None:
        super().__init__(content)
        self.place = place

    def __missing__(self, name: str) -> Any:
        raise UserError(f"{self.place} has no {name!r}")


def parse(text: str, place: str, kinds: Kinds | None = None, needed: Sequence[str] = ()) -> Record:
    """The object that is the whole text. kinds: types by name, also of the objects inside. needed:
    names that it must have; any other is missed when it is asked for. Raises UserError, which
    begins with `place`."""

    def checked(content: dict[str, Any]) -> Record:
        for name, kind in (kinds or {}).items():
            if name in content and not _is(content[name], kind):
                wanted = kind.__name__ if isinstance(kind, type) else kind
                raise UserError(f"{place}: {name} is {content[name]!r:.60}, not of type {wanted}")
        return Record(content, place)

    try:
        found = json.loads(text, object_hook=checked)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is damaged: {error}") from None
    if not isinstance(found, Record):
        raise UserError(f"{place} is damaged: {found!r:.60} is no object")
    for name in needed:
        if name not in found:
            raise UserError(f"{place} has no {name!r}")
    return found


def read_record(path: Path, kinds: Kinds | None = None, needed: Sequence[str] = ()) -> Record:
    """The object in a file, as of `parse`. UserError also where the file is not there."""
    return parse(read_text(path), str(path), kinds, needed)


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's `object_pairs_hook` for files of others. ValueError where a key is there twice, of
    which json would drop the first."""
    if name := twice(name for name, _ in pairs):
        raise ValueError(f"an object has the key {name!r} twice")
    return dict(pairs)


def twice(names: Iterable[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def read_text(path: Path) -> str:
    """UserError."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: no UTF-8 text at byte {error.start}") from None


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, GenericAlias):
        (inner,) = kind.__args__
        return isinstance(value, list) and all(_is(one, inner) for one in value)
    return isinstance(value, kind) and not isinstance(value, bool)
