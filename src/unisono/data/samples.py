"""A user's dataset and collate, wrapped so that every sample has its own seed and every error its index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from unisono.errors import InputError
from unisono.numerics.seeds import derive_seed, seed_cpu

Key: TypeAlias = tuple[int, int]  # (epoch, sample index): stateless, so loader workers may outlive an epoch


def check_dataset(dataset: Any, what: str) -> int:
    """Returns the number of samples of a map-style dataset.

    Raises:
        InputError: it is iterable-style, has no length, or is empty.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"{what} is iterable-style ({kind}): its order is not known in advance, so it cannot be shared out "
            "without a surprise; give a map-style dataset, with __getitem__ and __len__"
        )
    try:
        size = len(dataset)
    except TypeError:
        raise InputError(f"{what} ({kind}) has no length: give a map-style dataset, with __len__") from None
    if size == 0:
        raise InputError(f"{what} ({kind}) is empty: it needs at least one sample")
    return size


class SeededSamples:
    """Fetches samples by (epoch, index), with `random`, `numpy.random` and torch seeded from that alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> tuple[int, Any]:
        epoch, index = key
        seed_cpu(derive_seed(self.seed, "sample", epoch, index))
        try:
            return index, self.dataset[index]
        except InputError:
            raise
        except Exception as error:
            error.add_note(f"(unisono was fetching sample {index} of epoch {epoch})")
            raise


class SeededBatches(SeededSamples):
    """For datasets that fetch a whole micro-batch at once (Hugging Face): seeded by its first sample.

    The samples of a micro-batch are part of the recipe, so a number of workers or ranks cannot show.
    """

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[int, Any]]:
        epoch, first = keys[0]
        seed_cpu(derive_seed(self.seed, "sample", epoch, first))
        indices = [index for _, index in keys]
        return list(zip(indices, self.dataset.__getitems__(indices), strict=True))


class GatheredTensors:
    """A `TensorDataset` draws no random numbers and collates to rows of its tensors: taken in one call each.

    The bits of torch's own way, sample by sample, for a tenth of its time.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.tensors = dataset.tensors

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        indices = torch.tensor([index for _, index in keys])
        return [tensor[indices] for tensor in self.tensors]


def fetching(dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a dataset to be asked for lists of keys, and what makes a batch of its answer."""
    if type(dataset) is TensorDataset and collate in (None, default_collate):
        return GatheredTensors(dataset), _as_it_is
    return seeded(dataset, seed), NamedCollate(collate)


def _as_it_is(batch: Any) -> Any:
    return batch


def seeded(dataset: Any, seed: int) -> SeededSamples:
    """Wraps a dataset. A `Subset`'s own `__getitems__` is a plain loop, so it is fetched sample by sample."""
    batched = callable(getattr(dataset, "__getitems__", None)) and not isinstance(dataset, Subset)
    return (SeededBatches if batched else SeededSamples)(dataset, seed)


class NamedCollate:
    """Collates (index, sample) pairs; when that fails, says which sample is to blame."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, pairs: Sequence[tuple[int, Any]]) -> Any:
        samples = [sample for _, sample in pairs]
        try:
            return self.collate(samples)
        except Exception as error:
            blamed = self._blame(pairs)
            where = f"sample {blamed} does" if blamed is not None else f"samples {[i for i, _ in pairs]} do"
            # The first sentence: torch's own message goes on to print the batch.
            reason = str(error).split("; expected", 1)[0].splitlines()[0][:160] if str(error) else ""
            raise InputError(
                f"{where} not collate with sample {pairs[0][0]}: {type(error).__name__}: {reason}; "
                "make all samples alike, or give your own collate"
                if blamed != pairs[0][0]
                else f"{where} not collate: {type(error).__name__}: {reason}; give your own collate"
            ) from error

    def _blame(self, pairs: Sequence[tuple[int, Any]]) -> int | None:
        trials = [[pairs[0]]] + [[pairs[0], pair] for pair in pairs[1:]]
        for trial in trials:
            try:
                self.collate([sample for _, sample in trial])
            except Exception:
                return trial[-1][0]
        return None
