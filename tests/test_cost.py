"""Cost is division, so it is checked against divisions done by hand."""

import math

import pytest

from planner.core.quantities import Interval, PlannerError
from planner.planning.cost import cost


def test_by_hand() -> None:
    # 4 GPUs at $2 = $8 an hour; 1,000 tokens/s are 3.6 million an hour, 5 requests/s are 18,000.
    spent = cost(2.0, 4, Interval.exactly(1000.0), Interval.exactly(5.0), Interval.exactly(4000.0))
    assert spent.usd_per_hour == 8
    assert spent.usd_per_million_output_tokens.mid == pytest.approx(8 / 3.6)
    assert spent.usd_per_request.mid == pytest.approx(8 / 18_000)
    assert spent.utilisation.mid == pytest.approx(0.25)
    assert spent.usd_per_month == pytest.approx(8 * 24 * 365.25 / 12)


def test_a_faster_deployment_is_cheaper_per_token() -> None:
    spent = cost(2.0, 1, Interval(500, 1000, 2000), Interval(1, 2, 4))
    per_token = spent.usd_per_million_output_tokens
    assert per_token.lo < per_token.mid < per_token.hi
    assert per_token.hi == pytest.approx(4 * per_token.lo)


def test_no_throughput_costs_infinitely_much_a_token() -> None:
    assert math.isinf(cost(2.0, 1, Interval.exactly(0), Interval.exactly(0)).usd_per_request.mid)


def test_bad_input() -> None:
    with pytest.raises(PlannerError, match="at least one GPU"):
        cost(2.0, 0, Interval.exactly(1), Interval.exactly(1))
