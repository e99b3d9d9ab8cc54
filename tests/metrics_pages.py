"""/metrics pages of an engine as the replay has it: what it counted until one moment, and until a later one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.engines.deployment import Deployment
from planner.engines.metric_names import get_metric_names
from planner.memory.kv_cache import KvCachePool
from planner.planning.simulation_runs import simulate_once
from planner.simulator import kernel_types as kinds
from planner.simulator.results import SimulationResult
from planner.workload.workload import Workload

TOKENS = [n * 10**k for k in range(5) for n in (1, 2, 5)]
"""Edges of the histograms of lengths (vLLM)."""


@dataclass(frozen=True)
class Server:
    """A replica that really runs: maybe slower, with other drafts or adapters, than it was planned."""

    deployment: Deployment
    workload: Workload
    pace: float = 1.0
    requests: int = 800
    cpu: float = 0.4
    deferred: float = 0.0  # share of the waiting
    seed: int = 3
    pool: KvCachePool | None = None  # None: the planned one, of which the pages say nothing

    def run(self) -> SimulationResult:
        """What it did, with samples of its gauges."""
        return simulate_once(
            self.deployment,
            self.workload,
            self.requests,
            pool=self.pool,
            step_cost_factor=self.pace,
            seed=self.seed,
            gauge_s=1.0,
        )

    def pages(self, folder: Path, name: str = "page") -> tuple[list[Path], float]:
        """Two pages in `folder`, and the seconds between them."""
        run = self.run()
        first, last = run.sent[0], float(run.sent[-1])
        moments = first + (last - first) * 0.3, last
        paths = [folder / f"{name}-{k}.txt" for k in range(2)]
        for path, moment in zip(paths, moments, strict=True):
            path.write_text(self.page(run, moment), encoding="utf-8")
        return paths, moments[1] - moments[0]

    def page(self, run: SimulationResult, moment: float) -> str:
        """What /metrics says at `moment`, seconds of the replay."""
        known = get_metric_names(self.deployment.engine)
        names, outcome = known.names, run.outcome
        first = outcome.first_token * run.clock_scale <= moment
        done = outcome.last_token * run.clock_scale <= moment
        many = run.output > 1
        tpot = np.zeros(len(many))
        tpot[many] = run.tpot
        lines: list[str] = []

        def label(**more: object) -> str:
            pairs = {"model_name": "m", "engine": "0", **more}
            return "{" + ",".join(f'{key}="{value}"' for key, value in pairs.items()) + "}"

        def histogram(role: str, values: np.ndarray, edges: list[float]) -> None:
            if name := names.get(role):
                for edge in edges:
                    lines.append(
                        f"{name}_bucket{label(le=float(edge))} {np.count_nonzero(values <= edge)}"
                    )
                lines.append(f"{name}_bucket{label(le='+Inf')} {len(values)}")
                lines.append(f"{name}_sum{label()} {values.sum()}")
                lines.append(f"{name}_count{label()} {len(values)}")

        def number(role: str, value: float, **more: object) -> None:
            if name := names.get(role):
                lines.append(f"{name}{label(**more)} {value}")

        buckets = {
            role: list(known.buckets.get(role, ())) for role in ("ttft", "tpot", "e2e", "queue")
        }
        histogram("ttft", run.ttft[first], buckets["ttft"])
        histogram("tpot", tpot[done & many], buckets["tpot"])
        histogram("e2e", run.e2e[done], buckets["e2e"])
        histogram("queue", run.queue[first], buckets["queue"])
        histogram("prompt_lengths", run.prompt[done], TOKENS)
        histogram("output_lengths", run.output[done], TOKENS)
        if name := names.get("itl"):  # of all gaps a share, as large as that of the tokens
            share = run.output[done].sum() / run.output.sum()
            gaps = (
                kinds.ITL_FIRST_BIN_S
                * 10 ** (np.arange(kinds.NUM_ITL_BINS) / kinds.ITL_BINS_PER_DECADE)
                * run.clock_scale
            )
            counts = outcome.itl * share
            for edge in known.buckets["itl"]:
                lines.append(
                    f"{name}_bucket{label(le=float(edge))} {counts[gaps <= edge].sum():.0f}"
                )
            lines.append(f"{name}_bucket{label(le='+Inf')} {counts.sum():.0f}")
            spent = (outcome.last_token - outcome.first_token).sum() * run.clock_scale * share
            lines.append(f"{name}_sum{label()} {spent}")
            lines.append(f"{name}_count{label()} {counts.sum():.0f}")
        number("success", np.count_nonzero(done), finished_reason="stop")
        number("preemptions", run.preemptions[first].sum())
        number("prompt_tokens", run.prompt[first].sum())
        number("generation_tokens", run.output[done].sum())
        number("prefix_queries", run.prompt[first].sum())
        number("prefix_hits", outcome.cached[first].sum())
        if drafting := self.deployment.speculation:
            k, a = drafting.num_speculative_tokens, drafting.acceptance_rate
            steps = run.output[done].sum() / sum(a**i for i in range(k + 1))
            number("drafted", k * steps)
            number("accepted", steps * sum(a**i for i in range(1, k + 1)))
        gauges = run.gauges
        now = gauges.iloc[max(np.searchsorted(gauges.seconds, moment, side="right") - 1, 0)]
        if self.pool:
            block_size, num_blocks = self.pool.layout.block_size, self.pool.num_blocks
            number("cache_config", 1, block_size=block_size, num_gpu_blocks=num_blocks)
        number("running", now.running)
        number("waiting", now.waiting)
        number("kv_usage", now.kv_usage)
        number("waiting_by_reason", self.deferred * now.waiting, reason="deferred")
        number("waiting_by_reason", (1 - self.deferred) * now.waiting, reason="capacity")
        lines.append(f"process_cpu_seconds_total {self.cpu * moment}")
        lines.append("process_start_time_seconds 1.79e9")
        return "\n".join(lines) + "\n"
