"""Kind 1: rows and edges told apart by where they lie in the graph, or by their numbers."""

from __future__ import annotations

from functools import partial

from torch import nn

import call_models
import place_models
import value_models
from by_hand import ByHand, graph
from cases import Case, with_targets
from place_models import Body, Mods


def _built(body: Body, modules: Mods) -> nn.Module:
    return ByHand(body, **modules)


DRAWS = ("dropout of one kind", "draws for len", "dropout by a seed")
CASES = {
    name: Case(partial(_built, *row[:2]), lambda: with_targets(graph()), draws=name in DRAWS)
    for models in (place_models, value_models, call_models)
    for table in (models.EXACT, models.REFUSED, getattr(models, "SEEDED", {}))
    for name, row in table.items()
}
