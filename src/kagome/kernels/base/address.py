"""Address: what tells a tensor's numbers from another's.

Where it sits: whatever keeps results by the tensors they were computed from; imports nothing of ours.
"""

from __future__ import annotations

from torch import Tensor


def address(tensor: Tensor) -> int:
    """Where a tensor's numbers lie; of one without any, which storage it would have them in.

    What a rank without edges keeps must be what the others keep: two tensors of theirs are two of its own.
    """
    return tensor.data_ptr() or int(tensor.untyped_storage()._cdata)
