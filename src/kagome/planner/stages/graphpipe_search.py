"""GraphPipe search: compiled loops that find the fewest samples in flight at the head of a part of a model.

Where it sits: the inner loops of ``graphpipe``.

A table entry ``held[d, r]`` is the fewest samples that the head of a part holds, for plans with d devices and
a head whose largest micro-batch is ``sizes[r]``. ``sizes[0]`` is 0, for a part without stages. An entry is
infinite if there is no plan. Nothing else of a head matters to the stages before it: a stage of micro-batch s
and ``k = max(1, r / s)`` before a reader that holds h samples in micro-batches of r must hold
``ceil(h / s) s + k s`` samples. That grows with h and with r; with several readers the largest h and the
largest r count.

Source: GraphPipe, ASPLOS 2025, in-flight samples under kFkB.
"""

from __future__ import annotations

import math

import numpy as np

from kagome.kernels.base.jit import compiled
from kagome.planner.stages.operator_groups import Floats, Ints


@compiled
def trim(held: Floats) -> None:
    """Remove plans that another dominates: no more devices, no larger micro-batch, no more samples held."""
    devices, sizes = held.shape
    # Rows in order of devices, columns in order of micro-batch: an entry is useless if any entry above or to
    # the left, or both, holds as few samples.
    least = np.full(sizes, np.inf)  # the minimum of earlier rows, by the largest micro-batch allowed
    for d in range(devices):
        here = np.inf
        for r in range(sizes):
            here = min(here, least[r])
            now = held[d, r]
            if now >= here:
                held[d, r] = np.inf
            else:
                here = now
            least[r] = min(least[r], here)


@compiled
def stage(
    need: Ints, fixed: float, kept: float, size: float, h: float, reader: float, memory: float, batch: float
) -> tuple[int, float]:
    """Find the devices and held samples of a stage before a reader that holds h; 0 devices if none fits."""
    devices = need[0]
    if devices == 0:
        return 0, 0.0
    # The last term is k s = max(s, r). A stage never holds more than the batch.
    held = min(math.ceil(h / size) * size + max(size, reader), batch)
    free = memory - fixed
    # Replicas share the samples in flight, so more devices need less memory each. Take the fewest that fit
    # and are fast enough; a replica without a sample is of no use.
    if kept * held > free * devices:
        if free <= 0:
            return 0, 0.0
        least = max(devices, math.ceil(kept * held / free))
        if least > size or least >= need.size:
            return 0, 0.0
        devices = need[least]
    return devices, held


@compiled
def in_a_row(
    held: Floats,
    how: Ints,
    first: int,
    end: int,
    need: Ints,
    fixed: Floats,
    kept: Floats,
    sizes: Floats,
    memory: float,
    batch: float,
) -> None:
    """Fill the tables of plans that begin with a stage at some children of a series.

    Args:
        held: The tables, by the child that a plan begins with; written from ``end - 1`` back to ``first``.
        how: For each entry, where its first stage ends, and the devices and micro-batch of the rest.
        first: The first child to fill.
        end: The child after the last one to fill.
        need: The fewest devices of each run of children, by ``operator_groups.run`` and micro-batch; see
            ``Groups.need``.
        fixed: The bytes of each run without samples.
        kept: The bytes of each run per sample.
        sizes: The micro-batch sizes; the first one is 0.
        memory: Bytes of memory of a device.
        batch: The number of samples in a batch.

    Shapes:
        held ``[children + 1, devices + 1, sizes]``, how ``[*held.shape, 3]``.
    """
    children, most = held.shape[0] - 1, held.shape[1] - 1
    for p in range(end - 1, first - 1, -1):
        for q in range(p + 1, children + 1):
            # The same number as operator_groups.run, a Python function that compiled code cannot call.
            group = p * children - p * (p - 1) // 2 + q - p - 1
            for s in range(1, sizes.size):
                # sizes[0] is "no stage", so index s of the sizes is index s - 1 of `need`.
                if need[group, s - 1, 0] == 0:
                    continue
                for d in range(most):
                    for r in range(sizes.size):
                        h = held[q, d, r]
                        if h == np.inf:
                            continue
                        n, now = stage(
                            need[group, s - 1],
                            fixed[group],
                            kept[group],
                            sizes[s],
                            h,
                            sizes[r],
                            memory,
                            batch,
                        )
                        if n == 0 or d + n > most or now >= held[p, d + n, s]:
                            continue
                        held[p, d + n, s] = now
                        how[p, d + n, s, 0], how[p, d + n, s, 1], how[p, d + n, s, 2] = q, d, r
        trim(held[p])


@compiled
def before(held: Floats, how: Ints, child: Floats, d: int, r: int) -> None:
    """Add a child's own plans before one plan of the rest of its series.

    Args:
        held: The table of plans that begin with the child.
        how: For each entry, the marker -1, and the devices and micro-batch of the rest.
        child: The table of the child's own plans.
        d: The devices of the rest.
        r: The micro-batch of the rest, as an index of the sizes.

    Shapes:
        held and child ``[devices + 1, sizes]``, how ``[*held.shape, 3]``.
    """
    most = held.shape[0] - 1
    for d1 in range(most + 1 - d):
        for r1 in range(held.shape[1]):
            if child[d1, r1] < held[d + d1, r1]:
                held[d + d1, r1] = child[d1, r1]
                how[d + d1, r1, 0], how[d + d1, r1, 1], how[d + d1, r1, 2] = -1, d, r


@compiled
def side_by_side(
    held: Floats,
    how: Ints,
    begins: Ints,
    group: Ints,
    rest: Ints,
    inner: Floats,
    need: Ints,
    fixed: Floats,
    kept: Floats,
    sizes: Floats,
    h: float,
    reader: float,
    memory: float,
    batch: float,
) -> None:
    """Fill the tables of plans of branches that all come before one reader.

    Args:
        held: The tables by state; that of state 0 is given.
        how: For each entry, the option with its devices and micro-batch, and the micro-batch of the rest.
        begins: The first option of each state; see ``operator_groups.States``.
        group: The group that each option takes; see ``operator_groups.States``.
        rest: The state that each option leaves; see ``operator_groups.States``.
        inner: The tables of each child's own plans.
        need: The fewest devices of each group; see ``Groups.need``.
        fixed: The bytes of each group without samples.
        kept: The bytes of each group per sample.
        sizes: The micro-batch sizes; the first one is 0.
        h: The number of samples that the reader holds.
        reader: The largest micro-batch of the reader.
        memory: Bytes of memory of a device.
        batch: The number of samples in a batch.

    Shapes:
        held ``[states, devices + 1, sizes]``, how ``[*held.shape, 4]``, inner as held, by child.
    """
    most = held.shape[1] - 1
    alone = np.empty((most + 1, sizes.size))
    for state in range(1, held.shape[0]):
        for option in range(begins[state], begins[state + 1]):
            g, after = group[option], rest[option]
            alone[:] = np.inf
            # Either one branch with a plan of its own, or a group of branches as one stage.
            if g < 0:
                alone[:] = inner[-1 - g]
            else:
                for s in range(1, sizes.size):
                    n, now = stage(need[g, s - 1], fixed[g], kept[g], sizes[s], h, reader, memory, batch)
                    if 0 < n <= most:
                        alone[n, s] = now
            for d1 in range(1, most + 1):
                for r1 in range(1, sizes.size):
                    if alone[d1, r1] == np.inf:
                        continue
                    for d2 in range(most + 1 - d1):
                        for r2 in range(sizes.size):
                            if held[after, d2, r2] == np.inf:
                                continue
                            # Stages before the branches must satisfy the more demanding one.
                            now, r = max(alone[d1, r1], held[after, d2, r2]), max(r1, r2)
                            if now < held[state, d1 + d2, r]:
                                held[state, d1 + d2, r] = now
                                at = how[state, d1 + d2, r]
                                at[0], at[1], at[2], at[3] = option, d1, r1, r2
        trim(held[state])
