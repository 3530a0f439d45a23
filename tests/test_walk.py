"""An epoch, a halo row and a plan do not pass through more of the source than is written down."""

from __future__ import annotations

import json

import walk


def test_no_walk_through_the_source_grows():
    """``golden/walk.json`` holds the bounds; who shortens a walk lowers its bound."""
    bounds = json.loads(walk.BOUNDS.read_text())
    found = walk.measured()
    assert found.keys() == bounds.keys()
    assert {name: value for name, value in found.items() if value > bounds[name]} == {}
