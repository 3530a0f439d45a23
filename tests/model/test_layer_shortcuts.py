"""Stand-ins of functions in PyG's layers are found while other threads use the same classes."""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from torch_geometric.nn import GCNConv

from kagome.model.exact.layer_shortcuts import with_shortcuts


def test_a_class_may_gain_an_attribute_in_another_thread_meanwhile() -> None:
    """``deepcopy`` writes ``__slotnames__`` into a layer's class: ranks that are threads failed."""

    class Mine(GCNConv):  # type: ignore[misc]
        pass

    layer, ended, failures = Mine(2, 2), threading.Event(), []
    before = sys.getswitchinterval()

    def change() -> None:
        numbers = count()
        while not ended.is_set():
            setattr(Mine, f"attribute_{next(numbers) % 1_000}", 0)
            if len(vars(Mine)) > 1_000:
                for name in [each for each in list(vars(Mine)) if each.startswith("attribute_")]:
                    delattr(Mine, name)

    other = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    try:
        other.start()
        for _ in range(200):
            try:
                with_shortcuts(layer, cast(Any, SimpleNamespace()))
            except RuntimeError as error:
                failures.append(error)
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(before)
    assert not failures
