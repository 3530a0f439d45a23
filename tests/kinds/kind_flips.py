"""Kind 8: edges turned round, with the weights and attributes that belong to them."""

from __future__ import annotations

from functools import partial

from torch_geometric.data import Data

from cases import Case, with_targets
from edge_models import ORDERS, graph
from flip_models import FLIPS


def _data(order: str) -> Data:
    return with_targets(graph(order))


CASES = {
    name: Case(build, partial(_data, ORDERS[place % len(ORDERS)]))
    for place, (name, build) in enumerate(FLIPS.items())
}
