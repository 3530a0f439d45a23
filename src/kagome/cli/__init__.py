"""The command line: train, predict, plan, check, partition, report and doctor."""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise


def command() -> None:
    """Run the command of this process, as ``kagome`` and ``python -m kagome`` do.

    A training on one rank holds less memory (8 to 17 % were measured) with a setting of the allocator that a
    process has to be started with. So such a process is replaced by one with the same command line.

    Cost:
        The start of Python, if the process is replaced.
    """
    from kagome.errors import LaunchError
    from kagome.launch.allocator import TUNABLES, merging
    from kagome.launch.environment import environment

    try:
        # A launcher has started its ranks with what they are to have. A debugger would lose its process.
        again = environment().source == "single" and trains_alone(sys.argv[1:]) and sys.gettrace() is None
    except LaunchError:  # `main` tells it
        again = False
    if again and TUNABLES not in os.environ and (more := merging()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **more})
    main()


def trains_alone(words: Sequence[str]) -> bool:
    """Return whether a command may train as one rank, in its own process.

    Args:
        words: The words after ``kagome``.

    Example:
        >>> trains_alone(["train", "--data.name", "Cora"]), trains_alone(["train", "--nproc", "2"])
        (True, False)
    """
    # Without any flag there are two ranks.
    if list(words[:1]) != ["train"] or len(words) == 1:
        return False
    asked = [after for word, after in pairwise([*words, ""]) if word == "--nproc"]
    asked += [word.removeprefix("--nproc=") for word in words if word.startswith("--nproc=")]
    return all(number == "1" for number in asked)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Args:
        argv: The words after ``kagome``; those of the process where there are none.
    """
    # A launcher of ranks asks for this package only, and needs no torch.
    from kagome.cli.app import main as run

    run(argv)
