"""The command line: `headroom`, also called `planner`."""

import argparse
import errno
import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from planner import __version__
from planner.core.errors import PlannerError, require_extra
from planner.core.files import get_report_date
from planner.core.redaction import MASK, quote_name
from planner.core.text import get_program_name
from planner.ui.commands import data, diagnostics, plans, tables
from planner.ui.commands.options import print_message

COMMANDS = {
    "plan": (
        plans.add_init,
        plans.add_check,
        plans.add_plan,
        plans.add_report,
        plans.add_fleet,
        tables.add_predict,
        plans.add_lab,
    ),
    "operate": (
        diagnostics.add_verify,
        diagnostics.add_explain_log,
        diagnostics.add_diagnose,
        diagnostics.add_lint,
    ),
    "data": (
        diagnostics.add_profile,
        data.add_calibrate,
        data.add_replay,
        data.add_list,
    ),
}
"""What declares each command, by its group and in the order of `headroom --help`."""

REPLACEMENTS = {
    "gpus": "`headroom list gpus`",
    "mcp": "the `--json` of commands such as `headroom plan`",
    "models": "`headroom list models`",
    "review": "`headroom lint` of both files",
    "scenarios": "`headroom list scenarios`",
    "sweep": "`headroom predict SWEEP.yaml --out TABLE`",
    "upgrade": "`headroom lint plan.json --to VERSION`, or `headroom plan plan.json`",
}
"""What to use instead of commands of earlier versions."""

EXIT_FAILURE = 70
"""Exit code for a failure of the planner or the machine, `EX_SOFTWARE` of sysexits.h."""

IMPOSSIBLE_NAME_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP)
"""What systems say of names that no file can have: unusable input, whatever reads it first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 if all went well, 2 for unusable input.

    Commands have other codes of their own, such as 1 if rows of a batch failed. `EXIT_FAILURE`
    says that the planner or the machine failed, whatever the input.
    """
    if sys.stdout is None:  # closed: the next file that is opened would take its place
        print_message("stdout is closed; send it to /dev/null if you do not need it")
        return EXIT_FAILURE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals that are not UTF-8, names of no text
            stream.reconfigure(errors="backslashreplace")
    try:
        parser = build_parser()
        options, rest = parser.parse_known_args(arguments)
        if rest and not options.takes_rest(options):
            names = (
                f"--{quote_name(one.partition('=')[0].lstrip('-'))}" if one[:1] == "-" else MASK
                for one in rest
            )
            parser.error(f"unrecognized arguments: {' '.join(names)[:300]}")
        options.rest = rest
        # a search makes many small objects and few cycles; the default costs a tenth of its time
        gc.set_threshold(200_000, 20, 50)
        get_report_date()  # libraries read its variable too, and end with a traceback
        with require_extra(options.extra, options.command):
            code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _discard_stdout()
        return 0
    except argparse.ArgumentError as error:  # commands that exist have parsers of their own
        instead = REPLACEMENTS.get(name := (sys.argv[1:] if arguments is None else arguments)[0])
        # without the value that argparse quotes
        print_message(
            f"there is no command {name}: use {instead}"
            if instead
            else re.sub(r"(value:|choice:|got) (?:'[^']*'|\"[^\"]*\")", rf"\1 '{MASK}'", str(error))
        )
        return 2
    except PlannerError as error:
        for problem in error.problems:
            print_message(problem)
        return 2
    except MemoryError:
        print_message("the machine has too little memory for this")
        return EXIT_FAILURE
    except OSError as error:  # such as a full disk: readers and writers of files have their own
        _discard_stdout()
        where = f"{error.filename!s:.80}: " if error.filename else ""
        print_message(f"{where}{error.strerror or error}")
        return 2 if error.errno in IMPOSSIBLE_NAME_ERRORS else EXIT_FAILURE
    except Exception as error:
        if os.environ.get("PLANNER_TRACEBACK"):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        print_message(
            f"this is a bug of the planner, please report it ({type(error).__name__} in"
            f" {os.path.basename(place.filename)}:{place.lineno}: {str(error)[:200]});"
            " PLANNER_TRACEBACK=1 shows more"
        )
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print_message("interrupted")
        # does not wait for running notebooks: their kernels end with this process
        os._exit(130)


def _discard_stdout() -> None:
    """Send what is still to be written to stdout nowhere, so that Python does not try again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, which stores each one's function as `run`."""
    name = get_program_name()
    parser = argparse.ArgumentParser(
        prog=name,
        usage=f"{name} [-h] [--version] COMMAND ...",
        description="Capacity planning for LLM serving.",
        epilog=f"Start with `{name} init`, edit the file, then `{name} plan scenario.yaml`."
        f" `{name} COMMAND --help` lists the options of a command.",
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help(), takes_rest=lambda _: False, extra="")
    commands = parser.add_subparsers(
        prog=name, metavar="COMMAND", dest="command", help=argparse.SUPPRESS
    )
    for group, add_commands in COMMANDS.items():
        for add_command in add_commands:
            add_command(commands)
        # argparse has one list of commands, and lists what an argument group holds
        parser.add_argument_group(group)._group_actions.extend(commands._choices_actions)
        commands._choices_actions.clear()
    return parser
