"""A budget: which features, blocks and depth map a module has that may store so many parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import Parameter

from paramshare.depth import DepthMap, group_slots
from paramshare.errors import ShareError
from paramshare.layout import check_blocks, fit, largest_blocks
from paramshare.report import count_parameters
from paramshare.slots import Slot


@dataclass(frozen=True)
class Split:
    """Options of `share_from_embedding`, and what the module stores with them."""

    embedding_dim: int | None
    blocks: int | None
    depth: DepthMap
    stored: int
    left: int  # of the budget
    full: bool  # no weight has a lower rank than its shape allows

    def __str__(self) -> str:
        depth = "a callable" if callable(self.depth) else repr(self.depth)
        return f"embedding_dim={self.embedding_dim}, blocks={self.blocks}, depth={depth}"


class Budget:
    """The splits of `stored` parameters between table and projection.

    Free numbers of a weight of `O x I` are the `F O / b` that it reads of the projection, its rank
    is at most `F b`. A given option is kept, one that is None is chosen.
    """

    def __init__(
        self,
        stored: int,
        module: nn.Module,
        table: Parameter,
        slots: list[Slot],
        *,
        depth: DepthMap | None,
        layout: str,
        blocks: int | None,
        virtual_dim: int | None,
        projection_bias: bool,
        embedding_dim: int | None,
        may_narrow: bool,
    ) -> None:
        """may_narrow: whether the table can be factorised."""
        self.stored = stored
        self.tokens, self.width = table.shape
        self.virtual_dim, self.projection_bias = virtual_dim, projection_bias
        self.embedding_dim, self.may_narrow = embedding_dim, may_narrow
        self.layout = layout
        self.maps = {
            depth: [(group[0].rows, group[0].cols) for group in group_slots(slots, depth).values()]
            for depth in (DEPTHS if depth is None else (depth,))
        }
        weights = {id(slot.parameter): slot.parameter.numel() for slot in slots}
        # What sharing does not touch.
        self.rest = count_parameters(module) - table.numel() - sum(weights.values())
        largest = max(largest_blocks(slot.cols, self.tokens) for slot in slots)
        check_blocks(blocks, layout, largest)
        self.blocks: list[int | None] = [blocks]
        if blocks is None and layout == "aligned":
            self.blocks = [2**n for n in range(largest.bit_length())]  # none where none is aligned
            self.blocks.append(None)

    def split(self) -> Split:
        """The split that the rule takes. Raises ShareError where `stored` is too little."""
        splits = list(self._splits())
        fitting = [split for split in splits if split.left >= 0]
        if not fitting:
            least = min(split.stored for split in splits)
            raise ShareError(
                f"stored={self.stored} is too little: this module stores {least} parameters at "
                f"least, of which {self.rest} are not shared"
            )
        return next((split for split in fitting if split.full), fitting[-1])

    def _splits(self) -> Iterator[Split]:
        """One a depth map and number of blocks: with the largest table that the budget has room
        for, else with the smallest."""
        for depth, shapes in self.maps.items():
            for blocks in self.blocks:
                fits = [fit(self.layout, *shape, self.tokens, blocks) for shape in shapes]
                columns = sum(columns for _, columns, _ in fits)
                if self.virtual_dim is not None:
                    if columns > self.virtual_dim:
                        continue  # `make_plan` says so of what is given
                    columns = self.virtual_dim
                features = self._features(columns)
                stored = self._stored(features, columns)
                full = all(
                    min(shape) <= features * used
                    for shape, (layout, _, used) in zip(shapes, fits, strict=True)
                    if layout == "aligned"
                )
                narrow = features if features < self.width else None
                yield Split(narrow, blocks, depth, stored, self.stored - stored, full)

    def _features(self, columns: int) -> int:
        """The most of the table that fit; where none do, the fewest."""
        if self.embedding_dim is not None:
            return self.embedding_dim
        if not self.may_narrow or self._stored(self.width, columns) <= self.stored:
            return self.width
        room = self.stored - self.rest - self._biases(columns)
        return max(1, min(self.width - 1, room // (self.tokens + self.width + columns)))

    def _stored(self, features: int, columns: int) -> int:
        lift = self.width if features < self.width else 0
        return self.rest + features * (self.tokens + lift + columns) + self._biases(columns)

    def _biases(self, columns: int) -> int:
        return columns if self.projection_bias else 0


# In the order in which the rule looks at them.
DEPTHS = ("none", "all")


def check_stored(stored: int | None, virtual: bool) -> None:
    """Raises ShareError unless it is a budget that the call can use."""
    if stored is None:
        return
    if type(stored) is not int or stored < 1:
        raise ShareError(f"stored={stored!r} must be a whole number of parameters above zero")
    if not virtual:
        raise ShareError(
            f"stored={stored} needs virtual=True: there is no projection to split it with"
        )
