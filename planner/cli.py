"""The `planner` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import __version__
from planner.quantities import PlannerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all went well, 1 when rows of a batch failed, 2 for unusable input."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except PlannerError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # does not wait for the notebooks that still run: their kernels end with this process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="planner", description="Capacity planning for LLM serving.")
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="write the capacity report of a scenario, a PDF")
    report.add_argument("scenario", help="a YAML file, or the name of a shipped scenario")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to (default: reports/SCENARIO)")
    report.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of the scenario, such as workload.rate=12 (may be repeated)",
    )
    report.set_defaults(run=_report)

    predict = commands.add_parser("predict", help="predict a CSV of deployments, one a row")
    predict.add_argument("rows", type=Path, metavar="ROWS.csv")
    predict.add_argument("--out", type=Path, required=True, metavar="PREDICTIONS.csv")
    predict.add_argument("--calibration", type=Path, metavar="FILE", help="your own, by `planner calibrate --out`")
    predict.set_defaults(run=_predict)

    explain = commands.add_parser("explain-log", help="hold a vLLM start-up log against the plan, line by line")
    explain.add_argument("log", type=Path, metavar="FILE")
    explain.add_argument("--scenario", metavar="SCENARIO", help="whose plan it is; the log's own arguments win over it")
    explain.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on, which few logs name")
    explain.set_defaults(run=_explain_log)

    replay = commands.add_parser("replay", help="replay requests through vLLM's scheduler, step by step")
    replay.add_argument("case", nargs="?", type=Path, metavar="CASE.json", help="a configuration and its requests")
    replay.add_argument("--fixed-step-time", type=float, default=1.0, metavar="SECONDS", help="of a step (default: 1)")
    replay.add_argument("--step-log", type=Path, metavar="STEPS.csv", help="write what every step scheduled")
    replay.add_argument("--scenario", metavar="SCENARIO", help="instead of a case: one engine of its plan, its traffic")
    replay.add_argument("--requests", type=Path, metavar="REQUESTS.csv", help="write every request's times (scenario)")
    replay.set_defaults(run=_replay)

    calibrate = commands.add_parser("calibrate", help="fit the step costs to your own benchmarks")
    calibrate.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULTS",
        help="JSON of `vllm bench serve --save-result --save-detailed`, or CSV with measured_ttft_ms, measured_tpot_ms",
    )
    calibrate.add_argument("--scenario", metavar="SCENARIO", help="whose plan was measured (a CSV says it itself)")
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="your own, for a scenario's `calibration` (default: the catalog's file)",
    )
    calibrate.set_defaults(run=_calibrate)

    scenarios = commands.add_parser("scenarios", help="list the shipped scenarios")
    scenarios.set_defaults(run=_scenarios)
    return parser


def _report(options: argparse.Namespace) -> None:
    from planner.report import report

    overrides = dict(_assignment(text) for text in options.set)
    print(f"report: {report(options.scenario, options.out, overrides)}")


def _assignment(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not (key and equals):
        raise PlannerError(f"--set takes FIELD=VALUE, such as workload.rate=12, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise PlannerError(f"--set {key}: {value!r} is not a YAML value") from None


def _predict(options: argparse.Namespace) -> int:
    from planner.batch import predict_file

    return predict_file(options.rows, options.out, options.calibration)


def _explain_log(options: argparse.Namespace) -> None:
    from planner.explain import explain_file
    from planner.scenario import load_scenario
    from planner.search import search
    from planner.summary import subject

    planned = subject(search(load_scenario(options.scenario))) if options.scenario else None
    found = explain_file(options.log, options.gpu, planned)
    print(found)
    if found.fragment:
        print(f"\nTo plan with what this log says, add to the scenario (GiB):\n{found.fragment}")


def _replay(options: argparse.Namespace) -> None:
    from planner.cases import run_case

    if (options.case is None) == (options.scenario is None):
        raise PlannerError("replay takes either a CASE.json or --scenario SCENARIO")
    if options.case is not None:
        print(run_case(options.case, options.step_log, options.fixed_step_time))
        return
    from planner.predict import memory_of
    from planner.replay import replay_workload
    from planner.scenario import load_scenario
    from planner.search import search
    from planner.speculation import step_of
    from planner.summary import subject

    scenario = load_scenario(options.scenario)
    deployment = subject(search(scenario))
    found = replay_workload(deployment, memory_of(deployment).pool, step_of(deployment), scenario.workload)
    print(f"{deployment}\n{found}")
    if options.requests is not None:
        found.frame().to_csv(options.requests, index=False)


def _calibrate(options: argparse.Namespace) -> None:
    import datetime

    from planner.calibrate import REPEATS, fit, replayed
    from planner.results import planned, read_results

    deployment, prefix_tokens = planned(options.scenario) if options.scenario else (None, 0)
    results = read_results(options.results, deployment, prefix_tokens)
    fitted, today = fit(results.points, means=replayed, noise=REPEATS), f"{datetime.date.today():%Y-%m-%d}"
    print("\n".join((*results.notes, str(fitted))))
    if options.out is None:
        print(f"saved: {fitted.save_shipped(today)}")
    else:
        fitted.save_own(options.out, today)
        print(f"saved: {options.out}; to plan with it, add to the scenario:\ncalibration: {options.out}")


def _scenarios(_options: argparse.Namespace) -> None:
    from planner.catalog import read_yaml
    from planner.scenario import SCENARIOS, scenarios

    for name in scenarios():
        print(f"{name:20}{read_yaml(SCENARIOS / f'{name}.yaml')['question']}")
