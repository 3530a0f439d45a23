"""The source does not grow what a reader must hold at once past what is written down."""

from __future__ import annotations

import json

import house


def test_no_measure_of_the_source_grows():
    """``golden/house.json`` holds the bounds; who lowers a measure lowers its bound."""
    bounds = json.loads(house.BOUNDS.read_text())
    found = house.measured()
    assert found.keys() == bounds.keys()
    assert {name: value for name, value in found.items() if value > bounds[name]} == {}
