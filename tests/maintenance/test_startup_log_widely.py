"""What `test_startup_log.py` looks at in small, more widely."""

from pathlib import Path

from planner.tools.diagnostics.log_comparison import explain_log_file
from planner.ui.cli import main


def test_nothing_is_learnt_of_a_gpu_that_did_not_write_the_log(
    tmp_path: Path,
) -> None:
    """19.42 GiB of KV cache beside 16 GiB of weights are an L40S at 0.85: nothing is learnt about an H200 from it."""
    text = """
INFO non-default args: {'model': 'Qwen/Qwen3-32B-FP8', 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.85}
INFO Initializing a V1 LLM engine (v0.20.2) with config: model='Qwen/Qwen3-32B-FP8', quantization=fp8
INFO Model loading took 16.01 GiB memory and 41.203113 seconds
INFO Available KV cache memory: 19.42 GiB
"""
    log = tmp_path / "vllm.log"
    log.write_text(text)
    found = explain_log_file(log, "L40S")
    assert found.plan.deployment.gpu.name == "L40S" and not found.misfit
    assert str(found).splitlines()[0].endswith("on 2 x L40S, TP2, vllm 0.20.2, fp8_block")
    assert main(["explain-log", str(log), "--gpu", "L40S"]) == 0
    log.write_text(f"{text}RuntimeError: Engine core initialization failed.\n")
    assert main(["explain-log", str(log), "--gpu", "L40S"]) == 1
    log.write_text(text)
    wrong = explain_log_file(log, "H200")
    assert wrong.misfit and not wrong.scenario_line and "does not fit" in wrong.verdict
    log.write_text(f"{text}INFO device_name=NVIDIA_L40S,dtype=fp8_w8a8.json\n")
    assert explain_log_file(log).plan.deployment.gpu.name == "L40S"
