"""Commands that are killed, ended or interrupted leave whole files, and their next run is as if nothing had been."""

import pytest
from attack_kills import QUICK, attacked


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_commands_stopped_at_random_moments(command: str) -> None:
    assert attacked(command, 3)[1] == []
