"""The VRAM chapter's tables: budgets that add up, sweeps that rise and fall as they must, advice that starts."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.analysis import memory_sweeps
from planner.analysis.memory_sweeps import build_sequence_table
from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import find_max_model_len, get_memory_plan, plan_memory
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

LLAMA = deploy_on(
    "meta-llama/Llama-3.1-8B-Instruct", "L40S", engine_version="0.20.2", max_model_len=8192
)
CHAT = Workload(
    LengthDistribution.from_lognormal(1000, 3000),
    LengthDistribution.from_lognormal(200, 600),
    rate=1.0,
)


def test_the_terms_inside_the_budget_are_the_budget() -> None:
    table = memory_sweeps.build_budget_table(get_memory_plan(LLAMA)).set_index("term")
    inside = table[table["inside the budget"]].drop(index="budget")["GiB"]
    assert sum(value.mid for value in inside) == pytest.approx(
        table.loc["budget", "GiB"].mid, abs=1e-6
    )
    assert table.loc["budget", "GiB"].mid == pytest.approx(
        LLAMA.args.gpu_memory_utilization * LLAMA.gpu_total_bytes / GIB
    )
    assert table.loc["weights", "GiB"].mid == pytest.approx(
        14.99, abs=0.05
    )  # 8,030,261,248 parameters of 2 bytes


def test_more_utilization_is_more_cache_byte_for_byte() -> None:
    shares = (percent / 100 for percent in range(50, 100, 2))
    plans = (get_memory_plan(LLAMA.with_args(gpu_memory_utilization=share)) for share in shares)
    sizes = [max(plan.kv_available.mid, 0) / GIB for plan in plans]
    assert all(more >= less for less, more in pairwise(sizes))
    two_percent = 0.02 * LLAMA.gpu_total_bytes / GIB
    grown = [more - less for less, more in pairwise(sizes) if less > 0]
    assert grown == pytest.approx([two_percent] * len(grown), rel=1e-3)


def test_twice_the_length_is_half_the_sequences() -> None:
    short, long = (
        get_memory_plan(LLAMA.with_args(max_model_len=length)).max_concurrency.mid
        for length in (4096, 8192)
    )
    assert short / long == pytest.approx(2, rel=0.01)


def test_four_bits_take_about_a_quarter_and_are_read_faster() -> None:
    table = memory_sweeps.build_format_table(LLAMA, 1000).set_index("format")
    step = f"decode step of {memory_sweeps.COMPARED_BATCH} (ms)"
    sixteen, four = (
        table.iloc[0],
        next(row for name, row in table.iterrows() if "AWQ" in name or "4" in name),
    )
    assert sixteen["weights (GiB)"].mid == pytest.approx(14.99, abs=0.05)
    assert (
        0.25 < four["weights (GiB)"].mid / sixteen["weights (GiB)"].mid < 0.4
    )  # embeddings stay in 16 bits
    assert four[step] < sixteen[step] and four["sequences"] > sixteen["sequences"]
    assert all(table["published quality"]) and all(table["source"])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(share=st.floats(0.4, 0.95), gpu=st.sampled_from(["L40S", "RTX-4090", "H100-SXM"]))
def test_the_length_that_is_said_to_start_starts_and_a_longer_one_does_not(
    share: float, gpu: str
) -> None:
    made = deploy_on(LLAMA.model, gpu, engine_version="0.20.2", gpu_memory_utilization=share)
    found = get_memory_plan(made.with_args(max_model_len=1024))
    safe, likely = find_max_model_len(found)
    assert 0 <= safe <= likely <= 131072
    if likely:
        assert plan_memory(made.with_args(max_model_len=likely)).pool.max_concurrency_x >= 1
    if 0 < likely < 131072:
        assert plan_memory(made.with_args(max_model_len=likely + 16)).pool.max_concurrency_x < 1


def test_sequences_that_fit_are_risky_in_sum_and_rarer_the_longer() -> None:
    table = build_sequence_table(get_memory_plan(LLAMA), CHAT)
    assert list(table["sequences"]) == sorted(table["sequences"], reverse=True)
    assert list(table["preemption risk"]) == sorted(table["preemption risk"], reverse=True)
    assert table["preemption risk"].between(0, 1).all()


def test_a_recommendation_names_what_is_set_and_where_it_comes_from() -> None:
    found = get_memory_plan(LLAMA.with_args(max_num_seqs=64))
    text = memory_sweeps.describe_recommended_limits(found, CHAT, 0.1)
    assert "max_model_len 8,192" in text and "max_num_seqs 64" in text
    assert f"{CHAT.compute_total_tokens_quantile(0.99):,.0f} tokens" in text
    assert memory_sweeps.describe_memory_status(found) == ""
    tight = get_memory_plan(LLAMA.with_args(gpu_memory_utilization=0.3))
    assert "It does not start" in memory_sweeps.describe_memory_status(
        tight
    ) and "Remedy" in memory_sweeps.describe_memory_status(tight)
    assert "nothing to recommend" in memory_sweeps.describe_recommended_limits(tight, CHAT, 0.1)
