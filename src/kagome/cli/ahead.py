"""Compiling ahead: a process that compiles the loops of a first epoch while ranks import torch, and after.

Where it sits: ``cli.app`` has it run beside the ranks if machine code is missing. First come the loops for
which plain Python is too slow, without torch, which takes seconds to import. The rest, for which ranks have
plain code that gives the same bits, is compiled at the lowest priority. A rank that needs a loop which is
being compiled waits for it and loads the machine code.
"""

from __future__ import annotations

import os
import sys

from kagome.kernels.base.kept_code import AT_ONCE
from kagome.launch.os_errors import end_with


def cut() -> None:
    """Compile what cuts a graph, by a graph of two vertices with the types of a real one."""
    import numpy as np

    from kagome.graph.structure import edges, kernels

    source, target, parts = np.array([0, 1]), np.array([1, 0]), 2
    own, owner = np.array([0]), np.array([0, 1], np.int32)
    # Types decide what is compiled, values do not: one dimension and 64 bits here, 32 bits there.
    bounds, indptr, indices = np.ones((2, parts)), np.array([0, 1, 2]), np.array([1, 0], np.int32)
    kernels.mend(indptr, indices, np.ones(2), owner.astype(np.int64), bounds, 6)
    # No plain code gives its bits: it sorts floats, and numba puts equal ones in another order than numpy.
    # From here on ranks have plain code, so their work comes first.
    os.nice(19)
    edges.shared(source, source)
    edges.squeeze(source)
    kernels.adjacency(source, target, 2)
    edges.sort_rows(indptr, indices)
    edges.simple(indptr, indices)
    readers, _, _ = edges.read_by(source, target, owner, parts)
    edges.halo_counts(readers, parts)
    edges.sent_counts(readers, owner, parts)
    edges.halo_of(readers, owner, 0, parts)
    edges.sent_by(readers, own, parts)
    edges.edges_of(source, target, owner, 0, source)


def trained() -> None:
    """Compile what trains a GCN, and what the check of a model runs in float64."""
    import torch

    from kagome.kernels.first_calls import call_layouts, call_sums
    from kagome.model.exact.dropout import dropout

    # Ranks compile sums themselves while they wait for their parts, and are ahead of this process.
    call_sums()
    call_layouts()
    for dtype in (torch.float32, torch.float64):
        dropout(torch.ones(2, 1, dtype=dtype), torch.arange(2), 1, 0.5)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    # Else small arrays would go to plain code here, too.
    os.environ[AT_ONCE] = "1"
    cut()
    trained()
