"""Moving one thing at a time: what load, budgets, long prompts and reuse do to a deployment."""

import pytest
from shipped import plan_of

from planner.analysis import batching_tables
from planner.analysis.sweep import space_logarithmically, sweep
from planner.core.errors import PlannerError
from planner.planning.prediction import evaluate
from planner.planning.scenario import load_scenario

CHAT = load_scenario("chat-70b")


@pytest.fixture(scope="module")
def best():
    return plan_of("chat-70b").chosen


@pytest.fixture(scope="module")
def alone(best):
    deployment = best.deployment
    return deployment.with_replicas(1), CHAT.workload.split(deployment.layout.replicas)


def rises(values) -> bool:
    return all(
        later >= earlier * 0.999 for earlier, later in zip(values, list(values)[1:], strict=False)
    )


def test_a_sweep_has_a_row_for_each_combination_that_is_no_error():
    def read(seqs, tokens):
        if seqs > tokens:
            raise PlannerError("no engine starts so")
        return {"both": (seqs, tokens)}

    axes = {"max_num_seqs": [64, 512], "max_num_batched_tokens": [256, 1024]}
    swept = sweep(axes, read)
    assert list(swept.columns) == ["max_num_seqs", "max_num_batched_tokens", "both"]
    assert list(swept["both"]) == [(64, 256), (64, 1024), (512, 1024)]
    assert list(swept["max_num_seqs"]) == [64, 64, 512]


def test_more_requests_in_flight_mean_more_throughput_and_slower_tokens(alone):
    load = batching_tables.sweep_batch(*alone, space_logarithmically(1, 128))
    assert rises([value.mid for value in load["Output tokens/s"]])
    assert rises([value.mid for value in load["p95 TPOT (ms)"]])
    assert rises(list(load["arithmetic used (%)"])) and load["arithmetic used (%)"].max() < 100
    assert load["bandwidth used (%)"].between(0, 100).all()


def test_throughput_grows_almost_in_proportion_while_weights_dominate_a_step(alone):
    """Decode reads all weights whatever the batch: eight requests cost far less than eight times one."""
    load = batching_tables.sweep_batch(*alone, [1, 8]).set_index("requests in flight")
    assert load.loc[8, "Output tokens/s"].mid > 4 * load.loc[1, "Output tokens/s"].mid


def test_chunks_bound_the_gap_and_cost_the_prompt_time(alone):
    """Sarathi-Serve (OSDI 2024): chunked prefill bounds the stall of decodes and slows the prompt a little."""
    found = batching_tables.sweep_long_prompt(
        *alone, sequences=16, prompt=10_000, budgets=[512, 2048, 8192]
    )
    assert rises([gap.mid for gap in found["Longest gap (ms)"]])
    assert rises(list(found["Disturbed for (ms)"])[::-1])
    assert list(found["Steps"]) == [21, 5, 2, 1]


def test_gaps_begin_and_end_undisturbed(alone):
    data = batching_tables.simulate_prefill_gaps(*alone, sequences=16, prompt=10_000)
    assert not data["Prompt in it"].iloc[[0, 1, 2, -3, -2, -1]].any()
    assert data["Gap (ms)"].iloc[0] == data["Gap (ms)"].iloc[-1]


def test_a_budget_without_room_for_prompts_is_refused(alone):
    deployment, traffic = alone
    tiny = deployment.with_args(max_num_batched_tokens=64)
    with pytest.raises(PlannerError, match="leaves no room beside 64 decoding sequences"):
        batching_tables.simulate_prefill_gaps(tiny, traffic, sequences=64, prompt=1000)


def test_too_few_slots_never_keep_up(alone):
    deployment, traffic = alone
    served = [
        evaluate(deployment.with_args(max_num_seqs=n), traffic).performance for n in (1, 2, 256)
    ]
    assert [found.saturated for found in served] == [True, True, False]


def test_reuse_shortens_prefill_and_nothing_gets_worse(best):
    found = batching_tables.sweep_prefix_reuse(CHAT, best, [0, 0.25, 0.5, 0.75])
    assert rises([value.mid for value in found["Requests/s, all slots taken"]])
    assert rises([value.mid for value in found["mean TTFT (ms)"]][::-1])
