"""fairseq task `shared_masked_lm`: fairseq's masked language modelling with shared weights; and
ShareBERT as a model of it, `--arch sharebert_small` and so on."""

import logging
import re
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Optional, get_type_hints

from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model, register_model_architecture
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import II
from torch import Tensor, nn

from paramshare import ShareError
from paramshare.models.sharebert import PRESETS, MaskedLMHead, ShareBert, ShareBertConfig
from paramshare.sharing import named_pools
from paramshare.tasks.sharing import (
    Layouts,
    ShareConfig,
    Shares,
    SharingTask,
    in_options,
    refuse_shared_states,
)

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------- the task


def _share_option(name: str) -> Any:
    text = ShareConfig.__dataclass_fields__[name].metadata["help"]
    return field(default=None, metadata={"help": f"{text}; default: what the architecture says"})


@dataclass
class SharedMaskedLMConfig(MaskedLMConfig, ShareConfig):
    """The options of fairseq's masked language modelling and those of sharing."""

    share: Optional[Shares] = _share_option("share")  # type: ignore[valid-type]  # noqa: UP045
    share_layout: Optional[Layouts] = _share_option("share_layout")  # type: ignore[valid-type]  # noqa: UP045
    bpe_options: Any = II("bpe")


@register_task("shared_masked_lm", dataclass=SharedMaskedLMConfig)
class SharedMaskedLMTask(SharingTask, MaskedLMTask):
    """Masked language modelling by a model whose dense weights are read from its token table."""

    cfg: SharedMaskedLMConfig
    sharebert: dict[str, Any] = {}  # configuration of the model built last, if it is one

    def __init__(self, cfg: SharedMaskedLMConfig, dictionary: Any = None) -> None:
        super().__init__(cfg, dictionary)
        for name in ("share", "share_layout"):  # neither the user nor an architecture said it
            if getattr(cfg, name) is None:
                setattr(cfg, name, ShareConfig.__dataclass_fields__[name].default)
        # fairseq's whole-word masking looks for --bpe in `args`, which its task does not have.
        self.args = cfg.bpe_options
        if cfg.mask_whole_words and self.args is None:
            raise ShareError(
                "--mask-whole-words needs --bpe, which says where words begin; for a WordPiece "
                "vocabulary it is --bpe bert --bpe-vocab-file vocab.txt"
            )

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Builds fairseq's model, then shares its weights; a ShareBERT does that itself.

        A model that is loaded to be used is shared as it was trained, whatever the options of the
        command that loads it. Raises ShareError where options do not go together.
        """
        if not from_checkpoint:
            self.plans, self.sharebert = {}, {}
        model = super().build_model(cfg, from_checkpoint)
        if isinstance(model, ShareBertForMaskedLM):
            if cfg.sharebert_from and not from_checkpoint:
                # Not at the top of the file: it needs transformers.
                from paramshare.models.sharebert_fairseq import fill_from

                tokens = self.source_dictionary.symbols
                fill_from(Path(cfg.sharebert_from), model, model.config, tokens)
            self.sharebert = asdict(model.config)
            if not list(named_pools(model)):
                refuse_shared_states(model)
        else:
            self.share(model, from_checkpoint)
        return model

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sharebert": self.sharebert}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.sharebert = state.pop("sharebert", {})
        super().load_state_dict(state)


# ---------------------------------------------------------------------- the model

# Options of ShareBERT that the task has for all models.
_SHARING = {
    "sharing": "share",
    "depth": "share_depth",
    "layout": "share_layout",
    "blocks": "share_blocks",
    "table_gradient": "share_table_gradient",
}
_TYPES = get_type_hints(ShareBertConfig)
_OWN = [f for f in fields(ShareBertConfig) if f.name not in (*_SHARING, "vocab_size")]


def _option(f: Any) -> str:
    """The option of a field of the configuration: what is on by default, it switches off."""
    return f"no_{f.name}" if f.default is True else f.name


def _value(f: Any, value: Any) -> Any:
    """The option's value for the field's, and the other way round."""
    return not value if f.default is True else value


def _declared(f: Any) -> tuple[str, Any, Any]:
    text, default = f.metadata["help"], _value(f, f.default)
    text = f"{'not: ' if f.default is True else ''}{text} (--arch sharebert: {default})"
    return _option(f), _TYPES[f.name], field(default=default, metadata={"help": text})


_FROM = field(
    default="",
    metadata={"help": "start from the weights in this folder of transformers' save_pretrained"},
)
ShareBertOptions = make_dataclass(
    "ShareBertOptions",
    [*map(_declared, _OWN), ("sharebert_from", str, _FROM)],
    bases=(FairseqDataclass,),
)


@register_model("sharebert", dataclass=ShareBertOptions)
class ShareBertForMaskedLM(BaseFairseqModel):
    """ShareBERT with its head for masked tokens. The names of its parameters are those of the class
    of the same name for transformers. The pooler is not trained."""

    def __init__(self, config: ShareBertConfig, padding: int) -> None:
        super().__init__()
        self.config, self.padding = config, padding
        self.bert = ShareBert(config)
        self.head = MaskedLMHead(config)
        # DistributedDataParallel does not take what is trained and gets no gradient.
        self.bert.pooler.requires_grad_(False)
        self.head.bias.requires_grad_(self.head.output is None)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> Any:
        """The model of the checkpoint that is being loaded, or that of the options. Raises
        ShareError where these do not go together."""
        if not isinstance(task, SharedMaskedLMTask):
            raise ShareError("--arch sharebert needs --task shared_masked_lm")
        config = ShareBertConfig(**task.sharebert) if task.sharebert else _config(cfg, task)
        try:
            model = cls(config, task.source_dictionary.pad())
        except ShareError as error:
            text = in_options(error).replace("sharing=", "--share ")
            text = re.sub(r"\b[a-z]+(_[a-z]+)+=", lambda name: _written(name[0][:-1]) + " ", text)
            raise ShareError(f"--arch {cfg._name}: {text}") from None
        if model.bert.sharing is not None:
            logger.info(f"shared weights of the encoder:\n{model.bert.sharing}")
        return model

    def forward(
        self, src_tokens: Tensor, masked_tokens: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits: of the masked tokens `(masked, vocab_size)`, or of all `(batch, length,
        vocab_size)`."""
        x, _ = self.bert(src_tokens, src_tokens != self.padding)
        if masked_tokens is not None:
            x = x[masked_tokens]
        return self.head(x, self.bert.embeddings.tokens.weight), {}

    def max_positions(self) -> int:
        return self.config.max_position_embeddings


def _config(cfg: Any, task: SharedMaskedLMTask) -> ShareBertConfig:
    """What the options of model and task say."""
    for f in fields(ShareConfig):
        foreign = f.name.startswith("share_") and f.name not in _SHARING.values()
        if foreign and str(getattr(task.cfg, f.name)) != str(f.default):
            raise ShareError(
                f"{_written(f.name)} is not for --arch {cfg._name}, which has "
                f"{', '.join(map(_written, _SHARING.values()))}, and --embedding-size for the "
                "features of its table"
            )
    longest = task.cfg.tokens_per_sample
    if longest > cfg.max_position_embeddings:
        raise ShareError(
            f"--tokens-per-sample {longest} is more than --max-position-embeddings "
            f"{cfg.max_position_embeddings}: give one of them, so that they fit"
        )
    own = {f.name: _value(f, getattr(cfg, _option(f))) for f in _OWN}
    sharing = {name: getattr(task.cfg, option) for name, option in _SHARING.items()}
    sharing |= {name: str(sharing[name]) for name in ("sharing", "layout")}  # else Enums
    return ShareBertConfig(vocab_size=len(task.source_dictionary), **own, **sharing)


def _written(option: str) -> str:
    """As it is on the command line."""
    return f"--{option.replace('_', '-')}"


def _register_architecture(preset: str) -> None:
    """--arch sharebert_PRESET: gives the options that were not given, those of sharing too."""
    config = ShareBertConfig.preset(preset)
    own = {_option(f): _value(f, getattr(config, f.name)) for f in _OWN}
    sharing = {"share": config.sharing, "share_layout": config.layout}

    # fairseq calls it on all options, where those of the model that were not given are missing and
    # those of the task are None; and again on those of the model, which then are all there.
    def architecture(args: Any) -> None:
        for option, value in own.items():
            if option not in args:
                setattr(args, option, value)
        for option, value in sharing.items():
            if option in args and getattr(args, option) is None:
                setattr(args, option, value)

    register_model_architecture("sharebert", f"sharebert_{preset.replace('-', '_')}")(architecture)


for _preset in PRESETS:
    _register_architecture(_preset)
