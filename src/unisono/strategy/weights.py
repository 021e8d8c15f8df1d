"""FlatWeights: the weights of one group in one vector; whole on every rank, or this rank's part and the rest on loan.

Where weights are sharded, the vector's memory is given back while nobody needs it. Its storage object stays, so what
autograd saved of the weights is good again once they have been gathered for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.comm.api import Collectives, Pending
from unisono.strategy.flat import FlatGroup, view_of
from unisono.strategy.reduction import RESULTS, Partition
from unisono.strategy.saved import Held, shards_of
from unisono.strategy.team import Team


class FlatWeights:
    """See the module's docstring.

    Args:
        comm: The ranks.
        group: Whose weights; its parameters' data are moved here.
        partition: Who updates what; None where every rank updates all.
        team: Who keeps what; None where every rank keeps all.

    Attributes:
        own: The ranges that this rank updates.
        gathered: Whether all of it is there.
    """

    @torch.no_grad()
    def __init__(
        self, comm: Collectives, group: FlatGroup, partition: Partition | None = None, team: Team | None = None
    ) -> None:
        self.comm, self.group, self.partition = comm, group, partition
        self.team = team or Team(comm.rank, comm.world_size, 1)
        self.resident = self.team.shard_size == 1
        everything = [range(group.layout.total)]
        self.own = joined(everything if partition is None else partition.own(comm.rank))
        shared = self.resident and partition is not None  # else its memory has to be given back, or nobody is sent it
        allocate = comm.empty if shared else _empty
        self.flat = allocate(group.layout.total, group.dtype, group.device).zero_()
        places = zip(group.layout.segments, group.templates, strict=True)
        self._views = [view_of(self.flat, segment, like, segment.offset) for segment, like in places]
        for param, view in zip(group.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view
        self.gathered = True
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self._held = {} if self.resident else {member: self._held_by(member) for member in self.team.members}
        self._places = everything if self.resident else self._held[comm.rank]
        self._kept = [self.flat[place.start : place.stop] for place in self._places]
        if not self.resident:
            self._kept = [comm.empty(len(part), part.dtype, part.device).copy_(part) for part in self._kept]
            # Read, it is no number; written to, it is an error: nobody takes it for the weights.
            nan = torch.full((), torch.nan, dtype=group.dtype, device=group.device)
            self._away = [nan.expand(like.shape) for like in group.templates]
            self.free()

    def _held_by(self, rank: int) -> list[range]:
        """What a rank keeps of each bucket: what it and its peers update."""
        assert self.partition is not None
        return [
            range(min(shards[peer].start for peer in peers), max(shards[peer].stop for peer in peers))
            for peers in [self.team.peers(rank)]
            for shards in self.partition.shards
        ]

    def part(self, place: range) -> torch.Tensor:
        """Returns the memory of a range that this rank keeps."""
        if not place:
            return self.flat[:0]
        slot = next(slot for slot, kept in enumerate(self._places) if place.start in kept)
        start = self._places[slot].start
        return self._kept[slot][place.start - start : place.stop - start]

    def held(self) -> dict[int, Held]:
        """What this rank updates of each parameter, by its id."""
        found = {}
        for param, segment, like in zip(
            self.group.params, self.group.layout.segments, self.group.templates, strict=True
        ):
            inside = [range(max(s.start, segment.offset), min(s.stop, segment.stop)) for s in self.own]
            shards = [s for place in inside if place for s in shards_of(segment, like, place, self.part(place))]
            found[id(param)] = Held(tuple(like.shape), like.dtype, shards, whole=False)
        return found

    def share(self) -> list[Pending]:
        """Collective: starts to send what this rank has updated to its peers."""
        peers = self.team.peers(self.comm.rank)
        if self.partition is None or len(peers) == 1:
            return []
        return [self._exchange({peer: self.part(shards[peer]) for peer in peers}) for shards in self.partition.shards]

    def _exchange(self, parts: dict[int, torch.Tensor]) -> Pending:
        """Sends this rank's own part to the other ranks named, and receives theirs."""
        ranks, own = range(self.comm.world_size), parts.pop(self.comm.rank)
        sends = [[own] if rank in parts else [] for rank in ranks]
        receives = [[parts[rank]] if rank in parts else [] for rank in ranks]
        return self.comm.exchange_shards(sends, receives, channel=RESULTS)

    @torch.no_grad()
    def gather(self) -> None:
        """Collective: brings the whole vector together, for the parameters to be used."""
        if self.gathered:
            return
        self.flat.untyped_storage().resize_(self._num_bytes)
        for place, kept in zip(self._places, self._kept, strict=True):
            self.flat[place.start : place.stop].copy_(kept)
        arrivals = [
            self._exchange(
                {member: self.flat[places[slot].start : places[slot].stop] for member, places in self._held.items()}
            )
            for slot in range(len(self._places))
        ]
        for arrival in arrivals:
            arrival.wait()
        self._show(self._views)
        self.gathered = True

    def free(self) -> None:
        """Gives the memory back, but for what this rank keeps."""
        if self.resident or not self.gathered:
            return
        self._show(self._away)
        self.flat.untyped_storage().resize_(0)
        self.gathered = False

    @torch.no_grad()
    def keep(self) -> None:
        """Takes what was written to the gathered parameters into what this rank keeps."""
        if not self.resident and self.gathered:
            for place, kept in zip(self._places, self._kept, strict=True):
                kept.copy_(self.flat[place.start : place.stop])

    def _show(self, data: Sequence[torch.Tensor]) -> None:
        for param, value in zip(self.group.params, data, strict=True):
            param.data = value


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def joined(parts: Sequence[range]) -> list[range]:
    """Leaves out the empty ones and joins neighbours: a shard may go on in the next bucket."""
    found: list[range] = []
    for part in filter(None, parts):
        if found and found[-1].stop == part.start:
            part = range(found.pop().start, part.stop)
        found.append(part)
    return found
