"""ShareBERT for transformers: `ShareBertForMaskedLM.from_pretrained`, the Auto classes, `Trainer`,
`pipeline("fill-mask")`.

    import paramshare.models.pretrained

registers the classes. A folder holds what is stored and no more: the configuration says how the
weights are shared. Every class has the encoder as `bert`, so that one loads what another saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paramshare.models.pretrained import check_devices  # isort: skip  says what is missing

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from paramshare import state
from paramshare.errors import ShareError
from paramshare.marks import sources
from paramshare.models import sharebert
from paramshare.models.sharebert import MaskedLMHead, ShareBert
from paramshare.pool import Pool


class ShareBertConfig(sharebert.ShareBertConfig, PreTrainedConfig):
    """The options of `paramshare.models.sharebert.ShareBertConfig`, and those of transformers."""

    model_type = "sharebert"

    def __init__(self, **options: Any) -> None:
        for field in fields(sharebert.ShareBertConfig):
            setattr(self, field.name, options.pop(field.name, field.default))
        self.pad_token_id = options.pop("pad_token_id", None)
        PreTrainedConfig.__init__(self, **options)

    __repr__ = PreTrainedConfig.__repr__


class ShareBertPreTrainedModel(PreTrainedModel):
    """What the classes have in common."""

    config_class = ShareBertConfig
    config: ShareBertConfig
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _no_split_modules = ["ShareBert"]
    _keys_to_ignore_on_load_unexpected = [rf"paramshare\.{state.KEY}$"]
    pooled = False  # whether the class has a use for the pooler

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__(config)
        self.bert = ShareBert(config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' own makes everything trainable; what this class has no use for is not."""
        devices = kwargs.get("device_map")
        check_devices(devices.values() if isinstance(devices, dict) else ())
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded)._freeze()
        return loaded

    @property
    def base_model(self) -> nn.Module:
        return self.bert

    def train(self, mode: bool = True) -> Any:
        self._freeze()
        return super().train(mode)

    def _freeze(self) -> None:
        """What this class has no use for gets no gradient, which DistributedDataParallel does not
        take from a parameter that is trained. It is there for the classes that do."""
        if not self.pooled:
            self.bert.pooler.requires_grad_(False)

    def _finish(self) -> None:
        """Ends a constructor. The parts have filled themselves, but where nothing is allocated: so
        is a model that is loaded, and then transformers fills what the file does not have."""
        for part in self.modules():
            part._is_hf_initialized = not any(p.is_meta for p in part.parameters())  # type: ignore[assignment]
        self.post_init()
        self._freeze()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Pool) or module is self._table():
            for name, tensor in module.state_dict(keep_vars=True).items():
                if not getattr(tensor, "_is_hf_initialized", False):
                    raise ShareError(
                        f"{name} of {module} has no values, and all weights are read from it: it "
                        "is missing in the file"
                    )
        elif sources(module):
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)
            if isinstance(module, MaskedLMHead):
                init.zeros_(module.bias)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """transformers' own; a model that was materialized is saved as one that does not share
        itself. If it was shared again, otherwise, its plan goes along."""
        with self._config_as_it_is():
            super().save_pretrained(*args, **kwargs)

    @contextmanager
    def _config_as_it_is(self) -> Iterator[None]:
        sharing = self.config.sharing
        if self.bert.sharing is None:
            self.config.sharing = "none"
        try:
            yield
        finally:
            self.config.sharing = sharing

    def _table(self) -> nn.Module | None:
        """What the weights are read from."""
        return None if self.bert.sharing is None else self.bert.embeddings.tokens

    def get_input_embeddings(self) -> nn.Module:
        return self.bert.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.bert.embeddings.tokens = value

    def _encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The encoder's outputs, and those that transformers gives on demand."""
        lists: dict[str, list[Tensor] | None] = {}
        for name, wanted in (
            ("attentions", output_attentions),
            ("hidden_states", output_hidden_states),
        ):
            default = getattr(self.config, f"output_{name}")
            lists[name] = [] if (default if wanted is None else wanted) else None
        last, pooled = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **lists
        )
        return last, pooled, {name: x and tuple(x) for name, x in lists.items()}


class ShareBertModel(ShareBertPreTrainedModel):
    """The encoder and its pooler."""

    pooled = True

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__(config)
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        last, pooled, others = self._encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
        )
        return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, **others)


class ShareBertForMaskedLM(ShareBertPreTrainedModel):
    """The encoder with `MaskedLMHead`. The pooler is not trained."""

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__(config)
        self.head = MaskedLMHead(config)
        self._finish()

    def _freeze(self) -> None:
        super()._freeze()
        if self.head.output is not None:  # the released head never adds it
            self.head.bias.requires_grad_(False)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """transformers' own, with the head. ShareError where weights are read from the table."""
        embedding = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.head.resize(embedding.weight.shape[0], self.config.initializer_range)
        return embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> MaskedLMOutput:
        """labels: `(batch, length)`, -100 where no token is to be predicted. In training with
        labels only the tokens to be predicted go through the head, and `logits` are theirs,
        `(predicted, vocab_size)`; else they are `(batch, length, vocab_size)`."""
        x, _, others = self._encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
        )
        if labels is not None and self.training:
            predicted = labels != -100
            x, labels = x[predicted], labels[predicted]
        logits = self.head(x, self.bert.embeddings.tokens.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, **others)


class ShareBertForSequenceClassification(ShareBertPreTrainedModel):
    """The encoder with a linear layer on its pooled output; regression with one label."""

    pooled = True

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """labels: `(batch,)` of classes, or of numbers where there is one label; `(batch, labels)`
        of 0.0 and 1.0 for several labels a text, or of numbers with `problem_type="regression"`."""
        _, pooled, others = self._encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
        )
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            kind = self.config.problem_type
            if self.num_labels == 1 or kind == "regression":
                numbers = logits.squeeze(-1) if self.num_labels == 1 else logits
                loss = F.mse_loss(numbers, labels.view_as(numbers).to(logits.dtype))
            elif kind == "multi_label_classification" or labels.is_floating_point():
                loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
            else:
                loss = F.cross_entropy(logits, labels.long())
        return SequenceClassifierOutput(loss=loss, logits=logits, **others)


class ShareBertForTokenClassification(ShareBertPreTrainedModel):
    """The encoder with a linear layer on each token. The pooler is not trained."""

    def __init__(self, config: ShareBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._finish()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> TokenClassifierOutput:
        """labels: `(batch, length)`, -100 where no class is to be predicted."""
        x, _, others = self._encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
        )
        logits = self.classifier(self.dropout(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, **others)


def check_new(out: Path) -> None:
    """Before anything is read or made: raises ShareError where `out` is there already."""
    if os.path.lexists(out):
        raise ShareError(f"{out} exists already: give a folder that does not")


def save_whole(model: PreTrainedModel, out: Path, tokenizer: Any = None) -> None:
    """Writes a folder that appears whole or not at all. Raises ShareError where it cannot."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
            whole = Path(temporary) / out.name
            model.save_pretrained(whole)
            if tokenizer is not None:
                tokenizer.save_pretrained(whole)
            whole.rename(out)
    except (OSError, SafetensorError) as error:
        raise ShareError(f"{out} cannot be written: {error}") from None


AutoConfig.register(ShareBertConfig.model_type, ShareBertConfig)
for _auto, _model in (
    (AutoModel, ShareBertModel),
    (AutoModelForMaskedLM, ShareBertForMaskedLM),
    (AutoModelForSequenceClassification, ShareBertForSequenceClassification),
    (AutoModelForTokenClassification, ShareBertForTokenClassification),
):
    _auto.register(ShareBertConfig, _model)
