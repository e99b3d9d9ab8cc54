"""Compare simulated with measured requests of public open-loop runs.

Each run is simulated at the catalog's step costs, in whose fit its means are two rows of thousands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from planner.core.catalog import load_catalog
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.workload.traces import Trace
from planner.workload.workload import Workload
from validation.startup_logs import PublishedRun

TIMED_RUNS_FILE = "validation/timed_runs.yaml"
TimedRequest = tuple[NonNegativeFloat, PositiveInt, PositiveInt, PositiveFloat, PositiveFloat]
"""Arrival in seconds, prompt and output tokens, TTFT and E2E in ms."""
GaugeSample = tuple[NonNegativeFloat, NonNegativeInt, NonNegativeInt]
"""Seconds, and the requests running and waiting then."""
GAUGE_SAMPLE_INTERVAL_S = 0.25
"""Seconds between samples of the simulated gauges."""


class TimedRun(PublishedRun):
    """One entry of the catalog: every request of a run, and the engine's gauges over time."""

    requests: Annotated[tuple[TimedRequest, ...], Field(min_length=2)]
    gauges: Annotated[tuple[GaugeSample, ...], Field(min_length=2)]

    @property
    def workload(self) -> Workload:
        """Its requests with their arrival times."""
        arrival, prompt, output = np.array(self.requests)[:, :3].T
        return Workload.from_trace(
            Trace(Path(), arrival, prompt.astype(np.int64), output.astype(np.int64))
        )

    @property
    def means(self) -> tuple[float, float]:
        """Mean TTFT and TPOT in seconds."""
        _, _, output, ttft, e2e = np.array(self.requests).T
        return float(ttft.mean()) / 1e3, float(((e2e - ttft) / (output - 1)).mean()) / 1e3


@dataclass(frozen=True, eq=False)
class RunComparison:
    """A measured run and its simulation."""

    run: TimedRun
    replay: SimulationResult

    def compute_errors(self, metric: str) -> np.ndarray:
        """Return simulated / measured - 1 of "ttft" or "e2e", [requests]."""
        measured = np.array(self.run.requests)[:, {"ttft": 3, "e2e": 4}[metric]] / 1e3
        return np.asarray(getattr(self.replay, metric) / measured - 1)

    @property
    def gauge_frame(self) -> pd.DataFrame:
        """Running and waiting requests, measured and simulated, one row per sample and gauge."""
        seconds, *measured = np.array(self.run.gauges, float).T
        frame = self.replay.gauges
        frames = []
        for name, values in zip(("running", "waiting"), measured, strict=True):
            replayed = np.interp(seconds, frame["seconds"], frame[name], right=0)
            frames.append(
                pd.DataFrame(
                    {"Seconds": seconds, "gauge": name, "measured": values, "replayed": replayed}
                )
            )
        return pd.concat(frames, ignore_index=True)

    def compute_gauge_error(self, gauge: str) -> float:
        """Return the mean absolute error of "running" or "waiting", in requests."""
        frame = self.gauge_frame.query("gauge == @gauge")
        return float((frame["replayed"] - frame["measured"]).abs().mean())


@cache
def load_timed_runs() -> dict[str, TimedRun]:
    """Load the public runs by label."""
    return load_catalog(TIMED_RUNS_FILE, TimedRun)


def compare_timed_run(run: TimedRun) -> RunComparison:
    """Simulate `run` with its own arrivals and lengths."""
    deployment, pool = run.deployment, get_memory_plan(run.deployment).pool
    return RunComparison(
        run,
        simulate_workload(
            deployment,
            pool,
            build_step_model(deployment, run.workload),
            run.workload,
            gauge_s=GAUGE_SAMPLE_INTERVAL_S,
        ),
    )


def summarize_timed_accuracy(runs: Mapping[str, RunComparison]) -> pd.DataFrame:
    """Return median errors of TTFT and E2E and mean errors of the gauges, one row per run."""
    rows = []
    for name, comparison in runs.items():
        ttft, e2e = (np.abs(comparison.compute_errors(metric)) for metric in ("ttft", "e2e"))
        rows.append({
            "run": name, "requests": len(comparison.run.requests),
            "TTFT median error (%)": np.median(ttft) * 100,
            "E2E median error (%)": np.median(e2e) * 100,
            "running off by": comparison.compute_gauge_error("running"),
            "waiting off by": comparison.compute_gauge_error("waiting"),
        })  # fmt: skip
    return pd.DataFrame(rows)
