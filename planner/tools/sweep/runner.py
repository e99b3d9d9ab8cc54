"""`planner sweep`: thousands of what-ifs of one scenario, worked out on Dask and kept in a store.

Every point is the scenario with some fields set. Its answer is kept under a digest of all that
decides it: the fields, the files that they name, the catalogs and the planner's own code. What the
store knows is not worked out again.
"""

import hashlib
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from planner.core.catalog import compute_build_digest, validate_entry
from planner.core.errors import PlannerError
from planner.core.files import check_not_overwriting, ensure_folder, replace_atomically
from planner.core.text import escape_to_one_line
from planner.engines.deployment import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.models.registry import load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment
from planner.planning.evaluation import evaluate_candidate, simulate_candidate
from planner.planning.scenario import CandidateGpu, Scenario, parse_scenario
from planner.planning.search import search_analytically, search_deployments
from planner.planning.table_rows import build_output_row
from planner.simulator.simulation import compile_simulator
from planner.tools.sweep.sweep_spec import DeploymentEntry, SweepSpec, load_sweep_spec

if TYPE_CHECKING:
    import pandas as pd

POINTS_PER_TASK = {False: 64, True: 4}
"""Points of a task: in closed form, and where traffic is replayed."""


@cache
def _hash_file(file: Path) -> str:
    """A digest of a file that a question names; of a folder, of the `config.json` in it."""
    file = file / "config.json" if file.is_dir() else file
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def compute_point_key(sweep: SweepSpec, asked: Mapping[str, Any]) -> str:
    """What the answer to a question is kept under; its title and the files that it wants written do not count."""
    said = {name: value for name, value in asked.items() if name not in ("question", "files")}
    named = [said.get("model"), said.get("calibration")]
    for part, files in (("workload", ("trace", "day")), ("speculation", ("draft_model",))):
        if isinstance(given := said.get(part), dict):
            named += map(given.get, files)
    places = [
        place
        for name in named
        if isinstance(name, str)
        for place in (sweep.folder / name, Path(name))
    ]
    whole = [
        compute_build_digest(),
        sweep.answer,
        sweep.replay,
        said,
        [_hash_file(place) for place in places],
    ]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


class AnswerStore:
    """Answers by key in one SQLite file, which several sweeps may use at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ensure_folder(path.parent)
        with self._open() as data:
            data.execute(
                "create table if not exists answers (key text primary key, answer text not null)"
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as data, data:
                yield data
        except sqlite3.Error as error:
            raise PlannerError(f"cannot use {self.path} as a store of answers: {error}") from None

    def fetch(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The answers to those of `keys` that have one."""
        found: dict[str, dict[str, Any]] = {}
        asked = iter(dict.fromkeys(keys))
        with self._open() as data:
            while some := list(islice(asked, 500)):
                marks = ", ".join("?" * len(some))
                rows = data.execute(f"select key, answer from answers where key in ({marks})", some)
                found |= {name: json.loads(text) for name, text in rows}
        return found

    def add(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep `answers`, all of them or none; errors, which may pass, are not kept."""
        rows = [
            (name, json.dumps(one)) for name, one in answers.items() if one["status"] != "error"
        ]
        with self._open() as data:
            data.executemany("insert or ignore into answers values (?, ?)", rows)


def answer_points(
    sweep: SweepSpec, wanted: str, questions: Sequence[tuple[str, Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """The answers to (key, fields set) of some points: one task. `wanted` is the build that asks."""
    if compute_build_digest() != wanted:
        raise PlannerError(
            "a worker has another version of the planner, or other catalogs: give it the same"
        )
    return {name: answer_point(sweep, point) for name, point in questions}


def answer_point(sweep: SweepSpec, point: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the output; `status` is ok, does_not_fit, nothing_meets or error."""
    try:
        fields = sweep.build_scenario_fields(point)
        wanted = fields.pop("deployment", None)
        scenario = parse_scenario(fields, sweep.name, sweep.folder)
        if sweep.answer == "predict":
            candidate = _predict_point(
                scenario, validate_entry(DeploymentEntry, wanted, "deployment"), sweep.replay
            )
            return _build_point_row(scenario, candidate)
        plan = search_deployments(scenario) if sweep.replay else search_analytically(scenario)
        about: dict[str, Any] = {
            "verdict": plan.verdict,
            "binding": plan.binding_constraint.constraint,
        }
        if sweep.replay and (day := plan.autoscaling):
            fewest, most = min(day.replicas), max(day.replicas)
            about |= {
                "replicas_fewest": fewest,
                "replicas_most": most,
                "hours_missed": len(day.violated_hours),
            }
            about |= {"gpu_hours": day.gpu_hours, "gpu_hours_fixed": day.fixed_gpu_hours}
        if plan.best is None:
            return {"status": "nothing_meets", **about, "error": str(plan.binding_constraint)}
        row = _build_point_row(scenario, plan.best) | about
        return (
            row
            if plan.chosen
            else row | {"status": "nothing_meets", "error": "; ".join(plan.reasons)}
        )
    except PlannerError as error:
        return {"status": "error", "error": str(error)}
    except Exception as error:  # one odd point must not end the others
        return {
            "status": "error",
            "error": escape_to_one_line(
                f"this point cannot be planned ({type(error).__name__}: {error})"
            ),
        }


def _predict_point(
    scenario: Scenario, deployment_entry: DeploymentEntry, replay: bool
) -> Candidate:
    """The given deployment under the scenario's traffic."""
    name = get_gpu(deployment_entry.gpu).name if deployment_entry.gpu else scenario.gpus[0].gpu.name
    candidate_gpu = next((card for card in scenario.gpus if card.gpu.name == name), None)
    model = load_model(
        scenario.model,
        quantization=(
            None if deployment_entry.quantization == "checkpoint" else deployment_entry.quantization
        ),
    )
    layout = ParallelLayout(
        deployment_entry.tp,
        deployment_entry.pp,
        deployment_entry.dp,
        deployment_entry.ep,
        deployment_entry.dcp,
    )
    if reason := explain_illegal_layout(model, layout, layout.gpus_per_replica, scenario.engine):
        raise PlannerError(reason)
    drafting = (
        scenario.speculation.to_config()
        if scenario.speculation and scenario.speculation.allowed
        else None
    )
    candidate_gpu = candidate_gpu or CandidateGpu(
        get_gpu(name), layout.num_gpus * deployment_entry.replicas
    )
    deployment = build_deployment(
        scenario, candidate_gpu, model, layout, deployment_entry.kv_cache_dtype, drafting
    )
    candidate = evaluate_candidate(scenario, deployment, deployment_entry.replicas)
    return (
        simulate_candidate(scenario, candidate)
        if replay and candidate.prediction.can_start
        else candidate
    )


def _build_point_row(scenario: Scenario, candidate: Candidate) -> dict[str, Any]:
    """What a candidate is and does, with the columns of `planner predict`."""
    deployment = candidate.deployment
    verdict = (
        "nothing_meets"
        if not candidate.is_feasible
        else "at_risk"
        if candidate.at_risk
        else "holds"
    )
    return {
        "status": "ok", "verdict": verdict, "binding": "",
        "figures": "replay" if candidate.is_simulated else "closed form",
        "gpu": deployment.gpu.name,
        "gpus": sum(pool.num_gpus for pool in candidate.prediction.pools),
        "gpus_rented": candidate.prediction.num_gpus_billed, **vars(deployment.layout),
        "pools": candidate.description if candidate.is_disaggregated else "",
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto",
        "max_num_seqs": deployment.args.max_num_seqs,
        "max_model_len": deployment.args.max_model_len,
        "misses": "; ".join(candidate.violations),
        "margin": candidate.limit_utilization if math.isfinite(candidate.limit_utilization) else None,
    } | {
        # as JSON holds it
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in build_output_row(candidate.prediction).items()
    }  # fmt: skip


def unify_column_type(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """A column as Parquet holds it: text where its values are of several types, such as a number and "auto"."""
    if column.dtype != object or len({type(value) for value in column.dropna()}) < 2:
        return column
    return column.map(
        lambda value: value if isinstance(value, str) else json.dumps(value), na_action="ignore"
    )


def run_sweep(
    sweep: SweepSpec, store: AnswerStore, scheduler: str | None = None, workers: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The answers to all points, in their order; those that the store lacks are worked out and appended to it.

    They run on the Dask `scheduler` at an address, else on `workers` processes of this machine (as
    many as it has cores). `progress` is told the distinct points that are answered, all of them,
    and those that the store knew. Raises `PlannerError` where the scheduler cannot be reached or
    its workers have another planner.
    """
    keys = [compute_point_key(sweep, sweep.build_scenario_fields(point)) for point in sweep.points]
    found = store.fetch(keys)
    kept, all_points = len(found), dict(zip(keys, sweep.points, strict=True))
    open_points = [(name, point) for name, point in all_points.items() if name not in found]
    tell = progress or (lambda *_: None)
    tell(kept, len(all_points), kept)
    if open_points:
        if sweep.replay and not scheduler:
            compile_simulator()  # once, here: workers then find it on disk
        for some in _compute_answers(sweep, open_points, scheduler, workers):
            store.add(some)
            found |= some
            tell(len(found), len(all_points), kept)
    return [found[name] for name in keys]


def _compute_answers(
    sweep: SweepSpec,
    questions: list[tuple[str, Mapping[str, Any]]],
    scheduler: str | None,
    workers: int | None,
) -> Iterator[dict[str, dict[str, Any]]]:
    """Answers, chunk by chunk as they are found."""
    from dask.distributed import Client, KilledWorker, LocalCluster, as_completed
    from distributed.client import FutureCancelledError

    task, size = (
        partial(answer_points, replace(sweep, points=(), files=()), compute_build_digest()),
        POINTS_PER_TASK[sweep.replay],
    )
    if scheduler and not re.fullmatch(r"(tcp|tls|ws|wss)://.+:\d{1,5}", scheduler):
        raise PlannerError(
            f"--scheduler takes an address such as tcp://10.0.0.1:8786, got {scheduler!r:.80}"
        )
    chunks = [questions[k : k + size] for k in range(0, len(questions), size)]
    try:
        with ExitStack() as held:
            place: Any = scheduler or held.enter_context(
                LocalCluster(
                    n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0",
                    memory_limit=0,
                    silence_logs=50, local_directory=held.enter_context(TemporaryDirectory()),
                )
            )  # fmt: skip
            client = held.enter_context(Client(place, timeout=20, set_as_default=False))
            tasks = client.map(task, chunks, pure=False)
            for _, some in as_completed(tasks, loop=client.loop, with_results=True):
                yield some
    except (OSError, KilledWorker, FutureCancelledError) as error:
        where, why = scheduler or "this machine", error or type(error).__name__
        raise PlannerError(f"Dask on {where} gave up, what was answered is kept: {why}") from None


def run_sweep_file(
    path: Path, out: Path, store: Path, scheduler: str | None = None, workers: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> "pd.DataFrame":  # fmt: skip
    """Work out the sweep of `path` into the table `out`, CSV or Parquet, which is returned."""
    import pandas as pd

    if out.suffix not in (".csv", ".parquet"):
        raise PlannerError(f"--out takes a .csv or a .parquet file, got {out}")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise PlannerError(
            "Parquet is written by pyarrow, which is not installed: "
            "pip install 'headroom-planner[parquet]', or name a .csv"
        )
    sweep = load_sweep_spec(path)
    check_not_overwriting(sweep.files, [out, store])
    ensure_folder(out.parent)
    found = run_sweep(sweep, AnswerStore(store), scheduler, workers, progress)
    rows = [
        {
            "point": k,
            **{
                f"set.{name}": json.dumps(v) if isinstance(v, dict | list) else v
                for name, v in point.items()
            },
        }
        | one
        for k, (point, one) in enumerate(zip(sweep.points, found, strict=True))
    ]
    table = pd.DataFrame(rows)
    with replace_atomically(out) as (part,):
        if out.suffix == ".csv":
            table.to_csv(part, index=False, float_format="%.7g")
        else:
            table.apply(unify_column_type).to_parquet(part, index=False)
    return table


TERMINAL_COLUMNS = (
    "verdict",
    "gpu",
    "gpus_rented",
    "usd_per_hour",
    "ttft_ms_p95",
    "tpot_ms_p95",
    "figures",
)
"""Columns of a table that a terminal shows beside the fields that were set."""


def format_sweep(table: "pd.DataFrame", most: int = 20) -> str:
    """The first points of a sweep for a terminal; what has no verdict shows its status."""

    def figure(value: float) -> str:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"

    columns = [*(name for name in map(str, table) if name.startswith("set.")), *TERMINAL_COLUMNS]
    shown = (
        table.head(most)
        .reindex(columns=columns)
        .rename(columns=lambda name: name.removeprefix("set."))
    )
    shown["verdict"] = shown["verdict"].astype(object).fillna(table["status"])
    more = f"\n... and {len(table) - most:,} more" * (len(table) > most)
    return shown.to_string(index=False, na_rep="", float_format=figure) + more
