"""Kind 11: what a model keeps from one forward to the next: tables that forward writes to or replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree

from by_hand import ByHand, Given, graph
from cases import Case, with_targets

WIDTH = 8
Write = Callable[[nn.Module, Tensor, Tensor], Any]


def data() -> Data:
    """The sample graph with float targets."""
    return with_targets(graph())


NODES, EDGES = int(data().num_nodes or 0), data().edge_index.size(1)


class Keeps(nn.Module):
    """A module that keeps a table.

    Args:
        rows: Of the table.
        how: ``buffer``, ``unsaved``, ``plain``, ``dict``, ``list`` or ``none``.
    """

    def __init__(self, rows: int, how: str) -> None:
        super().__init__()
        self.table: Any = None
        self.seen: dict[str, Any] = {}
        self.rows: list[Tensor] = []
        self.marks: set[str] = set()
        table = torch.full((rows, WIDTH), 0.5, dtype=torch.float64)
        if how in ("buffer", "unsaved"):
            del self.table
            self.register_buffer("table", table, persistent=how == "buffer")
        elif how != "none":
            self.table = {"dict": {"rows": table}, "list": [table]}.get(how, table)

    def now(self) -> Tensor:
        """The table."""
        held = self.table
        return held["rows"] if isinstance(held, dict) else held[0] if isinstance(held, list) else held


def history(write: Write, how: str = "buffer") -> Case:
    """Rows of the last epoch are read, and those of this one are written."""

    def body(m: Any, x: Tensor, e: Tensor, d: Given) -> Tensor:
        out = x + m.kept.now()
        if m.training:
            write(m.kept, x.detach(), e)
        return out

    return Case(lambda: ByHand(body, kept=lambda: Keeps(NODES, how)), data)


def of_edges(write: Write, how: str = "buffer") -> Case:
    """The same of a row an edge."""

    def body(m: Any, x: Tensor, e: Tensor, d: Given) -> Tensor:
        messages = x[e[0]] * (1 + m.kept.now())
        if m.training:
            write(m.kept, messages.detach(), e)
        return x.index_add(0, e[1], messages.tanh())

    return Case(lambda: ByHand(body, kept=lambda: Keeps(EDGES, how)), data)


def by(body: Callable[[Any, Tensor, Tensor], Tensor], how: str = "buffer", rows: int = NODES) -> Case:
    """Lines of a forward of a model that keeps something."""
    return Case(
        lambda: ByHand(lambda m, x, e, d: body(m, x, e), kept=lambda: Keeps(rows, how)),
        data,
    )


def _set_item(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.now()[rows[:, 0] > 0] = rows[rows[:, 0] > 0]


def _add(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.table += rows


def _out(kept: Any, rows: Tensor, e: Tensor) -> None:
    torch.mul(rows, 0.5, out=kept.now())


def _replace(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.table = 0.6 * kept.table + 0.4 * rows


def _set_data(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.now().data = rows.clone()


def _span(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.now()[: rows.size(0)] = rows


def _index_copy(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.now().index_copy_(0, torch.arange(rows.size(0)), rows)


def _degrees(kept: Any, rows: Tensor, e: Tensor) -> None:
    kept.now().index_add_(0, e[1], torch.ones(e.size(1), WIDTH, dtype=torch.float64))


def _local(m: Any, x: Tensor, e: Tensor) -> Tensor:
    made = torch.zeros(NODES, WIDTH, dtype=torch.float64)
    made.copy_(x)
    return x + made.tanh()


def _local_span(m: Any, x: Tensor, e: Tensor) -> Tensor:
    made = torch.zeros(NODES, WIDTH, dtype=torch.float64)
    made[: x.size(0)] = x.detach()
    return x + made.tanh()


def _local_number(m: Any, x: Tensor, e: Tensor) -> Tensor:
    made = torch.zeros(NODES, WIDTH, dtype=torch.float64)
    made[: x.size(0)] = 2.0
    return x + made


def _mean(m: Any, x: Tensor, e: Tensor) -> Tensor:
    if m.training:
        m.kept.now().mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - m.kept.now()


def _logged(m: Any, x: Tensor, e: Tensor) -> Tensor:
    m.kept.table = x.tanh()
    return x + m.kept.table


def _last(m: Any, x: Tensor, e: Tensor) -> Tensor:
    out = x if m.kept.table is None else x + 0.5 * m.kept.table
    if m.training:
        m.kept.table = x.detach()
    return out


def _again(m: Any, x: Tensor, e: Tensor) -> Tensor:
    if m.kept.table is None:
        m.kept.table = torch.zeros_like(x)
    out = x + m.kept.table
    if m.training:
        m.kept.table.copy_(x.detach())
    return out


def _degree(m: Any, x: Tensor, e: Tensor) -> Tensor:
    if m.kept.table is None:
        m.kept.table = degree(e[1], x.size(0), x.dtype).view(-1, 1)
    return x / (1 + m.kept.table)


def _norm_once(m: Any, x: Tensor, e: Tensor) -> Tensor:
    if "norm" not in m.kept.seen:
        m.kept.seen["norm"] = gcn_norm(e, None, x.size(0), dtype=x.dtype)
    edges, weight = m.kept.seen["norm"]
    return x.index_add(0, edges[1], weight.view(-1, 1) * x[edges[0]])


def _degree_once(m: Any, x: Tensor, e: Tensor) -> Tensor:
    if "degree" not in m.kept.seen:
        m.kept.seen["degree"] = degree(e[1], x.size(0), x.dtype).view(-1, 1)
    return x / (1 + m.kept.seen["degree"])


def _last_in_dict(m: Any, x: Tensor, e: Tensor) -> Tensor:
    out = x
    if m.training:
        if "last" in m.kept.seen:
            out = x + 0.5 * m.kept.seen["last"].detach()
        m.kept.seen["last"] = x
    return out


def _first_in_dict(m: Any, x: Tensor, e: Tensor) -> Tensor:
    first = m.kept.seen.setdefault("first", x)
    return x + first.detach()


def _all_in_list(m: Any, x: Tensor, e: Tensor) -> Tensor:
    out = x.tanh() if len(m.kept.rows) < 3 else x
    if m.training:
        m.kept.rows.append(x)
    return out


def _in_dict(m: Any, x: Tensor, e: Tensor) -> Tensor:
    m.kept.seen["h"] = x
    return x + m.kept.seen["h"].mean(0)


def _counts(m: Any, x: Tensor, e: Tensor) -> Tensor:
    m.kept.seen["calls"] = m.kept.seen.get("calls", 0) + m.training
    return x * 2 if m.kept.seen["calls"] > 1 else x


def _in_set(m: Any, x: Tensor, e: Tensor) -> Tensor:
    out = x.tanh() if m.kept.marks else x
    m.kept.marks.add("seen")
    return out


class Inputs(nn.Module):
    """A forward that writes to its features before a layer reads neighbours' rows of them.

    Args:
        write: What it does, in training.
        first: The first epoch in which it does.
    """

    def __init__(self, write: Callable[[Tensor], Any], first: int) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(6, WIDTH), pyg.SAGEConv(WIDTH, 4)
        self.write, self.first, self.calls = write, first, 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls >= self.first:
                self.write(x)
        return self.two(self.one(x, edge_index).tanh(), edge_index)


def inputs(write: Callable[[Tensor], Any], first: int = 1) -> Case:
    """As a case. The plain loop's data is written to as well."""
    return Case(lambda: Inputs(write, first), data)


WRITES: dict[str, Write] = {
    "copy_": lambda kept, rows, e: kept.now().copy_(rows),
    "mul_ and add_": lambda kept, rows, e: kept.now().mul_(0.5).add_(rows, alpha=0.5),
    "lerp_": lambda kept, rows, e: kept.now().lerp_(rows, 0.3),
    "data.copy_": lambda kept, rows, e: kept.now().data.copy_(rows),
    "into a view": lambda kept, rows, e: kept.now()[:, :3].copy_(rows[:, :3]),
    "into what is turned": lambda kept, rows, e: kept.now().detach().t().copy_(rows.t()),
    "by a mask": _set_item,
    "+=": _add,
    "out=": _out,
    "replaced": _replace,
}
TO_INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(0.9),
    "+=": lambda x: x.__iadd__(x.detach().tanh()),
    "a column": lambda x: x[:, 0].copy_(x[:, 1]),
    "data": lambda x: x.data.mul_(0.9),
    "one row": lambda x: x[3].mul_(2.0),
    "rows by a slice": lambda x: x.__setitem__(slice(4, 9), 0.5),
}
CASES: dict[str, Case] = {
    **{f"a table, {name}": history(write) for name, write in WRITES.items()},
    **{f"a plain attribute, {name}": history(WRITES[name], "plain") for name in ("copy_", "+=", "replaced")},
    **{f"of edges, {name}": of_edges(WRITES[name]) for name in WRITES if name != "into what is turned"},
    "of edges, all scaled": of_edges(lambda kept, rows, e: kept.now().mul_(0.5)),
    "a table, data is set": history(_set_data),
    "a table, the span of all rows": history(_span),
    "a table, a view of the span of all rows": history(
        lambda kept, rows, e: kept.now()[: rows.size(0)].copy_(rows)
    ),
    "a table, index_copy_": history(_index_copy),
    "a table, index_add_ of edges": history(_degrees),
    "a table, all scaled": history(lambda kept, rows, e: kept.now().mul_(0.5)),
    "a table in a dict": history(WRITES["copy_"], "dict"),
    "a table in a list": history(WRITES["copy_"], "list"),
    "a table that is not saved": history(WRITES["copy_"], "unsaved"),
    "a table of forward's own, copy_": by(_local),
    "a table of forward's own, the span of all rows": by(_local_span),
    "a table of forward's own, one number": by(_local_number),
    "a running mean": by(_mean, rows=1),
    "rows kept to be looked at": by(_logged, "none"),
    "rows of the last epoch": by(_last, "none"),
    "rows of the last epoch, written again": by(_again, "none"),
    "a degree that is computed once": by(_degree, "none"),
    "a dict, the normalised edges": by(_norm_once, "none"),
    "a dict, degrees": by(_degree_once, "none"),
    "a dict, rows of the last training": by(_last_in_dict, "none"),
    "a dict, rows of the first forward": by(_first_in_dict, "none"),
    "a dict, rows of this forward": by(_in_dict, "none"),
    "a dict, a counter": by(_counts, "none"),
    "a list, rows of all forwards": by(_all_in_list, "none"),
    "a set": by(_in_set, "none"),
    **{f"inputs, {name}": inputs(write) for name, write in TO_INPUTS.items()},
    **{f"inputs, {name}, from epoch 2 on": inputs(TO_INPUTS[name], 2) for name in ("mul_", "data", "+=")},
}
