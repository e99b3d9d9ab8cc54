"""`headroom profile` prints what production sends as a workload that a scenario takes."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from metrics_pages import Server

from planner.core.errors import PlannerError
from planner.engines.deployment import deploy_on
from planner.planning.scenario_schema import WorkloadEntry
from planner.tools.diagnostics.metrics_pages import build_traffic_profile
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload


def test_an_access_log_becomes_its_own_figures(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    at = np.cumsum(rng.exponential(0.25, 4000))
    prompt, output = (np.maximum(rng.lognormal(mu, 0.8, 4000), 1).astype(int) for mu in (6.5, 5.0))
    log = tmp_path / "access.csv"
    rows = [f"{t:.3f},{p},{o}" for t, p, o in zip(at, prompt, output, strict=True)]
    log.write_text("\n".join(["arrived_at,num_prefill_tokens,completion_tokens", *rows]) + "\n")
    workload = yaml.safe_load(build_traffic_profile([log]))["workload"]
    WorkloadEntry(**workload)
    assert workload["rate"] == pytest.approx(4.0, rel=0.05)
    assert workload["prompt_tokens"]["mean"] == pytest.approx(prompt.mean(), rel=0.01)
    assert workload["output_tokens"]["p95"] == pytest.approx(np.quantile(output, 0.95), rel=0.02)


def test_pages_become_the_traffic_between_them(tmp_path: Path) -> None:
    served = deploy_on(
        "meta-llama/Llama-3.1-8B-Instruct", "H100", engine_version="0.33.0", max_model_len=16384
    )
    load = Workload(
        LengthDistribution.from_lognormal(1000, 2500),
        LengthDistribution.from_lognormal(200, 500),
        rate=4.0,
    )
    pages, seconds = Server(served, load).pages(tmp_path)
    workload = yaml.safe_load(build_traffic_profile(pages, seconds))["workload"]
    WorkloadEntry(**workload)
    assert workload["rate"] == pytest.approx(4.0, rel=0.15)
    assert workload["prompt_tokens"]["mean"] == pytest.approx(1000, rel=0.1)
    assert workload["prompt_tokens"]["p95"] == pytest.approx(
        2500, rel=0.3
    )  # buckets are 2,000 and 5,000
    assert workload["output_tokens"]["mean"] == pytest.approx(200, rel=0.1)
    with pytest.raises(PlannerError, match="--seconds"):
        build_traffic_profile(pages)
