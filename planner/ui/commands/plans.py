"""Commands that plan: init, check, plan, report and fleet."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core.errors import PlannerError
from planner.core.files import replace_atomically
from planner.ui.commands.options import (
    TEMPLATE_DIR,
    add_scenario_arguments,
    add_set_option,
    announce_compilation,
    format_json,
    parse_overrides,
    print_message,
)

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers

NEXT_COMMANDS = {"scenario": "check", "sweep": "sweep --out sweep.csv", "fleet": "fleet"}
"""The command for a file that `planner init` wrote, by its kind."""


def add_init(commands: "Subparsers") -> None:
    """Declare `planner init`."""
    parser = commands.add_parser(
        "init", help="write a commented scenario, sweep or fleet to start from"
    )
    parser.add_argument("file", nargs="?", type=Path, default="scenario.yaml", metavar="FILE.yaml")
    parser.add_argument(
        "--kind",
        choices=list(NEXT_COMMANDS),
        default="scenario",
        help="what is written (default: scenario)",
    )
    parser.set_defaults(run=run_init)


def run_init(options: argparse.Namespace) -> None:
    """Copy a template to a file that does not exist yet."""
    path, kind = options.file, options.kind
    if path.suffix not in (".yaml", ".yml"):
        raise PlannerError(f"a {kind} is a .yaml file, got {path}")
    if path.exists():
        raise PlannerError(f"{path} exists and stays as it is; name another file")
    with replace_atomically(path, new=True) as (part,):
        part.write_bytes((TEMPLATE_DIR / f"{kind}.yaml").read_bytes())
    print(f"wrote {path}; next: planner {NEXT_COMMANDS[kind]} {shlex.quote(str(path))}")


def add_check(commands: "Subparsers") -> None:
    """Declare `planner check`."""
    parser = commands.add_parser(
        "check", help="say what was understood of a scenario, without planning it"
    )
    add_scenario_arguments(parser)
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> None:
    """Print how a scenario is read."""
    from planner.planning.scenario import load_scenario
    from planner.ui.plan_text import format_scenario

    print(format_scenario(load_scenario(options.scenario, parse_overrides(options))))


def add_plan(commands: "Subparsers") -> None:
    """Declare `planner plan`."""
    parser = commands.add_parser("plan", help="the answer to a scenario in seconds, without a PDF")
    add_scenario_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write plan.json and the plan's files there"
    )
    parser.add_argument("--all", action="store_true", help="print all details below the answer")
    parser.add_argument(
        "--json", action="store_true", help="print plan.json instead of a dozen lines"
    )
    parser.set_defaults(run=run_plan)


@announce_compilation
def run_plan(options: argparse.Namespace) -> int:
    """Print the plan of a scenario, and write its files; the exit code is the verdict's."""
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search_deployments
    from planner.ui.plan_files import write_plan_files
    from planner.ui.plan_json import serialize_plan
    from planner.ui.plan_text import EXIT_CODES, format_plan
    from planner.ui.terminal import detect_style

    scenario = load_scenario(options.scenario, parse_overrides(options))
    if scenario.daily_profile and sys.stderr.isatty():
        print_message("replaying the hours of several days, up to a minute or two")
    plan = search_deployments(scenario)
    names = write_plan_files(plan, options.out) if options.out else ()
    if options.json:
        print(format_json(serialize_plan(plan)))
        return EXIT_CODES[plan.verdict]
    words = ["planner", "plan", options.scenario]
    words += [word for text in options.set for word in ("--set", text)]
    out = shlex.quote(str(options.out)) if options.out else ""
    command = shlex.join(words)
    print(format_plan(plan, detect_style(), command=command, out=out, detailed=options.all))
    if names:
        print(f"  Written   {', '.join(names)} in {options.out}")
    return EXIT_CODES[plan.verdict]


def add_report(commands: "Subparsers") -> None:
    """Declare `planner report`."""
    parser = commands.add_parser(
        "report",
        help="write the capacity report of a scenario, or of several side by side, a PDF",
    )
    parser.add_argument(
        "scenarios",
        nargs="+",
        metavar="SCENARIO",
        help="a YAML file, or the name of a shipped scenario; 2 to 4 are compared",
    )
    add_set_option(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to (default: reports/SCENARIO)"
    )
    parser.set_defaults(run=run_report)


@announce_compilation
def run_report(options: argparse.Namespace) -> None:
    """Write a PDF about one scenario, or one that compares several."""
    from planner.ui.pdf_report import write_comparison_report, write_report

    names, overrides = options.scenarios, parse_overrides(options)
    path = (
        write_report(names[0], options.out, overrides)
        if len(names) == 1
        else write_comparison_report(names, options.out, overrides)
    )
    print(f"report: {path}")


def add_fleet(commands: "Subparsers") -> None:
    """Declare `planner fleet`."""
    parser = commands.add_parser(
        "fleet",
        help="share a stock of GPUs among several scenarios at least cost, and write a PDF of it",
    )
    parser.add_argument(
        "fleet",
        type=Path,
        metavar="FLEET.yaml",
        help="scenarios, stock (GPUs by kind), usd_per_hour_at_most, power_at_most, growth",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: reports/FLEET)")
    parser.set_defaults(run=run_fleet)


@announce_compilation
def run_fleet(options: argparse.Namespace) -> None:
    """Write a PDF about the allocation of a fleet."""
    from planner.ui.pdf_report import write_fleet_report

    print(f"report: {write_fleet_report(options.fleet, options.out)}")
