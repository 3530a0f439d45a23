"""``python -m kagome``: the command line, for launchers that start modules."""

from kagome.config.named_module import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()
    from kagome.cli import command

    command()
