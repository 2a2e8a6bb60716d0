"""Train privately in a loop beside Hugging Face Accelerate, which stores and restores the whole training.

Give Accelerate the engine alone: clipping and noise need the model and the optimizer as they are.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

import dpsweep


def engine_of(accelerator: Accelerator) -> tuple[nn.Module, dpsweep.PrivateTraining]:
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(accelerator.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    engine = dpsweep.PrivateTraining(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        (x, y),
        clipping=1.0,
        sampling=40,
        epochs=3,
        delta=1e-4,
        target_epsilon=3,
    )
    accelerator.register_for_checkpointing(engine)
    return model, engine


def main(folder: str) -> None:
    accelerator = Accelerator()
    _, engine = engine_of(accelerator)
    for step, batch in enumerate(engine, 1):
        engine.step(batch)
        if step == 10:
            accelerator.save_state(folder)  # as private as the data: it holds the keys of the noise
            break
    accelerator = Accelerator()
    model, engine = engine_of(accelerator)
    accelerator.load_state(folder)
    for batch in engine:
        engine.step(batch)
    accelerator.print(f"epsilon {engine.epsilon:.2f} after {engine.trace.steps} steps")
    accelerator.print(f"{sum(each.numel() for each in model.parameters())} parameters on {accelerator.device}")


if __name__ == "__main__":
    main(sys.argv[1])
