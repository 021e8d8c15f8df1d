"""Trainer: the loop around a Recipe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unisono.data.loader import MicroBatchLoader
from unisono.errors import InputError, Interrupted
from unisono.evaluate import evaluating
from unisono.numerics.seeds import derive_seed, preserved, seed_all
from unisono.recipe import Recipe, dataset_of, is_function
from unisono.run import Run


class Trainer:
    """Trains what a recipe says, on the ranks of a run.

    Args:
        recipe: The whole definition.
        run: Made by `unisono.init(seed=recipe.seed, threads=recipe.threads)`.
        num_workers: Loader processes a rank. No part of the recipe: it cannot show in the weights.
        on_step: Called after every step, on every rank.

    Attributes:
        model: The model, once `fit` has begun.
        sampled: What the recipe's `sample` said of the trained model, on rank 0.
    """

    def __init__(
        self, recipe: Recipe, run: Run, *, num_workers: int = 0, on_step: Callable[[], None] = lambda: None
    ) -> None:
        self.recipe, self.run, self.num_workers, self._on_step = recipe, run, num_workers, on_step
        self.sampled: str | None = None

    def fit(self, on_start: Callable[[int], None] = lambda num_steps: None) -> dict[str, Any]:
        """Trains to the end and returns the run's summary.

        Args:
            on_start: Called with the number of steps, once it is known.

        Collective: every rank calls it.

        Raises:
            InputError: the recipe's data, loss or gradient cannot be used; the weights are those of the last step.
            Interrupted: SIGINT or SIGTERM came; the step has ended on all ranks, and the weights are its.
        """
        run, recipe = self.run, self.recipe
        train, eval_set = self._data(recipe.train), self._data(recipe.eval)
        # From here on, so that what the data functions drew does not show in the initial weights.
        seed_all(derive_seed(recipe.seed, "model"), run.device)
        with run.building():
            self.model = recipe.model()
        optimizer = recipe.optimizer(self.model.parameters())
        schedule = recipe.schedule(optimizer) if recipe.schedule else None
        _, _, loader = run.prepare(
            self.model,
            optimizer,
            train,
            global_batch=recipe.global_batch,
            micro_batch=recipe.micro_batch,
            collate=recipe.collate,
            num_workers=self.num_workers,
            drop_last=recipe.drop_last,
            schedule=schedule,
            clip_norm=recipe.clip_norm,
        )
        self.model.train()
        num_steps = recipe.steps or (recipe.epochs or 1) * loader.steps_per_epoch
        on_start(num_steps)
        run.saves_at_the_end = run.run_dir is not None
        if not run.resume() and recipe.init_from is not None:
            run.init_from(recipe.init_from)
        with self._stoppable():
            if run.step and (loader.position[1] == 0 or run.step >= num_steps) and run.ledger.evaluated != run.step:
                self._evaluate(eval_set)  # saved at an epoch's end, and not gone further
            while run.step < num_steps:
                self._epoch(loader, optimizer, num_steps)
                self._evaluate(eval_set)
        run.flush()
        self._sample()
        return run.summary()

    def _data(self, data: Any) -> Any:
        if not is_function(data):
            return data
        with self.run.rank0_first():
            return dataset_of(data)

    def _epoch(self, loader: MicroBatchLoader, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        # Held, so that it is not closed by the `return`: that would be the end of the epoch.
        self._batches = iter(loader)
        for batch in self._batches:
            loss, weight = self._loss(batch)
            self.run.backward(loss, weight=weight)
            optimizer.step()
            optimizer.zero_grad()
            if self.run.step_done:
                self._on_step()
            if self.run.step == num_steps:
                return

    def _loss(self, batch: Any) -> tuple[Any, Any]:
        found = self.recipe.loss(self.model, batch)
        if isinstance(found, tuple):
            if len(found) != 2:
                raise InputError(f"loss returned a tuple of {len(found)}: return the mean loss, or (mean loss, weight)")
            loss, weight = found
            if weight is not None and not isinstance(weight, int | float | torch.Tensor):
                raise InputError(f"loss returned the weight {weight!r}: return (mean loss, weight), weight a number")
            return loss, weight
        return found, None

    def _evaluate(self, dataset: Any) -> None:
        if dataset is not None and self.recipe.metrics is not None:
            self.run.evaluate(self.model, dataset, self.recipe.metrics, collate=self.recipe.collate)

    def _sample(self) -> None:
        if self.recipe.sample is None:
            return
        with self.run.whole():
            self._sample_here(self.recipe.sample)

    def _sample_here(self, sample: Callable[[torch.nn.Module], str]) -> None:
        if self.run.is_main:
            with preserved(self.run.device), evaluating(self.model):
                self.sampled = sample(self.model)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Turns the first SIGINT or SIGTERM into a stop after the present step; a second one acts at once."""

        def ask(number: int, frame: Any) -> None:
            signal.signal(number, before[signal.Signals(number)])
            self.run.stop()

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, ask)
        except ValueError:  # not in the main thread: signals are someone else's
            before = {}
        try:
            yield
            if self.run.stopping:
                self.run.save_at_the_end()
                raise Interrupted(f"stopped after step {self.run.step}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
