"""Groups: closing them never hides the error that ended the mesh."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from kagome.comm.groups import MeshGroups


@pytest.mark.parametrize(
    "fault", [ValueError, AssertionError, RuntimeError("ProcessGroup name not set"), KeyError]
)
def test_groups_close_in_reverse_order_whatever_torch_says_of_one(monkeypatch, fault):
    ended: list[object] = []

    def end(group: object) -> None:
        ended.append(group)
        if group == "second":
            raise fault

    monkeypatch.setattr(dist, "destroy_process_group", end)
    groups = MeshGroups(0, 1, 1, "cpu", 1.0)
    groups._created[:] = ["first", "second", "third"]
    groups.close()
    assert ended == ["third", "second", "first"]
    assert not groups._created
