"""fairseq task `shared_translation`: fairseq's translation with shared weights."""

from dataclasses import dataclass
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import nn

from paramshare import ShareError
from paramshare.tasks.sharing import Plans, ShareConfig, share_again, share_model


@dataclass
class SharedTranslationConfig(TranslationConfig, ShareConfig):
    """The options of fairseq's translation task and those of sharing."""


@register_task("shared_translation", dataclass=SharedTranslationConfig)
class SharedTranslationTask(TranslationTask):
    """Translation by a model whose dense weights are read from its token tables."""

    cfg: SharedTranslationConfig
    plans: Plans = {}  # of the model built last

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Builds fairseq's model, then shares its weights: after its own initialisation.

        A model that is loaded to translate is shared as it was trained, whatever the options of
        the command that loads it.
        """
        if getattr(cfg, "share_all_embeddings", False) and self.src_dict != self.tgt_dict:
            raise ShareError(
                f"--share-all-embeddings needs one dictionary, but source and target have "
                f"{len(self.src_dict)} and {len(self.tgt_dict)} different types; run "
                "fairseq-preprocess with --joined-dictionary (a flag, it takes no value)"
            )
        model = super().build_model(cfg, from_checkpoint)
        if from_checkpoint:
            share_again(model, self.plans)
        else:
            self.plans = share_model(model, self.cfg)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Goes into the checkpoint; fairseq gives it back before it builds a model to load."""
        return {**super().state_dict(), "sharing_plans": self.plans}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.plans = state.pop("sharing_plans", {})
        super().load_state_dict(state)
