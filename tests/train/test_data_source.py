"""Each rank's part, from memory, a folder or settings; every fault is told on every rank."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from kagome import config
from kagome.comm.channel import Channel
from kagome.errors import DataError, KagomeError, PartitionError
from kagome.storage import sealed_files
from kagome.train import data as source
from training import graph

SBM = "sbm:vertices=60,degree=4,features=3,classes=2,communities=2"

MAKERS = """
import torch
from torch_geometric.data import Data

print("what a script prints is not mistaken for an answer")

def fine():
    print("neither here")
    return Data(x=torch.ones(9, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.arange(9) % 2)

def short_labels():
    return Data(x=torch.ones(9, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.zeros(4))

def dies():
    import os
    os._exit(9)
"""


def told(error: KagomeError) -> tuple[str, str, str, str, str]:
    return type(error).__name__, error.expected, error.got, error.where, error.hint


def taken(channel: Channel, settings: config.Data, folder: str) -> tuple:
    import os

    before = os.getcwd()
    os.chdir(folder)  # where python: names are looked up, as under the command line
    try:
        part, meta = source.from_settings(settings, channel, method="metis", seed=0)
    except KagomeError as error:
        return told(error)
    finally:
        os.chdir(before)
    return part.own.tolist(), part.nodes["x"].shape, meta.num_nodes, meta.num_parts


@pytest.fixture
def makers(tmp_path: Path) -> str:
    (tmp_path / "makers_of_data.py").write_text(MAKERS)
    return str(tmp_path)


def test_from_settings_one_process_cuts_and_every_rank_reads_its_part(ranks, makers):
    found = ranks(3, taken, config.Data(name=SBM), makers)
    assert sorted(chain.from_iterable(own for own, *_ in found)) == list(range(60))
    assert [tuple(rest) for _, *rest in found] == [((len(own), 3), 60, 3) for own, *_ in found]


def test_a_python_function_makes_the_data_whatever_it_prints(ranks, makers):
    found = ranks(2, taken, config.Data(name="python:makers_of_data:fine"), makers)
    assert sorted(found[0][0] + found[1][0]) == list(range(9))


def test_an_error_of_the_child_is_the_same_leaf_on_all_ranks(ranks, makers):
    found = ranks(3, taken, config.Data(name="python:makers_of_data:short_labels"), makers)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == "DataError"
    assert "y to have a row" in found[0][1]


def test_a_child_that_dies_is_told(ranks, makers):
    found = ranks(2, taken, config.Data(name="python:makers_of_data:dies"), makers)
    assert found[0] == found[1]
    assert found[0][0] == "PartitionError"
    assert found[0][2] == "code 9"


def in_folder(channel: Channel, folder: str) -> tuple:
    try:
        part, _ = source.from_folder(folder, channel)
    except KagomeError as error:
        return told(error)
    return (part.own.tolist(),)


def test_a_partition_of_another_number_of_parts_is_refused_with_both_numbers(ranks, tmp_path):
    folder = tmp_path / "parts"
    meta = source.prepare(config.Data(name=SBM), method="random", seed=0, parts=2, folder=folder)
    assert meta.num_parts == 2
    assert sorted(chain.from_iterable(own for (own,) in ranks(2, in_folder, str(folder)))) == list(range(60))
    leaf, expected, got, _, hint = ranks(3, in_folder, str(folder))[2]
    assert leaf == "PartitionError"
    assert ("ranks, 3" in expected, "2 parts in" in got, "--parts 3" in hint) == (True, True, True)


def test_no_such_partition(tmp_path):
    with pytest.raises(PartitionError, match="nowhere"):
        source.from_folder(tmp_path / "nowhere", Channel(None, "cpu"))


def differing(channel: Channel, how: str) -> tuple:
    data = graph(vertices=60 + (channel.rank if how == "size" else 0))
    if how == "values" and channel.rank == 1:
        data.x = data.x + 1
    try:
        source.from_data(data, channel, method="metis", seed=0)
    except KagomeError as error:
        return told(error)
    return ()


@pytest.mark.parametrize("how", ["values", "size"])
def test_ranks_with_different_data_are_refused_on_every_rank(ranks, how):
    """With another number of vertices the broadcast of owners would have gloo end the process."""
    for found in ranks(3, differing, how):
        assert found[0] == "PartitionError"
        assert "seed whatever makes the data" in found[4]


def with_fault_on_one(channel: Channel) -> None:
    data = graph(vertices=60)
    if channel.rank == 1:
        data.x[3] = float("nan")
    source.from_data(data, channel, method="metis", seed=0)


def test_a_fault_in_one_rank_s_data_is_what_is_told(ranks):
    with pytest.raises(DataError, match="finite"):
        ranks(2, with_fault_on_one, spoils=True)


def histogram(channel: Channel) -> tuple[torch.Tensor, torch.Tensor]:
    data = graph(vertices=60)
    part, _ = source.from_data(data, channel, method="random", seed=0)
    whole = torch.bincount(torch.bincount(data.edge_index[1], minlength=60))
    return source.degree_histogram(part, channel), whole


@pytest.mark.parametrize("world", [1, 3])
def test_degree_histogram_is_the_whole_graph_s(ranks, world):
    for found, whole in ranks(world, histogram):
        assert torch.equal(found, whole)


def test_the_given_data_is_not_changed():
    data = Data(
        x=torch.ones(4, 2),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        y=torch.tensor([0, 1, 0, 1]),
        extra="word",
    )
    before = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in data.to_dict().items()
    }
    source.from_data(data, Channel(None, "cpu"), method="metis", seed=0)
    after = data.to_dict()
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[k], v) if isinstance(v, torch.Tensor) else after[k] == v for k, v in before.items()
    )


def test_a_saved_partition_says_which_settings_it_does_not_heed(tmp_path):
    """--data.undirected beside --data.partition was accepted and silently ignored."""
    folder = tmp_path / "parts"
    source.prepare(config.Data(name=SBM), method="random", seed=0, parts=1, folder=folder)
    alone = Channel(None, "cpu")
    for more, said in (({}, False), ({"undirected": True, "split": 2}, True)):
        settings = config.Data(partition=str(folder), root="elsewhere", **more)
        _, meta = source.from_settings(settings, alone, method="metis", seed=0)
        assert any("data.undirected, data.split" in note for note in meta.notes) is said


# Reuse ---------------------------------------------------------------------------------------------


def reusing(channel: Channel, settings: config.Data, folder: str, seed: int, reuse: bool) -> tuple:
    import os

    before = dict(os.environ)
    os.environ["KAGOME_CACHE"] = folder
    try:
        part, meta = source.from_settings(settings, channel, method="auto", seed=seed, reuse=reuse)
    finally:
        os.environ.clear()
        os.environ.update(before)
    said = [note for note in meta.notes if "no-reuse" in note]
    return part.own.tolist(), float(part.nodes["x"].sum()), meta.method, said


def edges_file(path: Path, last: int) -> config.Data:
    import numpy as np

    ring = np.stack([np.arange(40), (np.arange(40) + last) % 40])
    np.savez(path, edge_index=ring, x=np.ones((40, 2), np.float32), y=np.arange(40) % 2)
    return config.Data(name=f"npz:{path}")


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in (folder / "partitions").glob("*")}


def test_parts_are_cut_once_and_reused_until_the_file_or_the_seed_changes(ranks, tmp_path):
    folder, data = tmp_path / "cache", edges_file(tmp_path / "g.npz", 1)
    first = ranks(2, reusing, data, str(folder), 0, True)
    assert [said for *_, said in first] == [[], []]
    assert first[0][2] == "metis"
    (entry,) = entries(folder)
    again = ranks(2, reusing, data, str(folder), 0, True)
    assert [found[:3] for found in again] == [found[:3] for found in first]
    assert all("reused from" in found[3][0] and entry[:14] in found[3][0] for found in again)
    edges_file(tmp_path / "g.npz", 3)
    assert ranks(2, reusing, data, str(folder), 0, True)[0][3] == []
    assert ranks(2, reusing, data, str(folder), 1, True)[0][3] == []
    assert ranks(3, reusing, data, str(folder), 1, True)[0][3] == []
    assert len(entries(folder)) == 4


@pytest.mark.slow
def test_without_reuse_nothing_is_read_or_kept(ranks, tmp_path):
    folder, data = tmp_path / "cache", edges_file(tmp_path / "g.npz", 1)
    for _ in range(2):
        assert ranks(2, reusing, data, str(folder), 0, False)[0][3] == []
    assert not folder.exists()


@pytest.mark.slow
def test_a_damaged_entry_is_made_again(ranks, tmp_path):
    folder, data = tmp_path / "cache", edges_file(tmp_path / "g.npz", 1)
    first = ranks(2, reusing, data, str(folder), 0, True)
    (name,) = entries(folder)
    (folder / "partitions" / name / "part-00001.safetensors").write_bytes(b"half")
    again = ranks(2, reusing, data, str(folder), 0, True)
    assert [found[:3] for found in again] == [found[:3] for found in first]
    assert again[0][3] == []
    assert "reused" in ranks(2, reusing, data, str(folder), 0, True)[0][3][0]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_done_without(ranks, tmp_path):
    (tmp_path / "cache").write_text("a file")
    data = edges_file(tmp_path / "g.npz", 1)
    found = ranks(2, reusing, data, str(tmp_path / "cache"), 0, True)
    assert sorted(found[0][0] + found[1][0]) == list(range(40))


def in_memory(channel: Channel, folder: str, reuse: bool) -> tuple:
    import os

    before = dict(os.environ)
    os.environ["KAGOME_CACHE"] = folder
    try:
        data = graph(vertices=60)
        part, meta = source.from_data(data, channel, method="auto", seed=0, reuse=reuse)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return part.own.tolist(), [note for note in meta.notes if "no-reuse" in note], meta.method


def test_owners_of_data_in_memory_are_reused(ranks, tmp_path):
    folder = tmp_path / "cache"
    plain = ranks(3, in_memory, str(folder), False)
    assert not folder.exists()
    first = ranks(3, in_memory, str(folder), True)
    again = ranks(3, in_memory, str(folder), True)
    assert [own for own, *_ in plain] == [own for own, *_ in first] == [own for own, *_ in again]
    assert [said for _, said, _ in first] == [[], [], []]
    assert "reused from" in again[0][1][0]
    assert len(entries(folder)) == 1


def short_of_memory(channel: Channel, folder: str, amount: int | None) -> tuple:
    import os

    from kagome.train import data as source, host_parts

    before = dict(os.environ)
    os.environ["KAGOME_CACHE"] = folder
    kept = host_parts.available_bytes
    host_parts.available_bytes = source.available_bytes = lambda: amount
    try:
        named = source.from_settings(config.Data(name=SBM), channel, method="auto", seed=0, reuse=True)[1]
        given = source.from_data(graph(vertices=60), channel, method="auto", seed=0)[1]
    finally:
        host_parts.available_bytes = source.available_bytes = kept
        os.environ.clear()
        os.environ.update(before)
    return [(meta.method, sum("GiB are available" in note for note in meta.notes)) for meta in (named, given)]


@pytest.mark.slow
def test_auto_streams_where_metis_does_not_fit_and_says_so(ranks, tmp_path):
    folder = str(tmp_path / "cache")
    for _ in range(2):  # cut, then reused
        assert ranks(2, short_of_memory, folder, 1000) == [[("streaming", 1)] * 2] * 2
    assert ranks(2, short_of_memory, folder, 10**12) == [[("metis", 0)] * 2] * 2  # not the streamed parts
    assert ranks(2, short_of_memory, folder, 10**12) == [[("metis", 0)] * 2] * 2
    # Parts that METIS has made are as good with little memory.
    assert ranks(2, short_of_memory, folder, 1000) == [[("metis", 0), ("streaming", 1)]] * 2


# Saved partitions that were altered --------------------------------------------------------------------


def taken_from(channel: Channel, folder: str) -> str:
    try:
        source.from_folder(folder, channel)
    except KagomeError as error:
        return str(error)
    return "taken"


def test_a_damaged_part_of_one_rank_is_told_by_all(ranks, tmp_path):
    """The others waited for a rank that had given up."""
    cut = tmp_path / "cut"
    source.prepare(config.Data(name=SBM), method="random", seed=0, parts=3, folder=cut)
    assert ranks(3, taken_from, str(cut)) == ["taken"] * 3
    file = cut / "part-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    for text in ranks(3, taken_from, str(cut)):
        assert "part-00001.safetensors has been altered: its checksum is" in text


def test_parts_that_expect_other_rows_than_are_sent_are_refused(ranks, tmp_path):
    """Each part hangs together, and has the checksum that the page says."""
    cut = tmp_path / "cut"
    source.prepare(config.Data(name=SBM), method="random", seed=0, parts=3, folder=cut)
    file = cut / "part-00001.safetensors"
    tensors, text = sealed_files.read_tensors(file)
    halo, own, counts = tensors["halo"].clone(), tensors["own"], json.loads(text)["recv_counts"]
    free = sorted(set(range(int(halo[0]), int(halo[1]))) - set(own.tolist()) - set(halo.tolist()))
    assert counts[0] > 1
    assert free, "another draw of the test's graph"
    halo[0] = free[0]
    seal = sealed_files.write_tensors(
        file, {**{n: t.clone() for n, t in tensors.items()}, "halo": halo}, text
    )
    page = sealed_files.read_page(cut / "partition.json")
    page["files"][file.name] = [seal.bytes, seal.crc32]
    sealed_files.write_page(cut / "partition.json", page)
    for text in ranks(3, taken_from, str(cut)):
        assert "send each other the rows that they expect; got part 1, which expects others" in text


def test_a_damaged_part_of_the_cache_is_thrown_away_and_cut_anew(ranks, tmp_path):
    folder, data = tmp_path / "cache", edges_file(tmp_path / "g.npz", 1)
    before = ranks(2, reusing, data, str(folder), 0, True)
    (file,) = folder.glob("partitions/parts-*/part-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(
        PartitionError, match=r"has been altered(.|\n)*start again: what was kept is thrown away"
    ):
        ranks(2, reusing, data, str(folder), 0, True)
    assert not file.exists()
    assert ranks(2, reusing, data, str(folder), 0, True) == before
