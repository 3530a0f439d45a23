"""The twelve lines of README: one graph, one PyG model, any number of ranks.

Run:  python examples/twelve_lines.py
      torchrun --nproc-per-node 2 examples/twelve_lines.py
"""

import torch
from torch_geometric.nn import GCN

import kagome

torch.manual_seed(0)
data = kagome.load("digits")
model = GCN(data.num_features, 64, num_layers=2, out_channels=10, dropout=0.5)
with kagome.Trainer(model, data, parallel=kagome.Parallel()) as trainer:
    trainer.fit(epochs=50)
    accuracy = trainer.evaluate("test")
    scores = trainer.predict()
if trainer.mesh.rank == 0:
    print(f"test accuracy {accuracy:.4f}, scores {tuple(scores.shape)}")
