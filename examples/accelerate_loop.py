"""A model on parts of a graph under Accelerate: its backward, its clipping, its checkpoints.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py      (or accelerate launch)

Both print the same loss. Needs ``pip install accelerate``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch_geometric.nn import GCN

import kagome

STEPS = 20


def main() -> None:
    accelerator = Accelerator(cpu=True)  # makes the process group
    data = kagome.load("digits")
    wanted = data.x.mean(dim=1, keepdim=True)
    torch.manual_seed(0)
    model = GCN(64, 16, num_layers=2, out_channels=1)
    with kagome.shard(model, data) as net:
        # evaluation_mode: mixed precision and checkpoints, but no DistributedDataParallel around it.
        net = accelerator.prepare_model(net, evaluation_mode=True)
        optimizer = accelerator.prepare(torch.optim.Adam(net.parameters(), lr=0.01))
        y = net.place(wanted)
        for _ in range(STEPS):
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state("runs/accelerate")
        accelerator.print(f"loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
