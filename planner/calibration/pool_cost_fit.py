"""Fit `catalogs/pools.yaml`, what pools cost beside the step costs: `make pools`, after each `make fit`.

First decoding, without a replay: by Little's law a decode worker had C / D x stay / (stay + TTFT)
sequences in flight, all of them measured, so that TPOT is the time of that step. Then what is
before the first token, by replaying each run with decoding as fitted. Errors are logarithms under a
Student-t loss, parts have a normal prior around the step costs; Gauss-Newton. Held back are whole
curves, GPUs and releases, by one Newton step from the fit with all, replayed.

The runs' `max_num_seqs` is the decode batch in the names of InferenceX's TensorRT-LLM recipes (as
in ctx1_gen5_tep8_batch32), or, where none was found, the power of two at or below the concurrency
of a rank, as in those that were; above it requests wait for a seat.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO

import numpy as np
import yaml

from planner.calibration.catalog_writer import replace_catalog_entries
from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError, add_error_context
from planner.core.files import get_report_date
from planner.core.intervals import Z_SCORE_80PCT
from planner.core.readers import read_text
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_target_step_model
from planner.latency.worker_pool_costs import (
    WorkerPoolCosts,
    get_pool_coefficients,
    get_pool_costs,
    get_pool_entry_name,
)
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.disaggregated import DisaggregatedPools
from planner.planning.table_rows import (
    fit_max_model_len,
    parse_cells,
    parse_deployment,
    parse_model,
    parse_row_workload,
)
from planner.workload.workload import Workload

POOL_RUNS_FILE, POOL_COSTS_FILE = (
    CATALOG_DIR / "validation" / "pools.csv",
    CATALOG_DIR / "pools.yaml",
)
DECODE_PRIOR_SIGMAS = {
    "pace": 0.4, "row_s": 0.8, "kernel_s": 0.4, "expert_latency": 0.4, "expert_gemm": 0.4,
    "allreduce_s": 0.4,
    "memory_fp4": 0.4, "kv": 0.4, "link": 0.4, "step_s": 0.4,
}  # fmt: skip
PREFILL_PRIOR_SIGMAS = {
    "request_s": 1.0,
    "handover": 0.5,
    "pace": 0.3,
    "attention_dp": 0.5,
    "launch_s": 0.5,
}
"""What is fitted of each phase, and how far it may be from `START` (standard deviation of its logarithm)."""
INITIAL_VALUES = {"row_s": 20e-6, "request_s": 0.06, "handover": 1.0}
"""Where it starts, in its units; factors start at 1."""
ENGINE_PRIOR_SIGMAS = {"sglang": {"expert_gemm": 0.4, "token_passes": 0.4}}
"""What else is fitted of an engine's prefill: SGLang's recipes give its workers other expert kernels than servers that
do both (DeepEP with DeepGEMM, FlashInfer's CUTLASS; srt-slurm, 2026-02)."""
ENGINE_INITIAL_VALUES = {"sglang": {"handover": 20.0}}
"""First tokens of SGLang's pools were 200 ms late where the cache travelled for 6 ms and a step took 10 (issue 22853,
2026-04): workers look between steps for requests, seats and caches, in recipes of low latency every
tenth time."""
POOL_NOISE_TPOT, POOL_NOISE_TTFT, POOL_STUDENT_T_DOF = 0.08, 0.2, 2.0
"""Of the Student-t loss: scale of an error's logarithm, and degrees of freedom (some recipes hide what they did)."""
MAX_FITTED_IN_FLIGHT = 4100
"""Requests in flight of the runs that what is before the first token is fitted to: larger ones take long to replay."""


@dataclass(frozen=True)
class MeasuredPoolRun:
    """A measured run of pools, in seconds."""

    prefill: Deployment
    decode: Deployment
    memory: MemoryPlan
    workload: Workload
    ttft: float
    tpot: float
    curve: str

    @cached_property
    def holdout_groups(self) -> dict[str, str]:
        """The whole that it belongs to, by what may be new in a question."""
        engine = self.decode.engine
        return {
            "curve": self.curve,
            "gpu": self.decode.gpu.name,
            "release": f"{engine.name} {engine.version}",
        }

    def predict_tpot(self, costs: WorkerPoolCosts) -> float:
        """Seconds of a decode step with the sequences that Little's law says were in a worker."""
        stay = self.tpot * (self.workload.output.mean - 1)
        flying = (self.workload.concurrency or 1) * stay / (stay + self.ttft)
        ranks = self.decode.layout.replicas * self.decode.layout.dp
        roomy = replace(self.decode, args=replace(self.decode.args, max_num_seqs=2048))
        step = build_target_step_model(roomy, get_pool_coefficients(roomy, "decode", costs))
        return float(
            step.estimate_decode_step_s(max(flying / ranks, 1.0), self.workload.mean_decode_context)
        )

    def simulate(self, costs: WorkerPoolCosts) -> tuple[float, float]:
        """Mean TTFT and TPOT of its replay."""
        performance = DisaggregatedPools.from_deployments(
            self.prefill, self.decode, self.memory, self.workload, costs
        ).simulate(self.workload)
        return performance.ttft["mean"].mid, performance.tpot["mean"].mid


def load_pool_runs() -> list[MeasuredPoolRun]:
    """The public runs: columns of `planner predict`, `measured_ttft_ms`, `measured_tpot_ms`, `curve` and `source`."""
    pool_runs, folder = [], POOL_RUNS_FILE.parent
    for number, row in enumerate(
        csv.DictReader(StringIO(read_text(POOL_RUNS_FILE), newline="")), start=2
    ):
        with add_error_context(f"{POOL_RUNS_FILE.name}, line {number}"):
            cells, _ = parse_cells(row)
            workload, model = parse_row_workload(cells, folder, []), parse_model(cells, folder)
            if workload is None:
                raise PlannerError("isl and osl are missing")
            pools = [
                parse_deployment(model, cells, folder, [], pool) for pool in ("prefill", "decode")
            ]
            prefill, decode = (fit_max_model_len(pool, workload, []) for pool in pools)
        ttft, tpot = (float(row[name]) / 1e3 for name in ("measured_ttft_ms", "measured_tpot_ms"))
        pool_runs.append(
            MeasuredPoolRun(
                prefill, decode, get_memory_plan(decode), workload, ttft, tpot, row["curve"]
            )
        )
    return pool_runs


@dataclass(frozen=True)
class GaussNewtonFit:
    """One of the two fits: `x` logarithms over `START`, and slopes [runs, x] and errors [runs] there."""

    spread: np.ndarray
    noise: float
    x: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray

    @cached_property
    def residual_weights(self) -> np.ndarray:
        return (
            (POOL_STUDENT_T_DOF + 1)
            / (POOL_STUDENT_T_DOF + (self.errors / self.noise) ** 2)
            / self.noise**2
        )

    def refit_without(self, rows: np.ndarray) -> np.ndarray:
        """`x` of a fit without these runs, to first order."""
        kept = self.slopes[~rows]
        matrix = (kept * self.residual_weights[~rows, None]).T @ kept + np.diag(1 / self.spread**2)
        pull = (self.slopes[rows] * (self.residual_weights * self.errors)[rows, None]).sum(0)
        return np.asarray(self.x + np.clip(np.linalg.solve(matrix, pull), -0.5, 0.5))


def fit_pool_costs(
    errors: Callable[[np.ndarray], np.ndarray],
    spread: dict[str, float],
    noise: float,
    rounds: int = 8,
) -> GaussNewtonFit:
    """Gauss-Newton on `errors`(x), halving a step that makes things worse."""
    wide = np.array(list(spread.values()))

    def loss(found: np.ndarray, x: np.ndarray) -> float:
        unlikely = (POOL_STUDENT_T_DOF + 1) * np.log1p((found / noise) ** 2 / POOL_STUDENT_T_DOF)
        return float(unlikely.sum() + ((x / wide) ** 2).sum())

    x = np.zeros(len(wide))
    now = errors(x)
    for _ in range(rounds):
        slopes = np.stack(
            [(errors(x + 0.02 * unit) - now) / 0.02 for unit in np.eye(len(x))], axis=1
        )
        state = GaussNewtonFit(wide, noise, x, now, slopes)
        matrix = (slopes * state.residual_weights[:, None]).T @ slopes + np.diag(1 / wide**2)
        move = -np.linalg.solve(matrix, slopes.T @ (state.residual_weights * now) + x / wide**2)
        move = np.clip(move, -0.7, 0.7)
        for _ in range(4):
            tried = errors(x + move)
            if loss(tried, x + move) < loss(now, x):
                break
            move /= 2
        else:
            break
        gained = loss(now, x) - loss(tried, x + move)
        x, now = x + move, tried
        if gained < 0.003 * loss(now, x):
            break
    return replace(state, x=x, errors=now)


def convert_from_logs(
    x: np.ndarray, spread: Mapping[str, float], start: Mapping[str, float] = INITIAL_VALUES
) -> dict[str, float]:
    """Fitted logarithms in their units, by name."""
    return {
        name: start.get(name, 1.0) * math.exp(log)
        for name, log in zip(spread, x.tolist(), strict=True)
    }


def build_pool_costs(
    base: WorkerPoolCosts, decode: np.ndarray, prefill: Mapping[str, float] | None = None
) -> WorkerPoolCosts:
    """`base` with fitted values in place, of decoding by their logarithms."""
    pool_costs = base.model_copy(
        update={
            "decode": convert_from_logs(decode, DECODE_PRIOR_SIGMAS),
            "prefill": {},
            "attention_dp": 1.0,
        }
    )
    if prefill is None:
        return pool_costs
    given = dict(prefill)
    beside = {name: given.pop(name) for name in ("handover", "attention_dp")}
    return pool_costs.model_copy(update={"prefill": given, **beside})


def _compute_decode_errors(runs: Sequence[MeasuredPoolRun], x: np.ndarray) -> np.ndarray:
    """ln(predicted / measured) TPOT of `runs`, by Little's law, with these logarithms of `DECODE`."""
    costs = build_pool_costs(get_pool_costs(runs[0].decode.engine), x)
    return np.log([run.predict_tpot(costs) / run.tpot for run in runs])


def fit_engine_pools(engine: str, runs: Sequence[MeasuredPoolRun]) -> dict[str, dict[str, object]]:
    """The catalog's entries of `engine`: decoding of each fitted to its own runs, what is before it to all of them.

    How far off the fit is, also on what it goes without, is printed.
    """
    runs = [run for run in runs if run.decode.engine.name == engine]
    bases = [get_pool_costs(run.decode.engine) for run in runs]
    entries = np.array([get_pool_entry_name(run.decode.engine) for run in runs])
    small = np.array([(run.workload.concurrency or 0) <= MAX_FITTED_IN_FLIGHT for run in runs])
    decodes = {}
    for entry in np.unique(entries).tolist():
        own = [run for run, name in zip(runs, entries, strict=True) if name == entry]
        decodes[entry] = fit_pool_costs(
            partial(_compute_decode_errors, own), DECODE_PRIOR_SIGMAS, POOL_NOISE_TPOT, rounds=12
        )

    asked, start = (
        PREFILL_PRIOR_SIGMAS | ENGINE_PRIOR_SIGMAS.get(engine, {}),
        INITIAL_VALUES | ENGINE_INITIAL_VALUES.get(engine, {}),
    )

    def costs_at(k: int, decode: np.ndarray, prefill: np.ndarray) -> WorkerPoolCosts:
        return build_pool_costs(bases[k], decode, convert_from_logs(prefill, asked, start))

    def before(x: np.ndarray) -> np.ndarray:
        costs = (
            (runs[k], costs_at(k, decodes[entries[k]].x, x)) for k in np.flatnonzero(small).tolist()
        )
        return np.log([run.simulate(pool_costs)[0] / run.ttft for run, pool_costs in costs])

    prefill = fit_pool_costs(before, asked, POOL_NOISE_TTFT)
    widths = {}
    for what in ("", "curve", "gpu", "release"):
        wholes = np.array([run.holdout_groups[what] if what else "" for run in runs])
        if what and len(np.unique(wholes)) == 1:
            continue
        seen = np.zeros((len(runs), 2))
        for whole in np.unique(wholes):
            rows = wholes == whole
            for k in np.flatnonzero(rows).tolist():
                decode = decodes[entries[k]]
                own = rows[entries == entries[k]]
                if what and not own.all():
                    logs = decode.refit_without(own), prefill.refit_without(rows[small])
                elif what:  # all that its entry has
                    logs = np.zeros_like(decode.x), prefill.refit_without(rows[small])
                else:
                    logs = decode.x, prefill.x
                measured = np.array((runs[k].ttft, runs[k].tpot))
                seen[k] = np.log(np.array(runs[k].simulate(costs_at(k, *logs))) / measured)
        print(_format_errors(engine, what, seen, wholes))
        widths[what] = np.abs(seen)
    sigma_ttft, sigma_tpot = np.quantile(widths["curve"], 0.8, axis=0) / Z_SCORE_80PCT
    engine_pools = {}
    for entry, decode in decodes.items():
        mine = entries == entry
        costs = costs_at(int(np.argmax(mine)), decode.x, prefill.x)
        own = [run for run, use in zip(runs, mine, strict=True) if use]
        engine_pools[entry] = {
            **{
                name: {key: float(f"{value:.3g}") for key, value in getattr(costs, name).items()}
                for name in ("prefill", "decode")
            },
            "attention_dp": round(costs.attention_dp, 3), "handover": round(costs.handover, 2),
            **({"prefill_tokens": costs.prefill_tokens} if costs.prefill_tokens else {}),
            "sigma_tpot": round(float(sigma_tpot), 3), "sigma_ttft": round(float(sigma_ttft), 3),
            "gpus": sorted({run.decode.gpu.name for run in own}),
            "models": sorted({run.decode.model.architecture.model_type for run in own}),
            "points": len(own),
            "source": "InferenceX (SemiAnalysis, Apache-2.0), see validation/pools.csv; make pools",
            "date": f"{get_report_date():%Y-%m-%d}",
        }  # fmt: skip
    return engine_pools


def _format_errors(engine: str, what: str, seen: np.ndarray, wholes: np.ndarray) -> str:
    """Errors of TTFT and TPOT in a line; the interval of a run is put around by the errors of all other wholes."""
    sizes, off = np.abs(seen), np.abs(np.expm1(seen))
    parts = []
    for column, metric in enumerate(("TTFT", "TPOT")):
        text = f"{metric} median {np.median(off[:, column]):.1%}, mean {off[:, column].mean():.1%}"
        if what:
            inside = [
                sizes[k, column] <= np.quantile(sizes[wholes != wholes[k], column], 0.8)
                for k in range(len(seen))
            ]
            text += f", {np.mean(inside):.0%} inside the interval"
        parts.append(text)
    return (
        f"{engine}, {len(seen)} runs, {f'held back by {what}' if what else 'fitted'}:"
        f" {'; '.join(parts)}"
    )


if __name__ == "__main__":
    measured = load_pool_runs()
    names = sorted({run.decode.engine.name for run in measured})
    found = [entry for name in names for entry in fit_engine_pools(name, measured).items()]
    replace_catalog_entries(
        POOL_COSTS_FILE,
        "\n".join(yaml.safe_dump(dict([entry]), sort_keys=False, width=110) for entry in found),
    )
