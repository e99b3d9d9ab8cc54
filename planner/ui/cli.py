"""The `planner` command."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from planner import __version__
from planner.core.errors import PlannerError
from planner.ui.commands import catalogs, diagnostics, lab, plans, simulation, tables
from planner.ui.commands.options import print_message

COMMANDS = (
    plans.add_init,
    plans.add_check,
    plans.add_plan,
    plans.add_report,
    tables.add_predict,
    tables.add_sweep,
    plans.add_fleet,
    diagnostics.add_explain_log,
    diagnostics.add_diagnose,
    diagnostics.add_profile,
    diagnostics.add_lint,
    simulation.add_replay,
    simulation.add_calibrate,
    lab.add_lab,
    catalogs.add_scenarios,
    catalogs.add_models,
    catalogs.add_gpus,
)
"""What declares each command, in the order of `planner --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 if all went well, 2 for unusable input.

    Commands have other codes of their own, such as 1 if rows of a batch failed.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_rest(options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    # a search makes many small objects and few cycles; the default costs a tenth of its time
    gc.set_threshold(200_000, 20, 50)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PlannerError as error:
        print_message(str(error))
        return 2
    except KeyboardInterrupt:
        print_message("interrupted")
        # does not wait for running notebooks: their kernels end with this process
        os._exit(130)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, which stores each one's function as `run`."""
    parser = argparse.ArgumentParser(
        prog="planner", description="Capacity planning for LLM serving."
    )
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help(), takes_rest=lambda _: False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(commands)
    return parser
