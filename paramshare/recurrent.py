"""What torch's recurrent modules need when their weights are derived.

They hand a list of all their weights to one kernel, and keep that list between calls: a derived
weight in it would be stale, would keep a training step's graph alive, and could not be copied.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn


class FlatWeights:
    """Members of a recurrent module with derived weights: the list is made when it is read."""

    _flat_weights_names: list[str]

    # nn.RNNBase also writes what is set into its list, for which every weight would be read: FSDP
    # sets the biases while the table is not there.
    __setattr__ = nn.Module.__setattr__

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        return [getattr(self, name, None) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: object) -> None:
        pass  # nn.RNNBase refreshes a list that we do not keep

    def _init_flat_weights(self) -> None:
        pass

    def _weights_have_changed(self) -> bool:
        return False  # the list is always that of now

    def flatten_parameters(self) -> None:
        """Nothing to do: the weights are not stored, so they cannot be stored in one piece."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        _ignore_the_warning()
        self._flat_weight_refs: list[Any] = []

    @staticmethod
    def on_derive(module: nn.Module) -> None:
        """Drops the list of the old weights."""
        module.__dict__.pop("_flat_weights", None)
        _ignore_the_warning()

    @staticmethod
    def on_restore(module: nn.Module) -> None:
        """Makes the list again."""
        module._init_flat_weights()  # type: ignore[operator]


def _ignore_the_warning() -> None:
    """That of cuDNN's kernel, which copies weights that are not one piece of memory and says so in
    every step."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
