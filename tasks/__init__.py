"""fairseq plugins. Importing this package registers them; `paramshare user-dir` prints the folder
through which fairseq's commands do that with `--user-dir`."""

import argparse

import torch

try:
    import fairseq  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"paramshare.tasks needs fairseq ({error}): pip install 'paramshare[fairseq]', which takes "
        "the maintained distribution fairseq-fixed; upstream 0.12.2 does not import on "
        "Python 3.11 or newer"
    ) from error

# The one class in fairseq's checkpoints that torch.load (2.6 and newer) does not allow by itself.
torch.serialization.add_safe_globals([argparse.Namespace])

from paramshare.tasks import kinds, translation  # noqa: E402, F401
