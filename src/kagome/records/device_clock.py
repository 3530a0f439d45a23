"""Device clock: when a GPU comes to a point of the program, by events on its stream.

Where it sits: ``spans`` marks the begin and end of each phase with it. The host gives a GPU its work ahead of
time, so a host's clock would tell how long the giving takes: nearly all time would seem to pass where the
host first waits, as in an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DeviceClock:
    """Marks on the current stream of a device, read as seconds of a host's clock.

    Args:
        device: The device, not the CPU.
        clock: The host's clock, in seconds. The device's first mark is its zero.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._kind = device.type
        self._base = self.mark()
        # Both clocks are read at one moment: the host waits until the device has come to the mark.
        self._base.synchronize()
        self._zero = clock()

    def mark(self) -> torch.Event:
        """Mark the point that the host has come to; it does not wait."""
        import torch  # here, as pages of a run are written without it

        event = torch.Event(self._kind, enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        """Return when the device came to each mark.

        Cost:
            The host waits until the device has come to all of them.
        """
        for mark in marks:
            mark.synchronize()
        found = [self._zero + self._base.elapsed_time(mark) / 1e3 for mark in marks]
        if found:
            # An event's distance is a float32 of milliseconds, which is coarse after some hours. The next
            # marks are measured from the last one of these.
            self._zero = max(found)
            self._base = marks[found.index(self._zero)]
        return found
