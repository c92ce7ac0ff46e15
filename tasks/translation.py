"""fairseq task `shared_translation`: fairseq's translation with shared weights."""

from dataclasses import dataclass
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import nn

from paramshare import ShareError
from paramshare.tasks.sharing import ShareConfig, SharingTask


@dataclass
class SharedTranslationConfig(TranslationConfig, ShareConfig):
    """The options of fairseq's translation task and those of sharing."""


@register_task("shared_translation", dataclass=SharedTranslationConfig)
class SharedTranslationTask(SharingTask, TranslationTask):
    """Translation by a model whose dense weights are read from its token tables."""

    cfg: SharedTranslationConfig

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Builds fairseq's model, then shares its weights: after its own initialisation."""
        if getattr(cfg, "share_all_embeddings", False) and self.src_dict != self.tgt_dict:
            raise ShareError(
                f"--share-all-embeddings needs one dictionary, but source and target have "
                f"{len(self.src_dict)} and {len(self.tgt_dict)} different types; run "
                "fairseq-preprocess with --joined-dictionary (a flag, it takes no value)"
            )
        model = super().build_model(cfg, from_checkpoint)
        self.share(model, from_checkpoint)
        return model
