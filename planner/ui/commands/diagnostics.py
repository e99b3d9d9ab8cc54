"""Commands about servers that run: explain-log, diagnose, profile and lint."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from planner.ui.commands.options import announce_compilation, format_json

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_explain_log(commands: "Subparsers") -> None:
    """Declare `planner explain-log`."""
    parser = commands.add_parser(
        "explain-log", help="hold a vLLM start-up log against the plan, line by line"
    )
    parser.add_argument("log", type=Path, metavar="FILE")
    parser.add_argument(
        "--scenario",
        metavar="SCENARIO",
        help="whose plan it is, on the GPU that the log or --gpu names; the log's own arguments "
        "win over it",
    )
    parser.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on, which few logs name")
    parser.add_argument(
        "--model", metavar="NAME", help="the model that it served, where the log does not name it"
    )
    parser.set_defaults(run=run_explain_log)


@announce_compilation
def run_explain_log(options: argparse.Namespace) -> int:
    """Compare a startup log with the plan; 1 if the log ends in an error."""
    from planner.planning.scenario import load_scenario
    from planner.tools.diagnostics.log_comparison import explain_log_file

    explanation = explain_log_file(
        options.log,
        options.gpu,
        load_scenario(options.scenario) if options.scenario else None,
        options.model,
    )
    print(explanation)
    if explanation.scenario_line:
        print(
            "\nTo plan with what this log says, add to the scenario"
            f" (GiB):\n{explanation.scenario_line}"
        )
    if explanation.suggestions:
        print(f"\n{explanation.suggestions}")
    return int(bool(explanation.log.failure or explanation.errors))


def add_diagnose(commands: "Subparsers") -> None:
    """Declare `planner diagnose`."""
    parser = commands.add_parser(
        "diagnose",
        help="name what is wrong with a server, by its /metrics and its log, and what would mend "
        "it",
    )
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="METRICS",
        help="one or two saved /metrics pages of a replica, the earlier first, or its address",
    )
    parser.add_argument("--log", type=Path, metavar="LOG", help="its start-up log")
    parser.add_argument(
        "--plan", metavar="PLAN", help="what was planned: a scenario, or a plan.json"
    )
    _add_seconds_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run_diagnose)


def _add_seconds_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="between the pages, where the times of the files do not tell",
    )


@announce_compilation
def run_diagnose(options: argparse.Namespace) -> int:
    """Print what is wrong with a server; 1 if anything is."""
    from planner.tools.diagnostics import diagnose

    diagnosis = diagnose(options.pages, options.log, options.plan, options.seconds)
    print(format_json(diagnosis.to_json()) if options.json else diagnosis)
    return int(diagnosis.has_findings)


def add_profile(commands: "Subparsers") -> None:
    """Declare `planner profile`."""
    parser = commands.add_parser(
        "profile", help="print the workload of a scenario from what production says"
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        help="an access log (CSV, JSON lines), or one or two saved /metrics pages",
    )
    _add_seconds_option(parser)
    parser.set_defaults(run=run_profile)


def run_profile(options: argparse.Namespace) -> None:
    """Print the workload of recorded traffic as YAML."""
    from planner.tools.diagnostics.traffic_profile import build_traffic_profile

    print(build_traffic_profile(options.sources, options.seconds), end="")


def add_lint(commands: "Subparsers") -> None:
    """Declare `planner lint`."""
    parser = commands.add_parser(
        "lint", help="judge a command, unit, compose file or manifest that runs today"
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="+",
        help="a command line (in quotes where it has quotes or braces), or a file",
    )
    parser.add_argument(
        "--engine-version",
        metavar="V",
        help="what it runs (default: its image's tag, or the newest known)",
    )
    parser.add_argument(
        "--engine",
        metavar="E",
        help="vllm, sglang, trtllm or tgi, where WHAT is nothing but options",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="plan it on this GPU, or on so many (4xH100), and propose a better command",
    )
    parser.add_argument(
        "--scenario",
        metavar="SCENARIO",
        help="whose traffic it serves (default: 1,000 + 200 tokens a request)",
    )
    parser.add_argument("--to", metavar="V2", help="what another version would make of it")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    # the options of a command line that is not in quotes are the engine's
    parser.set_defaults(run=run_lint, takes_rest=lambda options: len(options.what) > 1)


@announce_compilation
def run_lint(options: argparse.Namespace) -> int:
    """Check a command or file; the exit code is the verdict's."""
    from planner.planning.scenario import load_scenario
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
    return {"ok": 0, "at_risk": 3, "mend": 1}[report.verdict]
