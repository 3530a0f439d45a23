"""Kind 1: rows told apart by where they lie in the graph."""

from __future__ import annotations

from functools import partial

from cases import Case, with_targets
from torch import nn

from by_hand import ByHand, graph
from place_models import EXACT, REFUSED, Body, Mods


def _built(body: Body, modules: Mods) -> nn.Module:
    return ByHand(body, **modules)


DRAWS = ("dropout of one kind", "draws for len")
CASES = {
    name: Case(partial(_built, body, modules), lambda: with_targets(graph()), draws=name in DRAWS)
    for name, (body, modules) in [*EXACT.items(), *((name, row[:2]) for name, row in REFUSED.items())]
}
