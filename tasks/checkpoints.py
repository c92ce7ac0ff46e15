"""fairseq's reading of checkpoints, by which all its commands say which file is damaged."""

import functools
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

from paramshare.models.fairseq_checkpoints import check_whole, damaged

# Of a file of torch.save that is none of fairseq's, or is damaged in a way that only torch finds.
_UNREADABLE = (LookupError, TypeError, AttributeError, ValueError, EOFError, RuntimeError)


def check_what_is_read() -> None:
    """From now on fairseq raises ShareError where it reads a file that is no whole checkpoint."""
    read = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(read)
    def checked(path: str, *args: Any, **options: Any) -> dict[str, Any]:
        check_whole(Path(path))
        try:
            return read(path, *args, **options)
        except _UNREADABLE as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise damaged(Path(path), f"fairseq cannot read it ({said})") from error

    checkpoint_utils.load_checkpoint_to_cpu = checked
