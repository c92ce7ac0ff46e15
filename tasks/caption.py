"""Captions by a trained model: `paramshare caption PICTURE --model DIR`, and whole splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from paramshare import ShareError
from paramshare.models.backbones import Backbone, make_backbone
from paramshare.tasks import captioning
from paramshare.tasks.caption_text import CaptionText
from paramshare.tasks.pictures import open_picture, together

CHECKPOINT = "checkpoint_best.pt"


class CaptionModel:
    """A trained captioner.

    path: a checkpoint of fairseq-train, or the folder with its checkpoint_best.pt. weights: file
    of the backbone's, where it is not published with its package.

    Raises ShareError where there is no such checkpoint, or the backbone cannot be had.
    """

    def __init__(self, path: Path, weights: str | None = None) -> None:
        path = path / CHECKPOINT if path.is_dir() else path
        if not path.is_file():
            raise ShareError(f"{path} is not there: --model is a folder of fairseq-train")
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
            own = state["task_state"]["captioning"]
        except (KeyError, TypeError):
            raise ShareError(f"{path} is no checkpoint of --task shared_captioning") from None
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ShareError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        cfg = state["cfg"]
        self.task = _Trained(cfg.task, own, weights)
        self.task.load_state_dict(state["task_state"])
        self.model = self.task.build_model(cfg.model, from_checkpoint=True)
        self.model.load_state_dict(state["model"], strict=True, model_cfg=cfg.model)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device).eval()
        self.weights = weights
        self._extract: Backbone | None = None

    def caption(
        self, pictures: Sequence[Path], batch: int = 16, **generation: Any
    ) -> Iterator[tuple[Path, str]]:
        """Each picture with its caption; `generation` as of `generate`."""
        transform = self._backbone().transform
        for part in _batches(pictures, batch):
            pixels = torch.stack([open_picture(path, transform) for path in part])
            yield from zip(part, self.generate(self.sources(pixels), **generation), strict=True)

    def sources(self, pixels: Tensor) -> list[Tensor]:
        """What the encoder gets of pixels `(pictures, 3, height, width)`."""
        if self.model.encoder.backbone is not None:
            return list(pixels)
        with torch.no_grad():
            # Features are float16 on disk.
            cells = self._backbone().to(self.device).eval()(pixels.to(self.device))
            return list(cells.half().float().cpu())

    def generate(
        self,
        sources: list[Tensor],
        beam: int = 3,
        lenpen: float = 1.0,
        no_repeat_ngram_size: int = 3,
        max_len_b: int = captioning.SharedCaptioningTask.LONGEST,
        min_len: int = 1,
    ) -> list[str]:
        """The best caption of each source, by beam search."""
        options = replace(
            GenerationConfig(),
            beam=beam,
            lenpen=lenpen,
            no_repeat_ngram_size=no_repeat_ngram_size,
            max_len_b=max_len_b,
            min_len=min_len,
        )
        generator = self.task.build_generator([self.model], options)
        sample = {"net_input": together(sources)}
        if self.device.type == "cuda":
            sample = utils.move_to_cuda(sample)
        found = self.task.inference_step(generator, [self.model], sample)
        return [self.task.decode(best[0]["tokens"]) for best in found]

    def _backbone(self) -> Backbone:
        """The network that made the features which the model was trained on."""
        if self.model.encoder.backbone is not None:
            return self.model.encoder.backbone
        if self._extract is None:
            made_by = self.task.made_by
            if made_by is None:
                raise ShareError(
                    "the model was trained on features of unknown origin: give it features, not "
                    "pictures"
                )
            backbone = make_backbone(made_by["name"], self.weights)
            self.task.check_made_by(backbone.identity, "the backbone's weights")
            self._extract = backbone
        return self._extract


class _Trained(captioning.SharedCaptioningTask):
    """The task of a checkpoint, where neither its data nor its features need to be there."""

    def __init__(self, cfg: Any, own: dict[str, Any], weights: str | None) -> None:
        super(captioning.SharedCaptioningTask, self).__init__(cfg)
        self.dictionary = Dictionary()
        for symbol, count in zip(own["symbols"], own["counts"], strict=True):
            self.dictionary.add_symbol(symbol, count)
        self.text = CaptionText(own["pieces"])
        self.feature_width, self.made_by = own["feature_width"], own["made_by"]
        self._backbone = None
        if cfg.backbone is not None:
            # Its weights are in the checkpoint.
            self._backbone = make_backbone(cfg.backbone, "random")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {name: x for name, x in state_dict.items() if name != "captioning"}
        super().load_state_dict(state)


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
