"""Kind 7: a graph that is given as a sparse matrix with values."""

from __future__ import annotations

from functools import partial

from torch_geometric.data import Data

from adjacency_models import ADJACENCIES, weighted
from cases import Case, with_targets

FORMS = (
    ("csr", "normalised"),
    ("csr", "simple"),
    ("coo", "normalised"),
    ("csr", "ones"),
    ("csc", "normalised"),
)
"""A matrix's layout and values, one after the other over the cases."""
ROWS_ONLY = (
    *("gat", "gatv2", "gat with loops", "gcn that normalises", "degrees"),
    *("an unfused layer", "an unfused mean"),
)
"""What plain PyG does not do with a matrix that is sorted by column."""


def _form(name: str, place: int) -> tuple[str, str]:
    layout, values = FORMS[place % len(FORMS)]
    return ("csr" if layout == "csc" and name in ROWS_ONLY else layout), values


def _data(form: tuple[str, str], side: int) -> Data:
    return with_targets(weighted(*form)[side])


CASES = {
    name: Case(build, partial(_data, _form(name, place), 0), ours=partial(_data, _form(name, place), 1))
    for place, (name, build) in enumerate(ADJACENCIES.items())
}
