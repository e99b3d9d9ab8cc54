"""From a scenario to a deployment: what starts on a card is not denied, and its arguments follow from its traffic."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.memory.concurrency_limits import estimate_preemption_risk
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import load_model
from planner.planning.deployment_builder import (
    MODEL_LEN_STEP_TOKENS,
    NUM_SEQS_STEP,
    build_deployment,
    choose_max_model_len,
)
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.search import search_deployments

CHAT = {
    "prompt_tokens": {"mean": 1000, "p95": 3000},
    "output_tokens": {"mean": 200, "p95": 500},
    "rate": 1,
}


def asked(served: str, gpu: str, **changes: Any) -> Scenario:
    data = {"question": "?", "model": served, "gpus": [{"gpu": gpu, "at_most": 1}], "engine_version": "0.20.2",
            "workload": CHAT, "service_level": {"tpot": {"p95": 500}}}  # fmt: skip
    return parse_scenario({**data, **changes}, "mine")


def deployed(found: Scenario) -> Deployment:
    served = load_model(found.model, quantization=found.quantizations[0])
    return build_deployment(found, found.gpus[0], served, ParallelLayout())


STARTS = [
    ("openai/gpt-oss-120b", "H100-SXM", "checkpoint"),
    ("Qwen/Qwen3-32B", "H100-SXM", "checkpoint"),
    ("google/gemma-3-12b-it", "RTX-4090", "fp8"),
    ("Qwen/Qwen3.6-27B", "H100-SXM", "fp8"),
]
"""Models that people serve on one such card, with little left for the warm-up of 1,024 sequences, or their states."""


@pytest.mark.parametrize("tenants", [0, 6])
@pytest.mark.parametrize(("served", "gpu", "quantization"), STARTS)
def test_what_people_serve_on_one_card_starts(
    served: str, gpu: str, quantization: str, tenants: int
) -> None:
    """Also beside 6 GiB of other processes: with less gpu_memory_utilization and fewer sequences there is room."""
    found = deployed(asked(served, gpu, quantization=[quantization], other_tenants_gib=tenants))
    memory = get_memory_plan(found)
    assert memory.status == "ok", memory.reason
    assert 1 <= found.args.max_num_seqs < 1024
    assert memory.pool.count_sequences(found.args.max_model_len) >= 1
    free = found.gpu_total_bytes - tenants * GIB
    assert found.args.gpu_memory_utilization * found.gpu_total_bytes <= free


@pytest.mark.parametrize("tenants", [0.5, 3, 6, 20])
def test_others_on_the_card_lower_the_utilization_and_no_more_than_needed(tenants: float) -> None:
    """vLLM refuses to start with less free memory than gpu_memory_utilization asks for (worker/utils.py)."""
    found = deployed(
        asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", other_tenants_gib=tenants)
    )
    alone = deployed(asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM"))
    share, total = found.args.gpu_memory_utilization, found.gpu_total_bytes / GIB
    assert share <= 1 - tenants / total
    assert share == alone.args.gpu_memory_utilization or share > 1 - tenants / total - 0.04
    assert get_memory_plan(found).kv_available.mid <= get_memory_plan(alone).kv_available.mid


def test_what_the_owner_sets_stays_set() -> None:
    given_args = {
        "gpu_memory_utilization": 0.8,
        "max_num_seqs": 7,
        "max_model_len": 5000,
        "kv_cache_dtype": "fp8",
    }
    found = deployed(asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", engine_args=given_args))
    assert {name: getattr(found.args, name) for name in given_args} == given_args


def test_a_memory_calibration_reaches_the_plan() -> None:
    plain = deployed(asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM"))
    own = deployed(
        asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM", memory_calibration={"non_torch": 1.5})
    )
    assert get_memory_plan(own).non_torch.mid - get_memory_plan(
        plain
    ).non_torch.mid == pytest.approx(1.5 * GIB)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mean=st.floats(50, 20_000), output=st.floats(10, 3000), gpu=st.sampled_from(["H100-SXM", "L40S", "RTX-4090"]),
    tenants=st.floats(0, 8),
)  # fmt: skip
def test_so_many_sequences_seldom_outgrow_the_pool(
    mean: float, output: float, gpu: str, tenants: float
) -> None:
    """In at most 5% of moments, where the pool and not the engine's own limit decides."""
    lengths = {"prompt_tokens": {"mean": mean}, "output_tokens": {"mean": output}, "rate": 1}
    found = asked(
        "meta-llama/Llama-3.1-8B-Instruct", gpu, workload=lengths, other_tenants_gib=tenants
    )
    made = deployed(found)
    memory, seqs = get_memory_plan(made), made.args.max_num_seqs
    if memory.can_start and seqs > 8:
        assert seqs % 8 == 0
        assert estimate_preemption_risk(memory, found.workload, seqs) <= 0.05 + 1e-9
    assert (
        made.args.max_model_len % MODEL_LEN_STEP_TOKENS == 0
        and made.args.max_model_len >= found.workload.compute_total_tokens_quantile(0.99)
    )


@pytest.mark.parametrize(("served", "gpu", "quantization"), STARTS)
def test_a_small_pool_is_filled_beside_its_own_sequences_and_not_the_default(
    served: str, gpu: str, quantization: str
) -> None:
    """The sampler of 1,024 rows takes what a few dozen leave to the pool: as many more, up to a step, are at risk."""
    found = asked(served, gpu, quantization=[quantization])
    made = deployed(found)
    seqs = made.args.max_num_seqs
    more = made.with_args(max_num_seqs=seqs + 2 * NUM_SEQS_STEP)
    assert estimate_preemption_risk(get_memory_plan(made), found.workload, seqs) <= 0.05
    assert (
        seqs == 256
        or estimate_preemption_risk(get_memory_plan(more), found.workload, seqs + 2 * NUM_SEQS_STEP)
        > 0.05
    )


def test_where_one_request_fills_the_pool_one_is_served() -> None:
    """16 GB of weights leave an L4 some 4 GiB, 32,000 tokens of 128 KiB: one of 25,000."""
    long = {"prompt_tokens": {"exactly": 25_000}, "output_tokens": {"exactly": 100}, "rate": 0.01}
    found = deployed(asked("meta-llama/Llama-3.1-8B-Instruct", "L4", workload=long))
    assert get_memory_plan(found).status == "ok" and found.args.max_num_seqs == 1


def test_the_context_holds_the_p99_and_never_more_than_the_model() -> None:
    found = asked("meta-llama/Llama-3.1-8B-Instruct", "H100-SXM")
    tokens = found.workload.compute_total_tokens_quantile(0.99)
    assert (
        1.1 * tokens
        <= choose_max_model_len(found.workload, 0.1, 131072)
        < 1.1 * tokens + MODEL_LEN_STEP_TOKENS
    )
    assert choose_max_model_len(found.workload, 0.1, 2048) == 2048


def test_a_card_that_a_version_no_longer_runs_on_is_told_alike() -> None:
    """vLLM's wheels from 0.20.0 on are built with CUDA 13, which knows no V100 (sm_70)."""
    owned = [{"gpu": "V100-SXM-32GB", "at_most": 1, "sold_in": [1]}]
    old, new = (asked("meta-llama/Llama-3.1-8B-Instruct", "V100-SXM-32GB", engine_version=version, gpus=owned)
                for version in ("0.19.0", "0.20.2"))  # fmt: skip
    assert search_deployments(old).chosen is not None
    plan = search_deployments(new)
    (rejection,) = plan.rejected
    assert (
        plan.chosen is None
        and rejection.bottleneck == "engine"
        and "up to 0.19" in rejection.reason
    )


def test_a_small_token_budget_is_judged_with_the_sequences_that_will_be_set() -> None:
    """vLLM refuses max_num_batched_tokens below max_num_seqs: 512 below its default of 1,024, not below what is set."""
    found = deployed(
        asked(
            "meta-llama/Llama-3.1-8B-Instruct",
            "H100-SXM",
            engine_args={"max_num_batched_tokens": 512},
        )
    )
    assert found.args.max_num_seqs <= found.args.max_num_batched_tokens == 512
