"""Cut by coordinates: vertices along a space-filling curve, in pieces of one size.

Where it sits: ``partitioners.assign`` calls it for ``partitioner="coordinates"``. A mesh, a grid of the
weather or a set of atoms is cut in milliseconds, and no part is empty.

::

    Morton order of 4 x 4 cells        two parts
      0  1 |  4  5                     the bits of the coordinates take turns: y1 x1 y0 x0,
      2  3 |  6  7   part 0            so cells that are near in the order are near in space
     ------+------
      8  9 | 12 13
     10 11 | 14 15   part 1
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kagome.errors import PartitionError

BITS: Final = 63
"""Bits of a place on the curve, for all coordinates together: the positive numbers of int64."""
MOST_BITS: Final = 21
"""Bits of a coordinate at most: a float32 has no more than 24 that count."""


Weights = NDArray[np.float64]
"""The work that each part is to get, relative to the others: ``[parts]``."""


def pieces(count: int, weights: Weights) -> Tensor:
    """Return the part of each place in a row of vertices, in consecutive pieces as large as their weights.

    Sizes differ from what the weights ask for by less than one.

    Shapes:
        ``[count]``, int64, ascending.

    Example:
        >>> pieces(7, np.array([2.0, 1.0])).tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    places, parts = torch.arange(count), weights.size
    if bool((weights == weights[0]).all()):
        # Floor of v P / N, in whole numbers: sizes differ by one at most.
        return places * parts // max(count, 1)
    # Where each piece ends; the last one takes what is left, so that rounding loses no vertex.
    ends = np.ceil(np.cumsum(weights) / weights.sum() * count)
    return torch.searchsorted(torch.from_numpy(ends[:-1]), places.double(), right=True)


def cut_by_coordinates(pos: Tensor | None, num_nodes: int, weights: Weights) -> Tensor:
    """Cut vertices into pieces as large as their weights along a Morton curve through their coordinates.

    Args:
        pos: The coordinates of each vertex, in one unit along all axes.
        num_nodes: The number of vertices.
        weights: The work of each part, relative to the others.

    Returns:
        The part of each vertex; with equal weights, sizes differ by one at most.

    Raises:
        PartitionError: If there are no coordinates, or they are not finite numbers.

    Shapes:
        pos ``[N, D]`` or ``[N]`` -> ``[N]``, int64.

    Cost:
        A sort of N numbers of 8 bytes.

    Source:
        Morton, A computer oriented geodetic data base, 1966.

    Example:
        >>> import torch
        >>> square = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float()
        >>> cut_by_coordinates(square, 16, np.ones(4)).view(4, 4).tolist()
        [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    """
    order = torch.argsort(morton_codes(_checked(pos, num_nodes)), stable=True)
    owner = torch.empty(num_nodes, dtype=torch.int64)
    owner[order] = pieces(num_nodes, weights)
    return owner


def morton_codes(pos: Tensor) -> Tensor:
    """Return the place of each point on a Morton curve.

    Shapes:
        ``[N, D]`` float64 -> ``[N]`` int64.
    """
    count, axes = pos.shape
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    bits = min(BITS // axes, MOST_BITS)
    low = pos.amin(0)
    # One scale for all axes: cells are cubes, and a thin sheet is not cut along its thickness.
    scale = (pos.amax(0) - low).max().clamp(min=torch.finfo(pos.dtype).tiny)
    cells = ((pos - low) / scale * (2**bits - 1)).long()
    codes = torch.zeros(count, dtype=torch.int64)
    for bit in range(bits):
        for axis in range(axes):
            # The first axis has the highest bit of each round.
            codes |= (cells[:, axis] >> bit & 1) << (bit * axes + axes - 1 - axis)
    return codes


def _checked(pos: Tensor | None, num_nodes: int) -> Tensor:
    if pos is None:
        raise PartitionError(
            "data.pos with the coordinates of each vertex, for partitioner='coordinates'",
            "data without pos",
            hint="data.pos = coordinates [N, D], or partitioner='metis'",
        )
    points = pos.detach().cpu()
    points = points.unsqueeze(1) if points.dim() == 1 else points
    if (
        points.dim() != 2
        or points.size(0) != num_nodes
        or not 0 < points.size(1) <= BITS
        or points.is_complex()
    ):
        raise PartitionError(
            f"coordinates [{num_nodes:,}, D] in data.pos, with 1 to {BITS} columns", f"{list(pos.shape)}"
        )
    points = points.double()
    if not bool(points.isfinite().all()):
        raise PartitionError(
            "finite coordinates in data.pos", f"{int((~points.isfinite()).any(1).sum()):,} rows that are not"
        )
    return points
