"""Every kind of model that was once silently wrong is plain PyG's on every mesh, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compare import KINDS, cases_of, expected, meshes_of, verdict


def _rows() -> list[tuple[str, str, str]]:
    return [
        (kind, name, mesh)
        for kind in KINDS
        for name, case in cases_of(kind).items()
        for mesh in meshes_of(case)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_at_least_twenty_cases(kind: str) -> None:
    assert len(cases_of(kind)) >= 20


@pytest.mark.some(2, each="kind")
@pytest.mark.parametrize(("kind", "name", "mesh"), _rows())
def test_equal_or_refused_by_name(ranks: Callable[..., list], kind: str, name: str, mesh: str) -> None:
    found = verdict(ranks, kind, name, mesh, expected(kind, name))
    assert found.word in ("equal", "refused"), found
    if mesh == "1 rank" and not cases_of(kind)[name].unclear:
        assert found.word == "equal", "one rank runs what plain PyG runs"
