"""The `planner` command."""

import argparse
import gc
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from pathlib import Path
from typing import Any

import yaml

from planner import __version__
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.files import check_not_overwriting, get_report_date, replace_atomically
from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GB, GIB

CLI_TEMPLATE_DIR = Path(__file__).with_name("templates")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all went well, 1 when rows of a batch failed, 2 for unusable input."""
    parser = _build_parser()
    options, rest = parser.parse_known_args(arguments)
    passed_on = options.run is _run_lab or len(getattr(options, "what", ())) > 1
    if rest and not passed_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    gc.set_threshold(
        200_000, 20, 50
    )  # a search makes many small objects and few circles: a tenth of its time
    try:
        done = int(options.run(options) or 0)
        sys.stdout.flush()
        return done
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PlannerError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr, flush=True)
        os._exit(
            130
        )  # does not wait for the notebooks that still run: their kernels end with this process


def _build_parser() -> argparse.ArgumentParser:
    """The commands of `templates/commands.yaml`, each a function of its name here."""
    parser = argparse.ArgumentParser(
        prog="planner", description="Capacity planning for LLM serving."
    )
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    for name, command in yaml.safe_load(
        (CLI_TEMPLATE_DIR / "commands.yaml").read_text(encoding="utf-8")
    ).items():
        argument_parser = commands.add_parser(name, help=command["about"])
        argument_parser.register("type", "path", Path)
        argument_parser.register("type", "float", float)
        argument_parser.register("type", "count", _parse_count)
        argument_parser.set_defaults(run=globals()[f"_run_{name.replace('-', '_')}"])
        for argument, how in command.get("takes", {}).items():
            argument_parser.add_argument(argument, **how)
    return parser


def _parse_count(text: str) -> int:
    """A whole number from 1 to 1,024; `ArgumentTypeError` for other text."""
    if not (text.isdecimal() and 1 <= int(text[:9]) <= 1024):
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to 1024, got {text!r:.40}"
        )
    return int(text)


NEXT_COMMANDS = {"scenario": "check", "sweep": "sweep --out sweep.csv", "fleet": "fleet"}
"""What is done with a file that `planner init` wrote."""


def _run_init(options: argparse.Namespace) -> None:
    path = options.file
    if path.suffix not in (".yaml", ".yml"):
        raise PlannerError(f"a {options.kind} is a .yaml file, got {path}")
    if path.exists():
        raise PlannerError(f"{path} exists and stays as it is; name another file")
    with replace_atomically(path, new=True) as (part,):
        part.write_text(
            (CLI_TEMPLATE_DIR / f"{options.kind}.yaml").read_text(encoding="utf-8"),
            encoding="utf-8",
        )
    print(f"wrote {path}; next: planner {NEXT_COMMANDS[options.kind]} {shlex.quote(str(path))}")


def _run_check(options: argparse.Namespace) -> None:
    from planner.planning.scenario import load_scenario
    from planner.ui.plan_text import format_scenario

    print(format_scenario(load_scenario(options.scenario, _parse_overrides(options))))


def _run_models(options: argparse.Namespace) -> None:
    from planner.models.registry import list_model_names, list_models, load_model

    known = list_model_names() if options.pattern else list_models()
    rows = [("model", "parameters", "active", "context", "weights")]
    for name in _filter_names(options.pattern, known, "model"):
        model = load_model(name)
        shape, stored = model.architecture, model.quantization.method
        total, active = (
            f"{count / 1e9:.2f} B" for count in (shape.params_total, shape.params_active)
        )
        weights = model.dtype if stored == "none" else stored
        rows.append(
            (name, total, active if shape.is_moe else "", f"{shape.max_position:,}", weights)
        )
    print(format_columns(rows))


def _run_gpus(options: argparse.Namespace) -> None:
    from planner.hardware.gpus import get_gpu, list_gpus
    from planner.hardware.prices import look_up_gpu_price

    known = {called: gpu.name for gpu in list_gpus() for called in (gpu.name, *gpu.aliases)}
    names = dict.fromkeys(known[called] for called in _filter_names(options.pattern, known, "GPU"))
    rows = [("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")]
    for card in map(get_gpu, names):
        price, versions = look_up_gpu_price(card), card.supported.items()
        engines = ", ".join(
            f"{name} {first}{f'-{last}' if last else '+'}" for name, (first, last) in versions
        )
        usd = f"{price.median_usd:.2f}" if price else "?"
        rows.append(
            (
                card.name,
                f"{card.memory_bytes / GIB:.1f}",
                f"{card.memory_bandwidth / GB:,.0f}",
                usd,
                engines,
            )
        )
    print(format_columns(rows))


def _filter_names(pattern: str, names: Iterable[str], what: str) -> list[str]:
    """Those of `names` that hold `pattern`, in which `*` is anything; `PlannerError` if there are none."""
    if len(pattern) > 200:
        raise PlannerError(f"a part of a name has at most 200 letters, got {len(pattern):,}")
    names = list(names)
    lines = [name for name in names if fnmatchcase(name.casefold(), f"*{pattern.casefold()}*")]
    if not lines:
        parts = {part for name in names for part in (name, *re.split("[/-]", name))}
        raise make_unknown_name_error(pattern, parts, what, min_similarity=0.6)
    return lines


def announce_compilation(
    command: Callable[[argparse.Namespace], Any],
) -> Callable[[argparse.Namespace], Any]:
    """A command that replays: when that is compiled first, a line on stderr says so, for it takes a while."""

    @wraps(command)
    def run(options: argparse.Namespace) -> Any:
        from numba.core.event import Event, Listener, install_listener

        class Telling(Listener):
            told = False

            def on_start(self, event: Event) -> None:
                if not self.told:
                    said = (
                        "planner: compiling the replay, once on this machine: up to a minute or two"
                    )
                    print(said, file=sys.stderr, flush=True)
                self.told = True

            def on_end(self, event: Event) -> None:
                pass

        with install_listener("numba:compile", Telling()):
            return command(options)

    return run


@announce_compilation
def _run_plan(options: argparse.Namespace) -> int:
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search_deployments
    from planner.ui.plan_files import write_plan_files
    from planner.ui.plan_json import serialize_plan
    from planner.ui.plan_text import EXIT_CODES, format_plan

    scenario = load_scenario(options.scenario, _parse_overrides(options))
    if scenario.daily_profile and sys.stderr.isatty():
        print(
            "planner: replaying the hours of several days, up to a minute or two",
            file=sys.stderr,
            flush=True,
        )
    plan = search_deployments(scenario)
    print(
        json.dumps(serialize_plan(plan), indent=2, allow_nan=False)
        if options.json
        else format_plan(plan)
    )
    if options.out:
        names = write_plan_files(plan, options.out)
        if not options.json:
            print(f"{'Written':<10}{', '.join(names)} in {options.out}")
    return EXIT_CODES[plan.verdict]


@announce_compilation
def _run_report(options: argparse.Namespace) -> None:
    from planner.ui.pdf_report import write_comparison_report, write_report

    first, *others = options.scenarios
    names, overrides = options.scenarios, _parse_overrides(options)
    print(
        "report:"
        f" {write_comparison_report(names, options.out, overrides) if others else write_report(first, options.out, overrides)}"
    )


def _parse_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """What --set asks for, by field."""
    from planner.core.readers import parse_yaml

    asked = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise PlannerError(f"--set takes FIELD=VALUE, such as workload.rate=12, got {text!r}")
        asked[key] = parse_yaml(value, f"--set {key}")
    return asked


@announce_compilation
def _run_predict(options: argparse.Namespace) -> int:
    from planner.tools.batch import predict_file

    shown = (
        (lambda done, rows: _print_progress(done, rows, "rows")) if sys.stderr.isatty() else None
    )
    say = partial(print, "planner:", file=sys.stderr)
    return predict_file(
        options.rows,
        options.out,
        options.calibration,
        resume=options.resume,
        progress=shown,
        report_message=say,
    )


def _print_progress(done: int, of: int, what: str) -> None:
    """A line on stderr, written over until all is done."""
    print(
        f"\r{done:,} of {of:,} {what}", end="\n" if done == of else "", file=sys.stderr, flush=True
    )


@announce_compilation
def _run_sweep(options: argparse.Namespace) -> int:
    from platformdirs import user_data_path

    from planner.tools.sweep.runner import format_sweep, run_sweep_file

    def progress(done: int, points: int, kept: int) -> None:
        if done == kept < points:
            said = (
                "planner: workers start; on a new machine they compile first, up to a minute or two"
            )
            print(said, file=sys.stderr, flush=True)
        if sys.stderr.isatty() or done in (kept, points):
            _print_progress(done, points, f"points, {kept:,} from the store")

    store = options.store or user_data_path("headroom") / "answers.sqlite"
    frame = run_sweep_file(
        options.sweep, options.out, store, options.scheduler, options.workers, progress
    )
    print(format_sweep(frame))
    failed = frame[frame["status"] == "error"]
    if len(failed):
        print(
            f"planner: {len(failed):,} points failed, the first: {failed['error'].iloc[0]}",
            file=sys.stderr,
        )
    return int(len(failed) > 0)


@announce_compilation
def _run_fleet(options: argparse.Namespace) -> None:
    from planner.ui.pdf_report import write_fleet_report

    print(f"report: {write_fleet_report(options.fleet, options.out)}")


def _run_explain_log(options: argparse.Namespace) -> int:
    from planner.planning.scenario import load_scenario
    from planner.tools.diagnostics.log_comparison import explain_log_file

    explanation = explain_log_file(
        options.log, options.gpu, load_scenario(options.scenario) if options.scenario else None
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


def _run_diagnose(options: argparse.Namespace) -> int:
    from planner.tools.diagnostics import diagnose

    diagnosis = diagnose(options.pages, options.log, options.plan, options.seconds)
    print(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False) if options.json else diagnosis)
    return int(diagnosis.has_findings)


def _run_profile(options: argparse.Namespace) -> None:
    from planner.tools.diagnostics.traffic_profile import build_traffic_profile

    print(build_traffic_profile(options.sources, options.seconds), end="")


def _run_lint(options: argparse.Namespace) -> int:
    from planner.planning.scenario import load_scenario
    from planner.tools.lint.report import lint

    traffic = load_scenario(options.scenario).workload if options.scenario else None
    words = [*options.what, *options.rest]
    what, version = words[0] if len(words) == 1 else shlex.join(words), options.engine_version
    report = lint(
        what, version, engine=options.engine, gpu=options.gpu, to=options.to, workload=traffic
    )
    print(json.dumps(report.to_json(), indent=2, allow_nan=False) if options.json else report)
    return {"ok": 0, "at_risk": 3, "mend": 1}[report.verdict]


@announce_compilation
def _run_replay(options: argparse.Namespace) -> None:
    from planner.simulator.schedule_cases import run_schedule_case

    written = [path for path in (options.step_log, options.requests) if path]
    check_not_overwriting(filter(None, [options.case]), written)
    if (options.case is None) == (options.scenario is None):
        raise PlannerError("replay takes either a CASE.json or --scenario SCENARIO")
    if options.case is not None:
        print(run_schedule_case(options.case, options.step_log, options.fixed_step_time))
        return
    from planner.planning.evaluation import get_candidate_workload
    from planner.planning.scenario import load_scenario
    from planner.planning.search import get_reference_deployment, search_deployments
    from planner.planning.simulation_runs import run_simulation

    scenario = load_scenario(options.scenario)
    check_not_overwriting(scenario.files, written)
    deployment = get_reference_deployment(search_deployments(scenario))
    result = run_simulation(deployment, get_candidate_workload(scenario, deployment)).mid
    print(f"{deployment}\n{result}")
    if options.requests is not None:
        with replace_atomically(options.requests) as (part,):
            result.to_frame().to_csv(part, index=False)


def _run_calibrate(options: argparse.Namespace) -> None:
    from planner.calibration.benchmark_results import (
        plan_benchmarked_deployment,
        read_benchmark_results,
    )
    from planner.calibration.user_fit import REPEAT_SIGMA_TTFT_TPOT, fit_calibration, simulate_means
    from planner.planning.scenario import find_scenario_file

    read = [*options.results, *([find_scenario_file(options.scenario)] if options.scenario else [])]
    check_not_overwriting(read, [options.out] if options.out else [])
    deployment, prefix_tokens = (
        plan_benchmarked_deployment(options.scenario) if options.scenario else (None, 0)
    )
    results = read_benchmark_results(options.results, deployment, prefix_tokens)
    fitted, date = (
        fit_calibration(results.points, means=simulate_means, noise=REPEAT_SIGMA_TTFT_TPOT),
        f"{get_report_date():%Y-%m-%d}",
    )
    print("\n".join((*results.notes, str(fitted))))
    if options.out is None:
        print("not saved: name a file with --out to plan with it")
    else:
        fitted.save(options.out, date)
        print(
            f"saved: {options.out}; to plan with it, add to the scenario:\ncalibration:"
            f" {options.out}"
        )


def _run_lab(options: argparse.Namespace) -> None:
    """Open JupyterLab; an unknown option is JupyterLab's own."""
    from planner.ui.lab_server import DEFAULT_FOLDER, open_lab

    words = [
        *([options.folder] if options.folder else []),
        *(word for word in options.rest if word != "--"),
    ]
    folder = None if not words or words[0].startswith("-") else words.pop(0)
    open_lab(Path(folder or DEFAULT_FOLDER), words)


def _run_scenarios(_options: argparse.Namespace) -> None:
    from planner.core.readers import read_yaml
    from planner.planning.scenario import SCENARIO_DIR, list_scenarios

    for name in list_scenarios():
        print(
            f"{name:20}{escape_to_one_line(read_yaml(SCENARIO_DIR / f'{name}.yaml')['question'])}"
        )
