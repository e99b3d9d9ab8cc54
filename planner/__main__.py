"""`python -m planner` is the command `headroom`."""

import os


def run() -> int:
    """Run the command; Ctrl-C ends it in a line while its modules load, too."""
    try:
        from planner.ui.cli import main

        return main()
    except KeyboardInterrupt:
        from planner.core.text import get_program_name

        os.write(2, f"{get_program_name()}: interrupted\n".encode())
        os._exit(130)


if __name__ == "__main__":
    raise SystemExit(run())
