"""fairseq plugins. Importing this package registers them; `paramshare user-dir` prints the folder
through which fairseq's commands do that with `--user-dir`."""

import argparse

import numpy as np
import torch

try:
    import fairseq  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"paramshare.tasks needs fairseq ({error}): pip install 'paramshare[fairseq]', which takes "
        "the maintained distribution fairseq-fixed; upstream 0.12.2 does not import on "
        "Python 3.11 or newer"
    ) from error

# What fairseq's checkpoints hold that torch.load (2.6 and newer) does not allow by itself: their
# arguments, and with --eval-bleu the counts of its n-grams, as numpy arrays and numbers.
_COUNTS = (np.zeros(1, np.int64), np.zeros(1, np.float64))
torch.serialization.add_safe_globals(
    [
        argparse.Namespace,
        np.ndarray,
        np.dtype,
        *(type(array.dtype) for array in _COUNTS),
        _COUNTS[0].__reduce__()[0],  # numpy's functions that make an array
        _COUNTS[0][0].__reduce__()[0],  # and a number; their place differs between versions
    ]
)

from paramshare.tasks import translation  # noqa: E402, F401
