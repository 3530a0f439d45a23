"""A Trainer on several kinds of vertices: papers have labels, authors and fields do not.

    python examples/hetero_trainer.py
    torchrun --nproc-per-node 2 examples/hetero_trainer.py

Both print the same numbers. The graph and the model are those of hetero.py, which has a loop of its own.
"""

from __future__ import annotations

import torch
from hetero import PAPERS, STEPS, Library, library

import kagome


def main() -> None:
    """Train on some of the papers, stop early by others, and print the accuracy on the rest."""
    torch.manual_seed(0)
    data = library()
    place = torch.arange(PAPERS) % 4
    data["paper"].train_mask = place < 2
    data["paper"].val_mask, data["paper"].test_mask = place == 2, place == 3
    train = kagome.Train(epochs=STEPS, patience=20, weight_decay=0.0)
    quiet = kagome.Report(page=False, trace=False, progress=False)
    with kagome.Trainer(Library(data), data, train=train, report=quiet) as trainer:
        summary = trainer.fit()
        scores = trainer.predict()  # of all papers on rank 0
        if trainer.mesh.rank == 0:
            shown = f"loss {trainer.records[-1].loss:.4f}, accuracy {summary['test_metric']:.4f}"
            print(f"scores of {scores.size(0)} papers: {shown}")


if __name__ == "__main__":
    main()
