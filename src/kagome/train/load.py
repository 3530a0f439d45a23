"""Load a graph by name: the data of ``kagome train --data.name``, as a function.

Where it sits: the public interface re-exports it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch_geometric.data import Data

from kagome import config
from kagome.errors import ConfigError
from kagome.graph.datasets.load import load_data


def load(name: str = "digits", **settings: Any) -> Data:
    """Load a graph by any name that the command line takes.

    Args:
        name: ``digits``, ``sbm:vertices=...``, ``Cora``, ``pyg:Class[:name]``, ``npz:FILE``, ...
        settings: Further fields of :class:`kagome.config.Data` (``root``, ``undirected``, ``project``, ...).

    Returns:
        A validated PyG ``Data`` with one training, validation and test mask.

    Raises:
        ConfigError: If there is no such setting, or its value has the wrong type.
        DataError: If the data set is unknown, cannot be obtained, or has a fault.

    Example:
        >>> import kagome
        >>> data = kagome.load("sbm:vertices=60,degree=4,features=6,classes=3,communities=3")
        >>> data.x.shape
        torch.Size([60, 6])
    """
    known = [field.name for field in fields(config.Data) if field.name != "name"]
    if other := [key for key in settings if key not in known]:
        raise ConfigError(f"settings of load(name, ...): {', '.join(known)}", repr(other[0]))
    return load_data(config.Data(name=name, **settings))
