"""Sessions of turns: what they send, and what an independent cache finds of it."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.answers.answer import build_offer
from planner.core.errors import PlannerError
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import derive_effective_workload, estimate_capacity
from planner.planning.engine_tuning import generate_neighbours
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.search import search_analytically
from planner.planning.simulation_runs import simulate_once
from planner.simulator.prefix_cache_hits import compute_prefix_hit_rate
from planner.workload.request_generator import build_segment_blocks, build_session_blocks
from planner.workload.sessions import SessionTrace, scale_sessions

CHAT: dict[str, Any] = {
    "users": 150, "turns": {"mean": 6, "p95": 15}, "system_tokens": 1200, "max_context": 32000,
    "context_tokens": {"mean": 1500}, "turn_tokens": {"mean": 300}, "output_tokens": {"mean": 250},
    "think_seconds": {"mean": 40, "p95": 120},
}  # fmt: skip
AGENT: dict[str, Any] = {
    "users": 12, "turns": {"mean": 30}, "system_tokens": 15_000, "max_context": 60_000,
    "context_tokens": {"mean": 2000}, "turn_tokens": {"mean": 1200}, "output_tokens": {"mean": 300},
    "think_seconds": {"mean": 8},
}  # fmt: skip


def scenario_of(sessions: dict[str, Any], **others: Any) -> Scenario:
    return parse_scenario(
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "gpus": [{"gpu": "H100-SXM", "at_most": 4}],
            "engine_version": "0.20.2",
            "workload": {"sessions": sessions, **others},
            "service_level": {"ttft": {"p95": 3000}, "tpot": {"p95": 80}},
        },
        "asked",
    )


def trace_of(sessions: dict[str, Any]) -> SessionTrace:
    trace = scenario_of(sessions).workload.trace
    assert isinstance(trace, SessionTrace)
    return trace


def plain_lru(trace: SessionTrace, engine: int, engines: int, tokens: int, size: int) -> float:
    """Hit rate of one cache of blocks, named by session and place, or by place in the system prompt."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = prompts = 0
    for i in np.flatnonzero(trace.session % engines == engine):
        session, prompt = int(trace.session[i]), int(trace.prompt[i])
        blocks = [
            (-1 if (k + 1) * size <= trace.sessions.system_tokens else session, k)
            for k in range((prompt + int(trace.output[i])) // size)
        ]
        whole = blocks[: prompt // size]
        run = next((k for k, block in enumerate(whole) if block not in cache), len(whole))
        if i >= trace.num_uncounted:
            hits, prompts = hits + run * size, prompts + prompt
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > tokens // size:
            cache.popitem(last=False)
    return hits / prompts


@pytest.mark.parametrize(
    ("sessions", "replicas", "pool_fraction"),
    [(CHAT, 1, 1.0), (CHAT, 1, 0.5), (CHAT, 2, 0.5), (AGENT, 2, 1.0)],
)
def test_the_cache_finds_what_a_plain_lru_finds(
    sessions: dict[str, Any], replicas: int, pool_fraction: float
) -> None:
    scenario, trace = scenario_of(sessions), trace_of(sessions)
    deployment = deploy_on(
        scenario.model, "H100", replicas=replicas, engine_version="0.20.2", max_model_len=65536
    )
    pool = get_memory_plan(deployment).pool
    small = replace(pool, num_blocks=int(pool.num_blocks * pool_fraction))
    tokens = int(pool.reported_tokens * pool_fraction)
    size = 32 if sessions is CHAT else 256
    expected = plain_lru(trace, 0, replicas, tokens, size)
    run = simulate_once(deployment, scenario.workload, 10**6, pool=small)
    assert run.outcome.cached.sum() / run.prompt.sum() == pytest.approx(expected, abs=0.03)
    both = np.mean([expected, plain_lru(trace, replicas - 1, replicas, tokens, size)])
    assert compute_prefix_hit_rate(trace, replicas, tokens) == pytest.approx(both, abs=0.03)
    if pool_fraction < 1:
        assert expected < trace.prefix_hit_rate - 0.1, "a cache that forgets nothing finds more"


def test_each_prompt_is_the_one_before_with_its_answer_and_more() -> None:
    trace = trace_of(AGENT)
    order = np.argsort(trace.session, kind="stable")
    session, prompt, output = (each[order] for each in (trace.session, trace.prompt, trace.output))
    follows = session[1:] == session[:-1]
    assert (prompt[1:] > (prompt + output)[:-1])[follows].all()
    assert prompt.min() > AGENT["system_tokens"]
    assert (prompt + output).max() <= AGENT["max_context"]
    assert (np.diff(trace.arrival[order])[follows] > 0).all()


def test_users_wait_for_their_answers_and_think() -> None:
    """Little's law: users / (answer + thinking) is the rate, an answer being 0.5 s and 20 ms a token."""
    trace = trace_of(CHAT)
    expected = CHAT["users"] / (40 + 0.5 + 0.02 * 250)
    assert scenario_of(CHAT).workload.rate == pytest.approx(expected, rel=0.06)
    assert trace_of({**CHAT, "users": 300}).rate == pytest.approx(2 * trace.rate, rel=0.06)
    slow = {**CHAT, "answer_seconds": 20}
    assert trace_of(slow).rate == pytest.approx(CHAT["users"] / 60, rel=0.06)
    hourly = {name: value for name, value in CHAT.items() if name != "users"}
    turns = trace_of({**hourly, "per_hour": 900, "turns": {"exactly": 4}})
    assert turns.rate == pytest.approx(900 * 4 / 3600, rel=0.06)


def test_counted_turns_are_as_long_at_the_end_as_at_the_start() -> None:
    trace = trace_of(AGENT)
    counted = trace.prompt[trace.num_uncounted :]
    first, last = counted[: len(counted) // 2].mean(), counted[len(counted) // 2 :].mean()
    assert first == pytest.approx(last, rel=0.1)
    assert trace.prompt[: trace.num_uncounted].mean() < 0.95 * counted.mean(), "sessions grow first"


@pytest.mark.parametrize("size", [16, 48])
def test_blocks_are_equal_where_the_texts_are(size: int) -> None:
    """As the general method numbers them, text by text."""
    trace = trace_of(CHAT)
    rows = np.arange(300)
    blocks, start = build_session_blocks(
        trace.session[rows], 1200, trace.prompt[rows], trace.output[rows], size
    )
    texts = [
        [("system", 1200), (f"session {s}", int(p + o) - 1200)]
        for s, p, o in zip(trace.session[rows], trace.prompt[rows], trace.output[rows], strict=True)
    ]
    expected, begin = build_segment_blocks(texts, size)
    assert (start == begin).all() and len(blocks) == len(expected)
    # a name of one set is a name of the other, both ways
    shared = np.isin(expected, np.flatnonzero(np.bincount(expected) > 1))
    pairs = np.unique(np.stack((blocks, expected))[:, shared], axis=1)
    assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]
    assert len(np.unique(blocks)) == len(np.unique(expected))


def test_a_plan_knows_how_much_of_the_sessions_its_memory_keeps() -> None:
    scenario = scenario_of(CHAT)
    rates = []
    for utilization in (0.4, 0.9):
        deployment = deploy_on(
            scenario.model, "H100", engine_version="0.20.2", max_model_len=32768,
            gpu_memory_utilization=utilization,
        )  # fmt: skip
        load = derive_effective_workload(deployment, scenario.workload)
        rates.append((load.prefix_hit_rate, estimate_capacity(deployment, scenario.workload).mid))
    (small_hits, small_rps), (hits, rps) = rates
    assert small_hits < hits - 0.1
    assert small_rps < 0.9 * rps, "what is not kept is computed again"
    assert any("session affinity" in sentence for sentence in scenario.workload.assumptions)


@pytest.mark.parametrize(
    ("version", "sizes"), [("0.20.2", {0, 2 * 64}), ("0.11.0", {0})], ids=["new", "old"]
)
def test_host_memory_is_tried_where_the_version_has_it(version: str, sizes: set[float]) -> None:
    scenario = replace(scenario_of(CHAT), host_memory_gib=64)
    usual = deploy_on(
        scenario.model, "H100", tp=2, engine_version=version, gpu_memory_utilization=0.4
    )
    variants = list(generate_neighbours(scenario, usual))
    assert {each.args.kv_offloading_size for each in variants} == sizes
    tiers = [each for each in variants if each.args.kv_offloading_size]
    hits = [
        derive_effective_workload(each, scenario.workload).prefix_hit_rate
        for each in (usual, *tiers)
    ]
    assert all(hits[0] < hit - 0.05 for hit in hits[1:]), "host memory keeps more than the pool"


def test_more_users_think_as_long() -> None:
    """At twice the rate there are twice the sessions at once; nobody hurries."""
    load, calm = scenario_of(CHAT).workload, trace_of(CHAT)
    busy = scale_sessions(load, 2 * calm.rate).trace
    assert isinstance(busy, SessionTrace) and busy.sessions.users == pytest.approx(300, rel=0.03)
    assert busy.rate == pytest.approx(2 * calm.rate, rel=0.03)

    def measure_pause(trace: SessionTrace) -> float:
        order = np.argsort(trace.session, kind="stable")
        same = np.diff(trace.session[order]) == 0
        return float(np.diff(trace.arrival[order])[same].mean())

    assert measure_pause(busy) == pytest.approx(measure_pause(calm), rel=0.03)


def test_users_may_be_the_question() -> None:
    """What is found is kept by a plan of so many users, and not by one of a third more."""
    asked = scenario_of({**CHAT, "users": "max"})
    found = search_analytically(replace(asked, gpus=(replace(asked.gpus[0], max_gpus=1),)))
    most = found.scenario.workload.trace.sessions.users
    assert most > 20 and build_offer(found.scenario, found.chosen).usd_per_user
    for share, holds in ((0.99, True), (1.33, False)):
        asked = scenario_of({**CHAT, "users": share * most})
        plan = search_analytically(replace(asked, gpus=(replace(asked.gpus[0], max_gpus=1),)))
        assert (plan.verdict == "holds") == holds
    with pytest.raises(PlannerError, match="max asks for a steady load"):
        scenario_of({**CHAT, "users": "max"}, office_hours=[9, 18])


def test_sessions_with_office_hours_are_planned_for_those_hours() -> None:
    """`users` are those at work at the busiest time, so that the office hours have all their load."""
    always, office = scenario_of(CHAT), scenario_of(CHAT, office_hours=[8, 18], office_days=5)
    assert office.workload.rate == always.workload.rate
    assert office.daily_profile and sum(office.daily_profile.hourly_fractions) == 50
    assert search_analytically(office).chosen == search_analytically(always).chosen


@pytest.mark.parametrize(
    ("changes", "others", "words"),
    [
        ({"users": None}, {}, "give users"),
        ({"per_hour": 20}, {}, "give users"),
        ({"max_context": 200_000}, {}, "must be up to 131,072 tokens"),
        ({"max_context": 1000}, {}, "no first prompt"),
        ({"turns": {"p95": 3}}, {}, "turns: needs the mean"),
        ({"turns": {"exactly": 10**9}}, {}, "turns: 1,000,000,000 on average; at most 1,000"),
        ({}, {"rate": 3}, "leave out rate"),
        ({}, {"peak_to_mean": 2}, "leave out peak_to_mean"),
        ({}, {"output_tokens": {"mean": 9}}, "leave out output_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    changes: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlannerError, match=words):
        scenario_of({**CHAT, **changes}, **others)
