"""One quantity, one value: plan.json and a row of `headroom predict` say what the plan says.

Shipped scenarios, and small ones for what those lack: a trace, users in a closed loop, answers of
one token.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shipped import answer_of, plan_of, plan_once, row_of, sampled, small_scenario

from planner.answers import serialize_answer
from planner.core.intervals import Interval
from planner.latency.performance import LATENCY_STATISTICS, Performance
from planner.planning.candidate import Candidate
from planner.planning.capacity import estimate_capacity
from planner.planning.scenario import list_scenarios
from planner.planning.search import Plan
from planner.tools.batch import predict_row
from planner.workload.sessions import SessionTrace

pytestmark = pytest.mark.slow

LATENCIES = ("ttft", "tpot", "itl", "e2e")
LENGTHS = {"prompt_tokens": {"mean": 900}, "output_tokens": {"mean": 150}}
BASE: dict[str, Any] = {
    "gpus": [{"gpu": "L40S", "at_most": 2}, {"gpu": "H100-SXM", "at_most": 1}],
    "workload.rate": 2,
}
"""What changes in the small scenario, for all of the following."""
OTHERS: dict[str, dict[str, Any]] = {
    "trace": {"workload": {"trace": "trace.csv"}},
    "trace at another rate": {"workload": {"trace": "trace.csv", "rate": 3.0}},
    "trace with lengths of its own": {"workload": {"trace": "trace.csv", "output_tokens": {"mean": 100, "p95": 300}}},
    "trace by tomorrow": {
        "workload": {"trace": "trace.csv", "requests": 3000, "within_hours": 1}, "service_level": {}
    },
    "users": {"workload": {**LENGTHS, "concurrency": 24}},
    "by tomorrow": {"workload": {**LENGTHS, "requests": 20_000, "within_hours": 4}, "service_level": {}},
    "one token": {"workload": {**LENGTHS, "output_tokens": {"exactly": 1}, "rate": 3}},
    "prefix": {"workload.shared_prefix": {"tokens": 500, "hit_rate": 0.9}},
    "bursts": {"workload.burstiness": 0.3},
    "other tenants": {"other_tenants_gib": 3, "gpus": [{"gpu": "L40S", "at_most": 2, "interconnect": "pcie4"}]},
    "a few refused": {"engine_args": {"max_model_len": 3072}, "refused_at_most": 0.05},
    "sglang": {"engine": "sglang"},
    "arguments": {"engine_args": {"async_scheduling": False, "long_prefill_token_threshold": 1024}},
}  # fmt: skip
SAMPLE = (
    "edge-8b-24gb",
    "trace by tomorrow",
    "users",
    "one token",
    "a few refused",
)


@cache
def traced(folder: Path) -> Path:
    """A service of two hundred seconds, ever busier, in `trace.csv`."""
    rng, n = np.random.default_rng(1), 500
    arrival = np.sort(200 * rng.random(n) ** 0.7)
    prompt, output = (
        rng.lognormal(6.3, 0.7, n).astype(int) + 1,
        rng.lognormal(4.5, 0.8, n).astype(int) + 1,
    )
    lines = [f"{at:.3f},{p},{o}" for at, p, o in zip(arrival, prompt, output, strict=True)]
    (folder / "trace.csv").write_text("\n".join(("arrival,prompt_tokens,output_tokens", *lines)))
    return folder


@pytest.fixture(scope="module", params=sampled([*list_scenarios(), *OTHERS], SAMPLE))
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    name = request.param
    if name not in OTHERS:
        return plan_of(name)
    folder = traced(tmp_path_factory.getbasetemp())
    return plan_once(small_scenario({**BASE, **OTHERS[name]}, folder))


@pytest.fixture
def chosen(plan: Plan) -> Candidate:
    assert plan.chosen is not None, str(plan)
    return plan.chosen


@pytest.fixture
def performance(chosen: Candidate) -> Performance:
    assert chosen.prediction.performance is not None
    return chosen.prediction.performance


def cells(performance: Performance, read: str = "get") -> Iterator[tuple[str, str, Interval]]:
    """Metric, point and ms of every latency."""
    for metric, point in product(LATENCIES, LATENCY_STATISTICS):
        yield metric, point, getattr(performance, read)(metric, point) * 1e3


def test_figures_rest_on_a_replay_and_hang_together(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    """What is served is what arrives where the queue does not grow; tokens are requests times their tokens."""
    assert performance.num_simulated_requests > 0 and performance.capacity is not None
    workload = plan.scenario.workload
    if workload.rate is not None and not plan.scenario.offline:
        assert performance.capacity == estimate_capacity(
            chosen.deployment, chosen.prediction.workload
        )
    assert (
        performance.capacity.mid >= performance.request_tps.mid * (1 - 1e-9)
        or performance.saturated
    )
    rate = workload.rate
    if rate is not None and not plan.scenario.offline and workload.trace is None:
        served = rate * (1 - chosen.prediction.rejected_fraction)
        assert performance.request_tps.mid == pytest.approx(served, rel=1e-6)
    if workload.trace is None:
        tokens = performance.request_tps.mid * workload.output.mean
        assert performance.output_tps.mid == pytest.approx(tokens, rel=0.03)
    assert 0 < performance.kv_usage <= performance.kv_usage_p99 <= 1


def test_bills_follow_from_the_rate_of_an_hour(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    """A month is 24 hours of 365.25 / 12 days; a token's price is an hour's over the tokens of an hour."""
    found = serialize_answer(answer_of(plan))
    assert found["headroom"] == pytest.approx(1 - found["planned_rps"] / found["capacity_rps"][0])
    if plan.scenario.workload.rate is not None:
        assert found["headroom"] >= plan.scenario.headroom - 1e-9
    if chosen.usd_per_hour:
        month = [each * 24 * 365.25 / 12 for each in found["usd_per_hour"]]
        assert found["usd_per_month"] == (None if plan.scenario.offline else pytest.approx(month))
        load = plan.scenario.workload
        is_output = load.output.max_tokens > 1
        rate = performance.request_tps.mid * load.prompt.mean
        rate = performance.output_tps.mid if is_output else rate
        price = found[f"usd_per_mtok_{'output' if is_output else 'prompt'}"][0]
        assert price == pytest.approx(chosen.usd_per_hour / 3600 / rate * 1e6)


def test_a_row_of_the_plan_predicts_the_plan(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    if isinstance(plan.scenario.workload.trace, SessionTrace):
        pytest.skip("rows have no sessions")
    found = predict_row(row_of(plan))
    assert found["status"] == "ok", found.get("error")
    for metric, point, value in cells(performance):
        name = f"{metric}_ms_{point}"
        ends = (found[f"{name}{end}"] for end in ("", "_lo", "_hi") if f"{name}{end}" in found)
        stated = [math.nan if end is None else end for end in ends]
        assert stated == pytest.approx(
            [value.mid, value.lo, value.hi][: len(stated)], nan_ok=True
        ), name
    for name, value in (
        ("capacity_rps", performance.capacity),
        ("output_tps", performance.output_tps),
    ):
        assert [found[name], found[f"{name}_lo"], found[f"{name}_hi"]] == pytest.approx(
            [value.mid, value.lo, value.hi]
        )
    assert found["kv_usage_p99"] == performance.kv_usage_p99
    assert found["queue_ms_p99"] == pytest.approx(performance.queue * 1e3)
    assert found["decode_batch_mean"] == performance.decode_batch
    assert found["num_gpu_blocks"] == chosen.prediction.memory.pool.num_blocks
    assert found["usd_per_hour"] == chosen.usd_per_hour
    if per_token := chosen.prediction.usd_per_mtok_output:
        assert found["usd_per_mtok_output"] == pytest.approx(per_token.mid)
