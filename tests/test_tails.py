"""Replayed tails, ceilings and bursts of the default plan: what queueing, batching and a finite KV pool imply."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import plan_of

from planner.analysis.tail_latency import run_load_ramp
from planner.core.errors import PlannerError
from planner.planning.capacity import drop_rejected_requests
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import get_memory_plan
from planner.planning.scenario import load_scenario
from planner.planning.simulation_runs import run_short_simulation, simulate_once
from planner.simulator.kernel_types import EngineRules, RequestBatch, StepCostTable
from planner.simulator.simulation import simulate_requests
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

CHAT = load_scenario("chat-70b")
LOAD = CHAT.workload


@pytest.fixture(scope="module")
def plan():
    chosen = plan_of("chat-70b").chosen
    assert chosen is not None
    return chosen.deployment


@pytest.fixture(scope="module")
def ramp(plan):
    return run_load_ramp(plan, LOAD)


def test_steps_that_cost_twice_as_much_take_a_lone_request_twice_as_long(plan):
    rare = LOAD.with_rate(1e-3)
    usual, twice = (simulate_once(plan, rare, 20, step_cost_factor=pace) for pace in (1.0, 2.0))
    assert twice.e2e == pytest.approx(2 * usual.e2e)


def test_prompts_that_the_engine_would_refuse_are_left_out():
    """vLLM answers 400 to a prompt of max_model_len tokens or more; a lognormal has some."""
    lengths = LengthDistribution.from_lognormal(1000, p95=3000)
    kept = drop_rejected_requests(
        Workload(lengths, LengthDistribution.from_constant(10), rate=1.0), 2048
    )
    assert kept.prompt.max_tokens < 2048 < lengths.max_tokens
    assert len(kept.prompt.values) == pytest.approx(np.count_nonzero(lengths.values <= 2047), abs=2)
    with pytest.raises(
        PlannerError, match="6,010 tokens on average do not fit into max_model_len 5,000"
    ):
        drop_rejected_requests(
            Workload(
                LengthDistribution.from_constant(6000),
                LengthDistribution.from_constant(10),
                rate=1.0,
            ),
            5000,
        )


@settings(max_examples=15, deadline=None)
@given(share=st.floats(0.0, 0.9), tokens=st.sampled_from([0, 512]))
def test_the_prefix_cache_finds_what_the_workload_says(plan, share, tokens):
    """Whole blocks of 16 tokens only, and nothing before somebody computed it."""
    lengths = LengthDistribution.from_constant(2048)
    run = simulate_once(
        plan,
        Workload(
            lengths,
            LengthDistribution.from_constant(4),
            rate=2.0,
            prefix_tokens=tokens,
            prefix_hit_rate=share,
        ),
        400,
    )
    expected = share * (tokens or 2048)
    spread = tokens * (share * (1 - share) / 400) ** 0.5
    assert run.outcome.cached.mean() == pytest.approx(
        expected, abs=16 + 0.02 * expected + 5 * spread
    )


def test_no_more_is_served_than_is_offered(ramp):
    assert all(row["Requests/s served"].hi <= row["Requests/s"] for _, row in ramp.iterrows())
    served = [row["Requests/s served"].mid / row["Requests/s"] for _, row in ramp.iterrows()]
    assert min(served[:-1]) >= 0.95 > served[-1]  # it ends where more comes than is served


def test_tails_grow_with_the_load(ramp):
    within = ramp[ramp["Requests/s"] <= LOAD.rate]
    for column in ("p99 TTFT (ms)", "p95 TPOT (ms)", "p99 ITL (ms)"):
        assert all(np.diff([each.mid for each in within[column]]) > 0)


def test_more_in_flight_never_serve_less(plan):
    ramp = run_load_ramp(plan, replace(saturate_workload(plan, LOAD), concurrency=16))
    assert list(ramp["Concurrent requests"]) == [4, 6, 8, 12, 16, 23, 32, 46, 64]
    assert all(b > 0.97 * a for a, b in pairwise(ramp["Requests/s served"]))


def test_the_preempted_wait_longest_between_two_tokens(plan):
    few = replace(get_memory_plan(plan).pool, num_blocks=2000)
    run = simulate_once(plan, LOAD, 1500, pool=few)
    tpot = np.full(len(run.output), np.nan)
    tpot[run.output > 1] = run.tpot
    again = run.preemptions > 0
    assert again.sum() > 20
    assert np.nanmedian(tpot[again]) > np.nanmedian(tpot[~again])


def test_bursts_wait_longer_than_poisson_arrivals_and_those_longer_than_an_even_stream(plan):
    bursts = (
        run_short_simulation(plan, replace(LOAD, burstiness=b), 4000, with_interval=False)
        for b in (0.25, 1, 100)
    )
    waits = [found.get("queue", "p99").mid for found in bursts]
    assert waits == sorted(waits, reverse=True)


def test_a_pipeline_with_steps_under_way_is_not_idle():
    rules = EngineRules(
        64, 2048, 4001, 8192, False, True, 0, False, False, False, np.array([[0, 16]])
    )
    table = StepCostTable(5e-3 + 2e-5 * np.arange(2049), 4e-6 * np.arange(65), 1e-3, stages=4)
    n = 40
    run = simulate_requests(
        rules, table, RequestBatch(np.zeros(n), np.full(n, 100), np.full(n, 200)), gauge_s=0.01
    )
    gauges = run.gauges
    assert (gauges.running[gauges.seconds < run.duration * 0.95] == n).mean() > 0.9
