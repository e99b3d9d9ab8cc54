"""Several replicas behind a router: each does what it would do alone with the requests that it is sent."""

import numpy as np
import pytest

from planner.simulator.kernel_types import (
    ROUTE_LEAST_LOADED,
    ROUTE_PREFIX_AFFINITY,
    ROUTE_ROUND_ROBIN,
    EngineRules,
    RequestBatch,
    RouterConfig,
    StepCostTable,
)
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_requests
from planner.workload.request_generator import build_shared_prefix_blocks, sample_arrivals

TABLE = StepCostTable(
    np.linspace(0.004, 0.03, 4097), np.linspace(0, 0.002, 300), 0.001, 1e-6, 2e-8, 1e-10
)
FATES = ("scheduled", "first_token", "last_token", "preemptions", "cached")


def rules(num_blocks: int = 600, overlap: bool = False) -> EngineRules:
    return EngineRules(
        32, 256, num_blocks, 1024, True, True, 0, overlap, False, False, np.array([[0, 16]])
    )


def traffic(n: int, rate: float, groups: int = 6) -> RequestBatch:
    """[n] requests of `groups` system prompts of 320 tokens."""
    rng = np.random.default_rng(0)
    prompt, output = 320 + rng.integers(1, 100, n), rng.integers(1, 150, n)
    content, start = build_shared_prefix_blocks(prompt, output, np.full(n, 320), 16)
    own = np.repeat(rng.integers(0, groups, n), (prompt + output) // 16)
    content = np.where(content < 20, content + 20 * own, content + 20 * groups)
    return RequestBatch(sample_arrivals(n, rate, 1.0, rng), prompt, output, content, start)


@pytest.mark.parametrize("policy", [ROUTE_ROUND_ROBIN, ROUTE_LEAST_LOADED, ROUTE_PREFIX_AFFINITY])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [90, 600])
def test_each_replica_does_what_it_would_do_alone(
    policy: int, overlap: bool, num_blocks: int
) -> None:
    sent, engine = traffic(400, 25.0), rules(num_blocks, overlap)
    found = simulate_requests(engine, TABLE, sent, router=RouterConfig(3, policy))
    assert np.isfinite(found.outcome.last_token).all()
    for r in range(3):
        own = np.flatnonzero(found.outcome.replica == r)
        part = RequestBatch(
            sent.arrival[own],
            sent.prompt[own],
            sent.output[own],
            sent.content,
            sent.content_start[own],
        )
        alone = simulate_requests(engine, TABLE, part)
        for name in FATES:
            assert np.array_equal(
                getattr(found.outcome, name)[own], getattr(alone.outcome, name)
            ), name


@pytest.mark.parametrize("policy", [ROUTE_ROUND_ROBIN, ROUTE_LEAST_LOADED])
def test_a_closed_loop_keeps_so_many_in_flight_over_all_replicas(policy: int) -> None:
    sent = traffic(500, 1.0)._replace(arrival=np.zeros(500), concurrency=24)
    outcome = simulate_requests(rules(), TABLE, sent, router=RouterConfig(3, policy)).outcome
    ends, moments = np.sort(outcome.last_token), np.unique(outcome.sent)[:-1]
    in_flight = np.searchsorted(np.sort(outcome.sent), moments, "right") - np.searchsorted(
        ends, moments, "right"
    )
    assert (in_flight == 24).all(), "the next is sent when one ends"


def test_routers_do_what_they_are_for() -> None:
    def served(policy: int) -> SimulationResult:
        return simulate_requests(
            rules(160), TABLE, traffic(1500, 30.0, groups=12), router=RouterConfig(4, policy)
        )

    in_turn, least, affine = (
        served(ROUTE_ROUND_ROBIN),
        served(ROUTE_LEAST_LOADED),
        served(ROUTE_PREFIX_AFFINITY),
    )
    assert least.compute_quantile("queue", 0.99) < in_turn.compute_quantile("queue", 0.99)
    assert affine.outcome.cached.sum() > 1.1 * in_turn.outcome.cached.sum(), (
        "a group's prompt is where it was"
    )
    assert affine.ttft.mean() < in_turn.ttft.mean()
