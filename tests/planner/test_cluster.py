"""An emulated cluster refuses with a reason, or is as asked and leaves nothing behind; rows are judged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cluster as emulated  # noqa: E402
from pipeline import probe, quotas, speed, tables  # noqa: E402
from wire import throughput  # noqa: E402

from hosts import NAME, need_cluster  # noqa: E402


def left() -> list[str]:
    """Namespaces and cgroups of this test's name."""
    spaces = [line.split()[0] for line in emulated.tool("ip", "netns", "list").splitlines() if line.strip()]
    found = [space for space in spaces if space.startswith(NAME)]
    return found + [str(parent / NAME) for _, parent in quotas.parents() if (parent / NAME).exists()]


def outside() -> list[str]:
    """Links of this machine itself."""
    return [line.split()[0] for line in emulated.tool("ip", "-brief", "link").splitlines()]


def reached(cluster: emulated.Cluster, way: str, low: float, high: float) -> float:
    """Mbit/s of a link: never more than ``high``; less than ``low`` only while others keep the cores busy."""
    for _ in range(30):
        found: float = probe.rate(probe.link(cluster, 0, 1)["seconds"][way])
        if not found < low:
            return found
        assert found < high
        time.sleep(1)
    return found


def test_a_slow_link_has_room_for_the_largest_packet() -> None:
    """With less a host that sent 60 MB at 200 Mbit/s spent a second of its kernel's time, not a tenth."""
    payload, header = 1448, 66  # of TCP over links of 1,500 bytes
    pieces = 65_535 // payload
    assert pieces * (payload + header) < emulated.LEAST_BURST


def test_a_recorded_command_names_no_folder_of_this_machine() -> None:
    """Replaced anywhere in it, a folder that is called data made --DATA.root of --data.root."""
    words = ("--data.root", "data", "--data.edges", "data/e.csv", "--out", "/tmp/run", "database")
    told = [speed.nameless(word, Path("/tmp/run"), Path("data")) for word in words]
    assert told == ["--data.root", "DATA", "--data.edges", "DATA/e.csv", "--out", "DIR", "database"]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as ended:
        emulated.main(["--hosts", "2"])
    assert ended.value.code == 2
    assert "needs root" in capsys.readouterr().err


def test_without_its_programs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(emulated.NotPermittedError, match="ip and tc"):
        emulated.Cluster(2, 100).__enter__()


@pytest.mark.slow
def test_links_and_shares_are_as_asked_and_nothing_is_left() -> None:
    need_cluster()
    before = outside()
    with emulated.Cluster(2, 200, 0.3, name=NAME) as cluster:
        assert len(cluster.addresses) == 2
        for way in probe.link(cluster, 0, 1)["seconds"]:
            assert 130 < reached(cluster, way, 130, 215) < 215
        cluster.shape(400)
        assert 260 < reached(cluster, "there", 260, 430) < 430
        if cluster.quota != quotas.NONE:
            # A machine with other work gives less, never more.
            assert all(one["cores"] < 0.33 for one in probe.spin(cluster, 2))
            for own, kernel in cluster.used():
                assert 0 < own < 4
                assert 0 < kernel < 4
            assert len(cluster.used()) in (0, 2)
        lingering = cluster.run(1, ["sleep", "600"])
        assert left()
    assert lingering.wait(10) != 0
    assert left() == []
    assert outside() == before


def test_ranks_are_set_as_by_torchrun_and_end_together() -> None:
    need_cluster()
    told = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $OWN"
    fails = "test $RANK = 0 && { echo broken >&2; exit 3; }; sleep 600"
    with emulated.Cluster(2, 100, name=NAME) as cluster:
        done = cluster.launch(["sh", "-c", told], env={"OWN": "mine"})
        assert [one.stdout.split() for one in done] == [
            [str(rank), "2", "0", "1", cluster.addresses[0], "eth0", "mine"] for rank in range(2)
        ]
        first, second = cluster.launch(["sh", "-c", fails], seconds=60)
        assert (first.returncode, first.stderr, second.returncode) == (3, "broken\n", -9)
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.launch(["sleep", "600"], seconds=0.5)
    assert left() == []


def test_errors_and_crashes_leave_nothing() -> None:
    need_cluster()

    def fail() -> None:
        with emulated.Cluster(2, 100, name=NAME):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert left() == []
    crash = f"""
import os, cluster
with cluster.Cluster(2, 100, name={NAME!r}) as cluster:
    cluster.run(0, ["sleep", "600"])
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", crash], cwd=BENCHMARKS, check=False)
    assert left()
    with emulated.Cluster(1, 100, name=NAME), pytest.raises(emulated.NotPermittedError, match="another"):
        emulated.Cluster(1, 100, name=NAME).__enter__()
    assert left() == []


def test_speed_ups_are_taken_where_graph_parallelism_is_exposed_for_so_long() -> None:
    rows = [
        {
            "key": f"{mesh}/{rate}",
            "graph": "g",
            "model": "m",
            "mesh": mesh,
            "rate": rate,
            "epoch_seconds": seconds,
            "exposed_share": share,
            "bytes_per_epoch": {"total": 1e6},
        }
        for rate, mesh, seconds, share in (
            (1000.0, "graph", 1.0, 0.6),
            (1000.0, "pipe", 2.0, 0.1),
            (100.0, "graph", 4.0, 0.8),
            (100.0, "pipe", 2.0, 0.1),
        )
    ]
    found = tables.conclusions([*rows, {**rows[0], "rate": 10.0, "error": "no"}])
    (case,) = found["cases"]
    assert case["rate"] == pytest.approx(10**2.5)
    assert case["speedup"]["pipe"] == pytest.approx(1.0)
    assert case["even_rate"]["pipe"] == pytest.approx(10**2.5)
    assert found["average"]["pipe"]["geometric"] == pytest.approx(1.0)
    facts = dict.fromkeys(("machine", "quota", "torch"), "") | {
        "hosts": 2,
        "cpu_share": 0.5,
        "layers": 2,
        "hidden": 4,
        "epochs": 3,
    }
    free = {**rows[0], "rate": 10_000.0, "epoch_seconds": 0.5, "exposed_share": 0.4}
    assert tables.of_links(tables.cases([*rows, free])["g", "m"], 1000.0) == pytest.approx(0.5)
    page = tables.page(facts, rows, {"graph": "graph=2", "pipe": "pipe=2"})
    assert "| g | m | 100 | 4.000 | 2.000 | 2.00 | 1.0 | 1.0 | 1.00 | 80% | 10% | - |" in page


def test_gains_are_set_beside_their_bound_and_drawn(tmp_path: Path) -> None:
    """0.4 s of computing and 0.6 of waiting, 10 times fewer bytes: at best 2.5 times as fast."""

    def row(seconds: float, bytes_: float) -> dict[str, object]:
        sent = {"halo": bytes_, "total": bytes_}
        busy = {"cores": [(0.1, 0.1), (0.25, 0.05)], "cpu_share": 0.5} if seconds in (0.8, 1.0) else {}
        return {"epoch_seconds": seconds, "exposed_share": 0.6, "bytes_per_epoch": sent} | busy

    rows = {
        f"made/8/{rate}/{setting}": row(seconds, bytes_)
        for rate in (100, 200)
        for setting, seconds, bytes_ in [
            ("fp32", 1.0, 50),
            ("fp32 late", 0.8, 50),
            ("onebit late", 0.5, 5),
            ("onebit late bf16", 0.4, 5),
        ]
    }
    one = throughput.points(rows)[0]
    assert (one.rate, one.fewer, one.bound) == (100, 10, pytest.approx(2.5))
    assert one.hides == pytest.approx(0.5)
    assert one.hides_idle == pytest.approx(0.5)  # it waits and uses its CPU for 0.6 s of 1
    assert one.busiest == pytest.approx(2.0)  # half of its share of the CPU is its own computing
    told = throughput.table(rows)
    gains = "| made | 8 | 100 | 1.000 | 1.25x |  | 2.00x | 2.50x | 10.0 |"
    assert f"{gains} 2.50x | 80% | 2.00x | 100% | 50% (50%) | 60% | 60% |  |" in told
    throughput.draw(rows, tmp_path / "drawn.svg")
    assert "made, hidden 8" in (tmp_path / "drawn.svg").read_text()
