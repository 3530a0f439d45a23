"""Your own graph in two ways: a function that returns a PyG ``Data``, and a NumPy file.

Run:  python examples/own_data.py
      kagome train --data.name python:examples.own_data:communities
      kagome train --data.name npz:communities.npz          (after the first line)
"""

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import kagome


def communities(vertices: int = 1200, groups: int = 4) -> Data:
    """Groups whose members are linked more often with each other; a vertex's label is its group.

    Takes no argument that has no default. Seeded, so that every rank makes the same graph.
    """
    rng = np.random.default_rng(0)
    label = rng.integers(groups, size=vertices)
    source, target = rng.integers(vertices, size=(2, 40 * vertices))
    kept = (source != target) & ((label[source] == label[target]) | (rng.random(source.size) < 0.05))
    edge_index = np.unique(np.stack([source[kept], target[kept]]), axis=1)
    both = np.concatenate([edge_index, edge_index[::-1]], axis=1)
    x = np.eye(groups)[label] + rng.normal(0, 2.0, size=(vertices, groups))
    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=torch.from_numpy(np.unique(both, axis=1)),
        y=torch.from_numpy(label),
    )  # no masks: Kagome makes a seeded 60/20/20 split


def write(data: Data, file: str) -> None:
    """The same graph as arrays; a CSR pair ``indptr``, ``indices`` may stand for ``edge_index``."""
    np.savez_compressed(file, edge_index=data.edge_index.numpy(), x=data.x.numpy(), y=data.y.numpy())


def main() -> None:
    write(communities(), "communities.npz")
    data = kagome.load("npz:communities.npz")
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 32, num_layers=2, out_channels=4)
    with kagome.Trainer(model, data) as trainer:
        trainer.fit(epochs=20)
        accuracy = trainer.evaluate("test")
    if trainer.mesh.rank == 0:
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
