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
