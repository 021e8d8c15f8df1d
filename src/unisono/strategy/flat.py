"""FlatGroup: parameters of one dtype and device, their flat gradient vectors and the tree that adds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import InputError
from unisono.numerics.layout import FlatLayout, Segment
from unisono.numerics.tree import TreeAccumulator

# See docs/design/0002-reduction.md.
ONE_SHOT_BYTES = 1024 * 1024
BUCKET_BYTES = 8 * 1024 * 1024
# From here on memory counts for more than hiding an exchange that shares the processor with the work anyway: gradients
# are freed as they are laid out, and nothing is kept to receive in. See benchmarks/memory.py.
FRUGAL_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class FlatBuffer:
    """One flat vector with a view a parameter.

    Attributes:
        flat: Shape (layout.total,).
        views: In the parameters' own shapes and memory formats, without the padding; by position in the group.
    """

    flat: torch.Tensor
    views: Mapping[int, torch.Tensor]


class FlatGroup:
    """The gradients of one step of parameters that share dtype and device.

    Lifetime: `begin` -> `add` once a micro-batch -> `items` and `inbox` during the exchange -> `recycle`.

    Args:
        named: Parameters by name, in the order in which backward reaches them.
        bucket_bytes: The unit of one exchange; the bits do not depend on it.
        number: Among the groups of an optimizer.
        whole_segments: Buckets are cut between parameters only.
        empty: Where gradients lie: `Collectives.empty`.

    Attributes:
        params: In the order of the layout's segments.
        frugal: Whether there is so much of it that memory comes first.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
        number: int = 0,
        whole_segments: bool = False,
        empty: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
    ) -> None:
        self.number, self.params = number, [param for _, param in named]
        # Shapes and strides, which outlive a parameter's data where weights are sharded.
        self.templates = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in self.params]
        first = self.params[0]
        itemsize = first.element_size()
        self.layout = FlatLayout.of([(name, param.numel()) for name, param in named])
        cut = self.layout.segment_buckets if whole_segments else self.layout.buckets
        self.buckets = cut(max(1, bucket_bytes // itemsize))
        self.num_bytes = self.layout.total * itemsize
        self.dtype, self.device = first.dtype, first.device
        self.frugal = self.device.type == "cpu" and self.num_bytes >= FRUGAL_BYTES
        self.present = [False] * len(self.params)
        self.tree: TreeAccumulator[FlatBuffer] = TreeAccumulator(1, self._merge)
        self._pool: list[FlatBuffer] = []
        self._empty = empty or (lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device))
        self._inboxes: list[torch.Tensor] = []

    def begin(self, num_leaves: int) -> None:
        """Starts the tree of a step."""
        self.tree = TreeAccumulator(num_leaves, self._merge)
        self.present = [False] * len(self.params)

    def add(self, leaf: int, scale: float, landed: FlatBuffer | None = None) -> None:
        """Takes the gradients of micro-batch `leaf` out of the parameters and adds them, times `scale`.

        Args:
            leaf: Of the tree.
            scale: A factor.
            landed: Where some of the gradients lie already, if they do.

        Raises:
            InputError: a gradient is sparse.
        """
        neighbour = self.tree.sibling_of(leaf) if scale == 1.0 and landed is None else None
        target = landed or neighbour or self.buffer()
        everything = range(len(self.params))
        for part in [[position] for position in everything] if self.frugal else [everything]:
            self.write(target, part, scale, onto=neighbour is not None)
            for position in part:
                self.params[position].grad = None
        self.take(leaf, target)

    @torch.no_grad()
    def write(self, target: FlatBuffer, positions: Iterable[int], scale: float, onto: bool = False) -> None:
        """Copies the gradients of some parameters into `target`, or adds them onto what it holds."""
        there, moved, grads = [], [], []
        for position in positions:
            grad, view = self.params[position].grad, target.views[position]
            if grad is None or scale == 0.0:  # a mean over nothing is not a number, and counts for nothing
                # Added, not skipped: -0.0 + 0.0 is 0.0 wherever this leaf happens to be computed.
                view.add_(0.0) if onto else view.zero_()
                continue
            if grad.layout is not torch.strided:
                name = self.layout.segments[position].name
                raise InputError(f"the gradient of {name} is sparse, which is not supported: use sparse=False")
            self.present[position] = True
            there.append(view)
            if grad is not view:
                moved.append(view)
                grads.append(grad)
        if grads and onto:
            torch._foreach_add_(moved, grads)
        elif grads:
            torch._foreach_copy_(moved, grads)
        if there and scale != 1.0:
            torch._foreach_mul_(there, self.factor(scale))

    def factor(self, scale: float) -> torch.Tensor:
        """`scale` as a tensor: of a plain number, torch 2.13 on CPU rounds it to bfloat16 or float16 first."""
        return torch.tensor(scale, dtype=torch.promote_types(self.dtype, torch.float32))

    def take(self, leaf: int, target: FlatBuffer) -> None:
        """Gives the tree the gradients of `leaf`, which are in `target`, and clears the parameters'."""
        for param in self.params:
            param.grad = None
        self.tree.add(leaf, target)  # where it is the neighbour's own buffer, the merge finds nothing left to do

    def _merge(self, left: FlatBuffer, right: FlatBuffer) -> FlatBuffer:
        if left is not right:
            left.flat.add_(right.flat)
            self._pool.append(right)
        return left

    def buffer(self) -> FlatBuffer:
        """Returns a flat vector whose views hold garbage and whose padding is zero."""
        if self._pool:
            return self._pool.pop()
        return self.buffer_of(range(self.layout.total))

    def buffer_of(self, bucket: range) -> FlatBuffer:
        """Returns new memory for the whole segments in `bucket`."""
        flat = self._empty(len(bucket), self.dtype, self.device).zero_()
        places = enumerate(zip(self.layout.segments, self.templates, strict=True))
        inside = [(k, s, p) for k, (s, p) in places if bucket.start <= s.offset and s.stop <= bucket.stop]
        return FlatBuffer(flat, {k: view_of(flat, s, p, s.offset - bucket.start) for k, s, p in inside})

    def recycle(self, used: FlatBuffer | None = None) -> None:
        """Gives back a buffer, or all that the tree still holds."""
        if used is not None:
            self._pool.append(used)
            return
        self._pool += [buffer for _, buffer in self.tree.items()]
        self.tree = TreeAccumulator(1, self._merge)

    def inbox(self, slot: int, numel: int) -> torch.Tensor:
        """Returns memory to receive `numel` elements in, kept from step to step unless that is much."""
        if self.frugal:
            return torch.empty(numel, dtype=self.dtype, device=self.device)
        while len(self._inboxes) <= slot:
            self._inboxes.append(torch.empty(0, dtype=self.dtype, device=self.device))
        if self._inboxes[slot].numel() < numel:
            self._inboxes[slot] = torch.empty(numel, dtype=self.dtype, device=self.device)
        return self._inboxes[slot][:numel]


def view_of(flat: torch.Tensor, segment: Segment, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A view of `flat` in the shape of `like`.

    In its own strides where they are dense: copies stay linear, and a fused update is right.
    """
    if torch.ops.aten.is_non_overlapping_and_dense.default(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + segment.numel].view(like.shape)
