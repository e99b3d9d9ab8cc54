"""Values that a version of vLLM, or a GPU, refuses; and what lint proposes instead."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner.core.readers import read_yaml
from planner.tools.lint.report import CommandReport, lint

PUBLISHED = read_yaml(Path(__file__).parent / "data" / "published_models.yaml")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)


def check(options: str, version: str, gpu: str | None = None) -> CommandReport:
    (report,) = lint(f"vllm serve Qwen/Qwen3-8B {options}", version, gpu=gpu).commands
    return report


@pytest.mark.parametrize(
    ("options", "version", "verdict"),
    [
        # vLLM's parser takes auto and -1 since 0.14
        ("--max-model-len auto", "0.14.0", None), ("--max-model-len -1", "0.14.0", None),
        ("--max-model-len auto", "0.33.0", None), ("--max-model-len auto", "0.12.0", "wrong value"),
        ("--max-model-len auto", "0.13.0", "wrong value"), ("--max-model-len -1", "0.13.0", "wrong value"),
        ("--max-model-len -2", "0.20.2", "wrong value"), ("--max-model-len 0", "0.20.2", "wrong value"),
        # QuantizationMethods of each version
        ("-q squeezellm", "0.20.2", "removed"), ("-q marlin", "0.20.2", "removed"),
        ("-q aqlm", "0.20.2", "removed"), ("-q deepspeedfp", "0.20.2", "removed"),
        ("-q hqq", "0.20.2", "removed"), ("-q deepspeedfp", "0.8.5", None), ("-q aqlm", "0.10.0", "risky"),
        ("-q gguf", "0.20.2", None), ("-q bitsandbytes", "0.20.2", None),
        ("-q gguf", "0.33.0", "removed"), ("-q bitsandbytes", "0.33.0", "removed"),
        ("-q auto_gptq", "0.20.2", "unknown"), ("-q nonsense", "0.20.2", "unknown"),
        ("-q rtn", "0.12.0", None),
        # any multiple of 16 (flash_attn.py, get_supported_kernel_block_sizes)
        ("--block-size 8", "0.20.2", "wrong value"), ("--block-size 8", "0.12.0", "wrong value"),
        ("--block-size 8", "0.33.0", "wrong value"), ("--block-size 32", "0.20.2", None),
        ("--attention-backend XFORMERS", "0.20.2", "removed"), ("--attention-backend FLASHINFER", "0.20.2", None),
        ("--kv-cache-dtype int8", "0.33.0", "unknown"), ("--kv-cache-dtype octave_4bit", "0.33.0", None),
        ("--max-cpu-loras 8", "0.20.2", "useless"), ("--max-cpu-loras 8 --enable-lora", "0.20.2", None),
    ],
)  # fmt: skip
def test_values_are_facts_of_a_version(options: str, version: str, verdict: str | None) -> None:
    found = [one.verdict for one in check(options, version).checked.findings if one.verdict != "ok"]
    assert found == [verdict] * bool(verdict)


@pytest.mark.parametrize(
    ("command", "gpu", "version", "refused"),
    [
        ("Qwen/Qwen3-0.6B --dtype bfloat16", "T4", "0.20.2", True),
        ("Qwen/Qwen3-0.6B --dtype half", "T4", "0.20.2", False),
        ("Qwen/Qwen3-0.6B --dtype bfloat16", "A10", "0.20.2", False),
        ("Qwen/Qwen3-0.6B --quantization fp8", "T4", "0.12.0", True),
        ("Qwen/Qwen3-0.6B --quantization fp8", "T4", "0.32.0", False),
        ("Qwen/Qwen3-0.6B --quantization fp8", "A10", "0.12.0", False),
        ("Qwen/Qwen3-8B-AWQ --max-model-len 4096", "V100", "0.12.0", True),
        ("Qwen/Qwen3-8B-AWQ --max-model-len 4096", "T4", "0.12.0", False),
    ],
)
def test_values_are_facts_of_a_gpu(command: str, gpu: str, version: str, refused: bool) -> None:
    """docs.vllm.ai, supported hardware of quantization kernels; bfloat16 needs Ampere."""
    report = lint(f"vllm serve {command}", version, gpu=gpu)
    assert ("does not run" in report.commands[0].not_planned_reason) == refused
    assert (report.verdict == "mend") == refused


EAGLE = json.dumps({"model": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "num_speculative_tokens": 3})


@pytest.mark.parametrize(
    ("layout", "version", "refused"),
    [("-tp 4 -pp 2", "0.20.2", True), ("-tp 4 -pp 2", "0.33.0", False), ("-tp 8", "0.20.2", False)],
)
def test_drafts_under_pipeline_parallelism(layout: str, version: str, refused: bool) -> None:
    """EAGLE-3 runs with pipeline stages since vLLM's pull 50514."""
    text = f"vllm serve meta-llama/Llama-3.3-70B-Instruct {layout} -sc '{EAGLE}'"
    assert lint(text, version).commands[0].refuses_to_start == refused


@pytest.mark.parametrize(
    "options",
    [
        "--swap-space 4 --enable-reasoning",
        "--attention-backend XFORMERS --max-num-seqs 8",
        "--max-cpu-loras 8",
    ],
)
def test_what_is_proposed_starts(options: str) -> None:
    report = check(options, "0.20.2")
    assert report.fixed.diff and not report.unsettled
    assert not check(report.fixed.command.line.partition("Qwen3-8B")[2], "0.20.2").refuses_to_start


@pytest.mark.parametrize(
    "line",
    [
        "VLLM_ATTENTION_BACKEND=XFORMERS vllm serve m",
        "vllm serve m --speculative-model [ngram] --num-speculative-tokens 4",
        "vllm serve m --guided-decoding-backend xgrammar --rope-theta 1e6",
    ],
)
def test_what_only_its_author_can_decide_is_asked(line: str) -> None:
    report = lint(line, "0.20.2").commands[0]
    assert not report.fixed.diff and any(one.needs_fix for one in report.checked.findings)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), [("Qwen/Qwen3-0.6B", "T4"), ("Qwen/Qwen3-8B", "L4")])
def test_no_proposal_makes_the_first_token_much_later(model: str, gpu: str) -> None:
    plan = lint(f"vllm serve {model}", "0.20.2", gpu=gpu).commands[0].plan
    assert plan
    if plan.improved and plan.memory.can_start:
        before, after = plan.loads[-1].performance, plan.improved.performance
        assert before and after
        assert after.get("ttft", "p50").mid < 1.2 * before.get("ttft", "p50").mid


@pytest.mark.parametrize("option", ["--kv-cache-memory-bytes 4G", "--num-gpu-blocks-override 500"])
def test_a_kv_cache_of_a_given_size_is_not_judged(option: str) -> None:
    report = lint(f"vllm serve meta-llama/Llama-3.1-8B-Instruct {option}", gpu="A100-80GB")
    assert report.verdict == "at_risk" and "size of the KV cache" in str(report)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_of_an_old_guide_still_extends_the_context() -> None:
    """Qwen3's model card: factor 4 of 32,768 tokens is 131,072."""
    line = f"vllm serve Qwen/Qwen3-8B --rope-scaling '{json.dumps(YARN)}' --max-model-len 131072"
    report = lint(line, gpu="H100")
    assert {one.name for one in report.findings if one.needs_fix} == {"--rope-scaling"}


def test_the_acceptance_of_drafts_that_is_assumed_is_told() -> None:
    config = '{{"method": "{}", "num_speculative_tokens": 3}}'
    for method, is_ngram in (("ngram", True), ("mtp", False)):
        model = "Qwen/Qwen3-8B" if is_ngram else "zai-org/GLM-4.5-Air"
        served = f"vllm serve {model} -tp 4 --speculative-config '{config.format(method)}'"
        (note,) = [one for one in lint(served, gpu="H100").notes if "70%" in one]
        assert method in note
    assert "70%" not in str(lint("vllm serve Qwen/Qwen3-8B", gpu="H100"))


@pytest.mark.parametrize(
    ("connector", "version", "verdict"),
    [
        ("NixlConnector", "0.33.0", ""),
        ("PyNcclConnector", "0.33.0", "unknown"),
        ("FooConnector", "0.33.0", "unknown"),
        ("nixlconnector", "0.33.0", "unknown"),  # names of classes
        ("P2pNcclConnector", "0.33.0", "removed"),
        ("P2pNcclConnector", "0.20.2", ""),
        ("P2pNcclConnector", "0.23.0", "risky"),  # in 0.22.0, not in 0.24.0
        ("NixlPullConnector", "0.20.2", "unknown"),
        ("FooConnector", "0.16.0", ""),  # not listed, which is said
    ],
)
def test_the_connectors_of_a_kv_transfer_are_those_of_the_version(
    connector: str, version: str, verdict: str
) -> None:
    """vLLM's kv_connector/factory.py at these versions: "Unsupported connector type" for others."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    served = "vllm serve Qwen/Qwen3-8B --kv-transfer-config"

    def find(config: dict[str, Any]) -> list[tuple[str, bool]]:
        report = lint(f"{served} {shlex.quote(json.dumps(config))}", version)
        assert ("connectors of vllm are listed" in str(report)) is (version == "0.16.0")
        return [(one.verdict, one.refused) for one in report.findings if one.needs_fix]

    expected = [(verdict, verdict != "risky")] if verdict else []
    assert find(config) == expected
    several = {"connectors": [{"kv_connector": "OffloadingConnector"}, config]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    assert find({**multi, "kv_connector_extra_config": several}) == expected
    if version == "0.33.0":  # a module of one's own has any name
        assert not find({**config, "kv_connector_module_path": "mine.connector"})


def test_advice_on_a_high_share_is_that_of_the_fixed_command() -> None:
    awq = "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"
    (command,) = lint(f"vllm serve {awq} --gpu-memory-utilization 0.98", gpu="A10G").commands
    (finding,) = [one for one in command.checked.findings if one.verdict == "risky"]
    assert finding.instead in command.fixed.command.line
    assert not re.search(r"max_model_len \d+: frees", str(lint(f"vllm serve {awq}", gpu="A10G")))


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen2.5-72B-Instruct --quantization fp8", "Qwen/Qwen3-32B"]
)
def test_a_suggestion_never_takes_throughput(model: str) -> None:
    line = f"vllm serve {model} --tensor-parallel-size 2 --max-model-len 32768"
    (command,) = lint(line, gpu="2xA100-SXM-80GB").commands
    assert command.plan and command.plan.memory.status == "ok"
    if command.plan.steps:
        before, after = command.plan.loads[-1].performance, command.plan.improved
        assert before and after and after.performance
        assert after.performance.output_tps.mid >= before.output_tps.mid


def test_a_family_whose_fields_are_not_all_read_is_not_judged(tmp_path: Path) -> None:
    """Ouro runs its layers four times, with a cache each: 48 layers of 16 heads would be a fourth of it."""
    told = PUBLISHED["unread"]["ByteDance/Ouro-2.6B"]
    (tmp_path / "config.json").write_text(json.dumps(told["config"]), encoding="utf-8")
    for gpu in ("L40S", "H100"):
        report = lint(f"vllm serve {tmp_path}", "0.33.0", gpu=gpu)
        assert report.verdict == "at_risk" and "total_ut_steps" in str(report), str(report)


def test_states_have_the_width_that_they_are_given_and_what_is_not_modelled_is_not_planned() -> (
    None
):
    """27 of its 56 layers keep a Mamba-2 state of 128 heads, 80 channels and 128 elements each (config.json)."""
    served = "vllm serve nvidia/NVIDIA-Nemotron-Nano-9B-v2 --max-model-len 8192"
    sizes = []
    for width in ("float32", "float16"):
        (report,) = lint(f"{served} --mamba-ssm-cache-dtype {width}", "0.33.0", gpu="L40S").commands
        assert report.plan
        mixers = report.plan.deployment.model.architecture.mixers
        sizes.append(
            sum(one.compute_state_bytes() for one in mixers if hasattr(one, "state_width"))
        )
    assert sizes[0] - sizes[1] == 27 * 128 * 80 * 128 * 2
    for gpu in ("L40S", None):
        report = lint(f"{served} --mamba-cache-dtype float32", "0.33.0", gpu=gpu)
        assert report.verdict == "at_risk" and "mamba_cache_dtype is not modelled" in str(report)
