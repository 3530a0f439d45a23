"""Results: own rows of all ranks, written to a file a rank; and rows of a part whose model is in stages.

Where it sits: ``module`` and ``pipelined`` give rows of vertices to the user with it.
"""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import Tensor

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.sharding.model_face import ModelFace
from kagome.sharding.rows.row_transfer import joined
from kagome.storage.row_files import Format, Share, write_rows


def written(
    channel: Channel,
    folder: str | Path,
    rows: Tensor,
    own: Tensor,
    *,
    axis: int = 0,
    format: Format = "safetensors",
) -> Path:
    """Write own rows and their ids, and return the file. All ranks of the channel call it.

    Args:
        channel: The ranks that share the graph.
        folder: Where to write; made if it is not there.
        rows: Own rows, along axis 0.
        own: Their ids.
        axis: The axis of the rows in the tensor that is read back.
        format: Of the file.
    """
    # Rank 0's text marks the files of all ranks, so files of an older save are known from them.
    told: Any = channel.gather_objects([token_hex(8), own.numel()], "save of rows")
    total = sum(count for _, count in told)
    share = Share(told[0][0], channel.rank, channel.size, total, axis, list(rows.shape[1:]))
    return write_rows(Path(folder), own, rows, share, format)


class PartRows(ModelFace):
    """Rows of vertices along axis 0, where each of a part's stages has the same ones."""

    _part: Partition

    def own(self) -> Tensor:
        """Return the ids of this rank's own vertices in the whole graph: ``[n]``, int64, ascending."""
        return self._part.own.to(self._mesh.device)

    def place(self, value: Tensor) -> Tensor:
        """Return this rank's rows of a tensor.

        Args:
            value: All rows of the graph, or this rank's own, along axis 0.

        Raises:
            ModelError: If it has another number of rows.
        """
        own, count = self._part.own.numel(), self._part.num_nodes
        if value.dim() == 0 or value.size(0) not in (own, count):
            raise ModelError(
                f"{own:,} rows along axis 0, this rank's own vertices, or {count:,}, all of the graph",
                f"shape {list(value.shape)}",
                where=f"net.place, rank {self._mesh.rank}",
            )
        value = value.to(self._mesh.device)
        # With as many own rows as the graph has, this rank has all of them, in the graph's order.
        return value if value.size(0) == own else value[self.own()]

    def gather(self, value: Tensor) -> Tensor | None:
        """Return the rows of all ranks in the graph's own order on rank 0; None on the others.

        Args:
            value: Own rows, such as those of ``net.eval_step``. All ranks call it.
        """
        rows = self.place(value)
        found = joined(self._mesh.graph, rows, self.own(), self._part.num_nodes, "gather of vertices", dst=0)
        # Each stage's ranks have gathered the same rows; rank 0 of the first stage is rank 0 of all.
        return None if self._mesh.rank else found

    def save(self, value: Tensor, folder: str | Path) -> Path:
        """Write own rows and their ids to a file of this part: ``rows-PART-of-PARTS.safetensors``.

        Args:
            value: Own rows, such as those of ``net.eval_step``.
            folder: Where to write; made if it is not there.
        """
        channel = self._mesh.graph
        # Ranks of later stages have the same rows, and must not write one file at the same time.
        if self._mesh.stage:
            return Path(folder) / f"rows-{channel.rank:05}-of-{channel.size:05}.safetensors"
        return written(channel, folder, self.place(value), self.own())
