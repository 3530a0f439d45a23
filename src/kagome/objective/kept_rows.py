"""Kept rows: refuse a loss that reads rows which forward has stored, since a rank stores its own rows only.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` enter it while a loss is checked. Rows
that forward returns reach the loss for the training vertices. Rows that forward stores in an attribute of the
model are all of the rank's own rows, and a mean over them is not a mean over the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kagome.errors import ModelError
from kagome.user_frame import user_line


class RefusesKept(TorchFunctionMode):
    """Torch function mode that refuses calls on tensors with a row for each vertex or edge of this part.

    Args:
        has_rows: Returns whether a tensor has such rows.
        model: The user's module; its parameters and buffers are whole on each rank and allowed.
    """

    def __init__(self, has_rows: Callable[[Tensor], bool], model: nn.Module) -> None:
        super().__init__()
        self._has_rows = has_rows
        # A weight can have as many rows as the part by chance.
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch call of the loss.

        Raises:
            ModelError: If it reads rows that forward has stored.
        """
        for value in (*args, *(kwargs or {}).values()):
            # torch.cat and torch.stack take their tensors in a list.
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(each, Tensor) and id(each) not in self._own and self._has_rows(each):
                    raise ModelError(
                        "a loss to read only rows that forward returns, of all ranks' training vertices",
                        "a loss that reads rows which forward has kept, of which a rank has its own",
                        where=user_line() or "the loss",
                        hint="return them beside the scores (out, h), or keep their mean",
                    )
        return func(*args, **(kwargs or {}))
