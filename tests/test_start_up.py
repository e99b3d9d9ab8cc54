"""Start-up by phase against public logs, and what must hold whatever the constants are."""

from typing import Any

import pytest

from planner.core.errors import PlannerError
from planner.engines.deployment import deploy_on
from planner.latency.startup_time import StartupTime, estimate_startup
from planner.memory.weights import compute_checkpoint_bytes


def started(
    name: str = "meta-llama/Llama-3.1-8B", storage: str = "page-cache", **args: Any
) -> StartupTime:
    found = estimate_startup(
        deploy_on(name, "H100", **{"engine_version": "0.19.0"} | args), storage
    )
    assert found is not None
    return found


# seconds of "init engine": llm-d-planner accuracy runs (Apache-2.0), 0.19.0; p5.48xlarge of
# mid-2025
LOGS = [
    ("ibm-granite/granite-3.1-8b-instruct", 1, "0.19.0", 26.17),
    ("google/gemma-2-27b-it", 1, "0.19.0", 28.63),
    ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", 4, "0.19.0", 59.98),
    ("Qwen/Qwen3-30B-A3B", 1, "0.19.0", 35.84),
    ("meta-llama/Meta-Llama-3-70B", 4, "0.9.2", 91.82),
    ("Qwen/Qwen3-235B-A22B", 8, "0.9.2", 170.53),
]


@pytest.mark.parametrize(("name", "tp", "version", "logged"), LOGS)
def test_initialisation_as_logged(name: str, tp: int, version: str, logged: float) -> None:
    found = started(name, tp=tp, engine_version=version, max_model_len=8192)
    initialised = found.compilation + found.profiling + found.graphs
    assert initialised.lo <= logged <= initialised.hi
    assert initialised.mid == pytest.approx(logged, rel=0.25)


def test_a_whole_start_as_logged() -> None:
    """Llama-3.3-70B FP8 on 4 H100, 0.19.0: 115 s from the first line, weights in memory, to the first /health."""
    found = started("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", tp=4, max_model_len=8192)
    assert found.total.mid == pytest.approx(115, rel=0.1)
    assert found.total_with_cache.mid < found.total.mid - 20


def test_weights_wait_for_the_slower_of_loader_and_storage() -> None:
    """Llama-3-70B on a p5.48xlarge: 16 s from memory by four ranks; its first download took 213 s."""
    seconds = {
        s: started("meta-llama/Meta-Llama-3-70B", s, tp=4).weights
        for s in ("page-cache", "nvme", "download")
    }
    assert seconds["page-cache"].lo < 17 < seconds["nvme"].mid
    assert seconds["download"].lo < 213 < seconds["download"].hi
    halves = started("meta-llama/Meta-Llama-3-70B", tp=8).weights.mid / seconds["page-cache"].mid
    assert halves == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("how", [{"tp": 4}, {"tp": 8}, {"tp": 4, "dp": 2}])
def test_a_checkpoint_crosses_a_slow_line_once_whoever_reads_it(how: dict[str, int]) -> None:
    """141.1 GB of Meta-Llama-3-70B (total_size of its index) at 1 Gbit/s, by ranks of one machine."""
    found = started("meta-llama/Meta-Llama-3-70B", "internet", **how)
    assert found.weights.mid == pytest.approx(141.1e9 * 8 / 1e9, rel=0.01)


def test_what_is_left_out_takes_no_time() -> None:
    eager = started(enforce_eager=True)
    assert eager.compilation.mid == eager.graphs.mid == 0 < eager.total.lo
    assert started(engine_version="0.5.0").compilation.mid == 0 < started().compilation.mid
    assert started(max_num_seqs=16).graphs.mid < started().graphs.mid / 4
    assert started(max_loras=64).weights == started().weights


def test_only_what_is_known() -> None:
    assert estimate_startup(deploy_on("meta-llama/Llama-3.1-8B", "H100", engine="sglang")) is None
    with pytest.raises(PlannerError, match="unknown storage 'tape'"):
        started(storage="tape")


def test_weights_converted_at_the_start_are_read_as_they_are_stored() -> None:
    """141.1 GB of Llama-3.1-70B in BF16 are read for FP8 too; RedHatAI's FP8 copy is 72.7 GB (Hub, files)."""
    name = "meta-llama/Llama-3.1-70B-Instruct"
    plain, online, published = (
        deploy_on(model, "H100", tp=4, quantization=quantization)
        for model, quantization in (
            (name, None), (name, "fp8"), ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", None),
        )
    )  # fmt: skip
    for storage in ("page-cache", "download"):
        read = [found.weights for d in (plain, online) if (found := estimate_startup(d, storage))]
        assert read[0] == read[1]
    assert compute_checkpoint_bytes(online) / 1e9 == pytest.approx(141.1, rel=0.01)
    assert compute_checkpoint_bytes(published) / 1e9 == pytest.approx(72.7, rel=0.01)
    # engines convert to no AWQ: that is a checkpoint of its own
    packed = deploy_on(name, "H100", tp=4, quantization="awq")
    assert compute_checkpoint_bytes(packed) < 45e9
