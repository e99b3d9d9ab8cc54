"""Commands about servers that run: explain-log, diagnose, profile and lint."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core.redaction import redact_text
from planner.ui.commands.options import format_json, watch_command

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_explain_log(commands: "Subparsers") -> None:
    """Declare `headroom explain-log`."""
    parser = commands.add_parser(
        "explain-log",
        help="compare a vLLM startup log with the plan, and show what could be gained",
    )
    parser.add_argument("log", type=Path, metavar="FILE", help="startup log of vLLM")
    parser.add_argument(
        "--scenario",
        metavar="SCENARIO",
        help="scenario to compare with, on the GPU of the log or --gpu; arguments in the log take "
        "precedence",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU of the server, or how many (4xH100); few logs name it"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model of the server, if the log does not name it"
    )
    parser.add_argument(
        "--command",
        dest="launched",
        metavar="WHAT",
        help="command line (in quotes) or file that started the server, for what the log leaves "
        "out; requires --gpu",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run_explain_log)


@watch_command
def run_explain_log(options: argparse.Namespace) -> int:
    """Compare a startup log with the plan; 1 if the log ends in an error."""
    from planner.tools.diagnostics.startup_errors import FailedStartError
    from planner.ui.log_explanation import explain_log

    try:
        explanation = explain_log(
            options.log,
            options.gpu,
            scenario=options.scenario,
            command=options.launched,
            model=options.model,
        )
    except FailedStartError as error:
        print(format_json({"failure": error.lines}) if options.json else "\n".join(error.lines))
        return 1
    failed = int(bool(explanation.log.failure or explanation.errors))
    if options.json:
        print(format_json(explanation.to_json()))
        return failed
    print(redact_text(str(explanation)))
    if explanation.scenario_line:
        print(
            "\nTo plan with what this log says, add to the scenario"
            f" (GiB):\n{explanation.scenario_line}"
        )
    if explanation.suggestions:
        print(redact_text(f"\n{explanation.suggestions}"))
    return failed


def add_diagnose(commands: "Subparsers") -> None:
    """Declare `headroom diagnose`."""
    parser = commands.add_parser(
        "diagnose",
        help="find what is wrong with a running server from its /metrics and log, and how to fix it",
    )
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="METRICS",
        help="one or two saved /metrics pages of a replica, the earlier first, or its URL",
    )
    parser.add_argument("--log", type=Path, metavar="LOG", help="startup log of the server")
    parser.add_argument(
        "--plan", metavar="PLAN", help="plan to compare with: a scenario or a plan.json"
    )
    _add_seconds_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run_diagnose)


def _add_seconds_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time between the two pages, if the files' times do not show it",
    )


@watch_command
def run_diagnose(options: argparse.Namespace) -> int:
    """Print what is wrong with a server; the exit code is the diagnosis's."""
    from planner.tools.diagnostics import diagnose

    diagnosis = diagnose(options.pages, options.log, options.plan, options.seconds)
    print(format_json(diagnosis.to_json()) if options.json else redact_text(str(diagnosis)))
    return diagnosis.exit_code


def add_profile(commands: "Subparsers") -> None:
    """Declare `headroom profile`."""
    parser = commands.add_parser(
        "profile", help="print a scenario's workload from an access log or /metrics pages"
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        help="access log (CSV, JSON lines), or one or two saved /metrics pages",
    )
    _add_seconds_option(parser)
    parser.set_defaults(run=run_profile)


def run_profile(options: argparse.Namespace) -> None:
    """Print the workload of recorded traffic as YAML."""
    from planner.tools.diagnostics.traffic_profile import build_traffic_profile

    print(build_traffic_profile(options.sources, options.seconds), end="")


def add_lint(commands: "Subparsers") -> None:
    """Declare `headroom lint`."""
    parser = commands.add_parser(
        "lint",
        help="check a launch command, systemd unit, compose file, manifest or alert rules",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="+",
        help="launch command (in quotes if it contains quotes or braces), a file with such commands, a plan.json or its"
        " folder, metric names, alert rules or a dashboard",
    )
    parser.add_argument(
        "--engine-version",
        metavar="V",
        help="version that it runs (default: the image's tag, else the newest known)",
    )
    parser.add_argument(
        "--engine",
        metavar="E",
        help="vllm, sglang or trtllm, if WHAT contains only options",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="size it for this GPU or number of GPUs (4xH100), and propose a better command",
    )
    parser.add_argument(
        "--scenario",
        metavar="SCENARIO",
        help="scenario whose traffic it serves (default: 1,000 + 200 tokens per request)",
    )
    parser.add_argument("--to", metavar="V2", help="also show what changes at another version")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    # the options of a command line that is not in quotes are the engine's
    parser.set_defaults(run=run_lint, takes_rest=lambda options: len(options.what) > 1)


@watch_command
def run_lint(options: argparse.Namespace) -> int:
    """Check a command or file; the exit code is the verdict's."""
    from planner.planning.scenario import load_scenario
    from planner.tools.lint.findings import LINT_EXIT_CODES
    from planner.tools.lint.report import lint

    words = [*options.what, *options.rest]
    report = lint(
        words[0] if len(words) == 1 else shlex.join(words),
        options.engine_version,
        engine=options.engine,
        gpu=options.gpu,
        to=options.to,
        workload=load_scenario(options.scenario).workload if options.scenario else None,
    )
    print(format_json(report.to_json()) if options.json else report)
    return LINT_EXIT_CODES[report.verdict]
