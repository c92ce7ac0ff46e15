"""The plan in a state_dict: tensors that fit in shape but were read otherwise would be noise.

It is the pool's extra state, which torch, its distributed checkpoints and transformers know: one
small tensor, so that safetensors takes it. It holds a byte a number, in float16: whoever averages
checkpoints, or converts them to any floating dtype, leaves such numbers as they are.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paramshare.errors import ShareError
from paramshare.plan import SharingPlan

KEY = "_extra_state"  # torch's name
EARLIER = "plan_version_1"  # in fairseq checkpoints from before; JSON, not compressed
_DAMAGES = (ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError, zlib.error)
_LARGEST = 1 << 24  # bytes of a plan: damaged data must not fill the memory


def encode(plan: SharingPlan) -> Tensor:
    """What of the plan says where numbers stand: equal for all plans that are."""
    groups = tuple(
        replace(g, name=g.slots[0], execution="materialized", spread=None) for g in plan.groups
    )
    canonical = replace(plan, groups=groups, init="match", table_gradient=1.0)
    data = list(zlib.compress(json.dumps(canonical.to_dict()).encode(), 9))
    return torch.tensor(data, dtype=torch.float16, device="cpu")  # with values, on meta as well


def read(plan: SharingPlan, stored: Any) -> SharingPlan:
    """What `encode` made, which may be whitened or not, whatever `plan` is. Raises ShareError where
    it is damaged, or another plan otherwise."""
    try:
        found = _decode(stored)
    except _DAMAGES as error:
        raise ShareError(f"the sharing plan in this state is damaged: {error}") from None
    difference = found.difference(replace(plan, whiten=found.whiten))
    if difference is not None:
        raise ShareError(
            "this state is of a module that was shared otherwise: its plan differs in "
            f"{difference}; share the module with the same options, then load it"
        )
    return found


def _decode(stored: Tensor) -> SharingPlan:
    data = bytes(stored.detach().cpu().double().round().long().tolist())
    if not data.startswith(b"{"):
        reader = zlib.decompressobj()
        data = reader.decompress(data, _LARGEST)
        if not reader.eof:
            raise ValueError("it does not end where it should")
    return SharingPlan.from_dict(json.loads(data))
