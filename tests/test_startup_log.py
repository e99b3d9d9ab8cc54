"""Start-up logs of several vLLM versions, read and explained."""

from __future__ import annotations

import pytest

from planner.deployment import deploy_on
from planner.memory import plan
from planner.quantities import GIB, PlannerError
from planner.startup_log import StartupLog, explain, read_log

V019 = """
(APIServer pid=1) INFO [utils.py:238] non-default args: {'gpu_memory_utilization': 0.95, 'max_model_len': 8192}
(EngineCore pid=97) INFO [core.py:97] Initializing a V1 LLM engine (v0.19.0) with config: model='microsoft/phi-4', \
speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, pipeline_parallel_size=1, \
quantization=None, enforce_eager=False, kv_cache_dtype=auto, enable_prefix_caching=False
(EngineCore pid=97) DEBUG [gpu_worker.py:290] Initial free memory: 78.68 GiB; Requested memory: 0.95 (util), 75.23 GiB
(EngineCore pid=97) INFO [gpu_model_runner.py:4820] Model loading took 27.39 GiB memory and 14.429680 seconds
(EngineCore pid=97) DEBUG [gpu_worker.py:430] Memory profiling takes 22.10 seconds. Total non KV cache memory: \
29.15GiB; torch peak memory increase: 1.52GiB; non-torch forward increase memory: 0.25GiB; weights memory: 27.39GiB.
(EngineCore pid=97) INFO [gpu_worker.py:436] Available KV cache memory: 46.08 GiB
(EngineCore pid=97) INFO [kv_cache_utils.py:1319] GPU KV cache size: 241,568 tokens
(EngineCore pid=97) INFO [kv_cache_utils.py:1324] Maximum concurrency for 8,192 tokens per request: 29.49x
(EngineCore pid=97) INFO [gpu_model_runner.py:6133] Graph capturing finished in 6 secs, took 1.07 GiB
"""
"""The figures of an llm-d-planner accuracy run (Apache-2.0) in vLLM 0.19's phrases."""
V0 = """
INFO worker.py:267] the current vLLM instance can use total_gpu_memory (39.38GiB) x gpu_memory_utilization (0.95) = \
37.41GiB
INFO worker.py:267] model weights take 34.43GiB; non_torch_memory takes 0.43GiB; PyTorch activation peak memory takes \
2.51GiB; the rest of the memory reserved for KV Cache is 0.04GiB.
"""
"""From vllm-project/vllm issue 16570 (vLLM 0.8.3)."""
TWO_RANKS = """
(Worker_TP0) INFO [gpu_model_runner.py:6605] Estimated CUDA graph memory: 1.97 GiB total
(Worker_TP0) INFO [gpu_worker.py:515] Available KV cache memory: 16.81 GiB
(Worker_TP1) INFO [gpu_worker.py:515] Available KV cache memory: 16.62 GiB
(Worker_TP0) INFO [gpu_worker.py:599] CUDA graph pool memory: 0.47 GiB (actual), 0.51 GiB (estimated), difference: 0.04
"""
REFUSED = """
ValueError: Free memory on device cuda:1 (60.33/79.19 GiB) on startup is less than desired GPU memory utilization \
(0.95, 75.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""


def gib(log: StartupLog) -> dict[str, float]:
    return {name: round(value / GIB, 2) for name, value in log.figures.items()}


def test_a_log_of_0_19_states_everything() -> None:
    log = read_log(V019)
    assert log.version == "0.19.0"
    figures = gib(log)
    assert (figures["weights"], figures["activation"], figures["non_torch"]) == (27.39, 1.52, 0.25)
    assert (figures["requested"], figures["kv_available"], figures["cudagraph_actual"]) == (75.23, 46.08, 1.07)
    assert (log.figures["kv_tokens"], log.figures["max_concurrency"]) == (241568, 29.49)
    assert log.arguments["model"] == "microsoft/phi-4"
    assert (log.arguments["tp"], log.arguments["max_model_len"], log.arguments["gpu_memory_utilization"]) == (
        1,
        8192,
        0.95,
    )
    assert "kv_cache_dtype" not in log.arguments


def test_older_phrases_and_several_ranks() -> None:
    assert gib(read_log(V0)) == {
        "total": 39.38, "requested": 37.41, "weights": 34.43, "activation": 2.51, "non_torch": 0.43,
        "kv_available": 0.04,
    }  # fmt: skip
    assert gib(read_log(TWO_RANKS)) == {"cudagraph_estimate": 1.97, "cudagraph_actual": 0.47, "kv_available": 16.62}


def test_a_refusal_keeps_its_reason() -> None:
    log = read_log(REFUSED)
    assert (gib(log)["free"], gib(log)["total"]) == (60.33, 79.19)
    assert log.failure.startswith("ValueError: Free memory on device cuda:1 (60.33/79.19 GiB)")


def test_a_text_without_figures_is_refused() -> None:
    with pytest.raises(PlannerError, match="no vLLM start-up figures found"):
        read_log("INFO: Application startup complete.")


def test_the_plan_of_the_same_deployment_agrees_line_by_line() -> None:
    log = read_log(V019)
    arguments = dict(log.arguments)
    found = explain(log, plan(deploy_on(arguments.pop("model"), "H100", **arguments)))
    assert {line.term for line in found.lines if not line.inside} <= {"kv_tokens", "max_concurrency", "kv_available"}
    assert "activation" in str(found) and "as planned" in str(found)
    assert set(found.frame().columns) == {"term", "planned", "lo", "hi", "logged", "off", "inside"}


def test_the_wrong_assumption_is_named_and_calibrated_away() -> None:
    """A rank that loses 1.5 GiB more to libraries than planned: named, and right after calibration."""
    text = V019.replace("increase memory: 0.25GiB", "increase memory: 1.75GiB").replace("46.08 GiB", "44.58 GiB")
    log = read_log(text)
    arguments = dict(log.arguments)
    deployment = deploy_on(arguments.pop("model"), "H100", **arguments)
    found = explain(log, plan(deployment))
    assert found.culprit is not None and found.culprit.term == "non_torch"
    again = plan(deployment, found.calibration)
    assert again.kv_available.mid / GIB == pytest.approx(44.58, abs=0.02)
    assert explain(log, again).culprit is None


def test_what_a_short_log_leaves_unexplained_goes_to_the_activation_peak() -> None:
    """Most logs state only the weights and the pool: what is missing between them is one figure."""
    text = "INFO Model loading took 14.99 GiB memory\nINFO Available KV cache memory: 55.00 GiB\n"
    deployment = deploy_on("meta-llama/Llama-3.1-8B", "H100", engine_version="0.19.0", gpu_memory_utilization=0.9)
    found = explain(read_log(text), plan(deployment))
    assert plan(deployment, found.calibration).kv_available.mid / GIB == pytest.approx(55.0, abs=0.02)
