"""paramshare: dense weights of a sequence model read from its own token embedding table."""

from paramshare.checkpoint import load_model, save_model
from paramshare.errors import ShareError
from paramshare.inference import prepare_for_inference
from paramshare.kinds import register_kind
from paramshare.operations import flops
from paramshare.plan import SharingPlan
from paramshare.quantized import quantize
from paramshare.report import Sharing
from paramshare.sharing import materialize, share_from_embedding

__version__ = "0.1.0"

__all__ = [
    "ShareError",
    "Sharing",
    "SharingPlan",
    "flops",
    "load_model",
    "materialize",
    "prepare_for_inference",
    "quantize",
    "register_kind",
    "save_model",
    "share_from_embedding",
]
