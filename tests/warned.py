"""Warnings as errors, or none: `warnings.catch_warnings(action=)` of Python 3.11, for 3.10."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def filtered(action: str, category: type[Warning] = Warning) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(action, category)  # type: ignore[arg-type]
        yield
