"""`python -m planner` is the command `headroom`."""

import os


def run() -> int:
    """Run the command; Ctrl-C ends it in a line while its modules load, too."""
    if os.path.expanduser("~") == "~":  # an account that is none of the machine's, in a container
        os.environ["HOME"] = os.devnull  # libraries ask for one as they load; nothing is kept in it
    try:
        from planner.ui.cli import main

        return main()
    except KeyboardInterrupt:
        from planner.core.text import get_program_name

        os.write(2, f"{get_program_name()}: interrupted\n".encode())
        os._exit(130)


if __name__ == "__main__":
    raise SystemExit(run())
