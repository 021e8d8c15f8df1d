"""FlatWeights: the weights of one group in one vector; whole on every rank, or this rank's shards and the rest on loan.

Where weights are sharded, the vector's memory is given back while nobody needs it. Its storage object stays, so what
autograd saved of the weights is good again once they have been gathered for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.comm.api import Collectives, Pending
from unisono.strategy.flat import FlatGroup, view_of
from unisono.strategy.reduction import RESULTS, Partition


class FlatWeights:
    """See the module's docstring.

    Args:
        comm: The ranks.
        group: Whose weights; its parameters' data are moved here.
        partition: Who updates what; None where every rank updates all.
        resident: Whether the whole vector stays.

    Attributes:
        own: The ranges that this rank updates.
        gathered: Whether all of it is there.
    """

    @torch.no_grad()
    def __init__(
        self, comm: Collectives, group: FlatGroup, partition: Partition | None = None, *, resident: bool = True
    ) -> None:
        self.comm, self.group, self.partition, self.resident = comm, group, partition, resident
        self.own = joined([range(group.layout.total)] if partition is None else partition.own(comm.rank))
        self.flat = torch.zeros(group.layout.total, dtype=group.dtype, device=group.device)
        places = zip(group.layout.segments, group.templates, strict=True)
        self._views = [view_of(self.flat, segment, like, segment.offset) for segment, like in places]
        for param, view in zip(group.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view
        self.gathered = True
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self._parts = [self.flat[part.start : part.stop] for part in self.own]
        if not resident:
            self._parts = [part.clone() for part in self._parts]
            # Read, it is no number; written to, it is an error: nobody takes it for the weights.
            nan = torch.full((), torch.nan, dtype=group.dtype, device=group.device)
            self._away = [nan.expand(like.shape) for like in group.templates]
            self.free()

    def part(self, place: range) -> torch.Tensor:
        """Returns the memory of a range that this rank owns."""
        slot = next(slot for slot, part in enumerate(self.own) if place.start in part)
        start = self.own[slot].start
        return self._parts[slot][place.start - start : place.stop - start]

    def share(self) -> list[Pending]:
        """Collective: starts to send what this rank has updated to all, where everybody keeps the whole."""
        if self.partition is None or not self.resident or self.comm.world_size == 1:
            return []
        return self._all_gather(self.partition)

    def _all_gather(self, partition: Partition) -> list[Pending]:
        slices = [[[self.flat[s.start : s.stop]] for s in shards] for shards in partition.shards]
        return [self.comm.all_gather(parts, channel=RESULTS) for parts in slices]

    @torch.no_grad()
    def gather(self) -> None:
        """Collective: brings the whole vector together, for the parameters to be used."""
        if self.gathered or self.partition is None:
            return
        self.flat.untyped_storage().resize_(self._num_bytes)
        for place, part in zip(self.own, self._parts, strict=True):
            self.flat[place.start : place.stop].copy_(part)
        for arrival in self._all_gather(self.partition):
            arrival.wait()
        self._show(self._views)
        self.gathered = True

    def free(self) -> None:
        """Gives the memory back, but for this rank's shards."""
        if self.resident or not self.gathered:
            return
        self._show(self._away)
        self.flat.untyped_storage().resize_(0)
        self.gathered = False

    @torch.no_grad()
    def keep(self) -> None:
        """Takes what was written to the gathered parameters into this rank's shards."""
        if not self.resident and self.gathered:
            for place, part in zip(self.own, self._parts, strict=True):
                part.copy_(self.flat[place.start : place.stop])

    def _show(self, data: Sequence[torch.Tensor]) -> None:
        for param, value in zip(self.group.params, data, strict=True):
            param.data = value


def joined(parts: Sequence[range]) -> list[range]:
    """Leaves out the empty ones and joins neighbours: a shard may go on in the next bucket."""
    found: list[range] = []
    for part in filter(None, parts):
        if found and found[-1].stop == part.start:
            part = range(found.pop().start, part.stop)
        found.append(part)
    return found
