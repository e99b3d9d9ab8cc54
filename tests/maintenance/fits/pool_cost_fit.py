"""Fit `catalogs/pools.yaml`, the costs of worker pools beyond the step costs: `make pools`.

Run it after each `make fit`. The decode coefficients are fitted first, without a simulation: by
Little's law a decode worker had concurrency / workers x decode time / (decode time + TTFT)
sequences in flight, all of them measured, so that TPOT is the time of that step. The prefill
coefficients are then fitted by simulating each run with the decode coefficients as fitted. The
prior is normal around the step costs (`robust_fit`). Errors for new curves, GPUs and releases are
estimated by one Newton step from the fit to all runs, then simulated.

The runs' `max_num_seqs` is the decode batch in the names of InferenceX's TensorRT-LLM recipes (as
in ctx1_gen5_tep8_batch32). Where the name has none, it is the largest power of two up to the
concurrency per rank, as in recipes that name it; above it requests wait for a slot.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO

import numpy as np
import yaml

from fits.catalog_writer import replace_catalog_entries
from planner.calibration.robust_fit import RobustFit, estimate_slopes, fit_student_t, remember_last
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

POOL_RUNS_FILE = CATALOG_DIR / "validation" / "pools.csv"
POOL_COSTS_FILE = CATALOG_DIR / "pools.yaml"
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
"""Values fitted for each phase, with the prior sigma of their logarithm around `INITIAL_VALUES`."""
INITIAL_VALUES = {"row_s": 20e-6, "request_s": 0.06, "handover": 1.0}
"""Where the fit starts, in each value's unit; factors start at 1."""
ENGINE_PRIOR_SIGMAS = {"sglang": {"expert_gemm": 0.4, "token_passes": 0.4}}
"""Prefill values fitted for one engine only. SGLang's recipes give its pool workers other expert
kernels than its servers that do both phases (DeepEP with DeepGEMM, FlashInfer's CUTLASS; srt-slurm,
2026-02)."""
ENGINE_INITIAL_VALUES = {"sglang": {"handover": 20.0}}
"""First tokens of SGLang's pools were 200 ms late although the transfer took 6 ms and a step 10 ms
(issue 22853, 2026-04): workers look for requests, slots and caches between steps, and in
low-latency recipes only every tenth time."""
POOL_NOISE_TPOT, POOL_NOISE_TTFT, POOL_STUDENT_T_DOF = 0.08, 0.2, 2.0
"""Scale of the errors' logarithm, and degrees of freedom. They are few because some recipes hide
what they did."""
MAX_FITTED_IN_FLIGHT = 4100
"""Largest concurrency of the runs that prefill is fitted to: simulating larger ones takes long."""


@dataclass(frozen=True)
class MeasuredPoolRun:
    """A measured run of disaggregated pools; latencies in seconds."""

    prefill: Deployment
    decode: Deployment
    memory: MemoryPlan
    workload: Workload
    ttft: float
    tpot: float
    curve: str

    @cached_property
    def holdout_groups(self) -> dict[str, str]:
        """The groups that the run is held out with, by what may be new in a scenario."""
        engine = self.decode.engine
        return {
            "curve": self.curve,
            "gpu": self.decode.gpu.name,
            "release": f"{engine.name} {engine.version}",
        }

    def predict_tpot(self, costs: WorkerPoolCosts) -> float:
        """Return the seconds of a decode step with the sequences that Little's law gives."""
        decode_s = self.tpot * (self.workload.output.mean - 1)
        in_flight = (self.workload.concurrency or 1) * decode_s / (decode_s + self.ttft)
        ranks = self.decode.layout.replicas * self.decode.layout.dp
        unlimited = replace(self.decode, args=replace(self.decode.args, max_num_seqs=2048))
        step = build_target_step_model(unlimited, get_pool_coefficients(unlimited, "decode", costs))
        return float(
            step.estimate_decode_step_s(
                max(in_flight / ranks, 1.0), self.workload.mean_decode_context
            )
        )

    def simulate(self, costs: WorkerPoolCosts) -> tuple[float, float]:
        """Return the simulated mean TTFT and TPOT in seconds."""
        performance = DisaggregatedPools.from_deployments(
            self.prefill, self.decode, self.memory, self.workload, costs
        ).simulate(self.workload)
        return performance.get("ttft", "mean").mid, performance.get("tpot", "mean").mid


def load_pool_runs() -> list[MeasuredPoolRun]:
    """Load the public runs.

    Columns are those of `headroom predict`, with `measured_ttft_ms`, `measured_tpot_ms`, `curve` and
    `source`.
    """
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


def fit_pool_costs(
    compute_errors: Callable[[np.ndarray], np.ndarray],
    prior_sigmas: Mapping[str, float],
    noise: float,
    max_evaluations: int = 10,
) -> RobustFit:
    """Fit the logarithms of values over `INITIAL_VALUES` to errors, ln(predicted / measured)."""
    sigmas, compute_errors = np.array(list(prior_sigmas.values())), remember_last(compute_errors)
    return fit_student_t(
        compute_errors,
        lambda x: estimate_slopes(lambda trials: map(compute_errors, trials), x, 0.02),
        noise, sigmas, POOL_STUDENT_T_DOF, max_evaluations=max_evaluations, tolerance=3e-3,
    )  # fmt: skip


def _refit_without(fit: RobustFit, rows: np.ndarray) -> np.ndarray:
    """Return the logarithms fitted without these runs; the step is limited, as it holds nearby."""
    return np.asarray(fit.x + np.clip(fit.compute_step_without(rows), -0.5, 0.5))


def convert_from_logs(
    x: np.ndarray, spread: Mapping[str, float], start: Mapping[str, float] = INITIAL_VALUES
) -> dict[str, float]:
    """Return the fitted values in their units by name."""
    return {
        name: start.get(name, 1.0) * math.exp(log)
        for name, log in zip(spread, x.tolist(), strict=True)
    }


def build_pool_costs(
    base: WorkerPoolCosts, decode: np.ndarray, prefill: Mapping[str, float] | None = None
) -> WorkerPoolCosts:
    """Return `base` with the fitted values: logarithms for decode, values for prefill."""
    pool_costs = base.model_copy(
        update={
            "decode": convert_from_logs(decode, DECODE_PRIOR_SIGMAS),
            "prefill": {},
            "attention_dp": 1.0,
        }
    )
    if prefill is None:
        return pool_costs
    values = dict(prefill)
    others = {name: values.pop(name) for name in ("handover", "attention_dp")}
    return pool_costs.model_copy(update={"prefill": values, **others})


def _compute_decode_errors(runs: Sequence[MeasuredPoolRun], x: np.ndarray) -> np.ndarray:
    """Return ln(predicted / measured) TPOT of `runs` for these logarithms of the decode values."""
    costs = build_pool_costs(get_pool_costs(runs[0].decode.engine), x)
    return np.log([run.predict_tpot(costs) / run.tpot for run in runs])


def fit_engine_pools(engine: str, runs: Sequence[MeasuredPoolRun]) -> dict[str, dict[str, object]]:
    """Return the catalog entries of `engine`; print the errors of the fit and of held-out groups.

    Decode values are fitted to the runs of their own entry, prefill values to all runs of the
    engine.
    """
    runs = [run for run in runs if run.decode.engine.name == engine]
    bases = [get_pool_costs(run.decode.engine) for run in runs]
    entries = np.array([get_pool_entry_name(run.decode.engine) for run in runs])
    small = np.array([(run.workload.concurrency or 0) <= MAX_FITTED_IN_FLIGHT for run in runs])
    decodes = {}
    for entry in np.unique(entries).tolist():
        entry_runs = [run for run, name in zip(runs, entries, strict=True) if name == entry]
        compute_errors = partial(_compute_decode_errors, entry_runs)
        decodes[entry] = fit_pool_costs(compute_errors, DECODE_PRIOR_SIGMAS, POOL_NOISE_TPOT, 15)
    prefill_sigmas = PREFILL_PRIOR_SIGMAS | ENGINE_PRIOR_SIGMAS.get(engine, {})
    start = INITIAL_VALUES | ENGINE_INITIAL_VALUES.get(engine, {})

    def costs_at(k: int, decode: np.ndarray, prefill: np.ndarray) -> WorkerPoolCosts:
        return build_pool_costs(bases[k], decode, convert_from_logs(prefill, prefill_sigmas, start))

    def compute_prefill_errors(x: np.ndarray) -> np.ndarray:
        costs = (
            (runs[k], costs_at(k, decodes[entries[k]].x, x)) for k in np.flatnonzero(small).tolist()
        )
        return np.log([run.simulate(pool_costs)[0] / run.ttft for run, pool_costs in costs])

    prefill = fit_pool_costs(compute_prefill_errors, prefill_sigmas, POOL_NOISE_TTFT)
    widths = {}
    for kind in ("", "curve", "gpu", "release"):
        groups = np.array([run.holdout_groups[kind] if kind else "" for run in runs])
        if kind and len(np.unique(groups)) == 1:
            continue
        errors = np.zeros((len(runs), 2))
        for group in np.unique(groups):
            rows = groups == group
            prefill_logs = _refit_without(prefill, rows[small]) if kind else prefill.x
            for k in np.flatnonzero(rows).tolist():
                decode = decodes[entries[k]]
                own_rows = rows[entries == entries[k]]
                decode_logs = decode.x
                if kind:  # an entry without any run left falls back to the prior
                    decode_logs = (
                        np.zeros_like(decode.x)
                        if own_rows.all()
                        else _refit_without(decode, own_rows)
                    )
                predicted = np.array(runs[k].simulate(costs_at(k, decode_logs, prefill_logs)))
                errors[k] = np.log(predicted / (runs[k].ttft, runs[k].tpot))
        print(_format_errors(engine, kind, errors, groups))
        widths[kind] = np.abs(errors)
    sigma_ttft, sigma_tpot = np.quantile(widths["curve"], 0.8, axis=0) / Z_SCORE_80PCT
    engine_pools = {}
    for entry, decode in decodes.items():
        costs = costs_at(entries.tolist().index(entry), decode.x, prefill.x)
        entry_runs = [run for run, name in zip(runs, entries, strict=True) if name == entry]
        engine_pools[entry] = {
            **{
                name: {key: float(f"{value:.3g}") for key, value in getattr(costs, name).items()}
                for name in ("prefill", "decode")
            },
            "attention_dp": round(costs.attention_dp, 3), "handover": round(costs.handover, 2),
            **({"prefill_tokens": costs.prefill_tokens} if costs.prefill_tokens else {}),
            "sigma_tpot": round(float(sigma_tpot), 3), "sigma_ttft": round(float(sigma_ttft), 3),
            "gpus": sorted({run.decode.gpu.name for run in entry_runs}),
            "models": sorted({run.decode.model.architecture.model_type for run in entry_runs}),
            "points": len(entry_runs),
            "source": "InferenceX (SemiAnalysis, Apache-2.0), see validation/pools.csv; make pools",
            "date": f"{get_report_date():%Y-%m-%d}",
        }  # fmt: skip
    return engine_pools


def _format_errors(engine: str, kind: str, errors: np.ndarray, groups: np.ndarray) -> str:
    """Return the errors of TTFT and TPOT in one line, each interval from all other groups."""
    sizes, fractions = np.abs(errors), np.abs(np.expm1(errors))
    parts = []
    for column, metric in enumerate(("TTFT", "TPOT")):
        values = fractions[:, column]
        text = f"{metric} median {np.median(values):.1%}, mean {values.mean():.1%}"
        if kind:
            inside = [
                sizes[k, column] <= np.quantile(sizes[groups != groups[k], column], 0.8)
                for k in range(len(errors))
            ]
            text += f", {np.mean(inside):.0%} inside the interval"
        parts.append(text)
    return (
        f"{engine}, {len(errors)} runs, {f'held back by {kind}' if kind else 'fitted'}:"
        f" {'; '.join(parts)}"
    )


if __name__ == "__main__":
    measured = load_pool_runs()
    names = sorted({run.decode.engine.name for run in measured})
    entries = [entry for name in names for entry in fit_engine_pools(name, measured).items()]
    replace_catalog_entries(
        POOL_COSTS_FILE,
        "\n".join(yaml.safe_dump(dict([entry]), sort_keys=False, width=110) for entry in entries),
    )
