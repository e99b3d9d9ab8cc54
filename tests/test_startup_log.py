"""Start-up logs of several vLLM versions, read and explained."""

from pathlib import Path

import pytest
import yaml

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import plan_memory
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG as GRANITE
from planner.tools.diagnostics.log_comparison import (
    compare_log_to_plan,
    explain_log_file,
    infer_deployment,
)
from planner.tools.diagnostics.startup_log import StartupLog, parse_startup_log
from planner.ui.cli import main

V064 = """
Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB peak_torch_memory=17.98GiB \
memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90
# GPU blocks: 1478, # CPU blocks: 2048
Maximum concurrency for 29000 tokens per request: 0.82x
"""
"""From vllm-project/vllm issue 10517 (vLLM 0.6.4)."""
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
    log = parse_startup_log(V019)
    assert log.arguments["engine_version"] == "0.19.0"
    figures = gib(log)
    assert (figures["weights"], figures["activation"], figures["non_torch"]) == (27.39, 1.52, 0.25)
    assert (figures["requested"], figures["kv_available"], figures["cudagraph_actual"]) == (
        75.23,
        46.08,
        1.07,
    )
    assert (log.figures["kv_tokens"], log.figures["max_concurrency"]) == (241568, 29.49)
    expected = {
        "model": "microsoft/phi-4",
        "tp": 1,
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.95,
    }
    assert expected.items() <= log.arguments.items() and "kv_cache_dtype" not in log.arguments


def test_older_phrases_and_several_ranks() -> None:
    assert gib(parse_startup_log(V0)) == {
        "total": 39.38, "requested": 37.41, "weights": 34.43, "activation": 2.51, "non_torch": 0.43,
        "kv_available": 0.04,
    }  # fmt: skip
    assert gib(parse_startup_log(TWO_RANKS)) == {
        "cudagraph_estimate": 1.97, "cudagraph_actual": 0.47, "kv_available": 16.62,
    }  # fmt: skip
    log = parse_startup_log(V064)
    assert gib(log) | {"num_blocks": log.figures["num_blocks"]} == {
        "total": 23.58, "non_torch": 0.35, "kv_available": 2.89, "num_blocks": 1478, "max_concurrency": 0,
    }  # fmt: skip
    assert (log.arguments["gpu_memory_utilization"], log.arguments["max_model_len"]) == (0.9, 29000)


def test_a_value_ends_before_the_full_stop_of_its_sentence() -> None:
    """What vLLM 0.6 to 0.19 print of chunked prefill, as in vllm-project/vllm issue 10537 (0.6.4)."""
    line = (
        "INFO 11-21 13:28:37 config.py:1136] Chunked prefill is enabled with"
        " max_num_batched_tokens=512.\n"
    )
    found = infer_deployment(parse_startup_log(line + V019), "H100")
    assert found.args.max_num_batched_tokens == 512
    log = parse_startup_log(
        "vLLM API server version 0.10.2rc2.dev0+g5438967fb.\nmodel=/models/llama/.\n" + V0
    )
    assert (log.arguments["engine_version"], log.arguments["model"]) == (
        "0.10.2rc2.dev0+g5438967fb",
        "/models/llama/",
    )


def test_a_refusal_keeps_its_kind() -> None:
    log = parse_startup_log(REFUSED)
    assert (gib(log)["free"], gib(log)["total"]) == (60.33, 79.19)
    assert log.failure == "Free memory on device"


def test_a_text_without_figures_is_refused() -> None:
    with pytest.raises(PlannerError, match="no vLLM start-up figures found"):
        parse_startup_log("INFO: Application startup complete.")


def test_a_log_that_ends_while_weights_load_is_held_against_the_plan() -> None:
    log = parse_startup_log(
        "non-default args: {'model': 'Qwen/Qwen3-32B', 'max_model_len': 16384}\n"
        "torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of 44.39 GiB\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    told = str(compare_log_to_plan(log, plan_memory(infer_deployment(log, "L40S"))))
    assert (
        "ends with: OutOfMemoryError" in told
        and "weights take 61.0 (60.7 to 61.3) of 44.4 GiB" in told
    )


def test_the_plan_of_the_same_deployment_agrees_line_by_line() -> None:
    log = parse_startup_log(V019)
    arguments = dict(log.arguments)
    found = compare_log_to_plan(
        log, plan_memory(deploy_on(arguments.pop("model"), "H100", **arguments))
    )
    assert {line.term for line in found.lines if line.status == "FAIL"} <= {
        "kv_tokens",
        "max_concurrency",
        "kv_available",
    }
    assert "activation" in str(found) and "as planned" in str(found)
    assert sum(line.status == "PASS" for line in found.lines) >= len(found.lines) - 3


def test_the_wrong_assumption_is_named_and_calibrated_away() -> None:
    """A rank that loses 1.5 GiB more to libraries than planned: named, and right after calibration."""
    text = V019.replace("increase memory: 0.25GiB", "increase memory: 1.75GiB").replace(
        "46.08 GiB", "44.58 GiB"
    )
    text = text.replace("241,568 tokens", "233,712 tokens").replace("29.49x", "28.52x")
    log = parse_startup_log(text)
    arguments = {name: value for name, value in log.arguments.items() if name != "model"}
    deployment = deploy_on("microsoft/phi-4", "H100", **arguments)
    found = compare_log_to_plan(log, plan_memory(deployment))
    assert found.largest_deviation is not None and found.largest_deviation.term == "non_torch"
    again = plan_memory(
        deploy_on("microsoft/phi-4", "H100", memory_calibration=found.calibration, **arguments)
    )
    assert again.kv_available.mid / GIB == pytest.approx(44.58, abs=0.02)
    assert compare_log_to_plan(log, again).largest_deviation is None


def test_what_a_short_log_leaves_unexplained_goes_to_the_activation_peak() -> None:
    """Most logs state only the weights and the pool: what is missing between them is one figure."""
    text = "INFO Model loading took 14.99 GiB memory\nINFO Available KV cache memory: 55.00 GiB\n"
    args = {"engine_version": "0.19.0", "gpu_memory_utilization": 0.9}
    found = compare_log_to_plan(
        parse_startup_log(text), plan_memory(deploy_on("meta-llama/Llama-3.1-8B", "H100", **args))
    )
    assert found.largest_deviation is None or found.largest_deviation.term == "unexplained"
    again = plan_memory(
        deploy_on("meta-llama/Llama-3.1-8B", "H100", memory_calibration=found.calibration, **args)
    )
    assert again.kv_available.mid / GIB == pytest.approx(55.0, abs=0.02)


def test_a_public_log_is_explained_line_by_line() -> None:
    """A granite-3.1-8b run of llm-d-planner (Apache-2.0): libraries held 0.46 GiB, 0.2 more than in its sister runs."""
    found = explain_log_file(GRANITE, "H100")
    assert (
        found.plan.deployment.args.max_num_seqs == 1024
        and found.plan.deployment.engine.version == "0.19.0"
    )
    assert [line.term for line in found.lines] == [
        "requested", "weights", "activation", "non_torch", "kv_available", "kv_tokens",
        "max_concurrency",
    ]  # fmt: skip
    assert found.largest_deviation is not None and found.largest_deviation.term == "non_torch"
    assert found.largest_deviation.difference == pytest.approx(0.19, abs=0.01)
    assert (
        "memory beside PyTorch" in found.verdict
        and "_" not in str(found).partition("It depends on")[0]
        and "NCCL" in found.verdict
    )


def test_its_fragment_makes_the_next_plan_agree() -> None:
    """What the command prints, pasted into a scenario, moves that scenario's plan to what was logged."""
    asked = {
        "question": "?", "model": "ibm-granite/granite-3.1-8b-instruct",
        "gpus": [{"gpu": "H100", "at_most": 1}],
        "engine_version": "0.19.0",
        "engine_args": {"gpu_memory_utilization": 0.95, "enable_prefix_caching": False,
        "max_model_len": 8192, "max_num_seqs": 1024, "max_num_batched_tokens": 8192},
        "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}, "rate": 1},
        "service_level": {"ttft": {"p99": 2000}},
    }  # fmt: skip
    found = explain_log_file(GRANITE, "H100")
    calibrated = search_deployments(
        parse_scenario({**asked, **yaml.safe_load(found.scenario_line)}, "mine")
    ).chosen
    plain = search_deployments(parse_scenario(asked, "mine")).chosen
    assert calibrated and plain
    assert plain.prediction.memory.kv_available.mid / GIB == pytest.approx(58.66 + 0.18, abs=0.03)
    assert calibrated.prediction.memory.kv_available.mid / GIB == pytest.approx(58.66, abs=0.03)
    again = explain_log_file(GRANITE, planned=calibrated.deployment)
    assert again.largest_deviation is None and again.scenario_line == found.scenario_line


def test_a_log_that_ends_in_an_error_says_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of vllm issues 27508 (0.11) and 16343 (0.8.3, on a 3090), and recipes pull 551."""
    log = tmp_path / "vllm.log"
    log.write_text(
        "INFO Initializing a V1 LLM engine (v0.11.0) with config: model='openai/gpt-oss-120b',"
        " max_seq_len=131072\nINFO Model loading took 65.97 GiB\nINFO Available KV cache memory:"
        " 1.71 GiB\nValueError: To serve at least one request with the models's max seq len"
        " (131072), (4.54 GiB KV cache is needed, which is larger than the available KV cache"
        " memory (1.71 GiB). Based on the available memory, the estimated maximum model length is"
        " 49152.\n"
    )
    assert "--max-model-len 49152 starts" in explain_log_file(log, "H100").suggestions
    log.write_text(
        "INFO Initializing a V1 LLM engine (v0.22.0) with config: model='Qwen/Qwen3.6-27B-FP8',"
        " max_seq_len=262144\nValueError: max_num_seqs (1024) exceeds available Mamba cache blocks"
        " (856). Each decode sequence requires one Mamba cache block.\n"
    )
    assert "--max-num-seqs 856 starts" in explain_log_file(log, "H100").suggestions
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 350.00 MiB. GPU 0 has a total "
                   "capacity of 23.68 GiB of which 212.81 MiB is free.\n")  # fmt: skip
    assert main(["explain-log", str(log), "--gpu", "RTX-3090"]) == 1
    assert "The GPU is full" in (told := capsys.readouterr().out) and "quantized weights" in told


def test_a_layout_that_differs_is_told_apart_from_the_budget() -> None:
    """Twice the tokens in the same memory: an FP8 cache that the arguments do not mention."""
    text = (
        GRANITE.read_text().replace("384,432 tokens", "768,864 tokens").replace("46.93x", "93.86x")
    )
    log = parse_startup_log(text.replace("increase memory: 0.46GiB", "increase memory: 0.27GiB"))
    found = compare_log_to_plan(log, plan_memory(infer_deployment(log, "H100")))
    assert (
        found.largest_deviation is not None
        and found.largest_deviation.term == "kv_tokens"
        and "kv_cache_dtype" in found.verdict
    )


def test_arguments_of_speculation_experts_and_adapters_are_read() -> None:
    log = parse_startup_log(
        "INFO non-default args: {'model': 'deepseek-ai/DeepSeek-V3', 'tensor_parallel_size': 8,"
        " 'enable_lora': True, 'enable_expert_parallel': True}\nINFO engine (v0.20.2) with config:"
        " model='deepseek-ai/DeepSeek-V3', speculative_config=SpeculativeConfig(method='mtp',"
        " model='deepseek-ai/DeepSeek-V3', num_spec_tokens=2), device_name=NVIDIA_H200.json\nINFO"
        " Model loading took 85.00 GiB memory"
    )
    found = infer_deployment(log)
    assert (found.gpu.name, found.layout.tp, found.layout.ep, found.args.max_loras) == (
        "H200-SXM",
        8,
        8,
        1,
    )
    assert found.speculation is not None and found.speculation.num_speculative_tokens == 2


def test_a_log_of_another_gpu_or_model_does_not_fit() -> None:
    with pytest.raises(PlannerError, match=r"log's GPU has 79\.19 GiB, L4 has"):
        explain_log_file(GRANITE, "L4")
    for model in ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"):
        found = explain_log_file(GRANITE, planned=deploy_on(model, "H100", tp=4))
        assert "does not fit" in found.verdict and not found.scenario_line and not found.suggestions


def test_a_gpu_that_a_log_does_not_name_is_inferred_by_its_memory(tmp_path: Path) -> None:
    found = explain_log_file(GRANITE)
    assert "the nearest to its 79.19 GiB; --gpu says another" in found.inferred
    assert found.plan.deployment.gpu.memory_bytes / GIB == pytest.approx(79.19, rel=0.01)
    (tmp_path / "log").write_text(
        "non-default args: {'model': 'Qwen/Qwen3-8B'}\nModel loading took 15.3 GiB\n"
    )
    with pytest.raises(PlannerError, match="does not name its GPU: add --gpu NAME"):
        explain_log_file(tmp_path / "log")


EXCERPT = """INFO vLLM API server version 0.20.2
INFO Initializing a V1 LLM engine (v0.20.2) with config: model='Qwen/Qwen3-8B', max_seq_len=8192
INFO Model loading took 15.27 GiB memory and 4.1 seconds
"""


def written(utilization: float, folder: Path) -> Path:
    """What a server with this utilization would log of weights and KV cache, and nothing else."""
    args = {
        "max_model_len": 8192,
        "engine_version": "0.20.2",
        "gpu_memory_utilization": utilization,
    }
    memory = plan_memory(deploy_on("Qwen/Qwen3-8B", "RTX-4090", **args))
    path = folder / "vllm.log"
    kv = f"INFO Available KV cache memory: {memory.kv_available.mid / GIB:.2f} GiB\n"
    path.write_text(EXCERPT + kv)
    return path


def test_a_utilization_that_an_excerpt_leaves_out_is_inferred_or_asked_for(tmp_path: Path) -> None:
    """By default vLLM 0.20 takes 0.9: more shows as negative other memory, less as too much of it."""
    more = explain_log_file(written(0.98, tmp_path), "RTX-4090")
    assert more.plan.deployment.args.gpu_memory_utilization == pytest.approx(0.98, abs=0.011)
    assert "Inferred" in str(more) and "activation" not in more.scenario_line
    less = explain_log_file(written(0.82, tmp_path), "RTX-4090")
    assert "another gpu_memory_utilization, which the log does not state" in less.verdict
    assert "--command" in less.verdict and "activation" not in less.scenario_line


def test_the_command_says_what_a_log_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain-log", str(written(0.8, tmp_path)), "--gpu", "RTX-4090", "--command"]
    command = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --gpu-memory-utilization "
    assert main([*words, f"{command}0.8"]) == 0
    assert "no assumption was off" in capsys.readouterr().out
    assert main([*words, f"{command}0.7"]) == 0
    told = capsys.readouterr().out
    assert (
        "Memory cannot be negative" in told
        and "more than gpu_memory_utilization 0.7" in told
        and "activation:" not in told
    )
    assert main([*words, "echo hello"]) == 2
    assert main(words[:2] + words[4:] + [command]) == 2


@pytest.mark.parametrize(
    "lines", ["", EXCERPT, f"{EXCERPT}INFO Available KV cache memory: 4.01 GiB\n"]
)
def test_no_assumption_is_called_right_after_an_out_of_memory(lines: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        f"{lines}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = explain_log_file(path, "RTX-4090", model="Qwen/Qwen3-8B")
    assert "no assumption was off" not in str(found)
    assert found.log.failure and "GPU is full" in found.suggestions
