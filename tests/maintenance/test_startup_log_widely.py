"""What `test_startup_log.py` looks at in small, more widely."""

import re
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.planning.scenario import parse_scenario
from planner.tools.diagnostics.log_comparison import explain_log_file
from planner.ui.cli import main


def test_a_scenario_with_several_gpus_is_planned_on_the_one_that_wrote_the_log(
    tmp_path: Path,
) -> None:
    """19.42 GiB of KV cache beside 16 GiB of weights are an L40S at 0.85: nothing is learnt about an H200 from it."""
    text = """
INFO non-default args: {'model': 'Qwen/Qwen3-32B-FP8', 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.85}
INFO Initializing a V1 LLM engine (v0.20.2) with config: model='Qwen/Qwen3-32B-FP8', quantization=fp8
INFO Model loading took 16.01 GiB memory and 41.203113 seconds
INFO Available KV cache memory: 19.42 GiB
"""
    asked = parse_scenario({
        "question": "?", "model": "Qwen3-32B", "quantization": ["fp8"],
        "gpus": [{"gpu": gpu, "at_most": 2} for gpu in ("H200", "L40S")],
        "workload": {"prompt_tokens": {"mean": 1500}, "output_tokens": {"mean": 300}, "rate": 1},
        "service_level": {"ttft": {"p95": 2000}},
    }, "mine")  # fmt: skip
    log = tmp_path / "vllm.log"
    log.write_text(text)
    with pytest.raises(PlannerError, match="scenario has H200-SXM, L40S: add --gpu"):
        explain_log_file(log, planned=asked)
    found = explain_log_file(log, "L40S", asked)
    assert found.plan.deployment.gpu.name == "L40S" and found.matches_deployment
    logged, planned = str(found).splitlines()[:2]
    assert logged.endswith("on 2 x L40S, TP2, vllm 0.20.2, fp8_block")
    assert re.fullmatch(r"The scenario plans \d x L40S, .*, fp8", planned)
    assert main(["explain-log", str(log), "--gpu", "L40S"]) == 0
    log.write_text(f"{text}RuntimeError: Engine core initialization failed.\n")
    assert main(["explain-log", str(log), "--gpu", "L40S"]) == 1
    log.write_text(text)
    wrong = explain_log_file(log, "H200", asked)
    assert (
        not wrong.matches_deployment and not wrong.scenario_line and "does not fit" in wrong.verdict
    )
    for line in (
        "device_name=NVIDIA_L40S,dtype=fp8_w8a8.json",
        "Free memory on device (43.9/44.40 GiB)",
    ):
        log.write_text(f"{text}INFO {line}\n")
        assert explain_log_file(log, planned=asked).plan.deployment.gpu.name == "L40S"
