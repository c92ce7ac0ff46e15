"""fairseq plugins. Importing this package registers them; `paramshare user-dir` prints the folder
through which fairseq's commands do that with `--user-dir`."""

import argparse
import typing
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch

try:
    from fairseq.distributed.utils import _TensorPlaceholder
except ImportError as error:
    raise ImportError(
        f"paramshare.tasks needs fairseq ({error}): pip install 'paramshare[fairseq]', which takes "
        "the maintained distribution fairseq-fixed; upstream 0.12.2 does not import on "
        "Python 3.11 or newer"
    ) from error
from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata


def allow_checkpoints() -> None:
    """Allows torch.load (2.6 and newer) what fairseq's checkpoints hold: their arguments, with
    --eval-bleu the counts of its n-grams, as numpy arrays and numbers, and what is in them when one
    of several workers hands them to the others: configurations, and what stands for a tensor.

    Importing this package does it. It is to be done again after transformers' Trainer has resumed
    in the same process, which takes back what it allows for itself.
    """
    counts = (np.zeros(1, np.int64), np.zeros(1, np.float64))
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            *(_TensorPlaceholder, DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata),
            *((typing.Any, "typing.Any"), defaultdict, dict, list, int),
            np.ndarray,
            np.dtype,
            *(type(array.dtype) for array in counts),
            counts[0].__reduce__()[0],  # numpy's functions that make an array
            counts[0][0].__reduce__()[0],  # and a number; their place differs between versions
        ]
    )


allow_checkpoints()

# fairseq's --sample-break-mode eos asks numpy for a name that numpy 2 does not have.
if not hasattr(np, "compat"):
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]

from paramshare.tasks import captioning, masked_lm, self_critical, translation  # noqa: E402, F401
from paramshare.tasks.checkpoints import check_what_is_read  # noqa: E402

check_what_is_read()
