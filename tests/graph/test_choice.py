"""The name auto: METIS where it fits, streaming where it does not, and memory as the system tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kagome.graph.datasets.builtin import sbm
from kagome.graph.partition.choice import SHARE, choose, metis_bytes
from kagome.launch import host_memory
from kagome.launch.host_memory import available_bytes

EDGES = sbm("vertices=400,degree=6,communities=4,features=1").edge_index
COUNT = EDGES.size(1)


def test_only_auto_is_decided() -> None:
    for name in ("metis", "streaming", "contiguous", "random"):
        assert choose(name, EDGES, 400, 4, 0) == (name, ())


def test_metis_where_it_fits_and_streaming_where_it_does_not() -> None:
    need = metis_bytes(400, COUNT, COUNT)  # every edge has its reverse: as many neighbours as edges
    assert choose("auto", EDGES, 400, 4, int(need / SHARE) + 1) == ("metis", ())
    name, said = choose("auto", EDGES, 400, 4, int(need / SHARE) - 1)
    assert name == "streaming"
    assert f"{need / 2**30:.2g} GiB" in said[0]
    assert choose("auto", EDGES, 400, 4, -5)[0] == "streaming"


def test_shares_of_a_part_change_nothing_about_the_choice() -> None:
    need = metis_bytes(400, COUNT, COUNT)
    assert choose("auto/2", EDGES, 400, 4, int(need / SHARE) + 1) == ("metis/2", ())
    assert choose("auto/2", EDGES, 400, 4, int(need / SHARE) - 1)[0] == "streaming/2"
    assert choose("random/2", EDGES, 400, 4, 0) == ("random/2", ())


def test_duplicates_and_self_loops_cost_less_than_edges() -> None:
    twice = torch.cat([EDGES, EDGES], dim=1)
    need = metis_bytes(400, 2 * COUNT, COUNT)
    assert choose("auto", twice, 400, 4, int(need / SHARE) + 1)[0] == "metis"
    assert choose("auto", twice, 400, 4, int(need / SHARE) - 1)[0] == "streaming"


def test_with_one_part_or_unknown_memory_there_is_nothing_to_decide() -> None:
    assert choose("auto", EDGES, 400, 1, 0) == ("metis", ())
    assert choose("auto", EDGES, 400, 4, None) == ("metis", ())


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    own = Path("/proc/self/cgroup")
    real = Path.read_text
    base = tmp_path if version == 2 else tmp_path / "memory"
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    line = "0::/job/step" if version == 2 else "4:cpu,memory:/job/step"

    def read(path: Path, *args: object, **more: object) -> str:
        return f"3:pids:/\n{line}\n" if path == own else real(path, *args, **more)  # type: ignore[arg-type]

    for folder, limit, used in (("job/step", "max", 100), ("job", "5000", 3000), (".", "9000", 3000)):
        (base / folder).mkdir(parents=True, exist_ok=True)
        (base / folder / names[0]).write_text(f"{limit}\n")
        (base / folder / names[1]).write_text(f"{used}\n")
        (base / folder / "memory.stat").write_text("file 70\ninactive_file 50\ntotal_inactive_file 50\n")
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    assert available_bytes() == 5000 - 3000 + 50


def test_without_a_group_it_is_the_machine_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    found = available_bytes()
    assert found is None or 0 < found < 2**50
