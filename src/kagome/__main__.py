"""``python -m kagome``: the command line, for launchers that start modules."""

from kagome.cli import main

if __name__ == "__main__":
    main()
