"""Commands about servers that run: explain-log, diagnose, profile, lint and verify."""

import argparse
import shlex
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.redaction import redact_text
from planner.ui.commands.options import (
    JSON,
    LOG,
    SECONDS,
    declare,
    format_json,
    make_command,
    parse_count,
    watch_command,
)


@watch_command
def run_explain_log(options: argparse.Namespace) -> int:
    """Compare a startup log with the plan; 1 if the log ends in an error."""
    from planner.tools.diagnostics import diagnose
    from planner.tools.diagnostics.log_comparison import explain_log_file
    from planner.tools.lint.report import read_launched_deployment

    if options.launched and not options.gpu:
        raise PlannerError("--command goes with --gpu NAME")
    try:
        explanation = explain_log_file(
            options.log,
            options.gpu,
            read_launched_deployment(options.launched, options.gpu) if options.launched else None,
            options.model,
        )
    except PlannerError as error:  # what a failed start says needs no plan
        diagnosis = diagnose(log=options.log)
        if not diagnosis.has_failed:
            raise
        text = f"{diagnosis}\n\nNot compared with a plan: {error}"
        print(format_json(diagnosis.to_json()) if options.json else redact_text(text))
        return 1
    print(format_json(explanation.to_json()) if options.json else redact_text(str(explanation)))
    return int(explanation.has_failed)


add_explain_log = make_command(
    "explain-log",
    run_explain_log,
    help="compare a vLLM startup log with the plan, and say what helps",
    arguments=[
        declare("log", type=Path, metavar="FILE", help="startup log of vLLM"),
        declare(
            "--gpu",
            metavar="NAME",
            help="GPU of the server, or how many (4xH100); few logs name it",
        ),
        declare("--model", metavar="NAME", help="model of the server, if the log does not name it"),
        declare(
            "--command",
            dest="launched",
            metavar="WHAT",
            help="command line (in quotes) or file that started the server, for what the log leaves "
            "out; requires --gpu",
        ),
        JSON,
    ],
)


@watch_command
def run_diagnose(options: argparse.Namespace) -> int:
    """Print what is wrong with a server; the exit code is the diagnosis's."""
    from planner.tools.diagnostics import diagnose

    diagnosis = diagnose(options.pages, options.log, options.plan, options.seconds)
    print(format_json(diagnosis.to_json()) if options.json else redact_text(str(diagnosis)))
    return diagnosis.exit_code


add_diagnose = make_command(
    "diagnose",
    run_diagnose,
    help="find what is wrong with a running server from its /metrics and log, and how to fix it",
    arguments=[
        declare(
            "pages",
            nargs="*",
            metavar="METRICS",
            help="one or two saved /metrics pages of a replica, the earlier first, or its URL",
        ),
        LOG,
        declare("--plan", metavar="PLAN", help="plan to compare with: a scenario or a plan.json"),
        SECONDS,
        JSON,
    ],
)


def run_profile(options: argparse.Namespace) -> None:
    """Print the workload of recorded traffic as YAML."""
    from planner.tools.diagnostics.metrics_pages import build_traffic_profile

    print(build_traffic_profile(options.sources, options.seconds), end="")


add_profile = make_command(
    "profile",
    run_profile,
    help="print a scenario's workload from an access log or /metrics pages",
    arguments=[
        declare(
            "sources",
            nargs="+",
            metavar="FILE",
            help="access log (CSV, JSON lines), or one or two saved /metrics pages",
        ),
        SECONDS,
    ],
)


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


add_lint = make_command(
    "lint",
    run_lint,
    help="check a launch command, systemd unit, compose file, manifest or alert rules",
    arguments=[
        declare(
            "what",
            metavar="WHAT",
            nargs="+",
            help="launch command (in quotes if it contains quotes or braces), a file with such commands, a plan.json or"
            " its folder, metric names, alert rules or a dashboard",
        ),
        declare(
            "--engine-version",
            metavar="V",
            help="version that it runs (default: the image's tag, else the newest known)",
        ),
        declare(
            "--engine",
            metavar="E",
            help="vllm, sglang or trtllm, if WHAT contains only options",
        ),
        declare(
            "--gpu",
            metavar="NAME",
            help="size it for this GPU or number of GPUs (4xH100), and propose a better command",
        ),
        declare(
            "--scenario",
            metavar="SCENARIO",
            help="scenario whose traffic it serves (default: 1,000 + 200 tokens per request)",
        ),
        declare("--to", metavar="V2", help="also show what changes at another version"),
        JSON,
    ],
    # the options of a command line that is not in quotes are the engine's
    takes_rest=lambda options: len(options.what) > 1,
)


VERDICT_CODES = {"PASS": 0, "FAIL": 1, "NOT MEASURED": 3}
"""Exit codes of `headroom verify`."""


@watch_command
def run_verify(options: argparse.Namespace) -> int:
    """Print what was measured beside what was planned; the exit code is the verdict's."""
    from planner.tools.diagnostics.launch_check import check_launch

    check = check_launch(
        options.plan, options.bench, options.metrics, options.log, options.seconds, options.replicas
    )
    print(format_json(check.to_json()) if options.json else check)
    return VERDICT_CODES[check.verdict]


add_verify = make_command(
    "verify",
    run_verify,
    help="compare a launched server's measurements with its plan: PASS or FAIL",
    description="Compare a launched server's measurements with its plan. Exit code: 0 for PASS, 1"
    " for FAIL, 3 if no KV cache or no latency was measured.",
    arguments=[
        declare(
            "plan",
            metavar="PLAN",
            help="folder that `headroom plan --out` wrote, its plan.json, or a scenario",
        ),
        declare(
            "--bench",
            nargs="+",
            type=Path,
            default=[],
            metavar="FILE",
            help="results of bench.sh (vllm bench serve), SGLang's bench_serving, or the "
            "table that they print",
        ),
        declare(
            "--metrics",
            nargs="+",
            default=[],
            metavar="PAGE",
            help="one or two saved /metrics pages of a replica, the earlier first, or its URL",
        ),
        LOG,
        SECONDS,
        declare(
            "--replicas",
            type=parse_count,
            default=1,
            metavar="N",
            help="number of replicas that the benchmark ran on (default: 1, as in bench.sh)",
        ),
        JSON,
    ],
)
