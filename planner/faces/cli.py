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
from planner.core.files import replacing, spare, today
from planner.core.quantities import GB, GIB, PlannerError, aligned, did_you_mean, one_line

TEMPLATES = Path(__file__).with_name("templates")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all went well, 1 when rows of a batch failed, 2 for unusable input."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and len(getattr(options, "what", ())) < 2:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    gc.set_threshold(200_000, 20, 50)  # a search makes many small objects and few circles: a tenth of its time
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
        os._exit(130)  # does not wait for the notebooks that still run: their kernels end with this process


def _parser() -> argparse.ArgumentParser:
    """The commands of `templates/commands.yaml`, each a function of its name here."""
    parser = argparse.ArgumentParser(prog="planner", description="Capacity planning for LLM serving.")
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    for name, command in yaml.safe_load((TEMPLATES / "commands.yaml").read_text(encoding="utf-8")).items():
        made = commands.add_parser(name, help=command["about"])
        made.register("type", "path", Path)
        made.register("type", "float", float)
        made.register("type", "count", _count)
        made.set_defaults(run=globals()[f"_{name.replace('-', '_')}"])
        for argument, how in command.get("takes", {}).items():
            made.add_argument(argument, **how)
    return parser


def _count(text: str) -> int:
    """A whole number from 1 to 1,024; `ArgumentTypeError` for other text."""
    if not (text.isdecimal() and 1 <= int(text[:9]) <= 1024):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1024, got {text!r:.40}")
    return int(text)


NEXT = {"scenario": "check", "sweep": "sweep --out sweep.csv", "fleet": "fleet"}
"""What is done with a file that `planner init` wrote."""


def _init(options: argparse.Namespace) -> None:
    path = options.file
    if path.suffix not in (".yaml", ".yml"):
        raise PlannerError(f"a {options.kind} is a .yaml file, got {path}")
    if path.exists():
        raise PlannerError(f"{path} exists and stays as it is; name another file")
    with replacing(path, new=True) as (part,):
        part.write_text((TEMPLATES / f"{options.kind}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    print(f"wrote {path}; next: planner {NEXT[options.kind]} {shlex.quote(str(path))}")


def _check(options: argparse.Namespace) -> None:
    from planner.operations.answer import understood
    from planner.planning.scenario import load_scenario

    print(understood(load_scenario(options.scenario, _overrides(options))))


def _models(options: argparse.Namespace) -> None:
    from planner.models.registry import model, models, names

    known = names() if options.pattern else models()
    rows = [("model", "parameters", "active", "context", "weights")]
    for name in _matching(options.pattern, known, "model"):
        served = model(name)
        shape, stored = served.architecture, served.quantization.method
        total, active = (f"{count / 1e9:.2f} B" for count in (shape.params_total, shape.params_active))
        weights = served.dtype if stored == "none" else stored
        rows.append((name, total, active if shape.is_moe else "", f"{shape.max_position:,}", weights))
    print(aligned(rows))


def _gpus(options: argparse.Namespace) -> None:
    from planner.facts.gpus import gpu, gpus
    from planner.facts.prices import price_per_hour

    known = {called: card.name for card in gpus() for called in (card.name, *card.aliases)}
    names = dict.fromkeys(known[called] for called in _matching(options.pattern, known, "GPU"))
    rows = [("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")]
    for card in map(gpu, names):
        price, versions = price_per_hour(card), card.supported.items()
        engines = ", ".join(f"{name} {first}{f'-{last}' if last else '+'}" for name, (first, last) in versions)
        usd = f"{price.usd:.2f}" if price else "?"
        rows.append((card.name, f"{card.memory / GIB:.1f}", f"{card.bandwidth / GB:,.0f}", usd, engines))
    print(aligned(rows))


def _matching(pattern: str, names: Iterable[str], what: str) -> list[str]:
    """Those of `names` that hold `pattern`, in which `*` is anything; `PlannerError` if there are none."""
    if len(pattern) > 200:
        raise PlannerError(f"a part of a name has at most 200 letters, got {len(pattern):,}")
    names = list(names)
    found = [name for name in names if fnmatchcase(name.casefold(), f"*{pattern.casefold()}*")]
    if not found:
        parts = {part for name in names for part in (name, *re.split("[/-]", name))}
        raise did_you_mean(pattern, parts, what, alike=0.6)
    return found


def compiles(command: Callable[[argparse.Namespace], Any]) -> Callable[[argparse.Namespace], Any]:
    """A command that replays: when that is compiled first, a line on stderr says so, for it takes a while."""

    @wraps(command)
    def run(options: argparse.Namespace) -> Any:
        from numba.core.event import Event, Listener, install_listener

        class Telling(Listener):
            told = False

            def on_start(self, event: Event) -> None:
                if not self.told:
                    said = "planner: compiling the replay, once on this machine: up to a minute or two"
                    print(said, file=sys.stderr, flush=True)
                self.told = True

            def on_end(self, event: Event) -> None:
                pass

        with install_listener("numba:compile", Telling()):
            return command(options)

    return run


@compiles
def _plan(options: argparse.Namespace) -> int:
    from planner.operations.answer import EXIT, answer, told, write
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search

    asked = load_scenario(options.scenario, _overrides(options))
    if asked.day and sys.stderr.isatty():
        print("planner: replaying the hours of several days, up to a minute or two", file=sys.stderr, flush=True)
    found = search(asked)
    print(json.dumps(answer(found), indent=2, allow_nan=False) if options.json else told(found))
    if options.out:
        names = write(found, options.out)
        if not options.json:
            print(f"{'Written':<10}{', '.join(names)} in {options.out}")
    return EXIT[found.verdict]


@compiles
def _report(options: argparse.Namespace) -> None:
    from planner.faces.report import compare, report

    first, *others = options.scenarios
    names, overrides = options.scenarios, _overrides(options)
    print(f"report: {compare(names, options.out, overrides) if others else report(first, options.out, overrides)}")


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """What --set asks for, by field."""
    from planner.core.catalog import parse_yaml

    asked = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise PlannerError(f"--set takes FIELD=VALUE, such as workload.rate=12, got {text!r}")
        asked[key] = parse_yaml(value, f"--set {key}")
    return asked


@compiles
def _predict(options: argparse.Namespace) -> int:
    from planner.operations.batch import predict_file

    shown = (lambda done, rows: _progress(done, rows, "rows")) if sys.stderr.isatty() else None
    say = partial(print, "planner:", file=sys.stderr)
    return predict_file(options.rows, options.out, options.calibration, resume=options.resume, progress=shown, say=say)


def _progress(done: int, of: int, what: str) -> None:
    """A line on stderr, written over until all is done."""
    print(f"\r{done:,} of {of:,} {what}", end="\n" if done == of else "", file=sys.stderr, flush=True)


@compiles
def _sweep(options: argparse.Namespace) -> int:
    from platformdirs import user_data_path

    from planner.operations.sweep import sweep_file, told

    def progress(done: int, points: int, kept: int) -> None:
        if done == kept < points:
            said = "planner: workers start; on a new machine they compile first, up to a minute or two"
            print(said, file=sys.stderr, flush=True)
        if sys.stderr.isatty() or done in (kept, points):
            _progress(done, points, f"points, {kept:,} from the store")

    store = options.store or user_data_path("headroom") / "answers.sqlite"
    found = sweep_file(options.sweep, options.out, store, options.scheduler, options.workers, progress)
    print(told(found))
    failed = found[found["status"] == "error"]
    if len(failed):
        print(f"planner: {len(failed):,} points failed, the first: {failed['error'].iloc[0]}", file=sys.stderr)
    return int(len(failed) > 0)


@compiles
def _fleet(options: argparse.Namespace) -> None:
    from planner.faces.report import fleet

    print(f"report: {fleet(options.fleet, options.out)}")


def _explain_log(options: argparse.Namespace) -> int:
    from planner.operations.explain_log import explain_file
    from planner.planning.scenario import load_scenario

    found = explain_file(options.log, options.gpu, load_scenario(options.scenario) if options.scenario else None)
    print(found)
    if found.fragment:
        print(f"\nTo plan with what this log says, add to the scenario (GiB):\n{found.fragment}")
    if found.outlook:
        print(f"\n{found.outlook}")
    return int(bool(found.log.failure or found.errors))


def _diagnose(options: argparse.Namespace) -> int:
    from planner.operations.diagnose import diagnose

    found = diagnose(options.pages, options.log, options.plan, options.seconds)
    print(json.dumps(found.data(), indent=2, allow_nan=False) if options.json else found)
    return int(found.wrong)


def _profile(options: argparse.Namespace) -> None:
    from planner.operations.traffic_profile import traffic_profile

    print(traffic_profile(options.sources, options.seconds), end="")


def _lint(options: argparse.Namespace) -> int:
    from planner.operations.lint import lint
    from planner.planning.scenario import load_scenario

    traffic = load_scenario(options.scenario).workload if options.scenario else None
    words = [*options.what, *options.rest]
    what, version = words[0] if len(words) == 1 else shlex.join(words), options.engine_version
    found = lint(what, version, engine=options.engine, gpu=options.gpu, to=options.to, workload=traffic)
    print(json.dumps(found.json(), indent=2, allow_nan=False) if options.json else found)
    return {"ok": 0, "at_risk": 3, "mend": 1}[found.verdict]


@compiles
def _replay(options: argparse.Namespace) -> None:
    from planner.simulator.schedule_cases import run_case

    written = [path for path in (options.step_log, options.requests) if path]
    spare(filter(None, [options.case]), written)
    if (options.case is None) == (options.scenario is None):
        raise PlannerError("replay takes either a CASE.json or --scenario SCENARIO")
    if options.case is not None:
        print(run_case(options.case, options.step_log, options.fixed_step_time))
        return
    from planner.planning.benchmark_run import run
    from planner.planning.candidate import traffic
    from planner.planning.scenario import load_scenario
    from planner.planning.search import search
    from planner.studies.summary import subject

    scenario = load_scenario(options.scenario)
    spare(scenario.files, written)
    deployment = subject(search(scenario))
    found = run(deployment, traffic(scenario, deployment)).mid
    print(f"{deployment}\n{found}")
    if options.requests is not None:
        with replacing(options.requests) as (part,):
            found.frame().to_csv(part, index=False)


def _calibrate(options: argparse.Namespace) -> None:
    from planner.operations.bench_results import planned, read_results
    from planner.operations.fits.calibration import REPEATS, fit, replayed
    from planner.planning.scenario import scenario_path

    read = [*options.results, *([scenario_path(options.scenario)] if options.scenario else [])]
    spare(read, [options.out] if options.out else [])
    deployment, prefix_tokens = planned(options.scenario) if options.scenario else (None, 0)
    results = read_results(options.results, deployment, prefix_tokens)
    fitted, date = fit(results.points, means=replayed, noise=REPEATS), f"{today():%Y-%m-%d}"
    print("\n".join((*results.notes, str(fitted))))
    if options.out is None:
        print("not saved: name a file with --out to plan with it")
    else:
        fitted.save(options.out, date)
        print(f"saved: {options.out}; to plan with it, add to the scenario:\ncalibration: {options.out}")


def _scenarios(_options: argparse.Namespace) -> None:
    from planner.core.catalog import read_yaml
    from planner.planning.scenario import SCENARIOS, scenarios

    for name in scenarios():
        print(f"{name:20}{one_line(read_yaml(SCENARIOS / f'{name}.yaml')['question'])}")
