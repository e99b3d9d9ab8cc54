"""What `test_decision.py` looks at in small, more widely."""

import math

from test_decision import plan_chat


def test_who_asks_for_more_certainty_pays_no_less() -> None:
    bills = [
        (plan.chosen.cost_key if plan.verdict == "holds" and plan.chosen else (True, math.inf))
        for plan in (plan_chat({"confidence": confidence}) for confidence in (0.55, 0.8, 0.95))
    ]
    assert bills == sorted(bills)
