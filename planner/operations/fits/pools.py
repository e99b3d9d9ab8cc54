"""Fit `catalogs/pools.yaml`, what pools cost beside the step costs: `make pools`, after each `make fit`.

First decoding, without a replay: by Little's law a decode worker had C / D x stay / (stay + TTFT) sequences in flight,
all of them measured, so that TPOT is the time of that step. Then what is before the first token, by replaying each run
with decoding as fitted. Errors are logarithms under a Student-t loss, parts have a normal prior around the step costs;
Gauss-Newton. Held back are whole curves, GPUs and releases, by one Newton step from the fit with all, replayed.

The runs' `max_num_seqs` is the decode batch in the names of InferenceX's TensorRT-LLM recipes (as in
ctx1_gen5_tep8_batch32), or, where none was found, the power of two at or below the concurrency of a rank, as in those
that were; above it requests wait for a seat.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO

import numpy as np
import yaml

from planner.core.catalog import CATALOGS, read_text
from planner.core.files import today
from planner.core.quantities import Z80, PlannerError, told_of
from planner.facts.deployment import Deployment
from planner.facts.workload import Workload
from planner.latency.pool_costs import PoolCosts, entry_of, pool_coefficients, pool_costs
from planner.latency.step_model import step_model
from planner.memory.budget import MemoryPlan, memory_of
from planner.operations.batch import that_starts
from planner.operations.batch_columns import read_cells, read_deployment, read_model, read_workload
from planner.operations.fits.pooled_catalog import write_entries
from planner.planning.disaggregated import Pools

RUNS, FITTED = CATALOGS / "validation" / "pools.csv", CATALOGS / "pools.yaml"
DECODE = {
    "pace": 0.4, "row_s": 0.8, "kernel_s": 0.4, "expert_latency": 0.4, "expert_gemm": 0.4, "allreduce_s": 0.4,
    "memory_fp4": 0.4, "kv": 0.4, "link": 0.4, "step_s": 0.4,
}  # fmt: skip
PREFILL = {"request_s": 1.0, "handover": 0.5, "pace": 0.3, "attention_dp": 0.5, "launch_s": 0.5}
"""What is fitted of each phase, and how far it may be from `START` (standard deviation of its logarithm)."""
START = {"row_s": 20e-6, "request_s": 0.06, "handover": 1.0}
"""Where it starts, in its units; factors start at 1."""
OWN = {"sglang": {"expert_gemm": 0.4, "token_passes": 0.4}}
"""What else is fitted of an engine's prefill: SGLang's recipes give its workers other expert kernels than servers that
do both (DeepEP with DeepGEMM, FlashInfer's CUTLASS; srt-slurm, 2026-02)."""
OWN_START = {"sglang": {"handover": 20.0}}
"""First tokens of SGLang's pools were 200 ms late where the cache travelled for 6 ms and a step took 10 (issue 22853,
2026-04): workers look between steps for requests, seats and caches, in recipes of low latency every tenth time."""
NOISE_TPOT, NOISE_TTFT, FREEDOM = 0.08, 0.2, 2.0
"""Of the Student-t loss: scale of an error's logarithm, and degrees of freedom (some recipes hide what they did)."""
LARGEST = 4100
"""Requests in flight of the runs that what is before the first token is fitted to: larger ones take long to replay."""


@dataclass(frozen=True)
class PoolRun:
    """A measured run of pools, in seconds."""

    prefill: Deployment
    decode: Deployment
    memory: MemoryPlan
    workload: Workload
    ttft: float
    tpot: float
    curve: str

    @cached_property
    def held_back(self) -> dict[str, str]:
        """The whole that it belongs to, by what may be new in a question."""
        engine = self.decode.engine
        return {"curve": self.curve, "gpu": self.decode.gpu.name, "release": f"{engine.name} {engine.version}"}

    def tpot_at(self, costs: PoolCosts) -> float:
        """Seconds of a decode step with the sequences that Little's law says were in a worker."""
        stay = self.tpot * (self.workload.output.mean - 1)
        flying = (self.workload.concurrency or 1) * stay / (stay + self.ttft)
        ranks = self.decode.layout.replicas * self.decode.layout.dp
        roomy = replace(self.decode, args=replace(self.decode.args, max_num_seqs=2048))
        step = step_model(roomy, pool_coefficients(roomy, "decode", costs))
        return float(step.decode_step(max(flying / ranks, 1.0), self.workload.context))

    def replayed(self, costs: PoolCosts) -> tuple[float, float]:
        """Mean TTFT and TPOT of its replay."""
        found = Pools.of(self.prefill, self.decode, self.memory, self.workload, costs).run(self.workload)
        return found.ttft["mean"].mid, found.tpot["mean"].mid


def pool_runs() -> list[PoolRun]:
    """The public runs: columns of `planner predict`, `measured_ttft_ms`, `measured_tpot_ms`, `curve` and `source`."""
    found, folder = [], RUNS.parent
    for number, row in enumerate(csv.DictReader(StringIO(read_text(RUNS), newline="")), start=2):
        with told_of(f"{RUNS.name}, line {number}"):
            cells, _ = read_cells(row)
            workload, model = read_workload(cells, folder, []), read_model(cells, folder)
            if workload is None:
                raise PlannerError("isl and osl are missing")
            pools = [read_deployment(model, cells, folder, [], pool) for pool in ("prefill", "decode")]
            prefill, decode = (that_starts(pool, workload, []) for pool in pools)
        ttft, tpot = (float(row[name]) / 1e3 for name in ("measured_ttft_ms", "measured_tpot_ms"))
        found.append(PoolRun(prefill, decode, memory_of(decode), workload, ttft, tpot, row["curve"]))
    return found


@dataclass(frozen=True)
class Fit:
    """One of the two fits: `x` logarithms over `START`, and slopes [runs, x] and errors [runs] there."""

    spread: np.ndarray
    noise: float
    x: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray

    @cached_property
    def weights(self) -> np.ndarray:
        return (FREEDOM + 1) / (FREEDOM + (self.errors / self.noise) ** 2) / self.noise**2

    def without(self, rows: np.ndarray) -> np.ndarray:
        """`x` of a fit without these runs, to first order."""
        kept = self.slopes[~rows]
        matrix = (kept * self.weights[~rows, None]).T @ kept + np.diag(1 / self.spread**2)
        pull = (self.slopes[rows] * (self.weights * self.errors)[rows, None]).sum(0)
        return np.asarray(self.x + np.clip(np.linalg.solve(matrix, pull), -0.5, 0.5))


def fit(errors: Callable[[np.ndarray], np.ndarray], spread: dict[str, float], noise: float, rounds: int = 8) -> Fit:
    """Gauss-Newton on `errors`(x), halving a step that makes things worse."""
    wide = np.array(list(spread.values()))

    def loss(found: np.ndarray, x: np.ndarray) -> float:
        unlikely = (FREEDOM + 1) * np.log1p((found / noise) ** 2 / FREEDOM)
        return float(unlikely.sum() + ((x / wide) ** 2).sum())

    x = np.zeros(len(wide))
    now = errors(x)
    for _ in range(rounds):
        slopes = np.stack([(errors(x + 0.02 * unit) - now) / 0.02 for unit in np.eye(len(x))], axis=1)
        state = Fit(wide, noise, x, now, slopes)
        matrix = (slopes * state.weights[:, None]).T @ slopes + np.diag(1 / wide**2)
        move = -np.linalg.solve(matrix, slopes.T @ (state.weights * now) + x / wide**2)
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


def values(x: np.ndarray, spread: Mapping[str, float], start: Mapping[str, float] = START) -> dict[str, float]:
    """Fitted logarithms in their units, by name."""
    return {name: start.get(name, 1.0) * math.exp(log) for name, log in zip(spread, x.tolist(), strict=True)}


def costs_of(base: PoolCosts, decode: np.ndarray, prefill: Mapping[str, float] | None = None) -> PoolCosts:
    """`base` with fitted values in place, of decoding by their logarithms."""
    found = base.model_copy(update={"decode": values(decode, DECODE), "prefill": {}, "attention_dp": 1.0})
    if prefill is None:
        return found
    given = dict(prefill)
    beside = {name: given.pop(name) for name in ("handover", "attention_dp")}
    return found.model_copy(update={"prefill": given, **beside})


def _decoding(runs: Sequence[PoolRun], x: np.ndarray) -> np.ndarray:
    """ln(predicted / measured) TPOT of `runs`, by Little's law, with these logarithms of `DECODE`."""
    costs = costs_of(pool_costs(runs[0].decode.engine), x)
    return np.log([run.tpot_at(costs) / run.tpot for run in runs])


def fit_engine(engine: str, runs: Sequence[PoolRun]) -> dict[str, dict[str, object]]:
    """The catalog's entries of `engine`: decoding of each fitted to its own runs, what is before it to all of them.

    How far off the fit is, also on what it goes without, is printed.
    """
    runs = [run for run in runs if run.decode.engine.name == engine]
    bases = [pool_costs(run.decode.engine) for run in runs]
    entries = np.array([entry_of(run.decode.engine) for run in runs])
    small = np.array([(run.workload.concurrency or 0) <= LARGEST for run in runs])
    decodes = {}
    for entry in np.unique(entries).tolist():
        own = [run for run, name in zip(runs, entries, strict=True) if name == entry]
        decodes[entry] = fit(partial(_decoding, own), DECODE, NOISE_TPOT, rounds=12)

    asked, start = PREFILL | OWN.get(engine, {}), START | OWN_START.get(engine, {})

    def costs_at(k: int, decode: np.ndarray, prefill: np.ndarray) -> PoolCosts:
        return costs_of(bases[k], decode, values(prefill, asked, start))

    def before(x: np.ndarray) -> np.ndarray:
        costs = ((runs[k], costs_at(k, decodes[entries[k]].x, x)) for k in np.flatnonzero(small).tolist())
        return np.log([run.replayed(given)[0] / run.ttft for run, given in costs])

    prefill = fit(before, asked, NOISE_TTFT)
    widths = {}
    for what in ("", "curve", "gpu", "release"):
        wholes = np.array([run.held_back[what] if what else "" for run in runs])
        if what and len(np.unique(wholes)) == 1:
            continue
        seen = np.zeros((len(runs), 2))
        for whole in np.unique(wholes):
            rows = wholes == whole
            for k in np.flatnonzero(rows).tolist():
                decode = decodes[entries[k]]
                own = rows[entries == entries[k]]
                if what and not own.all():
                    logs = decode.without(own), prefill.without(rows[small])
                elif what:  # all that its entry has
                    logs = np.zeros_like(decode.x), prefill.without(rows[small])
                else:
                    logs = decode.x, prefill.x
                measured = np.array((runs[k].ttft, runs[k].tpot))
                seen[k] = np.log(np.array(runs[k].replayed(costs_at(k, *logs))) / measured)
        print(_told(engine, what, seen, wholes))
        widths[what] = np.abs(seen)
    sigma_ttft, sigma_tpot = np.quantile(widths["curve"], 0.8, axis=0) / Z80
    found = {}
    for entry, decode in decodes.items():
        mine = entries == entry
        costs = costs_at(int(np.argmax(mine)), decode.x, prefill.x)
        own = [run for run, use in zip(runs, mine, strict=True) if use]
        found[entry] = {
            **{
                name: {key: float(f"{value:.3g}") for key, value in getattr(costs, name).items()}
                for name in ("prefill", "decode")
            },
            "attention_dp": round(costs.attention_dp, 3), "handover": round(costs.handover, 2),
            **({"prefill_tokens": costs.prefill_tokens} if costs.prefill_tokens else {}),
            "sigma_tpot": round(float(sigma_tpot), 3), "sigma_ttft": round(float(sigma_ttft), 3),
            "gpus": sorted({run.decode.gpu.name for run in own}),
            "models": sorted({run.decode.model.architecture.model_type for run in own}), "points": len(own),
            "source": "InferenceX (SemiAnalysis, Apache-2.0), see validation/pools.csv; make pools",
            "date": f"{today():%Y-%m-%d}",
        }  # fmt: skip
    return found


def _told(engine: str, what: str, seen: np.ndarray, wholes: np.ndarray) -> str:
    """Errors of TTFT and TPOT in a line; the interval of a run is put around by the errors of all other wholes."""
    sizes, off = np.abs(seen), np.abs(np.expm1(seen))
    parts = []
    for column, metric in enumerate(("TTFT", "TPOT")):
        text = f"{metric} median {np.median(off[:, column]):.1%}, mean {off[:, column].mean():.1%}"
        if what:
            inside = [
                sizes[k, column] <= np.quantile(sizes[wholes != wholes[k], column], 0.8) for k in range(len(seen))
            ]
            text += f", {np.mean(inside):.0%} inside the interval"
        parts.append(text)
    return f"{engine}, {len(seen)} runs, {f'held back by {what}' if what else 'fitted'}: {'; '.join(parts)}"


if __name__ == "__main__":
    measured = pool_runs()
    names = sorted({run.decode.engine.name for run in measured})
    found = [entry for name in names for entry in fit_engine(name, measured).items()]
    write_entries(FITTED, "\n".join(yaml.safe_dump(dict([entry]), sort_keys=False, width=110) for entry in found))
