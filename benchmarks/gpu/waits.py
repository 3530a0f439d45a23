"""How often the host waits for the GPU in an epoch that is not the first, and where."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import made
import torch
from main import Row, Visit

import kagome
from kagome import Parallel, Train


def waits(visit: Visit) -> Iterator[Row]:
    """Count what torch's own watch (``set_sync_debug_mode``) reports, by model and strategy of one rank."""
    if not torch.cuda.is_available():
        yield {"name": "(skipped)", "why": "torch watches waits on a GPU only"}
        return
    for name in made.NAMES:
        yield _counted(name, name, Parallel(), visit.small)
    yield _counted("chunks, history", "GCN", Parallel(chunks=4), visit.small)
    yield _counted("chunks, exact", "GCN", Parallel(chunks=4, cross_chunk="exact"), visit.small)
    yield _counted("decoupled", "GCN", Parallel(decouple=True), visit.small)


def _counted(label: str, name: str, parallel: Parallel, small: bool) -> Row:
    vertices, count = (256, 3000) if small else (4096, 60_000)
    data = made.dataset(vertices, count, 32, 5, edge=made.reads_edges(name))
    settings = Train(epochs=4, eval_every=10**6, check=False)
    try:
        with kagome.Trainer(
            made.model(name, 32, 32, 5, layers=3), data, parallel=parallel, train=settings
        ) as trainer:
            trainer.fit()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as seen, trainer.engine.net:
                warnings.simplefilter("always")
                trainer.engine.train(5, trainer.optimizer)
            torch.cuda.set_sync_debug_mode("default")
    except Exception as error:
        torch.cuda.set_sync_debug_mode("default")
        return {"name": label, "ok": False, "why": f"{type(error).__name__}: {str(error)[:300]}"}
    where = Counter(f"{w.filename.split('kagome/')[-1]}:{w.lineno}" for w in seen)
    return {"name": label, "count": len(seen), "where": ", ".join(f"{at} ({n})" for at, n in where.items())}
