"""Multi-LoRA in the replay: at most `max_loras` adapters in a step, as vLLM has it; loads; what a step costs more."""

import numpy as np
import pytest

from planner.facts.arrivals import arrivals
from planner.simulator.kernel_types import ENTRY, Rules, StepTable, Traffic
from planner.simulator.replay import ReplayResult, replay

STEPS = StepTable(np.linspace(0.004, 0.03, 4097), np.linspace(0, 0.002, 300))
N, ADAPTERS = 1500, 16


def served(slots: int, host: int = ADAPTERS, table: StepTable = STEPS, log: bool = False) -> ReplayResult:
    rng = np.random.default_rng(0)
    rules = Rules(
        64, 512, 3000, 1024, False, True, 0, False, False, False, np.array([[0, 16]]), max_loras=slots,
        max_cpu_loras=host,
    )  # fmt: skip
    prompt, output, adapter = rng.integers(10, 300, N), rng.integers(1, 200, N), rng.integers(-1, ADAPTERS, N)
    return replay(rules, table, Traffic(arrivals(N, 8.0, 1.0, rng), prompt, output, adapter=adapter), log=log)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_step_has_at_most_so_many_adapters_and_lets_others_past(slots: int) -> None:
    rng = np.random.default_rng(0)
    rng.integers(10, 300, N), rng.integers(1, 200, N)
    adapter = rng.integers(-1, ADAPTERS, N)
    step, request = served(slots, log=True).outcome.noted(ENTRY, 2).astype(int).T
    pairs = np.unique(np.stack([step, adapter[request]])[:, adapter[request] >= 0], axis=1)
    assert np.bincount(pairs[0]).max() == slots
    found = served(slots).outcome
    order = np.argsort(found.scheduled, kind="stable")
    assert (np.diff(order) < 0).any(), "some are let past others that wait for a slot"
    for a in range(-1, ADAPTERS):
        assert (np.diff(found.scheduled[adapter == a]) >= 0).all(), "but not past their own adapter's"
    assert not np.isnan(found.last_token).any()


@pytest.mark.parametrize("slots", [1, 4, ADAPTERS])
def test_many_equal_steps_at_once_are_the_same_steps(slots: int) -> None:
    table = STEPS._replace(adapter_s=3e-4, adapter_token_s=1e-5, adapter_load_s=0.01, adapter_cold_s=0.05)
    at_once, one_by_one = served(slots, ADAPTERS, table).outcome, served(slots, ADAPTERS, table, log=True).outcome
    assert np.allclose(at_once.last_token, one_by_one.last_token, rtol=0, atol=1e-9)


def test_each_adapter_is_loaded_once_where_all_have_a_slot() -> None:
    dear = STEPS._replace(adapter_load_s=1e-6)
    without, loads = served(ADAPTERS).outcome, served(ADAPTERS, table=dear).outcome
    assert loads.totals[1] - without.totals[1] == pytest.approx(ADAPTERS * 1e-6, rel=0.5)
    table = STEPS._replace(adapter_load_s=0.01, adapter_cold_s=0.1)
    few = served(4, 4, table)
    assert few.ttft.mean() > served(4, ADAPTERS, table).ttft.mean()
