"""The dataset of `shared_captioning`: features or pictures as sources, captions as targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import Tensor

from paramshare import ShareError
from paramshare.tasks.features import Features


class Sources(Protocol):
    """What an encoder gets of a picture."""

    def load(self, picture: int) -> Tensor: ...


class FeatureSources:
    """Rows of a file of features, `(cells, width)`, read when they are asked for."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def load(self, picture: int) -> Tensor:
        return torch.from_numpy(np.array(self.features[picture], dtype=np.float32))


class PictureSources:
    """Pixels `(3, height, width)` of pictures in a folder, as `transform` makes them."""

    def __init__(self, folder: Path, files: dict[int, str], transform: Any) -> None:
        self.folder, self.files, self.transform = folder, files, transform

    def load(self, picture: int) -> Tensor:
        return open_picture(self.folder / self.files[picture], self.transform)


def open_picture(path: Path, transform: Any) -> Tensor:
    """The picture as the backbone wants it. Raises ShareError where there is none."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return transform(picture)
    except FileNotFoundError:
        raise ShareError(f"{path} is not there") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        said = str(error).partition(",")[0]
        raise ShareError(f"{path} is too large ({said}): scale it down") from None
    except Exception as error:  # a damaged file fails in many ways
        said = str(error) or type(error).__name__
        raise ShareError(f"{path} is no picture that can be read: {said}") from None


class CaptionDataset(FairseqDataset):
    """Pairs of a picture and a caption; batches are of captions of like length.

    pictures: the id of each pair's picture. targets: each pair's tokens, the end included.
    """

    def __init__(
        self,
        pictures: Sequence[int],
        targets: Sequence[Tensor],
        sources: Sources,
        dictionary: Dictionary,
        shuffle: bool,
    ) -> None:
        self.pictures, self.targets = pictures, targets
        self.sources, self.dictionary, self.shuffle = sources, dictionary, shuffle
        self.sizes = np.array([len(target) for target in targets])

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = self.sources.load(self.pictures[index])
        return {"id": index, "source": source, "target": self.targets[index]}

    def __len__(self) -> int:
        return len(self.targets)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: Any) -> Any:
        return self.sizes[indices]

    def ordered_indices(self) -> Any:
        """By length; those of one length in the order of the epoch's own shuffle."""
        order = np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))
        return order[np.argsort(self.sizes[order], kind="stable")]

    @property
    def supports_prefetch(self) -> bool:
        return False

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        sources = together([sample["source"] for sample in samples])
        targets = [sample["target"] for sample in samples]
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        previous = data_utils.collate_tokens(targets, pad, eos, move_eos_to_beginning=True)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(map(len, targets)),
            "net_input": {**sources, "prev_output_tokens": previous},
            "target": data_utils.collate_tokens(targets, pad, eos),
        }


def together(sources: list[Tensor]) -> dict[str, Tensor]:
    """One batch, as encoders of fairseq call it; only regions differ in number."""
    return {
        "src_tokens": torch.nn.utils.rnn.pad_sequence(sources, batch_first=True),
        "src_lengths": torch.tensor([len(source) for source in sources]),
    }
