"""What is planned arrives: every command is read back by its engine's own parser, and starts exactly the plan."""

import pytest
from launch_plans import arrived, described, planned, plans

SHARES = {"vllm": 0.5, "sglang": 0.22, "trtllm": 0.18, "tgi": 0.1}


def check(engine: str, many: int, seed: int) -> None:
    seen = set()
    for launch in plans(engine, many, seed):
        assert arrived(launch) == planned(launch.deployment), described(launch)
        seen.add((launch.deployment.engine.version, launch.nodes > 1))
    assert len(seen) >= 2


@pytest.mark.parametrize("engine", SHARES)
def test_every_planned_value_arrives(engine: str) -> None:
    check(engine, round(60 * SHARES[engine]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARES)
def test_every_planned_value_of_300_plans_arrives(engine: str) -> None:
    check(engine, round(300 * SHARES[engine]), 1)
