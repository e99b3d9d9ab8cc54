"""A candidate is held against its service level, its capacity and the worst case, in closed form and replayed."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.core.intervals import Interval
from planner.engines.deployment import deploy_on
from planner.planning.candidate import Candidate
from planner.planning.capacity import estimate_capacity
from planner.planning.engine_tuning import tune_to_margin
from planner.planning.evaluation import check_against_slos, evaluate_candidate
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.simulation_runs import (
    simulate_once,
)
from planner.planning.slo import format_latency
from planner.planning.tolerance import EvaluationStore, simulate_candidate

CHAT: dict[str, Any] = {
    "question": "?",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpus": [{"gpu": "L40S", "at_most": 4}],
    "engine_version": "0.20.2",
    "workload": {
        "prompt_tokens": {"mean": 500, "p95": 1200},
        "output_tokens": {"mean": 100, "p95": 260},
        "rate": 4,
    },
    "service_level": {"ttft": {"p95": 4000}, "tpot": {"p95": 120}},
}
CARD = deploy_on(
    CHAT["model"], "L40S", engine_version="0.20.2", max_model_len=4096, max_num_seqs=32
)


def asked(**changes: Any) -> Scenario:
    return parse_scenario({**CHAT, **changes}, "chat")


def at(rate: float, **changes: Any) -> Scenario:
    return asked(workload={**CHAT["workload"], "rate": rate}, **changes)


@cache
def most() -> Interval:
    return estimate_capacity(CARD, asked().workload)


@cache
def found(share: float, headroom: float = 0.0) -> Candidate:
    """One card, replayed at a `share` of its capacity."""
    asking = at(share * most().mid, headroom=headroom, service_level={"ttft": {"mean": 1e6}})
    return simulate_candidate(asking, evaluate_candidate(asking, CARD, 1))


def test_headroom_is_the_share_of_the_capacity_that_stays_free() -> None:
    assert found(0.79, 0.2).is_feasible and not found(0.82, 0.2).is_feasible
    assert found(0.82, 0.1).is_feasible and found(0.97).is_feasible and not found(1.03).is_feasible
    assert found(0.82, 0.2).violated_constraints == ("capacity",)
    assert found(0.6, 0.2).limit_utilization == pytest.approx(0.6 / 0.8, rel=0.01)


def test_what_is_loaded_beyond_what_the_asked_probability_leaves_is_at_risk() -> None:
    """Whatever its latencies: here they may take as long as they like. The interval's end is exceeded in 90%."""
    low = (most().lo / most().mid) ** (0.8416 / 1.2816)  # the end that is exceeded in 80%
    safe, risky = found(low - 0.03), found(low + 0.03)
    assert safe.is_feasible and not safe.at_risk
    assert risky.is_feasible and risky.at_risk
    assert any("may serve only" in risk for risk in risky.risks)


def test_overload_misses_however_loose_the_limits() -> None:
    """In closed form as well: a queue that grows has no mean."""
    over = at(1.3 * most().mid, headroom=0.0, service_level={"ttft": {"mean": 1e6}})
    for candidate in (
        evaluate_candidate(over, CARD, 1),
        simulate_candidate(over, evaluate_candidate(over, CARD, 1)),
    ):
        assert not candidate.is_feasible and candidate.violated_constraints[0] == "capacity"
        assert candidate.limit_utilization == pytest.approx(1.3, rel=0.1)
    assert evaluate_candidate(over, CARD, 2).is_feasible


def test_a_target_between_the_middle_and_the_pessimistic_end_is_a_risk() -> None:
    performance = found(0.5).prediction.performance
    tpot = performance.get("tpot", "p95")
    for limit, meets, risky in (
        (1.01 * tpot.hi, True, False), ((tpot.mid + tpot.hi) / 2, True, True),
        (0.99 * tpot.mid, False, False)
    ):  # fmt: skip
        asking = at(0.5 * most().mid, service_level={"tpot": {"p95": limit * 1e3}}, headroom=0.0)
        candidate = check_against_slos(asking, found(0.5).prediction, ())
        assert (candidate.is_feasible, candidate.at_risk) == (meets, risky)


def test_refused_prompts_may_be_so_many_and_no_more() -> None:
    """An engine for 1,200 tokens refuses one prompt in twenty."""
    short = CARD.with_args(max_model_len=1200)
    for share, meets in ((0.06, True), (0.04, False)):
        candidate = evaluate_candidate(at(1, refused_at_most=share), short, 1)
        assert candidate.is_feasible == meets
        assert candidate.violated_constraints == (() if meets else ("max_model_len",))


def test_an_offline_plan_must_serve_in_time_with_room_to_spare() -> None:
    done = {"prompt_tokens": {"mean": 500, "p95": 1200}, "output_tokens": {"mean": 100, "p95": 260}}
    full = evaluate_candidate(
        asked(workload={**done, "requests": 1000, "within_hours": 1}, service_level={}), CARD, 1
    )
    served = full.prediction.performance.request_tps.mid
    for share, meets in ((0.75, True), (0.85, False)):
        hours = 200_000 / 3600 / (share * served)
        asking = asked(
            workload={**done, "requests": 200_000, "within_hours": hours}, service_level={}
        )
        assert evaluate_candidate(asking, CARD, 1).is_feasible == meets


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(rate=st.floats(0.1, 40), factor=st.floats(1.0, 3.0), replicas=st.integers(1, 4))
def test_more_traffic_or_fewer_replicas_never_take_a_smaller_share(
    rate: float, factor: float, replicas: int
) -> None:
    """In closed form, of which the share of the capacity is part."""
    one, more = (evaluate_candidate(at(r), CARD, replicas) for r in (rate, rate * factor))
    assert more.limit_utilization >= one.limit_utilization * 0.999
    assert (
        evaluate_candidate(at(rate), CARD, replicas + 1).limit_utilization
        <= one.limit_utilization * 1.001
    )


@given(seconds=st.floats(1e-4, 100), limit=st.floats(1e-4, 100))
def test_a_sentence_tells_a_figure_from_its_limit(seconds: float, limit: float) -> None:
    """Never "may reach 50 ms, above 50 ms", unless they differ by less than a hundredth of a millisecond."""
    if seconds > limit + (0.011 if seconds >= 10 else 1.1e-5):
        assert format_latency(seconds, limit) != format_latency(limit)


def test_a_smaller_batch_is_taken_where_a_full_one_is_too_slow() -> None:
    """A limit on the pace between that of a busy batch of 128 and that of 48, which still keeps up."""
    large = CARD.with_args(max_num_seqs=128)
    fixed = {"max_num_batched_tokens": large.args.max_num_batched_tokens}
    rate = 0.9 * estimate_capacity(CARD.with_args(max_num_seqs=48), asked().workload).mid
    loose = at(rate, headroom=0.0, service_level={"ttft": {"p95": 60_000}})
    pace = {
        size: simulate_candidate(
            loose, evaluate_candidate(loose, CARD.with_args(max_num_seqs=size), 1)
        ).prediction.performance.get("tpot", "p95")
        for size in (48, 128)
    }
    assert pace[48].mid < 0.97 * pace[128].mid
    limit = (pace[48].mid + pace[128].mid) / 2 * 1e3
    asking = at(rate, headroom=0.0, service_level={"ttft": {"p95": 60_000}, "tpot": {"p95": limit}},
                engine_args=fixed)  # fmt: skip
    store = EvaluationStore(asking)
    tuned = tune_to_margin(store, large, 0.0)
    assert store.get_margin(tuned, 0.0) <= 1 < store.get_margin(large, 0.0)
    assert tuned.args.max_num_seqs < 128


def test_candidates_with_other_arguments_are_others() -> None:
    """Slots for adapters among them: as many tokens, sequences and memory do not make them one."""
    slots = [CARD.with_args(max_loras=many, max_lora_rank=16, max_cpu_loras=64) for many in (4, 64)]
    assert len({evaluate_candidate(asked(), one, 1).identity_key for one in slots}) == 2


def test_waits_that_grow_are_no_figure() -> None:
    """Beyond its capacity a longer look finds a longer wait, so that none is told; the pace is one."""
    flood = at(10 * most().mid, service_level={"ttft": {"p95": 4000}})
    short, long = (simulate_once(CARD, flood.workload, many) for many in (1000, 4000))
    assert long.summarize("ttft")["p95"] > 3 * short.summarize("ttft")["p95"]
    assert long.summarize("tpot")["p95"] == pytest.approx(short.summarize("tpot")["p95"], rel=0.1)
    over = simulate_candidate(flood, evaluate_candidate(flood, CARD, 1))
    assert (
        over.violated_constraints == ("capacity", "p95 TTFT")
        and over.violations[1] == "p95 TTFT grows without bound"
    )
    seen = over.prediction.performance
    assert (
        seen is not None
        and math.isinf(seen.get_for_display("e2e", "mean").mid)
        and seen.queue_growth == "yes"
    )
    assert math.isfinite(seen.get_for_display("tpot", "p95").hi)
    ended = replace(
        flood, workload=replace(flood.workload, num_prompts=1000)
    )  # a run that ends has its figure
    last = simulate_candidate(ended, evaluate_candidate(ended, CARD, 1)).prediction.performance
    assert (
        last is not None
        and last.saturated
        and math.isfinite(last.get_for_display("ttft", "p95").mid)
    )
