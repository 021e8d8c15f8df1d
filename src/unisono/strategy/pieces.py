"""Pieces: what an optimizer updates where it is not to see the parameters themselves.

An elementwise optimizer gets 1-D pieces of the flat vector of weights: whole blocks, padding included, so neither a
shard's boundary nor a kernel's scalar tail can show. Any other optimizer gets whole parameters in their own shape,
each on one rank. Outside of the update `param_groups` lists the model's own parameters, as ever.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from unisono.comm.api import Collectives
from unisono.numerics.layout import Segment
from unisono.strategy.flat import FlatGroup, view_of
from unisono.strategy.reduction import RESULTS, Partition

# Each element's update depends on that element alone. Others (Muon, Adafactor, LAMB, any class that is not torch's
# own) look at a whole parameter; a subclass may do anything.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether a parameter may be cut; never guessed: an unknown optimizer gets whole parameters."""
    return type(optimizer) in _ELEMENTWISE


def may_draw(optimizer: optim.Optimizer) -> bool:
    """Whether an update may draw random numbers: torch's own do not, their hooks and other classes might."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not is_elementwise(optimizer)


def needs_padding(optimizer: optim.Optimizer, dtype: torch.dtype) -> bool:
    """Whether the last elements of a tensor may be rounded otherwise than the same values inside of it.

    Measured on CPU, torch 2.13 (docs/design/0004-sharding.md): for fused SGD, AdamW and Adagrad, and for 16-bit types;
    not for the foreach and the plain form of any elementwise optimizer in float32 and float64.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return is_elementwise(optimizer) and (fused or dtype.itemsize < 4)


class _Piece:
    """A rank's part of one parameter.

    Attributes:
        tensor: What the optimizer sees: a view of the flat weights, or the parameter itself.
        place: Its range in the flat vector.
    """

    def __init__(self, param: torch.Tensor, segment: Segment, flat: torch.Tensor, place: range, whole: bool) -> None:
        self.param, self.segment, self.place = param, segment, place
        self.whole = whole or param.dim() == 0  # whose state could not be told from a count of steps
        self.tensor = param if self.whole else nn.Parameter(flat[place.start : place.stop], param.requires_grad)


class _FlatWeights:
    """The weights of one group in one vector, and this rank's pieces of it."""

    def __init__(self, group: FlatGroup, own: Sequence[range], partition: Partition | None, whole: bool) -> None:
        self.group, self.partition = group, partition
        self.flat = torch.zeros(group.layout.total, dtype=group.dtype, device=group.device)
        self.pieces: list[_Piece] = []
        for param, segment in zip(group.params, group.layout.segments, strict=True):
            view = view_of(self.flat, segment, param, segment.offset)
            view.copy_(param.detach())
            param.data = view
            parts = _joined([range(max(s.start, segment.offset), min(s.stop, segment.stop)) for s in own])
            self.pieces += [_Piece(param, segment, self.flat, part, whole) for part in parts]


def _joined(parts: Sequence[range]) -> list[range]:
    """Leaves out the empty ones and joins neighbours: a shard may go on in the next bucket."""
    joined: list[range] = []
    for part in filter(None, parts):
        if joined and joined[-1].stop == part.start:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
    return joined


class Pieces:
    """See the module's docstring.

    Args:
        comm: The ranks.
        optimizer: The user's own object.
        sharded: Whether other ranks update what this one does not.
    """

    def __init__(self, comm: Collectives, optimizer: optim.Optimizer, *, sharded: bool) -> None:
        self.comm, self.optimizer, self.sharded = comm, optimizer, sharded
        self._whole = not is_elementwise(optimizer)
        self._weights: list[_FlatWeights] = []
        self._of: dict[int, list[_Piece]] = defaultdict(list)
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)

    def __contains__(self, group: FlatGroup) -> bool:
        return any(weights.group is group for weights in self._weights)

    @torch.no_grad()
    def add(self, group: FlatGroup, own: Sequence[range], partition: Partition | None = None) -> None:
        """Moves a group's parameters into one flat vector, of which `own` is this rank's to update."""
        if not self._weights:
            self._plain_state_dict = self.optimizer.state_dict
            self.optimizer.state_dict = self._full_state_dict  # type: ignore[method-assign]
        weights = _FlatWeights(group, own, partition, self._whole)
        self._weights.append(weights)
        for piece in weights.pieces:
            self._of[id(piece.param)].append(piece)

    def set_gradients(
        self, group: FlatGroup, gradient: Callable[[range], torch.Tensor], present: Sequence[bool]
    ) -> None:
        """Gives each piece its part of the step's gradient, None where no micro-batch had one.

        Args:
            gradient: Returns the gradient of a range of the flat vector.
        """
        there = {id(param): found for param, found in zip(group.params, present, strict=True)}
        for piece in next((weights.pieces for weights in self._weights if weights.group is group), ()):
            piece.tensor.grad = None
            if there[id(piece.param)]:
                found = gradient(piece.place)
                piece.tensor.grad = view_of(found, piece.segment, piece.param, 0) if piece.whole else found

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The optimizer sees this rank's pieces; afterwards all ranks have all weights. Collective."""
        optimizer = self.optimizer
        params = [group["params"] for group in optimizer.param_groups]
        hooks, state = optimizer._optimizer_step_post_hooks, optimizer.state
        self._take_over(state)
        if not self._whole:
            optimizer.state = self._state
        if self.sharded:  # they may look at the weights, which are whole only when the ranks have told each other
            optimizer._optimizer_step_post_hooks = OrderedDict()
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = [piece.tensor for param in own for piece in self._of.get(id(param), ())]
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, params, strict=True):
                group["params"] = own
            optimizer.state, optimizer._optimizer_step_post_hooks = state, hooks
        self._share()
        if self.sharded:
            for hook in hooks.values():
                hook(optimizer, (), {})

    def _share(self) -> None:
        pending = []
        for weights in self._weights:
            if weights.partition is not None and self.comm.world_size > 1:
                for shards in weights.partition.shards:
                    parts = [[weights.flat[shard.start : shard.stop]] for shard in shards]
                    pending.append(self.comm.all_gather(parts, channel=RESULTS))
            for piece in weights.pieces:
                piece.tensor.grad = None
        for arrival in pending:
            arrival.wait()
        # The parameters were written to through other tensors; a graph that saved them must not be used again.
        torch.autograd.graph.increment_version([p for weights in self._weights for p in weights.group.params])

    # The optimizer's state

    @torch.no_grad()
    def _take_over(self, state: dict[torch.Tensor, Any]) -> None:
        """Takes what the user's optimizer has, made before or loaded since, and keeps this rank's part of it."""
        managed = {id(param) for weights in self._weights for param in weights.group.params}
        for param in [param for param in state if id(param) in managed]:
            pieces = self._of.get(id(param), ())
            if self._whole and pieces:
                continue
            found = state.pop(param)
            for piece in pieces:
                self._state[piece.tensor] = {key: _cut(value, piece) for key, value in found.items()}

    def _full_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` as without sharding: whole tensors in the parameters' shapes. Collective."""
        optimizer, state = self.optimizer, self.optimizer.state
        self._take_over(state)
        full: defaultdict[torch.Tensor, Any] = defaultdict(dict, state)
        for weights in self._weights:
            full.update(self._assembled(weights))
        optimizer.state = full
        try:
            return self._plain_state_dict()
        finally:
            optimizer.state = state

    @torch.no_grad()
    def _assembled(self, weights: _FlatWeights) -> dict[torch.Tensor, Any]:
        position = {id(param): number for number, param in enumerate(weights.group.params)}
        state = self.optimizer.state if self._whole else self._state
        own = [
            (position[id(piece.param)], piece.place, {key: _host(value) for key, value in state[piece.tensor].items()})
            for piece in weights.pieces
            if piece.tensor in state
        ]
        everyone = self.comm.gather_objects(own) if self.sharded else [own]
        found: dict[torch.Tensor, Any] = {}
        for number, place, values in (item for part in everyone for item in part):
            param, segment = weights.group.params[number], weights.group.layout.segments[number]
            target = found.setdefault(param, {})
            for key, value in values.items():
                if self._whole or not _is_cut(value, place):
                    target[key] = value.to(param.device) if isinstance(value, torch.Tensor) and value.dim() else value
                    continue
                if key not in target:
                    flat = torch.zeros(segment.padded, dtype=value.dtype, device=param.device)
                    target[key] = view_of(flat, segment, param, 0)
                base = target[key].as_strided((segment.padded,), (1,), 0)
                base[place.start - segment.offset : place.stop - segment.offset].copy_(value)
        return found


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _is_cut(value: Any, place: range) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (len(place),)


def _cut(value: Any, piece: _Piece) -> Any:
    """A piece's part of a state value: tensors in the parameter's shape are laid out as it is and cut."""
    if not isinstance(value, torch.Tensor):
        return value
    if piece.whole or value.shape != piece.param.shape:
        return value.clone()
    flat = torch.zeros(piece.segment.padded, dtype=value.dtype, device=value.device)
    view_of(flat, piece.segment, piece.param, 0).copy_(value)
    offset = piece.segment.offset
    return flat[piece.place.start - offset : piece.place.stop - offset].clone()
