"""Pieces: what an optimizer updates where it is not to see the parameters themselves.

An elementwise optimizer gets 1-D pieces of the flat vector of weights: whole blocks, padding included, so neither a
shard's boundary nor a kernel's scalar tail can show. Any other optimizer gets whole parameters in their own shape,
each on one rank. Outside of the update `param_groups` lists the model's own parameters, as ever.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from unisono.comm.api import Collectives
from unisono.errors import InputError
from unisono.numerics.seeds import generators_state
from unisono.strategy.flat import FlatGroup, view_of
from unisono.strategy.offload import DiskShelf, Offload
from unisono.strategy.saved import Held, HeldState, shards_of
from unisono.strategy.weights import FlatWeights, joined

# The key of the float32 weights in `optimizer.state_dict()`, beside the optimizer's own.
MASTER = "master"
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
        tensor: What the optimizer sees: a part of the flat weights, or a copy of it.
        place: Its range in the flat vector.
        master: Whether the copy has more bits than the weights.
    """

    def __init__(
        self, weights: FlatWeights, position: int, place: range, *, whole: bool, on_host: bool, masters: bool
    ) -> None:
        self.param = weights.group.params[position]
        self.segment, self.template = weights.group.layout.segments[position], weights.group.templates[position]
        self.place, self._part = place, weights.part(place)
        self.whole = whole or self.param.dim() == 0  # whose state could not be told from a count of steps
        self.master = masters and self._part.dtype.itemsize < 4
        self._copies = on_host or self.master
        memory = self._part
        if self._copies:
            dtype = torch.float32 if self.master else None
            memory = self._part.to("cpu" if on_host else None, dtype, copy=True)
        self.tensor = nn.Parameter(self._view(memory), self.param.requires_grad)
        self.tensor.__dict__.update(self.param.__dict__)  # marks that the user's code may look for

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return view_of(flat, self.segment, self.template, 0) if self.whole else flat

    def take(self, gradient: torch.Tensor) -> None:
        """Gives the optimizer the gradient of the piece's range."""
        self.tensor.grad = self._view(gradient.to(self.tensor))

    def fetch(self) -> None:
        """Brings what was written to the weights since the last update to the copy that the optimizer works on."""
        if not self._copies:
            return
        copy, weights = self.tensor.detach(), self._view(self._part).to(self.tensor.device)
        if self.master:  # what is the copy rounded, nobody has written to
            copy.copy_(torch.where(weights == copy.to(weights.dtype), copy, weights.to(copy.dtype)))
        else:
            copy.copy_(weights)

    def done(self) -> None:
        """Brings what was updated back, and lets go of the gradient."""
        if self._copies and self.tensor.grad is not None:
            self._view(self._part).copy_(self.tensor.detach())
        self.tensor.grad = None


class Pieces:
    """See the module's docstring.

    Args:
        comm: The ranks.
        optimizer: The user's own object.
        sharded: Whether other ranks update what this one does not.
        masters: Whether weights of 16 bits are updated in float32.
        offload: Where state goes, if not beside the weights.
    """

    def __init__(
        self,
        comm: Collectives,
        optimizer: optim.Optimizer,
        *,
        sharded: bool,
        masters: bool = False,
        offload: Offload | None = None,
    ) -> None:
        self.comm, self.optimizer, self.sharded, self._masters = comm, optimizer, sharded, masters
        self._whole = not is_elementwise(optimizer)
        self.device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self._weights: list[tuple[FlatWeights, list[_Piece]]] = []
        self._of: dict[int, list[_Piece]] = defaultdict(list)
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._on_host = offload is not None and offload.kind == "cpu"
        self._shelf = DiskShelf(offload.folder) if offload is not None and offload.kind == "disk" else None

    def __contains__(self, group: FlatGroup) -> bool:
        return any(weights.group is group for weights, _ in self._weights)

    @property
    def empty(self) -> bool:
        """Whether no group was taken in: the optimizer updates the parameters themselves."""
        return not self._weights

    @torch.no_grad()
    def add(self, weights: FlatWeights) -> None:
        """Takes in a group's weights, of which this rank updates its shards."""
        if not self._weights:
            self._plain_state_dict = self.optimizer.state_dict
            self.optimizer.state_dict = self._full_state_dict  # type: ignore[method-assign]
            if self._masters:
                self.optimizer.register_load_state_dict_pre_hook(self._before_load)
                self.optimizer.register_load_state_dict_post_hook(self._after_load)
        pieces = []
        for position, segment in enumerate(weights.group.layout.segments):
            inside = [range(max(s.start, segment.offset), min(s.stop, segment.stop)) for s in weights.own]
            kind = {"whole": self._whole, "on_host": self._on_host, "masters": self._masters}
            pieces += [_Piece(weights, position, place, **kind) for place in joined(inside)]
        self._weights.append((weights, pieces))
        for piece in pieces:
            self._of[id(piece.param)].append(piece)

    def set_gradients(
        self, group: FlatGroup, gradient: Callable[[range], torch.Tensor], present: Sequence[bool]
    ) -> None:
        """Gives each piece its part of the step's gradient, None where no micro-batch had one.

        Args:
            gradient: Returns the gradient of a range of the flat vector.
        """
        there = {id(param): found for param, found in zip(group.params, present, strict=True)}
        for piece in next((pieces for weights, pieces in self._weights if weights.group is group), ()):
            piece.tensor.grad = None
            if there[id(piece.param)]:
                piece.take(gradient(piece.place))

    @torch.no_grad()
    def update(self, step: Callable[[], Any]) -> None:
        """Lets the optimizer's own `step` work on this rank's pieces; then all ranks have all weights. Collective.

        Raises:
            InputError: it drew random numbers, where what a rank draws depends on what it owns.
        """
        optimizer = self.optimizer
        params = [group["params"] for group in optimizer.param_groups]
        pre_hooks, post_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        state = optimizer.state
        self._take_over(state)
        optimizer.state = self._state
        before = generators_state(self.device) if self.sharded and self._whole else None
        try:
            for group, own in zip(optimizer.param_groups, params, strict=True):
                group["params"] = [piece.tensor for piece in self._pieces_of(own)]
            for hook in pre_hooks.values():
                hook(optimizer, (), {})
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            self._step(step, params)
        finally:
            for group, own in zip(optimizer.param_groups, params, strict=True):
                group["params"] = own
            optimizer.state = state
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre_hooks, post_hooks
        if before is not None and generators_state(self.device) != before:
            raise InputError(
                f"{type(optimizer).__name__} draws random numbers in its update, which in shards would depend on the "
                "number of processes: use the strategy ddp"
            )
        self._share()
        for hook in post_hooks.values():  # only now: they may look at the weights
            hook(optimizer, (), {})

    def _pieces_of(self, params: Sequence[torch.Tensor]) -> list[_Piece]:
        return [piece for param in params for piece in self._of.get(id(param), ())]

    def _step(self, step: Callable[[], Any], params: Sequence[Sequence[torch.Tensor]]) -> None:
        every = [piece for _, pieces in self._weights for piece in pieces]
        for piece in every:
            piece.fetch()
        if self._shelf is None:
            step()
        elif self._whole:  # which might count its steps, so it makes one
            step()
            for piece in every:
                self._shelf.put(id(piece), self._state.get(piece.tensor, {}))
        else:
            for group in self.optimizer.param_groups:
                group["params"] = []
            for group, own in zip(self.optimizer.param_groups, params, strict=True):
                for piece in self._pieces_of(own):
                    if piece.tensor.grad is not None:
                        group["params"] = [piece.tensor]
                        step()
                        self._shelf.put(id(piece), self._state[piece.tensor])
                group["params"] = []
        for piece in every:
            piece.done()

    def _share(self) -> None:
        for arrival in [arrival for weights, _ in self._weights for arrival in weights.share()]:
            arrival.wait()
        # The parameters were written to through other tensors; a graph that saved them must not be used again.
        torch.autograd.graph.increment_version([p for weights, _ in self._weights for p in weights.group.params])

    # The optimizer's state

    @torch.no_grad()
    def _take_over(self, state: dict[torch.Tensor, Any]) -> None:
        """Takes what the user's optimizer has, made before or loaded since, and keeps this rank's part of it."""
        if not state:
            return
        managed = {id(param) for weights, _ in self._weights for param in weights.group.params}
        for key in [key for key in state if not _is_tensor(key)]:  # of no parameter
            self._state[key] = state.pop(key)
        for param in [param for param in state if id(param) in managed]:
            found = state.pop(param)
            for piece in self._of.get(id(param), ()):
                own = {key: _cut(value, piece) for key, value in found.items()}
                if piece.master and MASTER in own:
                    piece.tensor.detach().copy_(own.pop(MASTER))
                self._state[piece.tensor] = own

    def _before_load(self, optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
        self._loaded: dict[str, Any] = saved

    def _after_load(self, optimizer: optim.Optimizer) -> None:
        """Takes the values as they were saved: torch has cast them to the dtype of the weights."""
        saved, self._loaded = self._loaded, {}
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for key, param in zip(keys, (p for group in optimizer.param_groups for p in group["params"]), strict=True):
            if key in saved["state"]:
                optimizer.state[param] = dict(saved["state"][key])

    @torch.no_grad()
    def held(self) -> HeldState:
        """Returns what this rank has, for a checkpoint."""
        self._take_over(self.optimizer.state)
        found = HeldState()
        found.add_all(self.optimizer.state)  # of parameters that have not been trained yet
        found.common.update({str(key): value for key, value in self._state.items() if not _is_tensor(key)})
        for weights, pieces in self._weights:
            for piece in pieces:
                if piece.tensor in self._state:
                    self._hold(found, weights.group, piece)
        return found

    def _hold(self, found: HeldState, group: FlatGroup, piece: _Piece) -> None:
        master = {MASTER: piece.tensor.detach()} if piece.master else {}
        for key, value in {**self._state[piece.tensor], **master}.items():
            if self._whole or not _is_cut(value, piece.place):
                found.add(piece.param, key, value)
            elif len(piece.place) == piece.segment.padded:
                found.add(piece.param, key, view_of(value, piece.segment, piece.template, 0))
            else:
                shards = shards_of(piece.segment, piece.template, piece.place, value)
                before = found.tensors.get((id(piece.param), key))
                shards = [*(before.shards if before else ()), *shards]
                found.tensors[id(piece.param), key] = Held(
                    tuple(piece.template.shape), value.dtype, shards, whole=False
                )

    def forget(self) -> None:
        """Forgets all state: other state is about to be loaded."""
        self._state.clear()

    def _full_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` as without sharding: whole tensors in the parameters' shapes. Collective."""
        optimizer, state = self.optimizer, self.optimizer.state
        self._take_over(state)
        full: defaultdict[Any, Any] = defaultdict(dict, state)
        full.update({key: value for key, value in self._state.items() if not _is_tensor(key)})
        for weights, pieces in self._weights:
            full.update(self._assembled(weights.group, pieces))
        optimizer.state = full
        try:
            return self._plain_state_dict()
        finally:
            optimizer.state = state

    def _state_of(self, piece: _Piece) -> dict[str, Any]:
        # A copy, since loading writes into the original: what was saved has to stay what it was.
        master = {MASTER: piece.tensor.detach().clone()} if piece.master else {}
        return {**self._state[piece.tensor], **master}

    @torch.no_grad()
    def _assembled(self, group: FlatGroup, pieces: Sequence[_Piece]) -> dict[torch.Tensor, Any]:
        position = {id(param): number for number, param in enumerate(group.params)}
        own = [
            (
                position[id(piece.param)],
                piece.place,
                {k: _host(value) for k, value in self._state_of(piece).items()},
            )
            for piece in pieces
            if piece.tensor in self._state
        ]
        everyone = self.comm.gather_objects(own) if self.sharded else [own]
        found: dict[torch.Tensor, Any] = {}
        for number, place, values in (item for part in everyone for item in part):
            segment, target = group.layout.segments[number], found.setdefault(group.params[number], {})
            for key, value in values.items():
                if self._whole or not _is_cut(value, place):
                    moves = isinstance(value, torch.Tensor) and value.dim() > 0
                    target[key] = value.to(group.device) if moves else value
                    continue
                if key not in target:
                    flat = torch.zeros(segment.padded, dtype=value.dtype, device=group.device)
                    target[key] = view_of(flat, segment, group.templates[number], 0)
                base = target[key].as_strided((segment.padded,), (1,), 0)
                base[place.start - segment.offset : place.stop - segment.offset].copy_(value)
        return found


def _is_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor)


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _is_cut(value: Any, place: range) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (len(place),)


def _cut(value: Any, piece: _Piece) -> Any:
    """A piece's part of a state value: tensors in the parameter's shape are laid out as it is and cut."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim():  # else it is a count, which torch keeps on the CPU
        value = value.to(piece.tensor.device)
    if piece.whole or value.shape != piece.template.shape:
        return value.clone()
    flat = torch.zeros(piece.segment.padded, dtype=value.dtype, device=value.device)
    view_of(flat, piece.segment, piece.template, 0).copy_(value)
    offset = piece.segment.offset
    return flat[piece.place.start - offset : piece.place.stop - offset].clone()
