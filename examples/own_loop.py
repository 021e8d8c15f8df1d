"""Door 1: your own loop. Runs alone, under `unisono run --nproc 2 examples/own_loop.py`, and under torchrun."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

run = unisono.init(seed=0)
inputs = torch.rand(2000, 2) * 2 - 1
labels = (inputs.square().sum(1) < 0.6).long()  # inside a circle or not
train_set, test_set = TensorDataset(inputs[:1600], labels[:1600]), TensorDataset(inputs[1600:], labels[1600:])

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, train_set, global_batch=128, micro_batch=16)


def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Right answers and their number: the total is divided once, over all ranks."""
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])


for epoch in run.epochs(5):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.print(f"epoch {epoch}: accuracy {run.evaluate(model, test_set, accuracy):.4f}")

run.print(f"{run.world_size} process(es): {run.weights_digest()}")
