"""Each kernel's time on made graphs, its share of a copy's bandwidth, and what others take for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import made
import timing
import torch
from main import Row, Visit
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import Structure
from kagome.model.exact.dropout import dropout, plain_scaled

GRAPHS = ("uniform", "near", "power")
SUMS = (
    (16, torch.float32),
    (64, torch.float32),
    (128, torch.float32),
    (128, torch.bfloat16),
    (256, torch.float32),
)


def rows(visit: Visit) -> Iterator[Row]:
    """Sums, attention and dropout; bytes are those that must be moved if nothing is kept in a cache."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vertices, count = (2**10, 20_000) if visit.small else (2**20, 20_000_000)
    copy = timing.copy_rate(2**20 if visit.small else 2**29)
    yield from _dropout(device, vertices, copy)
    for kind in GRAPHS:
        edge = made.edges(kind, vertices, count, device)
        s = Structure(edge[0].contiguous(), edge[1].contiguous(), vertices, vertices)
        yield {"name": f"{kind} graph", "largest degree": int(s.degree.max())}
        for row in (*_sums(s, edge, device), *_attention(s, device)):
            moved = row.pop("bytes")
            assert isinstance(moved, int)
            assert isinstance(row["ms"], float)
            rate = moved / row["ms"] * 1e3
            yield {**row, "name": f"{kind}: {row['name']}", "gb_s": rate / 1e9, "of_copy": rate / copy}
        if visit.left() < 30:
            return


def _sums(s: Structure, edge: Tensor, device: str) -> Iterator[Row]:
    layout, count = s.by_target, s.edges
    matrix: Any = None
    if device == "cuda" and (torch.version.cuda or torch.version.hip):  # the tests' fake device has none
        ones = torch.ones(count, device=device)
        matrix = torch.sparse_csr_tensor(
            layout.pointer.int(), layout.column, ones, size=(s.own, s.num_sources)
        )
    for columns, dtype in SUMS:
        x = torch.randn(s.num_sources, columns, device=device).to(dtype)
        moved = count * (columns * x.itemsize + 4) + s.own * columns * x.itemsize
        name = f"sum of {columns} columns, {str(dtype)[6:]}"
        row: Row = {"name": name, "bytes": moved, "ms": _ms(partial(ops.sum_rows, layout, x))}
        if matrix is not None and dtype == torch.float32:
            row["cusparse_ms"] = _ms(lambda x=x: matrix @ x)
        if columns == 128 and dtype == torch.float32:
            out = torch.zeros(s.own, columns, device=device)
            row["pyg_ms"] = _ms(lambda x=x, out=out: out.index_add(0, edge[1], x[edge[0]]), 3)
        yield row


def _attention(s: Structure, device: str) -> Iterator[Row]:
    heads, width, count = 8, 16, s.edges
    a, b = (torch.randn(s.num_sources, heads, device=device) for _ in range(2))
    x, y = (torch.randn(s.num_sources, heads, width, device=device) for _ in range(2))
    att = torch.randn(heads, width, device=device)
    alpha = ops.softmax_sum(s.by_target, a, b, 0.2)
    g = torch.randn_like(alpha)
    row, number = heads * width * 4, heads * 4
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("GAT's softmax", lambda: ops.softmax_sum(s.by_target, a, b, 0.2), count * (2 * number + 8)),
        ("its backward", lambda: ops.softmax_sum_back(s, a, b, 0.2, alpha, g), count * (5 * number + 16)),
        ("softmax", lambda: ops.softmax_edges(s.by_target, g), count * (2 * number + 4)),
        ("weighted sum, 8 heads", lambda: ops.sum_rows(s.by_target, x, alpha), count * (row + number + 8)),
        ("dots, 8 heads", lambda: ops.dot_edges(s.by_target, x, y), count * (row + number + 8)),
        ("GATv2's logits", lambda: ops.leaky_dots(s.by_target, x, y, att, 0.2), count * (row + number + 8)),
        ("their backward", lambda: ops.leaky_dots_back(s, x, y, att, 0.2, g), 2 * count * (row + number + 8)),
    )
    for name, work, moved in works:
        yield {"name": name, "bytes": moved, "ms": _ms(work, 5)}


def _dropout(device: str, vertices: int, copy: float) -> Iterator[Row]:
    x, ids = torch.randn(vertices, 128, device=device), torch.arange(vertices, device=device)
    took, plain = _ms(partial(dropout, x, ids, 7, 0.5)), _ms(partial(plain_scaled, x, ids, 7, 0.5), 3)
    torchs = _ms(partial(torch.nn.functional.dropout, x, 0.5))
    rate = 8 * x.numel() / took * 1e3
    row: Row = {"ms": took, "gb_s": rate / 1e9, "of_copy": rate / copy, "plain_ms": plain, "torch_ms": torchs}
    yield {"name": "dropout of 128 columns", **row}


def _ms(work: Callable[[], object], repeats: int = 7) -> float:
    return timing.seconds(work, repeats) * 1e3
