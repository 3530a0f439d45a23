"""The command line: train, predict, plan, check, partition, report and doctor."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Args:
        argv: The words after ``kagome``; those of the process where there are none.
    """
    # A launcher of ranks asks for this package only, and needs no torch.
    from kagome.cli.app import main as run

    run(argv)
