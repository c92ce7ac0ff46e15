"""transformers' own save_pretrained and from_pretrained, for shared models.

    import paramshare.models.pretrained

is all. The folder of a shared model then has its plans in config.json, its model.safetensors holds
what is stored and no more, and the classes of transformers load it shared. A process that loads
needs the import; one that saves has it, since sharing or unpickling a shared model makes it. In a
process without it, loading ends in an error: see `_stops`.

transformers has one door for models whose modules are changed before their weights are loaded:
quantization. Loading goes through it, and the model that comes out is not marked as quantized.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

try:
    from transformers import PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError(
        f"paramshare.models.pretrained needs transformers>=5 ({error}): pip install "
        "'paramshare[transformers]'"
    ) from error
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from paramshare import state
from paramshare.errors import ShareError
from paramshare.lifted import LiftedTable
from paramshare.marks import sources
from paramshare.plan import SharingPlan
from paramshare.pool import Pool
from paramshare.quantized import quantized_paths
from paramshare.readonly import ReadOnlyWeight
from paramshare.rewrite import prepare_all
from paramshare.sharing import (
    empty_weights,
    named_pools,
    read_plans,
    sources_in,
    stored_plans,
)

# The name of the method in config.json. Without this module transformers warns that it does not
# know the method, before it stops at the weights: so the name says what is missing.
METHOD = "paramshare (needs: import paramshare.models.pretrained)"

# transformers initialises nothing that has this mark: what is read from a table, or from factors,
# cannot be filled.
for _read in (LiftedTable, ReadOnlyWeight):
    _read._is_hf_initialized = True  # type: ignore[attr-defined]


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


def _stops(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the file holds under the names of derived weights: tensors without elements.

    Where this module is not imported, transformers would leave these weights random, and only warn.
    Now their shapes are an error to it. ShareBERT's classes need none: they are ours, and unknown
    to transformers without the import.
    """
    pools = {pool for root, pool in named_pools(model) if not _shares_itself(model, root)}
    found = sources_in(model)
    return {
        name: empty for name, empty in empty_weights(model).items() if found[name].pool in pools
    }


def _keeping_plans(save_pretrained: Any) -> Any:
    @functools.wraps(save_pretrained)
    def save(
        self: PreTrainedModel,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if getattr(self, "_hf_peft_config_loaded", False):  # only its adapter is written
            return save_pretrained(
                self, save_directory, is_main_process, state_dict, *args, **kwargs
            )
        with plans_in_config(self):
            stops = _stops(self)
            if stops:
                state_dict = {**stops, **(self.state_dict() if state_dict is None else state_dict)}
            return save_pretrained(
                self, save_directory, is_main_process, state_dict, *args, **kwargs
            )

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
    return {name for name, source in sources_in(model).items() if source.group is None}


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

_LOADING: ContextVar[bool] = ContextVar("_LOADING", default=False)


def _as_loading(from_pretrained: Any) -> Any:
    @functools.wraps(from_pretrained)
    def load(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        token = _LOADING.set(True)
        try:
            return from_pretrained(cls, *args, **kwargs)
        finally:
            _LOADING.reset(token)

    return load


def _to_be_filled(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def filled(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        found = state_dict(self, *args, **kwargs)
        if _LOADING.get():
            for path, part in self.named_modules():
                if isinstance(part, Pool):
                    found.pop(f"{path}.{state.KEY}", None)
        return found

    return filled


# While it loads, transformers fills all that a model's state has. The plan in it is nothing to
# fill: it is compared, and under the paths of the class that was saved, which may be another one.
PreTrainedModel.from_pretrained = classmethod(  # type: ignore[assignment, method-assign]
    _as_loading(PreTrainedModel.from_pretrained.__func__)
)
PreTrainedModel.state_dict = _to_be_filled(PreTrainedModel.state_dict)  # type: ignore[method-assign]


@register_quantization_config(METHOD)
class SharingConfig(QuantizationConfigMixin):
    """The entry of a config: what is shared, and how."""

    # What is loaded then counts as an ordinary model: transformers removes this entry, and all
    # that marks a quantized one.
    dequantize = True

    def __init__(self, sharings: Any = None, quant_method: str = METHOD, **unknown: Any) -> None:
        if unknown:
            raise _damaged(f"{min(unknown)!r} is unknown")
        self.quant_method = quant_method  # type: ignore[assignment]
        self.sharings = sharings


def _damaged(reason: object) -> ShareError:
    return ShareError(f"config.json has a damaged sharing plan in it: {reason}")


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
            raise _damaged(error) from None
        if not plans:
            raise _damaged("it shares nothing")
        try:
            here = [_as_in(model, root, plan) for root, plan in plans]
            rewrites = prepare_all(model, here)
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
        saved = {id(mine): plan for (_, mine), (_, plan) in zip(here, plans, strict=True)}
        pools = {path: p for path, p in model.named_modules() if isinstance(p, Pool)}
        keys = {f"{path}.{state.KEY}": saved[id(pool.plan)] for path, pool in pools.items()}
        _check_files(model, keys, kwargs.get("checkpoint_files"))
        self._unexpected = model._keys_to_ignore_on_load_unexpected
        _expect(model, [*sources_in(model), *keys])
        self._before = dict(model.state_dict())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        model.all_tied_weights_keys.update(self._lifted)
        model._keys_to_ignore_on_load_unexpected = self._unexpected
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                _remove_plans(part.config)  # parts may have copies of the config
        check_devices(parameter.device for parameter in model.parameters())
        # transformers only warns of what is missing, and lets quantized models have other shapes.
        for name, tensor in _needed(model):
            loaded = getattr(tensor, "_is_hf_initialized", False)
            if not loaded or tensor.shape != self._before[name].shape:
                raise ShareError(f"{name} is missing in the file, or has another shape there")
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() != self._before[name].is_floating_point():
                raise ShareError(f"{name} is {tensor.dtype} in the file: it is damaged")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check_files(
    model: PreTrainedModel, plans: dict[str, SharingPlan], files: Iterable[str] | None
) -> None:
    """Raises ShareError where the files' weights were saved under other plans than config.json's.

    plans: by the name that they have in the model's state. Files from before have none.
    """
    prefix = f"{model.base_model_prefix}."
    by_name = {name.removeprefix(prefix): plan for name, plan in plans.items()}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                plan = by_name.get(name.removeprefix(prefix))
                if plan is not None:
                    try:
                        found = state.read(plan, opened.get_tensor(name))
                        if found.whiten != plan.whiten:
                            raise ShareError("whiten is not that of the file's weights")
                    except ShareError as error:
                        raise _damaged(error) from None


def _expect(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Keeps transformers from telling that the file has these names, which are not for the model;
    with and without the name of the base model before them."""
    prefix = f"{model.base_model_prefix}."
    known = model._keys_to_ignore_on_load_unexpected
    patterns = [rf"(^|\.){re.escape(name.removeprefix(prefix))}$" for name in names]
    kind: Any = list if known is None else type(known)
    model._keys_to_ignore_on_load_unexpected = kind((*(known or ()), *patterns))


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
