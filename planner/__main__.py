"""`python -m planner` is the command `planner`."""

import os


def run() -> int:
    """Run the command; Ctrl-C ends it in a line while its modules load, too."""
    try:
        from planner.ui.cli import main

        return main()
    except KeyboardInterrupt:
        os.write(2, b"planner: interrupted\n")
        os._exit(130)


if __name__ == "__main__":
    raise SystemExit(run())
