"""Options and messages that several commands share."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from planner.core.errors import PlannerError
from planner.core.redaction import redact_text
from planner.core.text import escape_to_one_line, get_program_name

if TYPE_CHECKING:
    from numba.core.event import Event

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

TEMPLATE_DIR = Path(__file__).parents[1] / "templates"
ResultT = TypeVar("ResultT")
CLEAR_LINE = "\r\033[K"
"""Ends a line of progress on a terminal."""


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a scenario and the fields to set in it."""
    parser.add_argument(
        "scenario", help="YAML file, or name of a shipped scenario (`headroom scenarios`)"
    )
    add_set_option(parser)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add --set, which `parse_overrides` reads."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the scenario, such as workload.rate=12 or gpus.0.at_most=8; "
        "FIELD=null removes it; repeat for several fields",
    )


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


def announce_compilation(
    run: Callable[[argparse.Namespace], ResultT],
) -> Callable[[argparse.Namespace], ResultT]:
    """Make a command that simulates say once on stderr that it compiles, which takes a while."""

    @wraps(run)
    def run_announced(options: argparse.Namespace) -> ResultT:
        from numba.core.event import Listener, install_listener

        class CompilationListener(Listener):
            announced = False

            def on_start(self, event: "Event") -> None:
                if not self.announced:
                    print_message(
                        "compiling the simulator, once on this machine: up to a minute or two"
                    )
                self.announced = True

            def on_end(self, event: "Event") -> None:
                pass

        with install_listener("numba:compile", CompilationListener()):
            return run(options)

    return run_announced


def print_message(message: str) -> None:
    """Print a line on stderr, if it can be written."""
    if sys.stderr is not None:
        with suppress(OSError):
            text = f"{get_program_name()}: {redact_text(escape_to_one_line(message))}"
            print(f"{CLEAR_LINE * sys.stderr.isatty()}{text}", file=sys.stderr, flush=True)


def print_progress(done: int, total: int, unit: str) -> None:
    """Print a line on stderr that the next one overwrites until all is done."""
    end = "\n" if done == total else ""
    print(f"\r{done:,} of {total:,} {unit}", end=end, file=sys.stderr, flush=True)


@contextmanager
def show_elapsed_time(what: str) -> Iterator[None]:
    """Show on a terminal's stderr for how long `what` has run, on a line that is gone at its end."""
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        while not done.wait(1.0):
            elapsed = f"{what}, {time.monotonic() - start:.0f} s"
            print(f"{CLEAR_LINE}{elapsed}", end="", file=sys.stderr, flush=True)

    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def format_json(data: Mapping[str, object]) -> str:
    """Return JSON for `--json`."""
    return json.dumps(data, indent=2, allow_nan=False)
