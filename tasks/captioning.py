"""fairseq task `shared_captioning`: captions of pictures, by a model with shared weights.

DATA is what recipes/coco_captioning/prepare.py makes: train.json, valid.json, test.json (COCO
annotations), dict.txt, and pieces.model where captions are in pieces. The source is `--features`
(a folder with one of features for each split), or with `--backbone` the pictures themselves.

A checkpoint knows its vocabulary and where its features come from, so that it captions pictures
without DATA.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask, register_task
from omegaconf import MISSING
from torch import nn

from paramshare import ShareError
from paramshare.models import captioner  # noqa: F401  # registers the architectures
from paramshare.models.backbones import make_backbone
from paramshare.tasks.caption_text import CaptionText
from paramshare.tasks.captions import check_features, check_pictures, read_captions
from paramshare.tasks.features import Features
from paramshare.tasks.pictures import CaptionDataset, FeatureSources, PictureSources, Sources
from paramshare.tasks.sharing import ShareConfig, SharingTask
from paramshare.tasks.validation import CaptionScorer, log_cider

logger = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")


@dataclass
class SharedCaptioningConfig(ShareConfig):
    """The options of captioning and those of sharing."""

    data: str = field(default=MISSING, metadata={"help": "folder with captions and dict.txt"})
    features: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "folder with a folder of features for each split"}
    )
    backbone: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "read the pictures, by this network: efficientnet_lite0 or one of torchvision's"
        },
    )
    backbone_weights: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "file of its weights; default: those it is published with"}
    )
    finetune_backbone: bool = field(default=False, metadata={"help": "train the backbone, too"})
    image_dir: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "folder of the pictures; default: what DATA says"}
    )
    skip_bad: bool = field(
        default=False,
        metadata={"help": "leave out pictures and captions that cannot be used, saying which"},
    )
    eval_cider: bool = field(
        default=False,
        metadata={
            "help": "caption the validation pictures after each epoch and log CIDEr; keep the best "
            "by --best-checkpoint-metric cider --maximize-best-checkpoint-metric"
        },
    )
    eval_beam: int = field(default=3, metadata={"help": "beam of --eval-cider"})


@register_task("shared_captioning", dataclass=SharedCaptioningConfig)
class SharedCaptioningTask(SharingTask, FairseqTask):
    """Captioning by a model whose dense weights are read from the table of its words."""

    cfg: SharedCaptioningConfig
    LONGEST = 30  # tokens of a caption that is generated
    _scorer: CaptionScorer | None = None  # of the validation pictures

    def __init__(
        self, cfg: SharedCaptioningConfig, dictionary: Dictionary, text: CaptionText
    ) -> None:
        """Raises ShareError where there are neither features nor a backbone, or both."""
        super().__init__(cfg)
        self.dictionary, self.text = dictionary, text
        if cfg.eval_beam < 1:
            raise ShareError(f"--eval-beam {cfg.eval_beam} must be at least 1")
        if (cfg.features is None) == (cfg.backbone is None):
            raise ShareError(
                "the source is --features DIR (made by features.py) or the pictures by --backbone "
                "NAME (--backbone efficientnet_lite0): give one of them"
            )
        if cfg.features is None:
            self._backbone = make_backbone(cfg.backbone, cfg.backbone_weights)
            self.feature_width, self.made_by = self._backbone.width, self._backbone.identity
            return
        if cfg.finetune_backbone or cfg.backbone_weights or cfg.image_dir:
            raise ShareError(
                "--finetune-backbone, --backbone-weights and --image-dir belong to --backbone, "
                "which reads pictures; --features are made already"
            )
        self._backbone = None
        self.feature_width, self.made_by = _described(Path(cfg.features))

    @classmethod
    def setup_task(cls, cfg: SharedCaptioningConfig, **unused: Any) -> "SharedCaptioningTask":
        data = Path(cfg.data)
        if not (data / "dict.txt").is_file():
            raise ShareError(f"{data} holds no dict.txt: make it by prepare.py")
        pieces = data / "pieces.model"
        text = CaptionText(pieces.read_bytes() if pieces.is_file() else None)
        return cls(cfg, Dictionary.load(str(data / "dict.txt")), text)

    @property
    def source_dictionary(self) -> None:
        return None

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def max_positions(self) -> tuple[int, int]:
        return 100_000, 1024

    def build_backbone(self) -> nn.Module | None:
        """That of the encoder of a model that reads pictures."""
        return self._backbone

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Builds the model, then shares its weights; those of a backbone are its own."""
        model = super().build_model(cfg, from_checkpoint)
        encoder = getattr(model, "encoder", None)
        backbone = getattr(encoder, "backbone", None)
        if backbone is not None:
            encoder.backbone = None
        self.share(model, from_checkpoint)
        if backbone is not None:
            encoder.backbone = backbone
        return model

    def load_dataset(self, split: str, **unused: Any) -> None:
        """A pair for each caption; for other splits than train and valid one for each picture, by
        its first caption, for it is captioned once."""
        path = Path(self.cfg.data) / f"{split}.json"
        found = read_captions(path, self.text.split)
        sources: Sources
        if self._backbone is None:
            features = Features(Path(str(self.cfg.features)) / split)
            self.check_made_by(features.backbone, features.folder)
            check_features(found, features.ids)
            sources = FeatureSources(features)
        else:
            folder = Path(self.cfg.image_dir) if self.cfg.image_dir else found.folder
            if folder is None:
                raise ShareError(f"{path} does not say where its pictures are: give --image-dir")
            check_pictures(found, folder)
            sources = PictureSources(folder, found.files, self._backbone.transform)
        found.settle(bool(self.cfg.skip_bad))
        once = split not in ("train", "valid")
        pairs = [
            (picture, caption)
            for picture, captions in found.of.items()
            for caption in (captions[:1] if once else captions)
        ]
        self.datasets[split] = CaptionDataset(
            [picture for picture, _ in pairs],
            [self.encode(caption) for _, caption in pairs],
            sources,
            self.dictionary,
            shuffle=split == "train",
        )
        if split == "valid" and self.cfg.eval_cider:
            ids = [picture for picture, _ in pairs]
            self._scorer = CaptionScorer(self, ids, found.of, self.cfg.eval_beam)
        logger.info(f"{path}: {len(found.files):,} pictures, {len(pairs):,} captions")

    def valid_step(
        self, sample: dict[str, Any], model: nn.Module, criterion: nn.Module
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        loss, size, logged = super().valid_step(sample, model, criterion)
        if self._scorer is not None:
            bare = getattr(model, "module", model)  # without DistributedDataParallel
            logged = {**logged, **self._scorer.score(bare, sample)}
        return loss, size, logged

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: nn.Module) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        log_cider(logging_outputs)

    def encode(self, caption: str) -> torch.Tensor:
        """Its tokens, with the end."""
        tokens = [self.dictionary.index(token) for token in self.text.split(caption)]
        return torch.tensor([*tokens, self.dictionary.eos()])

    def decode(self, tokens: torch.Tensor) -> str:
        """The caption of tokens of the model, as text, without what stands for no word."""
        special = {self.dictionary.bos(), self.dictionary.eos(), self.dictionary.pad()}
        special.add(self.dictionary.unk())
        kept = [self.dictionary[i] for i in tokens.tolist() if i not in special]
        return self.text.join(kept)

    def check_made_by(self, identity: Any, what: object) -> None:
        """Raises ShareError where features are not of the network that the others are of."""
        if identity != self.made_by:
            raise ShareError(
                f"{what}: features of {identity}, but the model is for those of {self.made_by}"
            )

    # What a checkpoint must know to caption a picture, and what its words are.

    def state_dict(self) -> dict[str, Any]:
        dictionary = self.dictionary
        own = {
            "symbols": dictionary.symbols[dictionary.nspecial :],
            "counts": dictionary.count[dictionary.nspecial :],
            "pieces": self.text.pieces,
            "feature_width": self.feature_width,
            "made_by": self.made_by,
        }
        return {**super().state_dict(), "captioning": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ShareError where the checkpoint has other words, or another source, than DATA."""
        state = dict(state_dict)
        own = state.pop("captioning", None)
        super().load_state_dict(state)
        if own is None:
            return
        symbols = self.dictionary.symbols[self.dictionary.nspecial :]
        if own["symbols"] != symbols or own["pieces"] != self.text.pieces:
            raise ShareError(
                f"the checkpoint's vocabulary ({len(own['symbols']):,} tokens) is not that of "
                f"{self.cfg.data} ({len(symbols):,} tokens)"
            )
        if not self.cfg.finetune_backbone:
            self.check_made_by(own["made_by"], self.cfg.features or self.cfg.backbone)


def _described(folder: Path) -> tuple[int, Any]:
    """Width and origin of the features in `folder`, by the first split that there is."""
    for split in SPLITS:
        if (folder / split).is_dir():
            features = Features(folder / split)
            return features.width, features.backbone
    raise ShareError(f"{folder} holds no features of {', '.join(SPLITS)}: make them by features.py")
