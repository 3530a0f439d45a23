"""``python -m tests.fuzz``: many cases of the kinds; see ``--help``."""

from .runner import main

if __name__ == "__main__":
    main()
