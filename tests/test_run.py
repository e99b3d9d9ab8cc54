"""A run of a deployment: what its intervals hold, what it serves at most, and who is left out, worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment, deploy_on
from planner.latency.performance import LATENCY_STATISTICS
from planner.latency.step_model import StepModel, build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning import capacity as limits
from planner.planning import simulation_runs as runs
from planner.planning.capacity import estimate_capacity
from planner.planning.prediction import Prediction, predict
from planner.planning.simulation_runs import run_short_simulation, run_simulation, simulate_once
from planner.tools.batch import predict_row
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace
from planner.workload.workload import Workload

METRICS = ("ttft", "tpot", "itl", "e2e", "queue")
L40S = deploy_on(
    "meta-llama/Llama-3.1-8B-Instruct", "L40S", engine_version="0.20.2", max_model_len=4096
)
CARD = L40S.with_args(max_num_seqs=32)
CHAT = Workload(
    LengthDistribution.from_lognormal(500, 1200),
    LengthDistribution.from_lognormal(100, 260),
    rate=2.0,
)
STEP = 0.02


@pytest.fixture(scope="module")
def most() -> float:
    return estimate_capacity(CARD, CHAT).mid


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> StepModel:
    """Every step takes 20 ms, whatever is in it, and may take a quarter more or less."""
    known = build_step_model(CARD)
    flat = replace(
        known, parts={"all": np.zeros_like(known.grid)}, rows_s=np.zeros(33), fixed_s=STEP,
        decode_context_s=0.0,
        decode_windows=(), prefill_pair_s=0.0, prefill_windows=(), state_s=0.0, prefill_step_s=0.0,
        prompt_s=0.0,
        request_s=0.0, prompt_token_s=0.0, sigma_tpot=math.log(1.25) / runs.Z_SCORE_80PCT,
        sigma_ttft=0.0, sigma_capacity=math.log(1.25) / runs.Z_SCORE_80PCT,
    )  # fmt: skip
    for module in (runs, limits):
        monkeypatch.setattr(module, "build_step_model", lambda *_: flat)
    return flat


def recorded(arrival: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> Workload:
    return Workload.from_trace(Trace(Path("t.csv"), arrival, prompt, output))


def fresh_capacity(deployment: Deployment, load: Workload) -> Interval:
    """`capacity`, not remembered from before a step or a pool was replaced."""
    limits._simulate_saturated_rps.cache_clear()
    return estimate_capacity(deployment, load)


def test_capacity_of_equal_steps_is_slots_over_tokens_times_step(even: StepModel) -> None:
    """32 slots, 50 tokens of 20 ms each: 32 requests a second; a quarter slower or faster at the ends."""
    load = Workload(
        LengthDistribution.from_constant(16), LengthDistribution.from_constant(50), rate=1.0
    )
    found = fresh_capacity(CARD, load)
    assert found.mid == pytest.approx(32 / (50 * STEP), rel=0.02)
    assert (found.lo / found.mid, found.hi / found.mid) == (pytest.approx(0.8), pytest.approx(1.25))
    three = fresh_capacity(CARD.with_replicas(3), load)
    assert three.mid == pytest.approx(3 * found.mid)


def test_a_kv_pool_that_holds_few_bounds_the_capacity(
    even: StepModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 sequences of 160 + 160 tokens fill 160 blocks of 16: a quarter of the 32 slots, a quarter of the capacity."""
    load = Workload(
        LengthDistribution.from_constant(160), LengthDistribution.from_constant(160), rate=1.0
    )
    memory = get_memory_plan(CARD)
    small = replace(memory, pool=replace(memory.pool, num_blocks=1 + 8 * 20))
    ample = fresh_capacity(CARD, load).mid
    monkeypatch.setattr(limits, "get_memory_plan", lambda deployment: small)
    tight = fresh_capacity(CARD, load).mid
    assert ample == pytest.approx(32 / (160 * STEP), rel=0.02)
    assert (
        8 / (160 * STEP) * 0.95 < tight < 13 / (160 * STEP)
    )  # half of an answer is not there yet, on average


LENGTHS = {
    "spread": (
        LengthDistribution.from_lognormal(500, 1200),
        LengthDistribution.from_lognormal(100, 260),
    ),
    "narrow": (
        LengthDistribution.from_uniform(922, 0.8),
        LengthDistribution.from_uniform(922, 0.8),
    ),
    "alike": (LengthDistribution.from_constant(500), LengthDistribution.from_constant(300)),
    "few long": (
        LengthDistribution.from_lognormal(1500, 5000),
        LengthDistribution.from_lognormal(28, 90),
    ),
}


@pytest.mark.parametrize("slots", [32, 128, 512])
@pytest.mark.parametrize("name", LENGTHS)
def test_capacity_is_what_a_long_crowded_run_serves(name: str, slots: int) -> None:
    """Also where answers are alike, so that whole batches end together."""
    card, (prompt, output) = CARD.with_args(max_num_seqs=slots), LENGTHS[name]
    load = Workload(prompt, output, rate=1.0)
    found = simulate_once(card, replace(load, rate=None, concurrency=3 * slots), 40 * slots, seed=5)
    done = np.sort(found.sent + found.e2e)
    served = 30 * slots / (done[35 * slots - 1] - done[5 * slots - 1])  # whole batches
    assert estimate_capacity(card, load).mid == pytest.approx(served, rel=0.04)


def test_capacity_where_more_begin_than_the_pool_holds() -> None:
    """All answers are alike, so that they grow together until half of them are preempted."""
    card = deploy_on(
        "allenai/OLMoE-1B-7B-0125", "A100-SXM-80GB", quantization="fp8", max_num_seqs=1008
    )
    load = Workload(
        LengthDistribution.from_constant(356), LengthDistribution.from_constant(1024), rate=1.0
    )
    found = simulate_once(card, replace(load, rate=None, concurrency=1120), 20 * 1008, seed=5)
    assert found.preemptions.any()
    assert estimate_capacity(card, load).mid == pytest.approx(
        len(found.output) / found.duration, rel=0.06
    )


def test_queues_grow_beyond_the_capacity_and_not_below_it(most: float) -> None:
    """Which is what the word means: 10% below, the last quarter waits like the second; 10% above, far longer."""
    waits = []
    for share in (0.9, 1.1):
        queue = simulate_once(CARD, CHAT.with_rate(share * most), 6000, seed=3).queue
        waits.append(float(queue[4500:].mean() / max(queue[1500:3000].mean(), 1e-3)))
    assert waits[0] < 2 < waits[1]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(share=st.floats(0.1, 1.3), burstiness=st.floats(0.2, 4), tokens=st.integers(1, 300))
def test_percentiles_rise_and_lie_within_their_intervals(
    most: float, share: float, burstiness: float, tokens: int
):
    load = replace(
        CHAT.with_rate(share * most),
        output=LengthDistribution.from_uniform(tokens, 0.5),
        burstiness=burstiness,
    )
    found = run_short_simulation(CARD, load, 400)
    for metric in METRICS:
        values = [found.get(metric, point) for point in LATENCY_STATISTICS]
        if any(math.isnan(value.mid) for value in values):
            assert tokens == 1 and metric in ("tpot", "itl")
            continue
        assert all(0 <= value.lo <= value.mid <= value.hi for value in values)
        assert all(low.mid <= high.mid for low, high in pairwise(values[1:]))
    assert found.served_fraction.lo <= found.served_fraction.mid <= found.served_fraction.hi <= 1


@pytest.mark.parametrize("share", [0.5, 0.85])
def test_an_interval_holds_what_both_ends_of_the_step_cost_make_of_it(
    most: float, share: float
) -> None:
    """Its queue included: close to the capacity, steps that take half as long again make everybody wait."""
    found = run_simulation(CARD, CHAT.with_rate(share * most))
    for metric in ("ttft", "tpot", "itl", "e2e"):
        for point in LATENCY_STATISTICS:
            stated = found.get(metric, point)
            assert found.interval_ends[1].summarize(metric)[point] <= 1.03 * stated.hi, (
                metric,
                point,
            )
            assert 0.97 * stated.lo <= found.interval_ends[0].summarize(metric)[point], (
                metric,
                point,
            )


def test_a_slower_step_costs_a_closed_loop_that_much_longer(even: StepModel) -> None:
    """10 tokens of 20 ms, alone: 200 ms, and a quarter more or less."""
    load = Workload(
        LengthDistribution.from_constant(16),
        LengthDistribution.from_constant(10),
        concurrency=1,
        num_prompts=20,
    )
    found = run_simulation.__wrapped__(CARD, load)
    e2e = found.get("e2e", "p50")
    assert e2e.mid == pytest.approx(10 * STEP)
    tpot = found.get("tpot", "mean")
    assert [tpot.lo, tpot.mid, tpot.hi] == pytest.approx([STEP / 1.25, STEP, STEP * 1.25])


def test_without_the_beginning_and_the_end_every_mean_is_of_the_same_requests() -> None:
    """ITL is the time after the first token over the tokens after it, of those that are left."""
    inner = simulate_once(CARD, CHAT, 400).trim(100, 50)
    assert len(inner.output) == 250
    gaps = float((inner.e2e - inner.ttft).sum()) / (inner.output - 1).sum()
    assert inner.summarize("itl")["mean"] == pytest.approx(gaps)


def refusing(limit: int, **changes: object) -> Prediction:
    return predict(CARD.with_args(max_model_len=limit), replace(CHAT, **changes))


def test_refused_prompts_are_counted_and_only_the_others_served() -> None:
    """1,200 tokens is the p95 of these prompts, so that an engine for 1,200 refuses one in twenty."""
    found = refusing(1200)
    assert found.rejected_fraction == pytest.approx(0.05, abs=0.001)
    assert found.performance.request_tps.mid == pytest.approx(2.0 * (1 - found.rejected_fraction))
    assert "rejected requests: " in " ".join(found.warnings)
    replayed = run_simulation(found.deployment, found.workload).mid
    assert replayed.prompt.max() < 1200
    finite = refusing(1200, num_prompts=2000, rate=None, concurrency=16)
    served = run_simulation(finite.deployment, finite.workload)
    each = served.num_requests / len(served.seeds)
    assert each == pytest.approx(
        2000 * (1 - found.rejected_fraction), abs=4 * math.sqrt(2000 * 0.05)
    )
    assert found.effective_workload.prompt.max_tokens < 1200 <= CHAT.prompt.max_tokens
    assert found.effective_workload.rate == pytest.approx(2.0 * (1 - found.rejected_fraction))


def test_an_engine_that_refuses_everything_is_an_error_and_not_a_plan() -> None:
    with pytest.raises(PlannerError, match="max_model_len"):
        refusing(200)


@pytest.mark.parametrize("load", [{}, {"rate": None, "concurrency": 8}])
def test_one_token_has_neither_a_pace_nor_gaps(load: dict[str, object]) -> None:
    found = predict(
        CARD, replace(CHAT, output=LengthDistribution.from_constant(1), **load)
    ).performance
    assert found is not None
    for point in LATENCY_STATISTICS:
        assert math.isnan(found.get("tpot", point).mid), point
        assert math.isnan(found.get("itl", point).mid), point
        assert found.get("e2e", point).mid == pytest.approx(found.get("ttft", point).mid)
    assert "nan" not in str(found)


def test_a_trace_is_replayed_whole_and_as_it_came() -> None:
    """20 minutes: longer than the ten of a run that is nobody's."""
    rng = np.random.default_rng(0)
    n = 600
    arrival = np.cumsum(np.concatenate(([0.0], np.full(n - 1, 2.0))))
    prompt, output = rng.integers(50, 500, n), rng.integers(1, 60, n)
    found = run_simulation(CARD, recorded(arrival, prompt, output))
    assert found.num_requests == n
    unsaid = run_simulation(
        CARD, replace(recorded(arrival, prompt, output), num_prompts=None)
    )  # as scenarios have it
    assert unsaid.num_requests == n
    assert (found.mid.prompt == prompt).all() and (found.mid.output == output).all()
    assert found.mid.sent == pytest.approx(arrival)
    served = predict(
        CARD, replace(recorded(arrival, prompt, output), num_prompts=None)
    ).performance.request_tps
    assert served.mid == pytest.approx(
        n / arrival[-1], rel=0.02
    )  # it keeps up, so that is what it serves


def test_lengths_beside_a_trace_win_over_its_own() -> None:
    rng = np.random.default_rng(0)
    arrival = np.sort(100 * rng.random(200))
    base = recorded(arrival - arrival[0], rng.integers(50, 500, 200), rng.integers(1, 60, 200))
    found = run_simulation(CARD, replace(base, output=LengthDistribution.from_constant(7)))
    assert (found.mid.output == 7).all() and found.num_requests == 200
    assert found.mid.sent == pytest.approx(base.trace.arrival)
    assert set(found.mid.prompt) <= set(range(50, 501)) and found.mid.prompt.std() > 50


def test_replicas_take_turns_with_a_trace() -> None:
    """Every request of it is replayed on one engine or another."""
    rng = np.random.default_rng(0)
    arrival = np.sort(100 * rng.random(301))
    base = recorded(arrival - arrival[0], rng.integers(50, 500, 301), rng.integers(2, 60, 301))
    found = run_simulation(CARD.with_replicas(2), base)
    assert sorted(found.mid.prompt) == sorted(base.trace.prompt)


def test_more_in_flight_than_there_is_room_for_wait(most: float) -> None:
    """Little's law over a closed loop: 96 in flight, of which 32 decode at the rate of the capacity."""
    found = predict(CARD, replace(CHAT, rate=None, concurrency=96, num_prompts=4000)).performance
    assert found.request_tps.mid * found.get("e2e", "mean").mid == pytest.approx(96, rel=0.06)
    assert 0.9 * most < found.request_tps.mid < 1.02 * most  # it fills up and runs dry, too
    assert found.decode_batch <= 32


def test_a_benchmark_of_few_requests_is_that_run() -> None:
    """From the first request to the last token, with the idle end that every closed run has."""
    few = replace(CHAT, rate=None, concurrency=16, num_prompts=64)
    found, seeds = predict(CARD, few).performance, run_simulation(CARD, few).seeds
    assert {len(seed.output) for seed in seeds} == {
        64
    } and found.num_simulated_requests == 64 * len(seeds)
    assert found.request_tps.mid == pytest.approx(64 / np.mean([seed.duration for seed in seeds]))
    row = {"model": CARD.model.name, "gpu": "L40S", "engine_version": "0.20.2", "max_model_len": "4096",
           "max_num_seqs": "32", "isl": "500", "isl_p95": "1200", "osl": "100", "osl_p95": "260",
           "concurrency": "16", "num_prompts": "64"}  # fmt: skip
    assert predict_row(row)["e2e_ms_mean"] == pytest.approx(found.get("e2e", "mean").mid * 1e3)


def test_seats_by_the_hundred_thousand_have_a_capacity() -> None:
    """72 attention ranks of 1,408 sequences each: twice as many in flight would be more than a workload may hold."""
    wide = {"model": "deepseek-ai/DeepSeek-R1", "gpu": "GB200", "engine": "sglang", "quantization": "fp8", "tp": "1",
            "dp": "72", "ep": "72", "max_num_seqs": "101376", "gpu_memory_utilization": "0.8",
            "isl": "64", "osl": "9", "concurrency": "5632"}  # fmt: skip
    found = predict_row(wide)
    assert found["status"] == "ok", found.get("error")
    assert float(str(found["capacity_rps"])) >= float(str(found["request_tps"])) > 0
