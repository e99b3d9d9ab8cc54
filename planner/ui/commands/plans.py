"""Commands that plan: init, check, plan, report, fleet and lab."""

import argparse
import shlex
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import (
    OWN_PDF,
    check_output_folder,
    check_replaceable,
    replace_atomically,
)
from planner.core.text import get_program_name
from planner.ui.commands.options import (
    FORCE,
    SCENARIO,
    SET,
    TEMPLATE_DIR,
    declare,
    format_json,
    limit_time,
    make_command,
    parse_overrides,
    print_message,
    watch_command,
)

NEXT_COMMANDS = {"scenario": "plan", "sweep": "predict --out sweep.csv", "fleet": "fleet"}
"""The command for a file that `headroom init` wrote, by its kind."""

MEMO_PAGES = 2
"""What `headroom report --pages` takes: how many pages the memo has."""
PLAN_HELP = {
    "targets": "service_level of the scenario limits ttft (time to first token), tpot (time per output"
    " token), itl (gap between tokens) and e2e (whole answer), in ms, each at mean, p50, p95 or p99:"
    " --set service_level.ttft.p95=1000",
    "formats": "quantization (weights) takes checkpoint, fp8, awq, gptq, int8, nvfp4 and mxfp4,"
    " kv_cache_dtype auto and fp8, each a list to choose from: --set 'quantization=[checkpoint, fp8]'."
    " Traffic is lengths and a rate, or a trace: CSV or JSON lines such as Mooncake's",
    "exit codes": "0: meets the targets. 3: at risk, less likely than `confidence` to meet every target."
    " 4: no plan meets the targets. Of several models it is that of the best. 2: bad input. 70: a"
    " failure of the planner or the machine. 130: interrupted",
}
"""What `headroom plan --help` says below its options, by title."""


def run_init(options: argparse.Namespace) -> None:
    """Copy a template to a file that does not exist yet."""
    path, kind = options.file, options.kind
    if path.suffix not in (".yaml", ".yml"):
        raise PlannerError(f"a {kind} is a .yaml file, got {path}")
    if path.exists():
        raise PlannerError(f"{path} exists and stays as it is; name another file")
    with replace_atomically(path, new=True) as (part,):
        part.write_bytes((TEMPLATE_DIR / f"{kind}.yaml").read_bytes())
    print(
        f"wrote {path}; edit it, then: {get_program_name()} {NEXT_COMMANDS[kind]} {shlex.quote(str(path))}"
    )


add_init = make_command(
    "init",
    run_init,
    help="write a commented scenario, sweep or fleet",
    arguments=[
        declare(
            "file",
            nargs="?",
            type=Path,
            default="scenario.yaml",
            metavar="FILE.yaml",
            help="file to write, which must not exist yet (default: scenario.yaml)",
        ),
        declare(
            "--kind",
            choices=tuple(NEXT_COMMANDS),
            default="scenario",
            help="kind of file to write (default: scenario)",
        ),
    ],
)


def run_check(options: argparse.Namespace) -> None:
    """Print how a scenario is read."""
    from planner.planning.scenario import load_scenario
    from planner.ui.plan_text import format_scenario

    print(format_scenario(load_scenario(options.scenario, parse_overrides(options))))


add_check = make_command(
    "check",
    run_check,
    help="print how a scenario is read, without planning it",
    arguments=[
        SCENARIO,
        SET,
    ],
)


@watch_command
def run_plan(options: argparse.Namespace) -> int:
    """Print the plan of a scenario, and write its files; the exit code is the verdict's."""
    from planner.answers import build_answer
    from planner.core.progress import get_progress_watch
    from planner.planning.scenario import find_scenario_file, load_scenario, read_models
    from planner.planning.search import search_deployments
    from planner.ui.plan_files import (
        check_plan_folder,
        format_beside_saved,
        read_saved_plan,
        serialize_plan_file,
        write_plan_files,
    )
    from planner.ui.plan_text import EXIT_CODES, format_details, format_summary
    from planner.ui.terminal import detect_style

    overrides = parse_overrides(options)
    if isinstance(models := read_models(options.scenario, overrides), list):
        return _plan_models(options, overrides, models)
    scenario = load_scenario(options.scenario, overrides)
    saved = read_saved_plan(find_scenario_file(options.scenario))
    if options.out:
        check_plan_folder(scenario, options.out, force=options.force)
    answer = build_answer(search_deployments(scenario))
    if options.json:
        if options.out:
            write_plan_files(answer, options.out)
        print(format_json(serialize_plan_file(answer)))
        return EXIT_CODES[answer.verdict]
    changes = (word for text in options.set for word in ("--set", text))
    command = shlex.join([get_program_name(), "plan", options.scenario, *changes])
    out, style = shlex.quote(str(options.out)) if options.out else "", detect_style()
    summary = format_summary(answer, style, command=command, out=out, detailed=options.all)
    print(summary, flush=True)  # an interruption of what follows leaves it
    if saved:
        print(f"\n{format_beside_saved(saved, answer)}", flush=True)
    if options.all:
        print(format_details(answer, style), flush=True)
    if options.out:
        names = write_plan_files(answer, options.out)
        print(f"  Written   {', '.join(names)} in {options.out}")
    if left_out := get_progress_watch().describe_left_out():
        print(*style.format_rows([("Left out", left_out)]), sep="\n")
    return EXIT_CODES[answer.verdict]


add_plan = make_command(
    "plan",
    run_plan,
    help="find what to rent for a scenario, with cost and latencies; of a saved plan.json: again,"
    " beside what it says",
    arguments=[
        SCENARIO,
        SET,
        declare(
            "--out", type=Path, metavar="DIR", help="write plan.json and the plan's files there"
        ),
        FORCE,
        declare("--all", action="store_true", help="print all details below the answer"),
        declare("--json", action="store_true", help="print plan.json instead of the answer"),
        limit_time(),
    ],
    notes=PLAN_HELP,
)


def _plan_models(
    options: argparse.Namespace, overrides: dict[str, object], models: list[object]
) -> int:
    """Print the plans of several models side by side; the exit code is that of the best verdict."""
    from planner.answers import Answer, build_answer, serialize_answer
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search_deployments
    from planner.ui.plan_text import EXIT_CODES, format_models
    from planner.ui.terminal import detect_style

    names = [model for model in models if isinstance(model, str)]
    if not names or len(names) < len(models):
        raise PlannerError(f"model takes a name or a list of names, got {models!r:.100}")
    if options.out or options.all:
        raise PlannerError("--out and --all take one model; name it with --set model=NAME")
    answers: dict[str, Answer | PlannerError] = {}
    for model in dict.fromkeys(names):
        try:
            scenario = load_scenario(options.scenario, {**overrides, "model": model})
            answers[model] = build_answer(search_deployments(scenario))
        except PlannerError as error:  # such as a format that this model does not have
            answers[model] = error
    if options.json:
        plans = {
            model: {"error": str(found)}
            if isinstance(found, PlannerError)
            else serialize_answer(found)
            for model, found in answers.items()
        }
        print(format_json({"models": plans}))
    else:
        print(format_models(answers, detect_style()))
    codes = [EXIT_CODES[a.verdict] for a in answers.values() if not isinstance(a, PlannerError)]
    return min(codes, default=2)


@watch_command
def run_report(options: argparse.Namespace) -> None:
    """Write a PDF about a scenario."""
    from planner.planning.scenario import find_scenario_file, load_scenario
    from planner.ui.pdf_report import write_report
    from planner.ui.plan_files import check_plan_folder

    name, overrides = options.scenario, parse_overrides(options)
    chapters: list[Path] | None = [] if options.pages else None
    out = options.out or Path("reports") / find_scenario_file(name).stem
    check_report_folder(out, force=options.force)
    check_plan_folder(load_scenario(name, overrides), out, force=options.force)
    try:
        path = write_report(name, out, overrides, chapters)
    except KeyboardInterrupt:
        print_message("no report is written; what was searched is kept for the next run")
        raise
    print(f"report: {path}")


add_report = make_command(
    "report",
    run_report,
    help="write a PDF about a scenario",
    arguments=[
        declare(
            "scenario",
            metavar="SCENARIO",
            help="YAML file, or name of a shipped scenario (`headroom list scenarios`)",
        ),
        SET,
        declare(
            "--out", type=Path, metavar="DIR", help="folder to write to (default: reports/SCENARIO)"
        ),
        FORCE,
        declare(
            "--pages",
            type=int,
            choices=[MEMO_PAGES],
            metavar=str(MEMO_PAGES),
            help="write the memo of two pages alone, without the chapters behind it",
        ),
        limit_time(),
    ],
    extra="report",
)


def check_report_folder(out: Path, *, force: bool) -> None:
    """Raise `PlannerError` if a report would replace a PDF of the user's own, unless by `force`."""
    check_output_folder(out)
    if out.is_dir():
        check_replaceable(out / "report.pdf", *OWN_PDF, force=force)


@watch_command
def run_fleet(options: argparse.Namespace) -> int:
    """Write a PDF about the allocation of a fleet; the exit code is that of a plan."""
    from planner.ui.pdf_report import write_fleet_report
    from planner.ui.plan_text import EXIT_CODES

    out = options.out or Path("reports") / options.fleet.stem
    check_report_folder(out, force=options.force)
    path, is_served = write_fleet_report(options.fleet, out, force=options.force)
    print(f"report: {path}; beside it a folder of each scenario's plan and launch files")
    return EXIT_CODES["holds" if is_served else "nothing_meets"]


add_fleet = make_command(
    "fleet",
    run_fleet,
    help="share a stock of GPUs among several scenarios at least cost, as a PDF with each one's plan",
    arguments=[
        declare(
            "fleet",
            type=Path,
            metavar="FLEET.yaml",
            help="fleet file with scenarios, stock (GPUs by kind) and limits; `headroom init --kind fleet` "
            "writes one",
        ),
        declare(
            "--out", type=Path, metavar="DIR", help="folder to write to (default: reports/FLEET)"
        ),
        FORCE,
        limit_time(3600.0),  # it searches for each scenario and kind of GPU
    ],
    extra="report",
)


def run_lab(options: argparse.Namespace) -> None:
    """Open JupyterLab, which gets the options that this command does not know."""
    from planner.ui.lab_server import DEFAULT_FOLDER, open_lab

    words = [
        *([options.folder] if options.folder else []),
        *(word for word in options.rest if word != "--"),
    ]
    folder = None if not words or words[0].startswith("-") else words.pop(0)
    open_lab(Path(folder or DEFAULT_FOLDER), words)


add_lab = make_command(
    "lab",
    run_lab,
    help="open the cockpit and the notebooks in JupyterLab",
    arguments=[
        declare(
            "folder",
            nargs="?",
            metavar="DIR",
            help="folder for a copy of the notebooks; existing files are kept (default: "
            "headroom-notebooks). Further options go to JupyterLab and take an equals sign: "
            "--no-browser --port=8899",
        ),
    ],
    takes_rest=lambda _: True,
    extra="lab",
)
