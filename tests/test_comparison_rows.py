"""Rows that compare what is expected with what is, and their table."""

import math

import pytest

from planner.core.intervals import Interval
from planner.tools.comparison import ComparisonRow, ComparisonStatus, WorseSide

EXPECTED = Interval(80.0, 100.0, 125.0)


@pytest.mark.parametrize(
    ("worse", "below", "above"),
    [("higher", "PASS", "FAIL"), ("lower", "FAIL", "PASS"), ("both", "FAIL", "FAIL")],
)  # fmt: skip
def test_a_row_fails_on_its_worse_side_alone(
    worse: WorseSide, below: ComparisonStatus, above: ComparisonStatus
) -> None:
    rows = [ComparisonRow("x", "", EXPECTED, value, worse=worse) for value in (79.0, 126.0, 100.0)]
    assert [row.status for row in rows] == [below, above, "PASS"]


def test_a_limit_fails_what_its_interval_accepts() -> None:
    assert ComparisonRow("x", "ms", EXPECTED, 120.0, limit=110.0).status == "FAIL"
    assert ComparisonRow("x", "ms", None, 105.0, limit=110.0).status == "PASS"
    assert ComparisonRow("x", "ms", EXPECTED, math.nan, limit=110.0).status == "NOT MEASURED"


def test_repeats_and_rounding_widen_what_is_accepted() -> None:
    exact = Interval.from_value(100.0)
    assert ComparisonRow("x", "", exact, 100.009, rounding=0.01).status == "PASS"
    assert ComparisonRow("x", "", exact, 100.011, rounding=0.01).status == "FAIL"
    low, high = ComparisonRow("x", "", exact, sigma=0.1).accepted
    assert (low, high) == pytest.approx((100 * math.exp(-0.1282), 100 * math.exp(0.1282)), rel=1e-4)
