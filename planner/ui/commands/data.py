"""Commands about the data behind a plan: replay, calibrate and list."""

import argparse
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.files import (
    check_not_overwriting,
    check_replaceable,
    get_report_date,
    replace_atomically,
    write_csv,
)
from planner.core.number_format import format_number
from planner.core.progress import show_step
from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GB, GIB
from planner.ui.commands.options import (
    FORCE,
    JSON,
    declare,
    format_json,
    make_command,
    watch_command,
)


@watch_command
def run_replay(options: argparse.Namespace) -> None:
    """Simulate the requests of a case, or one engine of a scenario's plan."""
    from planner.planning.scenario import find_scenario_file
    from planner.simulator.schedule_cases import STEP_LOG_COLUMNS, run_schedule_case

    written = [path for path in (options.step_log, options.requests) if path]
    scenarios = [find_scenario_file(options.scenario)] if options.scenario else []
    check_not_overwriting([*filter(None, [options.case]), *scenarios], written)
    if (options.case is None) == (options.scenario is None):
        raise PlannerError("replay takes either a CASE.json or --scenario SCENARIO")
    ignored = (
        ("--step-log", options.step_log) if options.scenario else ("--requests", options.requests)
    )
    if ignored[1] is not None:
        kind = "a CASE.json" if options.scenario else "--scenario"
        raise PlannerError(f"{ignored[0]} is written for {kind} only")
    for path in written:
        beginning = "sent_s," if options.scenario else ",".join(STEP_LOG_COLUMNS)
        check_replaceable(path, beginning, force=options.force)
    if options.case is not None:
        print(run_schedule_case(options.case, options.step_log, options.fixed_step_time))
        return
    from planner.planning.evaluation import get_candidate_workload
    from planner.planning.plan import get_reference_deployment
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search_deployments
    from planner.planning.simulation_runs import list_requests, run_simulation

    scenario = load_scenario(options.scenario)
    check_not_overwriting(scenario.files, written)
    deployment = get_reference_deployment(search_deployments(scenario))
    with show_step("simulating one engine"):
        run = run_simulation(deployment, get_candidate_workload(scenario, deployment))
    result = run.mid
    print(f"{deployment}\n{result}")
    if len(run.seeds) > 1 and run.arrival_rps:
        arriving = run.arrival_rps / deployment.layout.replicas / result.engines
        print(
            f"{format_number(arriving)} requests/s arrive. The rate above is lower, as it includes the"
            f" ends of {len(run.seeds)} runs, one per seed, in which nothing arrives."
        )
    if options.requests is not None:
        with replace_atomically(options.requests) as (part,):
            write_csv(part, list_requests(result))


add_replay = make_command(
    "replay",
    run_replay,
    help="simulate requests with vLLM's scheduler and print their latencies",
    arguments=[
        declare(
            "case",
            nargs="?",
            type=Path,
            metavar="CASE.json",
            help="scheduler configuration and requests",
        ),
        declare(
            "--fixed-step-time",
            type=float,
            default=1.0,
            metavar="SECONDS",
            help="duration of every step of CASE.json (default: 1)",
        ),
        declare(
            "--step-log",
            type=Path,
            metavar="STEPS.csv",
            help="file to write: what each step of CASE.json schedules",
        ),
        declare(
            "--scenario",
            metavar="SCENARIO",
            help="instead of CASE.json: simulate one engine of the scenario's plan",
        ),
        declare(
            "--requests",
            type=Path,
            metavar="REQUESTS.csv",
            help="file to write: the times of each request, with --scenario",
        ),
        FORCE,
    ],
)


@watch_command
def run_calibrate(options: argparse.Namespace) -> None:
    """Fit a calibration to benchmark results, print its errors, and save it."""
    from planner.calibration.benchmark_results import (
        plan_benchmarked_deployment,
        read_benchmark_results,
    )
    from planner.calibration.user_fit import (
        REPEAT_SIGMA_TTFT_TPOT,
        fit_calibration,
        load_kept_calibrations,
        simulate_means,
    )
    from planner.planning.scenario import find_scenario_file

    read = [*options.results, *([find_scenario_file(options.scenario)] if options.scenario else [])]
    check_not_overwriting(read, [options.out] if options.out else [])
    if options.out:
        load_kept_calibrations(options.out, force=options.force)  # what is wrong is said at once
    deployment, prefix_tokens = (
        plan_benchmarked_deployment(options.scenario) if options.scenario else (None, 0)
    )
    results = read_benchmark_results(options.results, deployment, prefix_tokens)
    calibration = fit_calibration(
        results.points, means=simulate_means, noise=REPEAT_SIGMA_TTFT_TPOT
    )
    date = f"{get_report_date():%Y-%m-%d}"
    print("\n".join((*results.notes, str(calibration))))
    if options.out is None:
        print("not saved: name a file with --out to plan with it")
    else:
        calibration.save(options.out, date, force=options.force)
        print(
            f"saved: {options.out}; to plan with it, add to the scenario:\ncalibration:"
            f" {options.out}"
        )


add_calibrate = make_command(
    "calibrate",
    run_calibrate,
    help="fit step costs to your own benchmarks, for narrower intervals",
    arguments=[
        declare(
            "results",
            nargs="+",
            type=Path,
            metavar="RESULTS",
            help="benchmark results: JSON of `vllm bench serve --save-result --save-detailed`, SGLang's "
            "bench_serving, the table that they print, or a CSV as for `headroom "
            "predict` with measured_ttft_ms and measured_tpot_ms",
        ),
        declare(
            "--scenario",
            metavar="SCENARIO",
            help="scenario whose plan was measured; not needed for a CSV",
        ),
        declare(
            "--out",
            type=Path,
            metavar="FILE",
            help="file to write, for `calibration` in a scenario",
        ),
        FORCE,
    ],
)


Listed = tuple[dict[str, Any], tuple[str, ...]]
"""What is listed: its fields for --json, and its cells."""


def run_list(options: argparse.Namespace) -> None:
    """Print what matches a pattern."""
    find, headings = CATALOGS[options.kind]
    fields, cells = zip(*find(options.pattern), strict=True)
    print(
        format_json({options.kind: list(fields)})
        if options.json
        else format_columns([headings, *cells])
    )


def find_scenarios(pattern: str) -> Iterator[Listed]:
    """Yield the shipped scenarios that match, with their questions; see `_filter_names`."""
    from planner.core.readers import read_yaml
    from planner.planning.scenario import SCENARIO_DIR, list_scenarios

    for name in _filter_names(pattern, list_scenarios(), "scenario"):
        question = escape_to_one_line(read_yaml(SCENARIO_DIR / f"{name}.yaml")["question"])
        yield {"name": name, "question": question}, (name, question)


def find_models(pattern: str) -> Iterator[Listed]:
    """Yield the models whose names match; see `_filter_names`."""
    from planner.models.registry import list_model_names, list_models, load_model

    names = list_model_names() if pattern else list_models()
    for name in _filter_names(pattern, names, "model"):
        model = load_model(name)
        architecture, method = model.architecture, model.quantization.method
        fields = {
            "name": name,
            "parameters": architecture.params_total,
            "active_parameters": architecture.params_active,
            "context_tokens": architecture.max_position,
            "dtype": model.dtype,
            "quantization": method,
        }
        yield (
            fields,
            (
                name,
                f"{architecture.params_total / 1e9:.2f} B",
                f"{architecture.params_active / 1e9:.2f} B" if architecture.is_moe else "",
                f"{architecture.max_position:,}",
                model.dtype if method == "none" else method,
            ),
        )


def find_gpus(pattern: str) -> Iterator[Listed]:
    """Yield the GPUs of which a name or an alias matches, with their prices; see `_filter_names`."""
    from planner.hardware.gpus import get_gpu, list_gpus
    from planner.hardware.prices import look_up_gpu_price

    known = {alias: gpu.name for gpu in list_gpus() for alias in (gpu.name, *gpu.aliases)}
    for name in dict.fromkeys(known[name] for name in _filter_names(pattern, known, "GPU")):
        gpu = get_gpu(name)
        price = look_up_gpu_price(gpu)
        fields = {
            "name": name,
            "aliases": list(gpu.aliases),
            "memory_gib": gpu.memory_bytes / GIB,
            "memory_basis": gpu.memory_basis,
            "bandwidth_gb_per_s": gpu.memory_bandwidth / GB,
            "usd_per_hour": price
            and {"median": price.median_usd, "min": price.min_usd, "max": price.max_usd},
            "price_source": str(price) if price else None,
            "engines": {
                engine: [str(first), None if last is None else str(last)]
                for engine, (first, last) in gpu.supported.items()
            },
        }
        yield (
            fields,
            (
                name,
                f"{gpu.memory_bytes / GIB:.1f}",
                f"{gpu.memory_bandwidth / GB:,.0f}",
                f"{price.median_usd:.2f}" if price else "?",
                ", ".join(
                    f"{engine} {first}{f'-{last}' if last else '+'}"
                    for engine, (first, last) in gpu.supported.items()
                ),
            ),
        )


CATALOGS = {
    "scenarios": (find_scenarios, ("scenario", "question")),
    "models": (find_models, ("model", "parameters", "active", "context", "weights")),
    "gpus": (find_gpus, ("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")),
}
"""What finds each kind of thing that is listed, and the headings of its cells."""


def _filter_names(pattern: str, names: Iterable[str], kind: str) -> list[str]:
    """Return the names that contain `pattern`, in which `*` matches anything.

    Raises `PlannerError` if there are none.
    """
    if len(pattern) > 200:
        raise PlannerError(f"a part of a name has at most 200 letters, got {len(pattern):,}")
    names = list(names)
    matches = [name for name in names if fnmatchcase(name.casefold(), f"*{pattern.casefold()}*")]
    if not matches:
        parts = {part for name in names for part in (name, *re.split("[/-]", name))}
        raise make_unknown_name_error(pattern, parts, kind, min_similarity=0.6)
    return matches


add_list = make_command(
    "list",
    run_list,
    help="list the shipped scenarios, or the models or GPUs of the catalog",
    arguments=[
        declare("kind", choices=CATALOGS, metavar="KIND", help=", ".join(CATALOGS)),
        declare(
            "pattern",
            nargs="?",
            default="",
            metavar="PATTERN",
            help="part of a name; * matches anything",
        ),
        JSON,
    ],
)
