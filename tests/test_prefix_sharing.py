"""What prefix caches find of shared documents: the arithmetic of the working set, routing, and what breaks a prefix."""

import pytest

from planner.analysis.prefix_cache_sweeps import (
    build_document_workload,
    get_hit_percent,
    simulate_routed,
    sweep_pool_size,
    sweep_routing,
)
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import drop_rejected_requests
from planner.planning.simulation_runs import simulate_once
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

L40S = deploy_on(
    "meta-llama/Llama-3.1-8B", "L40S", engine_version="0.20.2", max_model_len=16384, max_num_seqs=64
)
POOL = get_memory_plan(L40S).pool.reported_tokens


def test_of_documents_that_are_all_alike_a_cache_finds_the_part_that_it_holds():
    load = build_document_workload(60, 12, rate=1.0, requests=2500)
    swept = sweep_pool_size(L40S, load, (1, 0.5))
    shared = 12 / 13
    for row in swept.to_dict("records"):
        held = row["KV pool (tokens)"] / (60 * 12 * 512)
        assert row["a plain LRU would find (%)"] == pytest.approx(100 * shared * held, rel=0.15)
        assert row["found (%)"] == pytest.approx(row["a plain LRU would find (%)"], abs=2)
    assert load.trace is not None
    assert load.trace.prefix_hit_rate == pytest.approx(shared * (1 - 60 / 2500), abs=1e-9)


def test_what_stands_first_decides_what_is_shared():
    dated = build_document_workload(20, 12, rate=0.5, requests=300, question_first=True)
    assert get_hit_percent(simulate_routed(L40S, dated)) == 0
    assert (
        get_hit_percent(
            simulate_routed(L40S, build_document_workload(20, 12, rate=0.5, requests=300))
        )
        > 80
    )


def test_replicas_add_their_caches_up_only_if_requests_go_by_prefix():
    found_by = sweep_routing(
        L40S,
        build_document_workload(60, 12, rate=2.0, requests=2000),
        (1, 4),
        ("in turn", "to who has the prefix"),
    )["found (%)"]
    alone, turn, prefix = found_by[[0, 2, 3]]
    assert turn < alone < 55
    assert 4 * POOL > 60 * 12 * 512
    assert prefix > 85


def test_favourites_are_found_more_often_and_crowd_one_replica():
    even, favourites = (
        sweep_routing(
            L40S,
            build_document_workload(60, 12, rate=2.0, requests=2000, zipf=zipf),
            (4,),
            ("to who has the prefix",),
        ).iloc[0]
        for zipf in (0.0, 1.2)
    )
    assert favourites["busiest, of the mean"] > 1.3 > even["busiest, of the mean"]


def test_a_prompt_shares_no_more_than_it_has():
    """Prompts of 1,500 tokens in common, where a third is shorter: both forms count what is really found."""
    load = Workload(
        LengthDistribution.from_lognormal(2500, p50=1915),
        LengthDistribution.from_constant(20),
        rate=2.0,
        prefix_tokens=1500,
        prefix_hit_rate=1.0,
    )
    replay = simulate_once(L40S, drop_rejected_requests(load, 16384), 1500)
    assert load.mean_cached_tokens < 0.9 * 1500
    assert replay.outcome.cached[100:].mean() == pytest.approx(load.mean_cached_tokens, rel=0.05)
