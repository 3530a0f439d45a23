"""Regression on a real graph: whether plain PyG, 1 and 3 ranks have the same curve and R2.

The target is the logarithm of a page's monthly traffic (Wikipedia's chameleon pages).

Run: python benchmarks/same_curve/regression.py --data ../shared/data  (resumes where it stopped)
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome import Report, Train, Trainer

HERE = Path(__file__).parent
SIDES = ("PyG", "1", "3")
SETTINGS = [(dtype, dropout) for dtype in ("float32", "float64") for dropout in (0.0, 0.5)]
SEED, LR, DECAY = 0, 0.01, 5e-4


def chameleon(folder: Path, dtype: torch.dtype) -> Data:
    """Pages, links, and a target around 0; 60 % of the pages train, 20 % validate."""
    with np.load(folder / "wikipedia_network" / "chameleon" / "raw" / "chameleon.npz") as arrays:
        x, y = torch.from_numpy(arrays["features"]).to(dtype), torch.from_numpy(arrays["target"]).double()
        edge_index = torch.from_numpy(arrays["edges"]).long().t().contiguous()
    draw = torch.rand(x.size(0), generator=torch.Generator().manual_seed(SEED))
    low, high = draw.quantile(0.6), draw.quantile(0.8)
    masks = {"train_mask": draw < low, "val_mask": (draw >= low) & (draw < high), "test_mask": draw >= high}
    return Data(x=x, y=(y - y[masks["train_mask"]].mean()).to(dtype)[:, None], edge_index=edge_index, **masks)


def model(data: Data, dropout: float) -> nn.Module:
    """Two layers of GraphSAGE."""
    torch.manual_seed(SEED)
    return pyg.GraphSAGE(data.num_features, 32, 2, 1, dropout=dropout).to(data.x.dtype)


def r2(out: Tensor, y: Tensor) -> float:
    """As scikit-learn has it."""
    out, y = out.double(), y.double()
    return float(1 - (out - y).square().sum() / (y - y.mean()).square().sum())


def plain(data: Data, dropout: float, epochs: int) -> dict[str, Any]:
    """A loop as PyG's tutorial has it."""
    mine = model(data, dropout)
    optimizer = torch.optim.Adam(mine.parameters(), lr=LR, weight_decay=DECAY)
    curve, best = [], (0, -float("inf"), 0.0)
    for epoch in range(1, epochs + 1):
        mine.train()
        optimizer.zero_grad()
        loss = F.mse_loss(mine(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        mine.eval()
        with torch.no_grad():
            out = mine(data.x, data.edge_index)
        val, test = (r2(out[mask], data.y[mask]) for mask in (data.val_mask, data.test_mask))
        curve.append({"loss": float(loss.detach()), "val": val})
        if val > best[1]:
            best = (epoch, val, test)
    return {"curve": curve, "best_epoch": best[0], "test_r2": best[2]}


def trained(data: Data, dropout: float, epochs: int) -> dict[str, Any]:
    """The same by Kagome, on the ranks that this script was started with."""
    quiet = Report(page=False, trace=False, progress=False)
    train = Train(epochs=epochs, seed=SEED, lr=LR, weight_decay=DECAY)
    with Trainer(model(data, dropout), data, loss="mse", metric="r2", train=train, report=quiet) as trainer:
        summary = trainer.fit()
        curve = [{"loss": record.loss, "val": record.val_metric} for record in trainer.records]
        rank = trainer.mesh.rank
    return {
        "rank": rank,
        "curve": curve,
        "best_epoch": summary["best_epoch"],
        "test_r2": summary["test_metric"],
    }


def side(name: str, options: argparse.Namespace, dtype: str, dropout: float) -> dict[str, Any]:
    """One side in processes of its own, kept."""
    out = options.runs / f"chameleon-{dtype}-{dropout:g}-{options.epochs}-{name}.json"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", name]
        words = [f"--side={name}", f"--epochs={options.epochs}", f"--dtype={dtype}", f"--dropout={dropout}"]
        given = [f"--data={options.data}", f"--out={out}"]
        command = [sys.executable, *(ranks if name != "PyG" else []), __file__, *words, *given]
        subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    """Run all sides and write ``results_regression.json`` and ``results_regression.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    if options.side:
        run = plain if options.side == "PyG" else trained
        found = run(chameleon(options.data, getattr(torch, options.dtype)), options.dropout, options.epochs)
        if found.pop("rank", 0) == 0:
            options.out.write_text(json.dumps(found))
        return
    rows = [
        {
            "dtype": dtype,
            "dropout": dropout,
            **{name: side(name, options, dtype, dropout) for name in SIDES},
        }
        for dtype, dropout in SETTINGS
    ]
    facts = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "epochs": options.epochs,
    }
    (options.out / "results_regression.json").write_text(
        json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    )
    (options.out / "results_regression.md").write_text(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, each side beside one rank of Kagome."""
    lines = [
        "| numbers | dropout | side | test R2 | best epoch | loss, first / last epoch "
        "| largest relative difference of loss from 1 rank: epoch 10 / any |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = [epoch["loss"] for epoch in row["1"]["curve"]]
        for name in SIDES:
            found = row[name]
            losses = [epoch["loss"] for epoch in found["curve"]]
            off = [abs(mine - other) / abs(other) for mine, other in zip(losses, one, strict=True)]
            side = "plain PyG" if name == "PyG" else f"Kagome, {name} rank{'s' * (name != '1')}"
            differs = f"{max(off[:10]):.1e} / {max(off):.1e}"
            # Masks of dropout follow from the vertex here, not from torch's generator.
            differs = "other masks" if name == "PyG" and row["dropout"] else differs
            lines.append(
                f"| {row['dtype']} | {row['dropout']:g} | {side} | {found['test_r2']:.4f} "
                f"| {found['best_epoch']} | {losses[0]:.4f} / {losses[-1]:.4f} | {differs} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
