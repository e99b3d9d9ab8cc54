"""Options and messages that several commands share."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import PlannerError
from planner.core.progress import watch_progress
from planner.core.redaction import redact_json, redact_text
from planner.core.text import escape_to_one_line, get_program_name
from planner.ui.progress_line import CLEAR_LINE, draw_on_terminal

if TYPE_CHECKING:
    from numba.core.event import Event

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Argument = tuple[tuple[str, ...], dict[str, Any]]
TEMPLATE_DIR = Path(__file__).parents[1] / "templates"
TIME_LIMIT_S = 600.0
"""Seconds that a command takes by default before it answers with what it has."""


def declare(*names: str, **settings: Any) -> Argument:
    """Declare an argument of a command, with what `ArgumentParser.add_argument` takes."""
    return names, settings


def limit_time(default_s: float = TIME_LIMIT_S) -> Argument:
    """Declare --time-limit, which `watch_command` reads."""
    return declare(
        "--time-limit",
        type=float,
        default=default_s,
        metavar="SECONDS",
        help="answer with what is found after so many seconds, and say what was left out "
        f"(default: {default_s:g})",
    )


SET = declare(
    "--set",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="change a field of the scenario, such as workload.rate=12 or gpus.0.at_most=8; "
    "FIELD=null removes it; repeat for several fields",
)
SCENARIO = declare(
    "scenario",
    help="YAML file, name of a shipped scenario (`headroom list scenarios`), or saved plan whose"
    " scenario is meant: plan.json or its folder",
)
FORCE = declare(
    "--force", action="store_true", help="replace files that this command did not write"
)
JSON = declare("--json", action="store_true", help="print JSON instead of text")
LOG = declare("--log", type=Path, metavar="LOG", help="startup log of the server")
SECONDS = declare(
    "--seconds",
    type=float,
    metavar="S",
    help="time between the two pages, if the files' times do not show it",
)


def make_command(
    name: str, run: Callable[[argparse.Namespace], int | None], *, arguments: Sequence[Argument],
    notes: Mapping[str, str] | None = None, extra: str = "",
    takes_rest: Callable[[argparse.Namespace], bool] = lambda _: False, **settings: Any,
) -> "Callable[[Subparsers], None]":  # fmt: skip
    """Return what adds a command, which `run` does, to the parser.

    `notes` stand below its options, by title; `extra` is the optional part that it needs. It gets
    unknown words where it `takes_rest`. `settings` are those of its parser.
    """

    def add_command(commands: "Subparsers") -> None:
        parser = commands.add_parser(name, exit_on_error=False, **settings)
        for names, each in arguments:
            parser.add_argument(*names, **each)
        for title, text in (notes or {}).items():
            parser.add_argument_group(title, text)
        parser.set_defaults(run=run, takes_rest=takes_rest, extra=extra)

    return add_command


def parse_overrides(options: argparse.Namespace) -> dict[str, object]:
    """Return the values that --set gives, by field."""
    from planner.core.readers import parse_yaml

    overrides = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise PlannerError(f"--set takes FIELD=VALUE, such as workload.rate=12, got {text!r}")
        overrides[key] = parse_yaml(value, f"--set {key}")
    return overrides


def parse_count(text: str) -> int:
    """Return a whole number from 1 to 1,024; raise `ArgumentTypeError` for other text."""
    if not (text.isdecimal() and 1 <= int(text[:9]) <= 1024):
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to 1024, got {text!r:.40}"
        )
    return int(text)


def watch_command(
    run: Callable[[argparse.Namespace], int | None],
) -> Callable[[argparse.Namespace], int | None]:
    """Make a command show its progress on a terminal, and answer within its --time-limit.

    It says once on stderr that it compiles, and the limit counts from then. A command that answered
    although it was interrupted ends as one that did not.
    """

    @wraps(run)
    def run_watched(options: argparse.Namespace) -> int | None:
        from numba.core.event import Listener, install_listener

        class CompilationListener(Listener):
            announced = False

            def on_start(self, event: "Event") -> None:
                from planner.simulator.compilation import find_code_folder

                if not self.announced:
                    how_often = (
                        "once on this machine"
                        if find_code_folder()
                        else "each time, as you have no cache folder to keep it in"
                    )
                    print_message(f"compiling the simulator, {how_often}: up to a minute or two")
                self.announced = True

            def on_end(self, event: "Event") -> None:
                watch.started = watch.clock()

        limit_s = getattr(options, "time_limit", math.inf)
        with (
            watch_progress(limit_s, draw_on_terminal) as watch,
            install_listener("numba:compile", CompilationListener()),
        ):
            code = run(options)
        if watch.is_interrupted:
            sys.stdout.flush()
            raise KeyboardInterrupt
        return code

    return run_watched


def print_message(message: str) -> None:
    """Print a line on stderr, if it can be written."""
    if sys.stderr is not None:
        with suppress(OSError):
            text = f"{get_program_name()}: {redact_text(escape_to_one_line(message))}"
            print(f"{CLEAR_LINE * sys.stderr.isatty()}{text}", file=sys.stderr, flush=True)


def format_json(data: Mapping[str, object]) -> str:
    """Return JSON for `--json`, without secrets."""
    return json.dumps(redact_json(data), indent=2, allow_nan=False)
