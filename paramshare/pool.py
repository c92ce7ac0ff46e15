"""The pool: what the weights are read from, and how they are derived from it."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paramshare import state
from paramshare.blockwise import apply_tiles
from paramshare.errors import ShareError
from paramshare.factored import complete, expand
from paramshare.gradients import scale_gradient, virtual_columns
from paramshare.held import (
    WATCHED,
    Frame,
    Holder,
    look_up,
    look_up_weight,
    new_frame,
    put,
    put_weight,
    weights_in,
)
from paramshare.layout import read, table_blocks
from paramshare.lifted import LiftedTable
from paramshare.plan import Group, SharingPlan
from paramshare.reduced import drop_reduced, reduced_input
from paramshare.standin import tensors_of
from paramshare.whiten import colored, sampled, whitened, whitening

_ALIVE: weakref.WeakSet[Pool] = weakref.WeakSet()


def table_of(embedding: nn.Module) -> nn.Parameter:
    """The table itself, as the embedding module has it now."""
    return embedding.weight  # type: ignore[return-value]


def columns_taken(table: nn.Parameter) -> list[tuple[int, int]]:
    """(first, end) of the columns of this table that weights are read from (EPS), in order."""
    return sorted(
        (group.start, group.start + group.columns)
        for pool in readers(table)
        if pool.projection is None
        for group in pool.plan.groups
    )


def readers(table: nn.Parameter) -> list[Pool]:
    """The pools that read this table."""
    return [pool for pool in list(_ALIVE) if table_of(pool.embedding) is table]


def is_read(parameter: nn.Parameter) -> bool:
    """Whether a pool reads it: its table, or the lift of one that was narrowed."""
    lifts = (pool.lift for pool in list(_ALIVE) if pool.lift is not None)
    return bool(readers(parameter)) or any(table_of(lift) is parameter for lift in lifts)


class Pool(nn.Module):
    """Owns the projection (VEPS) or the constants (EPS), refers to the embedding module.

    It is registered once, under the shared module (under the embedding where that is a container,
    whose children are its layers). `projection` is `(features, columns)`, its
    optional `bias` `(columns,)`; `scale`, a buffer, has one number a group.
    """

    folded = False  # the projection is not that of training, see `fold`

    def __init__(
        self, root: nn.Module, plan: SharingPlan, embedding: nn.Module, lift: nn.Module | None
    ) -> None:
        """embedding: the module whose weight is the table, in `root`; lift: of a factorised one.

        Raises ShareError unless the table is the plan's.
        """
        super().__init__()
        _check_size(embedding, plan)
        self.plan = plan
        self._root: weakref.ref[nn.Module] | None = weakref.ref(root)
        self.embedding: nn.Module
        self.lift: nn.Module | None
        self.scale: Tensor | None
        # Not registered: these have their places in the state_dict already. The modules and not
        # their weights, since trainers and loaders replace the tensors.
        self.__dict__["embedding"] = embedding
        self.__dict__["lift"] = lift
        table = table_of(embedding)

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=table.dtype, device=table.device)

        def parameter(*size: int, exists: bool) -> nn.Parameter | None:
            # A plain attribute where there is none: a registered None is an entry for trainers.
            return nn.Parameter(empty(*size)) if exists else None

        self.projection = parameter(plan.features, plan.columns, exists=plan.virtual)
        self.bias = parameter(plan.columns, exists=plan.virtual and plan.projection_bias)
        if not plan.virtual and plan.init == "match":
            self.register_buffer("scale", empty(len(plan.groups)))
        else:
            self.scale = None
        self._start()

    # ------------------------------------------------------------------ what is stored

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the projection, or computes the constants, from the table as it is now.

        init="match": each weight gets its group's spread exactly. "paper": N(0, 0.02) as in the
        released code, whatever that makes of the weights.
        """
        if self.bias is not None:
            self.bias.zero_()
        if self.projection is not None:
            if self.plan.init == "paper":
                self.projection.normal_(0, 0.02)
                return
            self.projection.zero_()  # columns that nothing reads
        elif self.scale is not None:
            self.scale.fill_(1)
        wanted = [(i, group, group.spread) for i, group in enumerate(self.plan.groups)]
        for _, group, spread in wanted:
            if spread is not None and self.projection is not None:
                self._columns_of(group).normal_(0, spread)
        frame = new_frame(self._stored())
        for index, group, spread in wanted:
            found = float(self._generate([index], frame)[0].float().std(correction=0))
            if spread is None or found == 0:
                continue
            if self.projection is not None:
                self._columns_of(group).mul_(spread / found)
            elif self.scale is not None:
                self.scale[index] = spread / found

    def _columns_of(self, group: Group) -> Tensor:
        """Of the projection."""
        assert self.projection is not None
        return self.projection[:, group.start : group.start + group.columns]

    @torch.no_grad()
    def fold(self) -> None:
        """Makes the projection `S P` of `paramshare.whiten`, so that nothing has to be computed for
        the weights that are read from it: for inference. `train()` takes it back."""
        if self.plan.whiten:
            self._change_projection(whitened)
            self.plan, self.folded = replace(self.plan, whiten=False), True

    @torch.no_grad()
    def unfold(self) -> None:
        """Undoes `fold`: the weights stay what they are, the projection is that of training."""
        if self.folded:
            self._change_projection(colored)
            self.plan, self.folded = replace(self.plan, whiten=True), False

    def _change_projection(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        assert self.projection is not None
        changed = self.projection.clone()
        frame = new_frame(self._stored())
        for group in self.plan.groups:
            columns = changed[:, group.start : group.start + group.columns]
            columns.copy_(change(self._whitening(group, frame), columns))
        self.projection.data = changed  # a state_dict that somebody holds stays what it is

    # ------------------------------------------------------------------ what is read

    def weight(self, index: int, training: bool) -> Tensor:
        """The `(rows, cols)` weight of a group, generated if it is not at hand."""
        frame = self._frame(training)
        weight, written = look_up_weight(frame, index, self._device)
        if written and WATCHED in frame:
            frame[WATCHED].add(index)
        elif written:
            self._warn_of_writing(index)
        if weight is None:
            weight = self._generate([index], frame)[0]
            put_weight(frame, index, self._device, weight)
        return weight

    def linear(self, index: int, input: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        """`linear(input, weight of the group, bias)`, by the group's execution."""
        group = self.plan.groups[index]
        if group.execution == "materialized":
            return nn.functional.linear(input, self.weight(index, training), bias)
        frame = self._frame(training)
        projection, projection_bias = self._parts(frame)[index]
        if group.execution == "blockwise":
            blocks = (
                table_blocks(projection, group.cols, group.blocks)  # EPS: columns of the table
                if self.projection is None
                else self._table_blocks(frame, group.cols, group.blocks)
            )
            output = apply_tiles(input, blocks, None if self.projection is None else projection)
            if self.scale is not None:
                # A copy: before every forward pass DDP may write what buffers have already.
                output = output * self.scale[index].clone()
            return complete(output, input, projection_bias, group.rows, bias)
        blocks = self._table_blocks(frame, group.cols, group.blocks)
        reduced = reduced_input(frame, input, blocks, index, self._device)
        if reduced.first is not None:
            self.same_input.add((reduced.first, index))
        with reduced.saving:
            return expand(reduced.tensor, input, projection, projection_bias, group.rows, bias)

    def lifted_table(self) -> LiftedTable:
        """What the embedding's weight was, where it is factorised: `(tokens, width)`."""
        assert self.lift is not None
        return LiftedTable(table_of(self.embedding), table_of(self.lift).t())

    def enter(self, training: bool, all_groups: bool) -> Frame | None:
        """Starts to hold what is read, unless an outer forward does already.

        all_groups: generates the materialized groups now, in one product. Returns what
        `leave` wants back.
        """
        outer = self.holder.running
        if outer is None:
            frame = self._frame(training, whole=all_groups)
            if all_groups:
                missing = [
                    index
                    for index, group in enumerate(self.plan.groups)
                    if group.execution == "materialized"
                    and look_up_weight(frame, index, self._device)[0] is None
                ]
                if torch.is_grad_enabled() and missing:
                    parts = [missing]  # by one product, which has one in backward, too
                else:
                    parts = [[index] for index in missing]  # their columns do not exist together
                for indices in parts:
                    weights = self._generate(indices, frame)
                    for index, weight in zip(indices, weights, strict=True):
                        put_weight(frame, index, self._device, weight)
            self.holder.running = frame
        return outer

    def leave(self, outer: Frame | None) -> None:
        """Ends what `enter` began: the outermost drops what was held."""
        if outer is None and self.holder.running is not None:
            drop_reduced(self.holder.running, self._device)  # frames are kept for decoding
        self.holder.running = outer

    @contextmanager
    def watch(self, anyway: Iterable[int] = ()) -> Iterator[None]:
        """Warns when somebody writes into a weight that is read meanwhile: initialisations do,
        and would otherwise be lost without a word. `anyway`: groups to warn of in any case."""
        outer = self.holder.running
        self.holder.running = frame = new_frame(self._stored())
        written = frame[WATCHED] = set(anyway)
        try:
            yield
        finally:
            self.holder.running = outer
            for index, weight, marked in weights_in(frame):
                # Writing through .data leaves no mark.
                if not marked and (weight.is_meta or weight.dtype != self.dtype):
                    continue  # no values, or read under an autocast that is over
                if marked or not torch.equal(weight, self._generate([index], {})[0]):
                    written.add(index)
            for index in sorted(written):
                self._warn_of_writing(index)

    def _warn_of_writing(self, index: int) -> None:
        warnings.warn(
            f"{self.plan.groups[index].name} is read from the embedding, and what is written into "
            "it has no effect: initialise before sharing (the weights keep the spread that they "
            "had), or call reset_parameters of the pool (sharing.pool), which draws the projection",
            stacklevel=3,
        )

    def _frame(self, training: bool, whole: bool = False) -> Frame:
        # Nothing is kept of what FSDP gathers: it does that into the same tensors each time, and
        # their versions do not show it.
        gathered = "_is_fsdp_managed_module" in self.embedding.__dict__
        return self.holder.frame(self._stored(), training or gathered, whole)

    def _stored(self) -> list[Tensor]:
        """What everything is derived from."""
        sources = (table_of(self.embedding), self.projection, self.bias, self.scale)
        return [tensor for source in sources for tensor in tensors_of(source)]

    @property
    def _device(self) -> str:
        return table_of(self.embedding).device.type

    @property
    def dtype(self) -> torch.dtype:
        """Of the table, and of the weights outside of autocast."""
        return table_of(self.embedding).dtype

    # ------------------------------------------------------------------ how it is saved

    def get_extra_state(self) -> Tensor:
        """The plan, as it stands in a state_dict."""
        encoded = state.encode(self.plan)
        device = table_of(self.embedding).device
        return encoded if device.type == "meta" else encoded.to(device)

    def set_extra_state(self, stored: Any) -> None:
        """Reads the projection as the state says from now on. Raises ShareError where that is of
        another plan."""
        self.read_as(state.read(self.plan, stored))

    def read_as(self, plan: SharingPlan) -> None:
        """A projection that is going to be loaded is whitened or not as in this plan."""
        if plan.whiten != self.plan.whiten:
            self.plan, self.folded = replace(self.plan, whiten=plan.whiten), False
            self.holder.kept = None

    def check_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raises ShareError where a state_dict, in which the pool has this prefix, is of another
        plan, or says nothing of how its projection is read. One without a plan, from before there
        was any in it, passes otherwise."""
        plans = [
            prefix + name for name in (state.KEY, state.EARLIER) if prefix + name in state_dict
        ]
        for name in plans:
            state.read(self.plan, state_dict[name])
        if not plans and self.plan.whiten and f"{prefix}projection" in state_dict:
            raise ShareError(
                f"this state has a projection and no sharing plan ({prefix}{state.KEY}): if it is "
                "from before there was whitening, share with whiten=False, then load it; if a tool "
                "has removed the plan, put it back"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.check_state(state_dict, prefix)
        earlier = state_dict.pop(prefix + state.EARLIER, None)
        if earlier is not None:
            self.set_extra_state(earlier)
        state_dict.setdefault(prefix + state.KEY, self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ------------------------------------------------------------------ what becomes of it

    def check_embedding(self, root: nn.Module) -> None:
        """Raises ShareError where the shared module has another embedding by now: its weights
        would be read from a table that nobody sees, moves, trains or saves."""
        embedding: nn.Module = root
        for name in self.plan.table.split("."):  # compilers know no get_submodule
            embedding = getattr(embedding, name, None)  # type: ignore[assignment]
        if embedding is not self.embedding and (
            embedding is None or all(p is not self.embedding for p in embedding.modules())
        ):
            raise ShareError(
                f"{self.plan.table} was replaced after sharing, and the weights are read from the "
                "old one; call paramshare.materialize, replace it, and share again"
            )

    def train(self, mode: bool = True) -> Pool:
        """Also drops what was kept for decoding, unless it is eval() once more."""
        if mode or self.training:
            self.holder.kept = None
        if mode:
            self.unfold()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.holder.kept = None
        return super()._apply(*args, **kwargs)

    @property
    def qconfig(self) -> None:
        """What torch.ao.quantization gives to each module that it is about to change. Raises
        ShareError when it is set: it would change what is not shared, and leave the rest."""
        return None

    @qconfig.setter
    def qconfig(self, value: object) -> None:
        raise ShareError(
            "torch.ao.quantization cannot change weights that are read from the embedding: use "
            "paramshare.quantize, or call paramshare.materialize first"
        )

    def retire(self) -> None:
        """Gives its columns back: nothing reads them any more."""
        _ALIVE.discard(self)

    def _start(self) -> None:
        self.holder = Holder()
        # Factored groups that were given the same input: (the one that came first, the other).
        self.same_input: set[tuple[int, int]] = set()
        self._sizes, self._piece_of = _pieces(self.plan.groups, self.plan.columns)
        _ALIVE.add(self)
        transformers = sys.modules.get("transformers.modeling_utils")
        if transformers is None:
            return
        try:
            # Its save_pretrained must keep the plan, whether the model was shared or unpickled.
            import paramshare.models.pretrained  # noqa: F401
        except ImportError as error:
            root = self._root() if self._root is not None else None
            if isinstance(root, transformers.PreTrainedModel):
                warnings.warn(
                    f"{error}; save_pretrained would lose the sharing plan: use "
                    "paramshare.save_model",
                    stacklevel=2,
                )

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v for k, v in self.__dict__.items() if k not in ("holder", "same_input", "_root")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._root = None
        self._start()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        root = self._root() if self._root is not None else None
        if root is not None and id(root) not in memo:
            # No error: the copy computes the same, and tracers make such copies.
            warnings.warn(
                "a copy of a part of a shared module reads a table of its own, which is not among "
                "the copy's parameters; copy the whole module, or materialize it first",
                stacklevel=2,
            )
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if root is not None and id(root) in memo:
            copied._root = weakref.ref(memo[id(root)])
        return copied

    # ------------------------------------------------------------------ how it is derived

    def _generate(self, indices: list[int], frame: Frame) -> list[Tensor]:
        """The weights of the groups, from one product."""
        with _out_of_sight():
            return self._derive(indices, frame)

    def _derive(self, indices: list[int], frame: Frame) -> list[Tensor]:
        groups = [self.plan.groups[index] for index in indices]
        parts = [self._parts(frame)[index] for index in indices]
        tokens = self.plan.tokens
        if len(groups) == 1 and not torch.is_grad_enabled():
            # Backward would pad the gradient to the whole table.
            tokens = groups[0].tokens_read(tokens)
        if self.projection is None:
            # A copy: what is read must not be the table itself, where somebody may write into it.
            columns = [part[:tokens].t().contiguous() for part, _ in parts]
        else:
            projection = torch.cat([part for part, _ in parts], dim=1)
            biases = [bias for _, bias in parts if bias is not None]
            bias = torch.cat(biases) if biases else None
            _check_size(self.embedding, self.plan)
            table: Tensor = table_of(self.embedding)
            table = table if tokens == self.plan.tokens else table[:tokens]
            virtual = virtual_columns(table, projection, bias, self.plan.table_gradient)
            # One split: N slices would allocate N gradients of the whole in backward.
            columns = list(virtual.split([group.columns for group in groups]))
        weights = [
            read(part, group.rows, group.cols, group.layout, group.blocks)
            for part, group in zip(columns, groups, strict=True)
        ]
        if self.scale is not None:
            scales = self.scale[indices].unbind()
            weights = [w * scale for w, scale in zip(weights, scales, strict=True)]
        # As its layer will read it: weight norm is slow on a transposed view, in every step.
        return [
            weight.t().contiguous().t() if group.out_last else weight
            for weight, group in zip(weights, groups, strict=True)
        ]

    def _parts(self, frame: Frame) -> list[tuple[Tensor, Tensor | None]]:
        """Each group's columns of the projection and its bias; for EPS, of the table."""
        key = ("parts",)
        parts = look_up(frame, key, self._device)
        if parts is None:
            source = self._table(frame) if self.projection is None else self.projection
            columns = self._split(source)
            if self.plan.whiten:
                columns = self._whitened(columns, frame)
            biases = [None] * len(columns) if self.bias is None else self._split(self.bias)
            parts = put(frame, key, self._device, list(zip(columns, biases, strict=True)))
        return parts

    def _whitened(self, columns: list[Tensor], frame: Frame) -> list[Tensor]:
        """The groups' columns, by one product for all that look at the same rows of the table."""
        alike: dict[tuple[int, int], list[int]] = {}
        for index, group in enumerate(self.plan.groups):
            alike.setdefault(self._sampled(group), []).append(index)
        found: list[Any] = [None] * len(columns)
        for indices in alike.values():
            matrix = self._whitening(self.plan.groups[indices[0]], frame)
            with _out_of_sight():
                joined = torch.cat([columns[index] for index in indices], dim=1)
                together = whitened(matrix, joined)
            parts = together.split([columns[index].shape[1] for index in indices], dim=1)
            for index, part in zip(indices, parts, strict=True):
                found[index] = part
        return found

    def _whitening(self, group: Group, frame: Frame) -> Tensor:
        sample = self._sampled(group)
        key = ("whitening", *sample)
        matrix = look_up(frame, key, self._device)
        if matrix is None:
            _check_size(self.embedding, self.plan)
            matrix = whitening(table_of(self.embedding), *sample)
            put(frame, key, self._device, matrix)
        return matrix

    def _sampled(self, group: Group) -> tuple[int, int]:
        return sampled(group.tokens_read(self.plan.tokens), self.plan.features)

    def _split(self, tensor: Tensor) -> list[Tensor]:
        """The groups' columns of the last dimension, by one split."""
        pieces = tensor.split(self._sizes, dim=-1)
        return [pieces[index] for index in self._piece_of]

    def _table(self, frame: Frame) -> Tensor:
        """The table, through which only a share of the weights' gradient flows back."""
        key = ("table",)
        table = look_up(frame, key, self._device)
        if table is None:
            _check_size(self.embedding, self.plan)
            table = scale_gradient(table_of(self.embedding), self.plan.table_gradient)
            put(frame, key, self._device, table)
        return table

    def _table_blocks(self, frame: Frame, cols: int, blocks: int) -> Tensor:
        """One view a shape, so that backward pads its gradient to the whole table once."""
        key = ("blocks", cols, blocks)
        view = look_up(frame, key, self._device)
        if view is None:
            view = table_blocks(self._table(frame), cols, blocks)
            put(frame, key, self._device, view)
        return view


def _check_size(embedding: nn.Module, plan: SharingPlan) -> None:
    shape = tuple(table_of(embedding).shape)
    if shape != (plan.tokens, plan.features):
        raise ShareError(
            f"the table {plan.table} is {shape[0]} x {shape[1]}, the plan's is {plan.tokens} x "
            f"{plan.features}; to resize it, materialize first and share again"
        )


def _pieces(groups: tuple[Group, ...], width: int) -> tuple[list[int], list[int]]:
    """Sizes of the pieces that a width splits into, and which piece is each group's."""
    sizes: list[int] = []
    piece_of = [0] * len(groups)
    position = 0
    for index in sorted(range(len(groups)), key=lambda index: groups[index].start):
        group = groups[index]
        sizes += [group.start - position, group.columns]  # what nobody reads, then the group's
        piece_of[index] = len(sizes) - 1
        position = group.start + group.columns
    return [*sizes, width - position], piece_of


def _out_of_sight() -> AbstractContextManager[object]:
    """Gradient checkpointing counts the tensors that a region saves, and a recomputation may derive
    what the first pass found held: what deriving saves (views of Parameters, and small matrices) is
    kept out of its sight."""
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or torch._C._functorch.maybe_current_level() is not None  # has no such hooks
    ):
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # torch checks this by itself only where there are no hooks
        raise RuntimeError(
            "the table or the projection was modified in place between forward and backward"
        )
    return tensor
