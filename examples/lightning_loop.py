"""A model on parts of a graph under Lightning: its loop, its checkpoints, its logs.

    python examples/lightning_loop.py
    torchrun --nproc-per-node 2 examples/lightning_loop.py

Both print the same loss. Needs ``pip install lightning``.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import kagome

STEPS = 20


class Regression(lightning.LightningModule):
    """Learns a number for each vertex of one graph."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        super().__init__()
        self.model, self.data = model, data

    def setup(self, stage: str) -> None:
        # Lightning has made the process group. Names in checkpoints stay those of the plain model.
        self.model = kagome.shard(self.model, self.data)

    def teardown(self, stage: str) -> None:
        net, self.model = self.model, self.model.model
        net.close()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch  # all rows, or this rank's own
        self.model.step = self.trainer.fit_loop.total_batch_idx  # of dropout, also after ckpt_path=
        out = self.model(x, self.data.edge_index)
        loss = self.model.mean((out - self.model.place(y)) ** 2)
        self.log("loss", loss)  # the same number on all ranks: no sync_dist
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


def main() -> None:
    data = kagome.load("digits")
    torch.manual_seed(0)
    model = GCN(64, 16, num_layers=2, out_channels=1)
    samples = DataLoader([(data.x, data.x.mean(dim=1, keepdim=True))], batch_size=None)
    best = ModelCheckpoint("runs/lightning", "best", monitor="loss", enable_version_counter=False)
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",  # it averages gradients that are equal on all ranks: see docs/frameworks.md
        use_distributed_sampler=False,  # all ranks take the same samples
        max_epochs=STEPS,
        callbacks=[best],
        **settings,
    )
    trainer.fit(Regression(model, data), samples)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.6f}, best in {best.best_model_path}")


if __name__ == "__main__":
    main()
