"""A model on parts of a graph as a Ray Train function, on two workers.

    python examples/ray_loop.py

Prints the same loss for any number of workers. Needs ``pip install "ray[train]"``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch_geometric.nn import GCN

import kagome

STEPS, WORKERS = 20, 2


def loop(config: dict[str, Any]) -> None:
    """Run on each worker; Ray has made the process group."""
    data = kagome.load("digits")
    wanted = data.x.mean(dim=1, keepdim=True)
    torch.manual_seed(0)
    model = GCN(64, 16, num_layers=2, out_channels=1)
    with kagome.shard(model, data) as net:  # not ray.train.torch.prepare_model
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        y = net.place(wanted)
        for _ in range(config["steps"]):
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            if net.rank == 0:
                torch.save(net.state_dict(), Path(folder) / "model.pt")
            # All workers report; one of them has the checkpoint.
            saved = Checkpoint.from_directory(folder) if net.rank == 0 else None
            train.report({"loss": loss.item()}, checkpoint=saved)


def main() -> None:
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": STEPS},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="ray", storage_path=str(Path("runs").resolve())),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.6f}, checkpoint {Path(result.checkpoint.path).exists()}")


if __name__ == "__main__":
    main()
