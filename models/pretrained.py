"""transformers' own save_pretrained and from_pretrained, for shared models.

    import paramshare.models.pretrained

is all. The folder of a shared model then has its plans in config.json, its model.safetensors holds
what is stored and no more, and the classes of transformers load it shared. A process that loads
needs the import; one that saves has it, since sharing or unpickling a shared model makes it.

transformers has one door for models whose modules are changed before their weights are loaded:
quantization. Loading goes through it, and the model that comes out is not marked as quantized.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError(
        f"paramshare.models.pretrained needs transformers>=5 ({error}): pip install "
        "'transformers>=5'"
    ) from error
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from paramshare.errors import ShareError
from paramshare.lifted import LiftedTable
from paramshare.marks import sources
from paramshare.plan import SharingPlan
from paramshare.pool import Pool
from paramshare.quantized import quantized_paths
from paramshare.rewrite import prepare_all
from paramshare.sharing import named_pools, read_plans, stored_plans

# The name of the method in config.json. Without this module transformers only warns that it does
# not know the method, and goes on with weights of chance: so the name says what is missing.
METHOD = "paramshare (needs: import paramshare.models.pretrained)"

# transformers leaves alone what has this mark: weights of embeddings and of heads, here, of which
# only the factors can be filled.
LiftedTable._is_hf_initialized = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- saving


@contextmanager
def plans_in_config(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, the model's config has the plans of what is shared in it.

    Only then: several models may have one config, and who builds from it wants a plain one.
    Raises ShareError for a part of a shared module, and for what would not be loaded again.
    """
    if quantized_paths(model):
        raise ShareError(
            "from_pretrained knows nothing of paramshare.quantize, and would not find the weights: "
            "use paramshare.save_model and load_model"
        )
    sharings = [plan for plan in stored_plans(model) if not _shares_itself(model, plan["root"])]
    lifted = _lifted(model)
    for target, source in model.all_tied_weights_keys.items():
        if source in lifted and target not in lifted:
            raise ShareError(
                f"{target} is not tied to the factorised table any more, and from_pretrained would "
                "tie it again: set config.tie_word_embeddings=False, or use paramshare.save_model"
            )
    homes = {path for path, part in model.named_modules() if isinstance(part, Pool)}
    if any(f"{model.base_model_prefix}.{path}" in homes for path in homes):
        # When transformers loads, it adds and removes this prefix wherever that gives a name.
        raise ShareError(
            f"the whole model was shared, and its {model.base_model_prefix} by itself: "
            "transformers would mix them up when it loads the folder; share both by calls on the "
            "model, or use paramshare.save_model"
        )
    _remove_plans(model.config)  # a config that was read from the folder of another model
    if sharings:
        if getattr(model.config, "quantization_config", None) is not None:
            raise ShareError(
                "the model is both shared and quantized, and its config has room for one; call "
                "paramshare.materialize before it is quantized"
            )
        model.config.quantization_config = {"quant_method": METHOD, "sharings": sharings}
    try:
        yield
    finally:
        _remove_plans(model.config)


def _shares_itself(model: nn.Module, root: str) -> bool:
    """Whether what was shared does that in its constructor, by its configuration."""
    return getattr(model.get_submodule(root), "sharing", None) is not None


def _remove_plans(config: PreTrainedConfig) -> None:
    entry = getattr(config, "quantization_config", None)
    if entry is not None and dict(entry).get("quant_method") == METHOD:
        del config.quantization_config


def _keeping_plans(save_pretrained: Any) -> Any:
    @functools.wraps(save_pretrained)
    def save(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with plans_in_config(self):
            return save_pretrained(self, *args, **kwargs)

    return save


# No hook of transformers sees both the model and the config that is about to be written. This does,
# and so is right for parts that were shared by themselves, for models that have one config, and for
# what cannot be saved: a part of what was shared.
PreTrainedModel.save_pretrained = _keeping_plans(  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained
)


# ---------------------------------------------------------------------- ties


def _without_lifted(expand: Any) -> Any:
    @functools.wraps(expand)
    def expanded(self: PreTrainedModel, all_submodels: bool = False) -> dict[str, str]:
        ties = self._tied_weights_keys or {}
        lifted = _lifted(self)
        if all_submodels or not lifted:
            return expand(self, all_submodels)
        own = self.__dict__.get("_tied_weights_keys")
        self._tied_weights_keys = {
            target: source
            for target, source in ties.items()
            if not any(re.search(f"^{key}", name) for key in (target, source) for name in lifted)
        }
        try:
            return expand(self, all_submodels)
        finally:
            del self._tied_weights_keys
            if own is not None:
                self._tied_weights_keys = own

    return expanded


def _lifted(model: nn.Module) -> set[str]:
    """The names of the weights that read the factors of a table."""
    return {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules(remove_duplicate=False)
        for name, source in sources(part).items()
        if source.group is None
    }


def _tying_the_rest(tie_weights: Any) -> Any:
    @functools.wraps(tie_weights)
    def tie(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        lifted = _lifted(self)
        if not lifted:
            return tie_weights(self, *args, **kwargs)
        all_ties = self.all_tied_weights_keys
        self.all_tied_weights_keys = {
            target: source for target, source in all_ties.items() if not {target, source} & lifted
        }
        try:
            return tie_weights(self, *args, **kwargs)
        finally:
            self.all_tied_weights_keys = all_ties

    return tie


# What tie_weights ties. What is tied to a factorised table reads its factors, always, and is no
# Parameter that could be tied.
PreTrainedModel.get_expanded_tied_weights_keys = _without_lifted(  # type: ignore[method-assign]
    PreTrainedModel.get_expanded_tied_weights_keys
)
PreTrainedModel.tie_weights = _tying_the_rest(PreTrainedModel.tie_weights)  # type: ignore[method-assign]


# ---------------------------------------------------------------------- resizing


def _refusing(resize_token_embeddings: Any) -> Any:
    @functools.wraps(resize_token_embeddings)
    def resize(
        self: PreTrainedModel, new_num_tokens: int | None = None, *args: Any, **kw: Any
    ) -> Any:
        for _, pool in named_pools(self):
            if new_num_tokens is not None and new_num_tokens != pool.plan.tokens:
                raise ShareError(
                    f"the weights are read from a table of {pool.plan.tokens} tokens, which cannot "
                    f"be resized to {new_num_tokens}; call paramshare.materialize, resize, and "
                    "share again"
                )
        return resize_token_embeddings(self, new_num_tokens, *args, **kw)

    return resize


# It would leave half of a model resized, and a tied head untied.
PreTrainedModel.resize_token_embeddings = _refusing(  # type: ignore[method-assign]
    PreTrainedModel.resize_token_embeddings
)


# ---------------------------------------------------------------------- loading


@register_quantization_config(METHOD)
class SharingConfig(QuantizationConfigMixin):
    """The entry of a config: what is shared, and how."""

    # What is loaded then counts as an ordinary model: transformers removes this entry, and all
    # that marks a quantized one.
    dequantize = True

    def __init__(self, sharings: Any = None, quant_method: str = METHOD) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.sharings = sharings


@register_quantizer(METHOD)
class SharingQuantizer(HfQuantizer):
    """Shares the empty model by its config's plans, and checks what was then loaded into it."""

    quantization_config: SharingConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        check_devices(device_map.values() if isinstance(device_map, dict) else ())
        # As they were when it was shared: a factorised table must find all that is tied to it.
        ties = model.all_tied_weights_keys
        for target, source in ties.items():
            path, _, name = target.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(source))
        try:
            plans = read_plans(self.quantization_config.sharings)
        except ShareError as error:
            raise ShareError(f"config.json has a damaged sharing plan in it: {error}") from None
        try:
            rewrites = prepare_all(model, [_as_in(model, root, plan) for root, plan in plans])
        except ShareError as error:
            raise ShareError(
                f"what is shared in the file is not what a {type(model).__name__} has: {error}; "
                "load it with the class that was saved"
            ) from None
        for rewrite in rewrites:
            rewrite.commit()
        # What is tied to a factorised table is no Parameter now, and transformers looks for one.
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._lifted = {a: ties.pop(a) for a in list(ties) if not {a, ties[a]} <= names}
        for part in _settled(model):
            part._is_hf_initialized = True  # type: ignore[assignment]
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        model.all_tied_weights_keys.update(self._lifted)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                _remove_plans(part.config)  # parts may have copies of the config
        check_devices(parameter.device for parameter in model.parameters())
        # transformers only warns of what is missing, and lets quantized models have other shapes.
        for name, tensor in _needed(model):
            loaded = getattr(tensor, "_is_hf_initialized", False)
            if not loaded or tensor.shape != self._shapes[name]:
                raise ShareError(f"{name} is missing in the file, or has another shape there")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def check_devices(devices: Iterable[Any]) -> None:
    """Raises ShareError unless all are one device."""
    found = set(devices)
    if len(found) > 1 or found & {"disk", torch.device("meta")}:
        raise ShareError(
            "a shared model must be on one device, since all its weights are read from its table: "
            'device_map={"": 0}, for example'
        )


def _as_in(model: PreTrainedModel, root: str, plan: SharingPlan) -> tuple[str, SharingPlan]:
    """A plan with the paths of the class at hand, which need not be the one that was saved: a base
    model is loaded from the folder of one with a head, and the other way round."""
    prefix = f"{model.base_model_prefix}."
    slot = f"{root}.{plan.groups[0].slots[0]}".lstrip(".")
    if not _holds(model, slot) and _holds(model, prefix + slot):
        return (prefix + root).rstrip("."), plan
    if not _holds(model, slot) and _holds(model, slot.removeprefix(prefix)):
        if root:
            return f"{root}.".removeprefix(prefix).rstrip("."), plan
        return root, _without(prefix, plan)
    return root, plan


def _without(prefix: str, plan: SharingPlan) -> SharingPlan:
    """The plan with the prefix of its paths removed."""

    def short(path: str) -> str:
        if not path.startswith(prefix):
            raise ShareError(f"{path} is not in its {prefix.rstrip('.')}")
        return path.removeprefix(prefix)

    groups = tuple(
        replace(g, name=g.name.removeprefix(prefix), slots=tuple(map(short, g.slots)))
        for g in plan.groups
    )
    return replace(plan, table=short(plan.table), groups=groups)


def _holds(model: nn.Module, path: str) -> bool:
    """Whether the model has the module of the Parameter at `path`."""
    try:
        model.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return False
    return True


def _settled(model: nn.Module) -> set[nn.Module]:
    """The modules that transformers is not to initialise: it would fill derived weights, their own
    or their children's (T5's attention fills those of its projections), which is of no effect but
    takes time. Not those with something that no file holds, which it must fill."""
    return {
        part
        for part in model.modules()
        if any(sources(near) for near in (part, *part.children()))
        and not any(near._non_persistent_buffers_set for near in (part, *part.children()))
        and not isinstance(part, PreTrainedModel)
    }


def _needed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the file must hold: what weights are read from, and what else is in the
    modules that are not initialised."""
    parts = _settled(model)
    parts |= {child for part in parts for child in part.children()}
    for _, pool in named_pools(model):
        parts |= {part for part in (pool, pool.embedding, pool.lift) if part is not None}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if model.get_submodule(name.rpartition(".")[0]) in parts:
            yield name, tensor


# Our own classes: one import knows all that can be loaded.
import paramshare.models.sharebert_pretrained  # noqa: E402, F401
