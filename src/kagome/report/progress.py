"""Progress of a run while it trains: a live line on a terminal, plain lines in a log, TensorBoard on demand.

Where it sits: rank 0 passes it each epoch's record; nothing reads it back.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kagome.errors import ConfigError
from kagome.records.epoch import EpochRecord, by_kind
from kagome.records.units import metric_text, seconds_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Display of epoch, loss, validation metric and time left.

    On a terminal it is one live line. Elsewhere (CI logs, batch jobs) it prints plain lines: the first, the
    last, and between them at most one every ``every`` seconds.

    Args:
        epochs: The number of epochs of the whole run.
        done: The number of epochs done before a resume.
        metric_name: For example ``accuracy``; or a function that returns it once it is known.
        enabled: Whether to show anything; False on other ranks and with ``--report.no-progress``.
        stream: Where to write; by default standard error.
        every: Least seconds between two plain lines.
        clock: Returns seconds.
    """

    def __init__(
        self,
        epochs: int,
        *,
        done: int = 0,
        metric_name: str | Callable[[], str] = "metric",
        enabled: bool = True,
        stream: TextIO | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epochs, self.done, self.metric_name = epochs, done, metric_name
        self.enabled = enabled
        self.stream = sys.stderr if stream is None else stream
        self.every, self.clock = every, clock
        self._val: float | None = None
        self._shown_at: float | None = None
        self._unshown: str | None = None
        # Ends of the last epochs, evaluation included; the time left is estimated from them.
        self._ends: deque[float] = deque([clock()], maxlen=30)
        # A live line moves the cursor, which fills a log file with escape codes.
        self._live: RichProgress | None = self._start_live() if enabled and self.stream.isatty() else None

    def update(self, record: EpochRecord) -> None:
        """Record one finished epoch and show it."""
        self.done += 1
        self._ends.append(self.clock())
        # Evaluation may come every few epochs; between them the last score is shown.
        if record.val_metric is not None:
            self._val = record.val_metric
        if not self.enabled:
            return
        if self._live is not None:
            task = self._live.task_ids[0]
            self._live.update(task, completed=self.done, facts=self._facts(record), left=self._left())
            return
        line = f"epoch {self.done}/{self.epochs}  {self._facts(record)}  {self._left()}".rstrip()
        # A log of ten thousand short epochs is of no use to anyone, and writing it takes time.
        due = self._shown_at is None or self.clock() - self._shown_at >= self.every
        if due or self.done >= self.epochs:
            self._print(line)
        else:
            self._unshown = line

    def close(self) -> None:
        """Show the last epoch if it was not shown (an early stop), and release the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._unshown is not None:
            self._print(self._unshown)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _facts(self, record: EpochRecord) -> str:
        facts = f"loss {metric_text(record.loss)}"
        if self._val is None:
            return facts
        name = self.metric_name() if callable(self.metric_name) else self.metric_name
        return f"{facts}  val {name} {metric_text(self._val)}"

    def _left(self) -> str:
        # `update` has added an end, so there are two at least.
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = (self.epochs - self.done) * pace
        if left <= 0:
            return ""
        return f"{math.ceil(left)} s left" if left < 119.5 else f"{seconds_text(left)} left"

    def _print(self, line: str) -> None:
        self._shown_at, self._unshown = self.clock(), None
        print(line, file=self.stream, flush=True)

    def _start_live(self) -> RichProgress:
        # Imported here: rich takes time to load, and most ranks show nothing.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn

        live = RichProgress(
            TextColumn("epoch"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[facts]}", markup=False),
            TextColumn("[dim]{task.fields[left]}"),
            console=Console(file=self.stream),
        )
        live.add_task("training", total=self.epochs, completed=self.done, facts="", left="")
        live.start()
        return live


class TensorBoard:
    """Writer of each epoch as TensorBoard scalars.

    Args:
        folder: The folder for the event files.
        after: On resume, the last epoch in the checkpoint; later events are hidden.

    Raises:
        ConfigError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path, *, after: int | None = None) -> None:
        try:
            import tensorboard  # noqa: F401

            # The only place of ``report`` that loads torch, and only if TensorBoard was asked for.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard to be installed for report.tensorboard",
                f"an import that failed: {error}",
                hint="pip install 'kagome[tensorboard]', or leave --report.tensorboard out",
            ) from None
        step = None if after is None else after + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=step)

    def write(self, record: EpochRecord) -> None:
        """Write one epoch; values that were not evaluated are left out."""
        scalars = {
            "loss": record.loss,
            "metric/train": record.train_metric,
            "metric/validation": record.val_metric,
            "seconds": record.seconds,
        }
        scalars |= {f"bytes/{kind}": count for kind, count in by_kind(record.bytes).items() if count}
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.epoch)

    def close(self) -> None:
        """Write pending events and close the files."""
        self._writer.close()


def warn(line: str) -> None:
    """Print a warning to standard error in Kagome's name."""
    print(f"kagome: {line}", file=sys.stderr, flush=True)
