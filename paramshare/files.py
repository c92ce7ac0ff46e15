"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE

from paramshare.errors import ShareError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends; after an error nothing is left.

    It is in the same folder, and of this call alone: threads and processes that write one file at
    once do not disturb each other. Raises ShareError where the file cannot be written.
    """
    temporary = path.parent / f".paramshare-{token_hex(8)}.part"
    try:
        temporary.touch(exist_ok=False)
        # As this process makes its files; safetensors replaces it by one that is private.
        mode = S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        raise ShareError(f"{path} cannot be written: {error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
