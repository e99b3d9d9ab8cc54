"""What `test_figures.py` looks at in small, more widely."""

from dataclasses import replace

import pytest
from shipped import plan_of, plan_once
from test_figures import RATE_TOLERANCE

from planner.planning.growth import find_growth_limit


def test_room_to_grow_is_the_largest_load_that_the_same_gpus_serve() -> None:
    plan = plan_of("chat-70b")
    growth, chosen = find_growth_limit(plan), plan.chosen
    assert growth and chosen
    (gpus,) = plan.scenario.gpus
    same = replace(gpus, max_gpus=chosen.prediction.num_gpus_billed)
    most = plan_once(replace(plan.scenario, gpus=(same,), open_figure="rate"))
    assert most.scenario.workload.rate == pytest.approx(growth.confident_rps, rel=RATE_TOLERANCE)
