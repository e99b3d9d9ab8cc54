"""What `test_pools.py` looks at in small, more widely."""

import pytest
from shipped import sampled
from test_pools import CHEAPER, asked, plan_of

from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.disaggregated_search import evaluate_pools, search_pools
from planner.planning.prediction import predict


def _one_less(first: int, rest: int) -> list[tuple[int, int]]:
    return [(n, m) for n, m in ((first - 1, rest), (first, rest - 1)) if n and m]


@pytest.mark.parametrize("case", sampled(CHEAPER, CHEAPER[:1]), ids=str)
def test_long_prompts_beside_a_strict_gap_between_tokens_are_cheaper_in_pools(
    case: list[int],
) -> None:
    """Both replayed: the pools keep every promise at the pessimistic end, and the best without them costs more."""
    plan = plan_of(*case)
    best, whole = plan.chosen, plan.without_disaggregation.chosen
    assert best and best.is_disaggregated and best.is_simulated and plan.verdict == "holds"
    assert whole is None or (best.cost_key < whole.cost_key and whole is plan.runner_up)
    first, rest = best.prediction.pools
    again = evaluate_disaggregated(
        first, rest, plan.scenario.workload, plan.scenario.prices
    ).performance
    assert again == best.prediction.performance
    for target in plan.scenario.slo_targets:
        assert (
            again is not None and again.get(target.metric, target.percentile).hi <= target.seconds
        )
    fewer = [
        (first.with_replicas(n), rest.with_replicas(m))
        for n, m in _one_less(first.num_replicas, rest.num_replicas)
    ]
    found = [evaluate_pools(plan.scenario, *pools, plan.scenario.workload) for pools in fewer]
    assert not any(one and one.is_feasible and not one.at_risk for one in found)
    if whole:
        told_of = predict(whole.deployment, plan.scenario.workload).performance
        assert told_of is not None and whole.is_feasible


def test_pools_at_risk_do_not_replace_what_holds() -> None:
    for pools in search_pools(asked(6000, 150, 6, {"ttft": {"p95": 4000}, "itl": {"p99": 25}})):
        whole = plan_of(*CHEAPER[0]).without_disaggregation.chosen
        assert whole and (not pools.at_risk or pools.rank_key > whole.rank_key)
