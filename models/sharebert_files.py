"""ShareBERTs in the files of others: configurations and tensors that may be damaged, or made up.

Nothing of a file is run. What its tensors and its configuration say is compared before a model is
built, so that its size is that of the file, whatever numbers stand in it. All that is wrong is one
ShareError.
"""

from __future__ import annotations

import json
import pickle
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paramshare import state
from paramshare.errors import ShareError
from paramshare.models import sharebert
from paramshare.models.fairseq_checkpoints import damage
from paramshare.pool import Pool

Model = TypeVar("Model", bound=nn.Module)

_NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in it is a ShareError: readers of damaged files raise anything, `Exception`
    itself included. So it holds readers only."""
    try:
        if path.exists() and not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
            raise ValueError("it is neither a file nor a folder")
        yield
    except RecursionError:
        raise ShareError(f"{path} cannot be read: it is nested too deeply") from None
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL (\S+)", str(error))
        reason = "it holds something else than data and tensors"
        if needed is not None:
            reason = f"it needs {needed[1]}, and what is in a file is not run"
        raise ShareError(f"{path} cannot be read: {reason}") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ShareError(f"{path} cannot be read: {reason or type(error).__name__}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ShareError."""
    with reading(path):
        content = json.loads(path.read_text("utf8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} instead of an object")
        return content


def read_pickle(path: Path) -> Any:
    """What torch.save has written: plain data and tensors. Raises ShareError."""
    with reading(path):
        reason = damage(path)
        if reason is not None:
            raise ValueError(reason)
        return torch.load(path, map_location="cpu", weights_only=True)


def check_options(options: Any, path: Path) -> None:
    """Raises ShareError unless these are options of a ShareBERT that go together."""
    known = sharebert.ShareBertConfig.__dataclass_fields__
    if not isinstance(options, dict) or not all(name in known for name in options):
        raise ShareError(f"{path} has options in it that are not those of a ShareBERT")
    try:
        sharebert.ShareBertConfig(**options).check()
    except ShareError as error:
        raise ShareError(f"{path}: {error}") from None


def check_tensors(tensors: Any, path: Path) -> None:
    """Raises ShareError unless this is a dict of names and of dense tensors, of finite numbers of
    one floating-point type, with all of these in memory; a plan has numbers of its own."""
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ShareError(f"{path} holds no state_dict of weights")
    plans = {name for name in tensors if name.endswith((f".{state.KEY}", f".{state.EARLIER}"))}
    for name, tensor in tensors.items():
        flaw = _form(tensor) or (None if name in plans else _numbers(tensor))
        if flaw is not None:
            raise ShareError(f"{path}: {name} is {flaw}")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in plans}
    if len(dtypes) > 1:
        raise ShareError(f"{path} has tensors of several types: {', '.join(map(str, dtypes))}")


def _form(tensor: Any) -> str | None:
    """What keeps it from being a dense tensor in memory."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a {type(tensor).__name__}, not a tensor"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return "no dense tensor"
    if tensor.is_meta:
        return "a tensor without values"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"{tuple(tensor.shape)} by its shape, and the file holds fewer numbers of it"
    return None


def _numbers(tensor: Tensor) -> str | None:
    """What is wrong with the numbers in it."""
    if tensor.dtype not in _NUMBERS:
        return f"of {tensor.dtype}, not of a type that models have"
    return None if tensor.isfinite().all() else "not finite everywhere"


def load(
    build: Callable[[], Model],
    config: sharebert.ShareBertConfig,
    tensors: Mapping[str, Tensor],
    path: Path,
    names: str = "",
) -> Model:
    """The model of `build()`, which has this configuration, with copies of these tensors.

    They are those of `path`, which check_tensors has seen. A plan may be among them, and must be
    the model's. names: says in errors whose names of tensors these are. Raises ShareError where
    tensors are missing, too many or of other shapes.
    """
    _check_sizes(config, tensors, path, names)
    try:
        with torch.device("meta"):
            model = build()
    except ValueError as error:  # ShareError is one, and what depth="cycle:TEXT" comes to
        raise ShareError(f"{path}: {error}") from None
    pools = [place for place, part in model.named_modules() if isinstance(part, Pool)]
    plans = {f"{place}.{key}" for place in pools for key in (state.KEY, state.EARLIER)}
    expected = {name: x for name, x in model.state_dict().items() if name not in plans}
    for name, tensor in expected.items():
        if name not in tensors:
            raise ShareError(f"{path} has no {name}{names} of shape {tuple(tensor.shape)}")
    for name, tensor in tensors.items():
        if name in plans:
            continue
        if name not in expected:
            raise ShareError(f"{path} has {name}{names} beside what makes a model")
        _check_shape(name, tensor, tuple(expected[name].shape), path, names)
    copies = {name: x.detach().clone() for name, x in tensors.items()}  # some may be one memory
    try:
        model.load_state_dict(copies, assign=True)
    except ShareError as error:
        raise ShareError(f"{path}: {error}") from None
    return model.eval()


def _check_sizes(
    config: sharebert.ShareBertConfig, tensors: Mapping[str, Tensor], path: Path, names: str
) -> None:
    """Every size of the configuration is compared with a tensor, as it would be built."""
    layers = {found[1] for name in tensors if (found := re.match(r"bert\.layers\.(\d+)\.", name))}
    if len(layers) != config.num_hidden_layers:
        raise ShareError(
            f"{path} has tensors of {len(layers)} layers, by its configuration it should have "
            f"num_hidden_layers={config.num_hidden_layers}"
        )
    width = config.hidden_size
    for name, shape in (
        ("bert.embeddings.tokens.weight", (config.vocab_size, config.embedding_size)),
        ("bert.embeddings.positions.weight", (config.max_position_embeddings, width)),
        ("bert.embeddings.types.weight", (config.type_vocab_size, width)),
        ("bert.layers.0.intermediate.bias", (config.intermediate_size,)),
    ):
        if name not in tensors:
            raise ShareError(f"{path} has no {name}{names} of shape {shape}")
        _check_shape(name, tensors[name], shape, path, names)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], path: Path, names: str) -> None:
    if tensor.shape != shape:
        raise ShareError(
            f"{name}{names} is {tuple(tensor.shape)} in {path}, by its configuration it should be "
            f"{shape}"
        )
