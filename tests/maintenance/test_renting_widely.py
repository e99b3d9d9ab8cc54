"""What `test_renting.py` looks at in small, more widely."""

import json

from hypothesis import given
from hypothesis import strategies as st
from test_renting import QUICK, RATES, UNITS, planned, usd


@QUICK
@given(rate=RATES, sold_in=UNITS, spare=st.integers(0, 2))
def test_a_spare_replica_never_costs_less_and_serves_nothing(
    rate: float, sold_in: list[int], spare: int
) -> None:
    fields = {"rate": rate, "sold_in": sold_in}
    assert usd(**fields, spare_replicas=spare) <= usd(**fields, spare_replicas=spare + 1)
    some, none = (planned(json.dumps({**fields, "spare_replicas": many})) for many in (spare, 0))
    same = {c.identity_key: c for c in none.candidates}
    for candidate in some.candidates:
        if other := same.get(candidate.identity_key):
            assert candidate.prediction.performance == other.prediction.performance


@QUICK
@given(rate=RATES, factor=st.sampled_from([1.0, 1.3, 2.0, 4.0]))
def test_a_tighter_limit_never_costs_less(rate: float, factor: float) -> None:
    for name, limit in (("start_up_at_most", 60.0), ("power_at_most", 300.0)):
        assert (
            usd(rate=rate)
            <= usd(rate=rate, **{name: limit * factor})
            <= usd(rate=rate, **{name: limit})
        )
