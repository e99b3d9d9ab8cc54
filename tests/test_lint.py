"""`headroom lint`: real commands of guides get their answers, right ones no false alarm, and hostile ones no harm."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_plans import plans

from planner.core.errors import PlannerError
from planner.deploy import render_artifacts
from planner.engines.cli_options import get_cli_options, load_flag_lists
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools.lint.findings import load_engine_changes
from planner.tools.lint.fixes import fix_command
from planner.tools.lint.report import lint
from planner.tools.lint.rules import load_option_rules
from planner.tools.lint.shell_parser import parse_statements
from planner.tools.lint.source_reader import read_source
from planner.ui.cli import main

COMMANDS = yaml.safe_load(
    (Path(__file__).parent / "data" / "commands.yaml").read_text(encoding="utf-8")
)
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)


def verdicts(text: str, version: str | None = None, **asked: Any) -> dict[str, str]:
    """Name -> verdict, of what is not simply right."""
    return {
        found.name: found.verdict
        for found in lint(text, version, **asked).findings
        if found.verdict != "ok"
    }


def test_forty_commands_of_guides_and_forty_current_ones_are_judged() -> None:
    found = [
        [read_source(one["command"]).commands[0].engine for one in COMMANDS[kind]]
        for kind in ("guides", "current")
    ]
    assert all(len(engines) >= 40 for engines in found)
    assert {"vllm", "sglang"} <= {*found[0]} and {"vllm", "sglang", "trtllm"} <= {*found[1]}
    gone = [verdict for guide in COMMANDS["guides"] for verdict in guide["finds"].values()]
    assert sum(verdict in ("removed", "renamed") for verdict in gone) >= 50


@pytest.mark.parametrize(
    "guide", COMMANDS["guides"], ids=lambda guide: guide["source"].rpartition("/")[2]
)
def test_what_is_wrong_in_the_commands_of_guides(guide: dict[str, Any]) -> None:
    found = lint(guide["command"], guide.get("version"))
    known = (one for one in found.findings if one.needs_fix and one.verdict != "unread")
    assert {one.name: one.verdict for one in known} == guide["finds"]
    assert found.verdict != "ok"
    for one in found.commands:
        judged = one.checked
        again = judged.options.parse(fix_command(judged).argv)
        left = {one.written for one in again.options if one.error}
        asked = {one.name for one in found.findings if not one.instead.startswith("nothing")}
        assert left <= asked  # what only its author can say


@pytest.mark.parametrize(
    "command", COMMANDS["current"], ids=lambda command: command["source"].rpartition("/")[2]
)
def test_no_false_alarm_on_current_commands(command: dict[str, Any]) -> None:
    found = lint(command["command"], command.get("version"))
    assert len(found.commands) == 1 and len(found.findings) >= 1
    known = {one.name: one.verdict for one in found.findings if one.needs_fix}
    known.pop("--trust-remote-code", "")  # which is a risk on every day
    assert {*known.values()} <= {"unread"}  # placeholders
    assert not found.commands[0].checked.as_meant.errors


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_no_false_alarm_on_what_we_emit(engine: str) -> None:
    for launch in plans(engine, 10, seed=1):
        found = lint(next(iter(launch.shell_lines.values())), launch.deployment.engine.version)
        assert {
            one.name
            for one in found.findings
            if one.needs_fix and one.verdict != "unread" and "pipeline" not in one.why
        } <= {
            "--enforce-eager", "--disable-cuda-graph", "--trust-remote-code", "--trust_remote_code",
        }  # fmt: skip
        assert len(found.commands) == 1


def test_the_flags_of_old_guides_all_get_their_answer() -> None:
    flags = ["--speculative-model x", "--swap-space 4", "--scheduler-delay-factor 0.1", "--preemption-mode swap",
             "--use-v2-block-manager", "--worker-use-ray", "--num-scheduler-steps 8"]  # fmt: skip
    for version in ("0.20.2", "0.33.0"):
        for flag in flags:
            found = lint(f"vllm serve m {flag}", version).findings[0]
            assert found.verdict in ("removed", "renamed") and found.why and found.instead
    assert verdicts("vllm serve m --disable-log-requests", "0.20.2") == {
        "--disable-log-requests": "removed"
    }
    assert verdicts("vllm serve m --disable-log-requests", "0.33.0") == {
        "--disable-log-requests": "useless"
    }
    both = (
        "VLLM_USE_V1=1 VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_WORKER_MULTIPROC_METHOD=spawn vllm"
        " serve m"
    )
    assert verdicts(both, "0.20.2") == {
        "VLLM_USE_V1": "removed",
        "VLLM_ATTENTION_BACKEND": "renamed",
    }
    assert verdicts(both, "0.10.0") == {"VLLM_USE_V1": "useless"}
    assert verdicts("VLLM_USE_V1=0 vllm serve m", "0.8.5") == {"VLLM_USE_V1": "risky"}


def test_metrics_by_version() -> None:
    alerts = (
        "expr: vllm:gpu_cache_usage_perc > 0.9 and"
        " rate(vllm:time_per_output_token_seconds_bucket[5m]) > 0"
    )
    for version, verdict in (("0.8.5", []), ("0.20.2", ["renamed", "renamed"])):
        assert [
            one.verdict for one in lint(alerts, version).metrics if one.verdict != "ok"
        ] == verdict
    hit, _ = lint(alerts, "0.33.0").metrics
    assert hit.instead == "vllm:kv_cache_usage_perc"
    assert [one.verdict for one in lint("sglang:token_usage sglang:tokn_usage").metrics] == [
        "ok",
        "unknown",
    ]


CONTRADICTIONS = [
    ("vllm serve m --enable-auto-tool-choice", "--enable-auto-tool-choice"),
    ("vllm serve m --lora-modules a=b", "--lora-modules"),
    ("vllm serve m --enforce-eager --cudagraph-capture-sizes 1 2", "--cudagraph-capture-sizes"),
    ("CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4", "CUDA_VISIBLE_DEVICES"),
    (f"vllm serve {LLAMA} -tp 3", "--tensor-parallel-size"),
    (f"vllm serve {LLAMA} --quantization awq", "--quantization"),
    (f"vllm serve {LLAMA} --max-model-len 200000", "--max-model-len"),
    (
        f"vllm serve {LLAMA} --max-num-batched-tokens 64 --max-num-seqs 128",
        "--max-num-batched-tokens",
    ),
    (
        f"vllm serve {LLAMA} --no-enable-chunked-prefill --max-num-batched-tokens 2048",
        "--max-num-batched-tokens",
    ),
]


@pytest.mark.parametrize(("command", "name"), CONTRADICTIONS)
def test_contradictions(command: str, name: str) -> None:
    assert verdicts(command, None)[name] == "contradicts"


@pytest.mark.parametrize(
    "command",
    [
        "text-generation-launcher --model-id Qwen/Qwen3-8B",
        "docker run --gpus all ghcr.io/huggingface/text-generation-inference:3.1.0 --model-id m",
    ],
)
def test_another_server_is_not_judged(command: str) -> None:
    with pytest.raises(PlannerError, match=r"no server starts in .*: expected `vllm serve`"):
        lint(command)
    with pytest.raises(PlannerError, match="unknown engine 'tgi'; known: sglang, trtllm, vllm"):
        lint("--num-shard 2", engine="tgi")


def test_what_is_useless_or_risky() -> None:
    assert verdicts("vllm serve m --gpu-memory-utilization 0.98", "0.20.2") == {
        "--gpu-memory-utilization": "risky"
    }
    assert not verdicts("vllm serve m --gpu-memory-utilization 0.92", "0.20.2")
    assert verdicts("vllm serve m --enable-prefix-caching", "0.6.6") == {}
    assert verdicts("vllm serve m --api-key sk-123456789", "0.20.2") == {"--api-key": "risky"}
    assert verdicts(
        "docker run --gpus all -e HF_TOKEN=hf_abcdefgh12 vllm/vllm-openai:v0.20.2 --model m"
    ) == {"HF_TOKEN": "risky"}
    assert verdicts(
        "docker run --gpus all lmsysorg/sglang:v0.5.10 python -m sglang.launch_server --model-path m"
    ) == {"--host": "risky"}
    assert "sk-123456789" not in str(lint("vllm serve m --api-key sk-123456789", "0.20.2"))
    for launcher in (
        "vllm serve m",
        "trtllm-serve m",
    ):  # one does not take it
        for option in (
            "--api-key sk-123456789",
            "--api_key=sk-123456789",
            "--hf_token sk-123456789",
        ):
            found = lint(f"{launcher} {option}")
            assert "sk-123456789" not in f"{found}{json.dumps(found.to_json())}"


def test_what_is_risky_is_written_at_the_value_that_is_named() -> None:
    found = lint(
        "vllm serve m --gpu-memory-utilization 0.98 --max-model-len 4096", "0.20.2"
    ).commands[0]
    assert (
        found.fixed.command.line
        == "vllm serve m --gpu-memory-utilization 0.95 --max-model-len 4096"
    )
    wide = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --gpu-memory-utilization 0.977"
    edge = lint(wide, "0.20.2", gpu="H100").commands[0]
    assert edge.plan and edge.plan.memory.status == "at_risk" and edge.plan.loads
    again = lint(edge.fixed.command.line, "0.20.2", gpu="H100").commands[0]
    assert again.plan and again.plan.memory.status == "ok"


@pytest.mark.parametrize("share", ["1.2", "0", "-0.5", "nan"])
def test_a_share_of_memory_beyond_all_or_of_nothing_never_starts(share: str) -> None:
    """vLLM 0.20.2, CacheConfig: Field(gt=0, le=1)."""
    found = lint(f"vllm serve m --gpu-memory-utilization {share}", "0.20.2")
    assert found.verdict == "mend" and found.findings[0].refused
    assert found.commands[0].fixed.command.line == "vllm serve m --gpu-memory-utilization 0.95"


def test_a_quantization_that_vllm_does_not_have_never_starts() -> None:
    """`Unknown quantization method: fp9. Must be one of [...]`, config/model.py; its parser takes any word."""
    for method, refused in {
        "fp9": True,
        "fp8": False,
        "FP8": False,
        "torchao": False,
        "${METHOD}": False,
    }.items():
        assert (
            lint(f"vllm serve {LLAMA} --quantization {method}", "0.33.0")
            .commands[0]
            .refuses_to_start
            == refused
        )


def test_a_misspelt_option_is_spelt_right_in_what_is_better() -> None:
    (found,) = lint(f"vllm serve {LLAMA} --max-num-batchd-tokens 2048", "0.33.0").commands
    assert found.refuses_to_start and found.fixed.command.line.endswith(
        "--max-num-batched-tokens 2048"
    )


def test_slots_that_only_the_machine_fills_in_are_planned_as_vllm_has_them() -> None:
    usual, unknown = (
        lint(f"vllm serve {LLAMA} --enable-lora{more}", "0.20.2", gpu="H100").commands[0].plan
        for more in ("", " --max-loras $SLOTS --max-lora-rank $RANK")
    )
    assert usual and unknown and usual.deployment == unknown.deployment


def test_a_group_of_no_ranks_is_no_layout() -> None:
    none = (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --dp 0"
        " --enable-dp-attention"
    )
    assert lint(none, gpu="H200").commands[0].plan is None


POD = """apiVersion: v1
kind: Service
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:v0.20.2
        command: ["/bin/sh", "-c"]
        args: ["exec vllm serve $(MODEL) --swap-space 4"]
        env: [{name: MODEL, value: Qwen/Qwen3-8B}, {name: VLLM_USE_V1, value: "1"}]
        resources: {limits: {nvidia.com/gpu: 1}}
"""
COMPOSE = """services:
  server:
    image: vllm/vllm-openai:v0.20.2
    environment: {VLLM_USE_V1: 1}
    command: ["Qwen/Qwen3-8B", "--swap-space", 4]
    gpus: all
"""


WRITTEN = {
    "tmux": "tmux new-session -d -s x 'vllm serve Qwen/Qwen3-8B --swap-space 4'",
    "ssh": "ssh gpu1 \"vllm serve 'Qwen/Qwen3-8B' --swap-space 4\"",
    "uv": "uv run --with vllm==0.20.2 vllm serve Qwen/Qwen3-8B --swap-space 4",
    "numactl": (
        "sudo numactl -N 0 python -m vllm.entrypoints.api_server --model=Qwen/Qwen3-8B"
        " --swap-space=4"
    ),
    "argument": 'M="${1:-Qwen/Qwen3-8B}"\nvllm serve "$M" --swap-space 4',
    "kserve": (
        "kind: InferenceService\nspec: {predictor: {model: {modelFormat: {name: huggingface}, args:"
        " [--model_name=q, --model_id=Qwen/Qwen3-8B, --backend=vllm, --swap-space=4]}}}\n"
    ),
    "production-stack": (
        "servingEngineSpec:\n  modelSpec:\n  - {modelURL: Qwen/Qwen3-8B, repository:"
        " vllm/vllm-openai, tag: v0.20.2, requestGPU: 1, vllmConfig: {maxModelLen: 4096, extraArgs: [--swap-space,"
        " '4']}}\n"
    ),
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_commands_are_found_however_people_start_them(text: str, tmp_path: Path) -> None:
    (found,) = lint(text, "0.20.2").commands
    model = (*found.checked.as_meant.positional, found.checked.argument_values.get("model"))[0]
    assert model == "Qwen/Qwen3-8B"
    assert {one.name for one in found.checked.findings if one.needs_fix} == {"--swap-space"}


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m dynamo.vllm --model Qwen/Qwen3-8B --disaggregation-mode prefill --swap-space 4",
        "docker run --gpus all nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.2.0 python3 -m dynamo.vllm --model m",
        "python3 -m sglang_router.launch_server --model-path Qwen/Qwen3-8B --dp-size 4",
        "vllm serve Qwen/Qwen2.5-Omni-7B --omni --stage-configs-path a.yaml",
        "torchrun --nproc_per_node=2 vllm/entrypoints/api_server.py --model m",
    ],
)
def test_programs_that_start_a_server_in_their_own_way_are_not_judged(line: str) -> None:
    report = lint(line, gpu="H100")
    assert report.verdict == "at_risk" and not report.commands[0].plan
    assert [one.verdict for one in report.findings] == ["unread"]


def test_kserves_own_options_are_those_of_the_engine() -> None:
    with pytest.raises(PlannerError, match="no server starts"):
        lint(WRITTEN["kserve"].replace("--backend=vllm", "--backend=huggingface"))


def test_words_that_only_the_machine_fills_in_are_no_unknown_options() -> None:
    assert verdicts("vllm serve m --max-num-seqs 8 ${EXTRA:-}", "0.20.2") == {}
    for more in ("$EXTRA_ARGS", "$([ $RANK = 0 ] || echo --headless)", '"$@"'):
        found = verdicts(f"vllm serve m --max-num-seqs 8 {more}", "0.20.2")
        assert list(found.values()) == ["unread"]  # they may be anything, which is said


def test_a_version_that_the_command_pins_is_its_version() -> None:
    assert str(lint(WRITTEN["uv"]).commands[0].checked.version) == "0.20.2"


def test_two_hyphens_that_a_word_processor_joined_are_told_apart() -> None:
    (found,) = [
        one for one in lint("vllm serve m \u2014max-num-seqs=8", "0.20.2").findings if one.needs_fix
    ]
    assert found.instead == "--max-num-seqs=8" and "no hyphen" in found.why


def test_a_container_that_is_given_fewer_gpus_than_the_command_takes() -> None:
    pod = yaml.safe_load(POD.partition("---")[2])
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    container["args"] = ["exec vllm serve $(MODEL) -tp 2"]
    for many, fine in ((1, False), (2, True), ("2", True)):
        container["resources"] = {"limits": {"nvidia.com/gpu": many}}
        found = lint(yaml.safe_dump(pod), "0.20.2").findings
        assert any(one.name == "GPUs" and one.refused for one in found) is not fine
    service = yaml.safe_load(COMPOSE)
    devices = [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    service["services"]["server"] |= {"command": ["Qwen/Qwen3-8B", "-tp", 2],
                                      "deploy": {"resources": {"reservations": {"devices": devices}}}}  # fmt: skip
    assert any(one.name == "GPUs" for one in lint(yaml.safe_dump(service), "0.20.2").findings)


def test_the_version_is_that_of_the_image_unless_another_is_asked_for() -> None:
    text = "docker run --gpus all vllm/vllm-openai:v0.8.5 --model m --swap-space 4"
    assert verdicts(text) == {"--swap-space": "useless"}
    assert verdicts(text, "0.20.2") == {"--swap-space": "removed"}
    assert "checked against vllm 0.33.0" in str(lint("vllm serve m"))
    assert "vllm 0.19.0 is read by the options of 0.18.0" in str(lint("vllm serve m", "0.19.0"))


def test_script_and_unit_of_a_plan_are_read_at_its_version(tmp_path: Path) -> None:
    """The unit starts the script that lies beside it."""
    asked = load_scenario("edge-8b-24gb")
    for name, text in render_artifacts(
        search_deployments(asked).best.prediction, asked.slo_targets
    ).items():
        (tmp_path / name).write_text(text)
    for name in ("serve.sh", "headroom@.service"):
        found = lint(str(tmp_path / name))
        assert [str(one.checked.version) for one in found.commands] == [
            asked.engine.version
        ] and not found.notes
        assert found.verdict == "ok"


def test_a_file_of_a_plan_is_judged_on_the_gpu_that_heads_it(tmp_path: Path) -> None:
    """A share of memory that is safe on its GPU is none to mend, and nothing is proposed for other traffic.

    An L40S keeps 0.9 GiB outside of 0.98, more than vLLM takes there without NCCL; an RTX 4090 0.5
    GiB.
    """
    command = (
        f"vllm serve {LLAMA} --max-model-len 8192 --max-num-seqs 32 --gpu-memory-utilization 0.98"
    )
    for gpu, layout, verdict in (
        ("L40S", "TP1 of ", "ok"),
        ("L40S", "", "ok"),
        ("RTX-4090", "TP1 of ", "at_risk"),
    ):
        (tmp_path / "serve.sh").write_text(
            f"# {LLAMA} on {layout}{gpu}, vllm 0.33.0\nexec {command}\n"
        )
        found = lint(str(tmp_path / "serve.sh"))
        assert found.verdict == verdict and f"on 1 x {gpu}" in str(found)
        assert (found.commands[0].fixed.diff == ()) == (verdict == "ok")


def test_an_option_that_went_between_two_lists_is_a_risk_and_a_wrong_value_is_no_unknown_option() -> (
    None
):
    """Engine V0, and with it several steps at once, left vLLM with 0.11, between the lists of 0.10 and 0.12."""
    steps = "vllm serve m --num-scheduler-steps 8"
    assert verdicts(steps, "0.11.0") == {"--num-scheduler-steps": "risky"} and "of 0.10.0" in str(
        lint(steps, "0.11.0")
    )
    assert verdicts(steps, "0.12.0") == {"--num-scheduler-steps": "removed"}
    assert verdicts("vllm serve m --max-num-seqs many", "0.20.2") == {
        "--max-num-seqs": "wrong value"
    }


def test_drift_between_two_versions() -> None:
    found = lint(
        "vllm serve m --swap-space 4 -tp 2 --disable-custom-all-reduce", "0.10.0", to="0.33.0"
    )
    drift = {one.name: (one.verdict, one.instead) for one in found.upgrade_findings}
    assert drift["--swap-space"][0] == "removed"
    assert drift["--gpu-memory-utilization"] == ("default changed", "--gpu-memory-utilization 0.9")
    assert drift["--async-scheduling"] == ("default changed", "--no-async-scheduling")
    assert "--tensor-parallel-size" not in drift and "--disable-custom-all-reduce" not in drift
    assert lint("vllm serve m", "0.33.0", to="0.33.0").upgrade_findings == ()


def test_a_default_that_changed_is_named_and_kept_by_words_of_its_own() -> None:
    """vLLM 0.8 and later reuse prefixes unless they are told not to."""
    found = lint("vllm serve Qwen/Qwen3-8B", "0.6.6", to="0.12.0")
    kept = [one for one in found.upgrade_findings if one.verdict == "default changed"]
    assert kept and all(one.name in one.written and one.why for one in kept)
    assert "--no-enable-prefix-caching" in {one.instead for one in kept}


def test_what_is_filled_in_where_it_runs_still_is_in_what_is_better(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(
        """vllm serve m --swap-space 4 --port "$((8000 + replica))" --api-server-count '$(id)'"""
    )
    told = str(lint(str(tmp_path / "serve.sh"), "0.33.0"))
    assert """--port "$((8000 + replica))" --api-server-count '$(id)'""" in told


def test_a_variable_becomes_the_option_that_took_it_over() -> None:
    served = "VLLM_ATTENTION_BACKEND=TRITON_ATTN_VLLM_V1 vllm serve m"
    moved = lint(served, "0.20.2").commands[0].fixed.command
    assert moved.argv == ("m", "--attention-backend", "TRITON_ATTN") and not moved.environment


@pytest.mark.slow
def test_on_a_gpu_it_is_planned_and_a_better_command_proposed() -> None:
    found = lint(
        f"vllm serve {LLAMA} --enforce-eager --max-num-seqs 64", "0.20.2", gpu="H100"
    ).commands[0]
    assert found.plan and found.plan.memory.status == "ok"
    tpot = [one.performance.get("tpot", "mean").mid for one in found.plan.loads if one.performance]
    assert tpot == sorted(tpot) and len(tpot) == 3
    (step,) = found.plan.steps
    assert (step.argument, step.value) == ("enforce_eager", False) and "TPOT" in step.benefit
    assert found.fixed.command.argv == (LLAMA, "--max-num-seqs", "64")
    assert found.plan.improved and found.plan.improved.performance
    assert found.plan.improved.performance.get("tpot", "mean").mid < tpot[-1]

    crowded = f"vllm serve {LLAMA} --gpu-memory-utilization 0.7 --max-num-seqs 1024"
    better = lint(crowded, "0.20.2", gpu="L40S").commands[0]
    assert better.plan and {one.argument for one in better.plan.steps} >= {"gpu_memory_utilization"}
    after = lint(better.fixed.command.line, "0.20.2", gpu="L40S")
    assert after.verdict == "ok" and after.commands[0].plan
    assert after.commands[0].plan.sequences > better.plan.sequences
    assert "gpu_memory_utilization" not in {one.argument for one in after.commands[0].plan.steps}

    full = lint(
        "vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.99", "0.33.0", gpu="RTX-4090"
    ).commands[0]
    assert full.plan and not full.plan.memory.can_start
    assert lint(full.fixed.command.line, "0.33.0", gpu="RTX-4090").verdict == "ok"

    small = lint(f"vllm serve {LLAMA}", "0.20.2", gpu="L4")
    assert (
        small.verdict == "mend"
        and small.commands[0].plan
        and not small.commands[0].plan.memory.can_start
    )
    assert small.commands[0].fixed.command.argv != (LLAMA,)
    again = lint(small.commands[0].fixed.command.line, "0.20.2", gpu="L4").commands[0]
    assert again.plan and again.plan.memory.can_start

    unknown = lint("vllm serve /models/mine", "0.20.2", gpu="H100").commands[0]
    assert unknown.plan is None and "mine" in unknown.not_planned_reason


REFUSED = [
    (f"vllm serve {LLAMA} --quantization awq", "packs nothing into awq"),
    (f"vllm serve {LLAMA} -tp 3", "must be divisible"),
    (f"vllm serve {LLAMA} --max-model-len 200000", "was made for"),
    (f"vllm serve {LLAMA} --enable-auto-tool-choice", "it ends with an error without"),
    (f"CUDA_VISIBLE_DEVICES=0 vllm serve {LLAMA} -tp 2", "takes 2 GPUs, and 1 is visible"),
    (f"vllm serve {LLAMA} --max-num-seqs many", "takes a whole number"),
]


@pytest.mark.parametrize(("command", "why"), REFUSED)
def test_what_does_not_start_has_no_latencies(command: str, why: str) -> None:
    (found,) = lint(command, "0.33.0", gpu="H100").commands
    assert found.refuses_to_start and found.plan is None
    assert (
        found.not_planned_reason.startswith("the server ends with an error while it starts. ")
        and why in found.not_planned_reason
    )


def test_what_starts_only_once_it_is_mended_is_said_to() -> None:
    (old,) = lint(f"vllm serve {LLAMA} --swap-space 4", "0.33.0", gpu="H100").commands
    (new,) = lint(f"vllm serve {LLAMA}", "0.33.0", gpu="H100").commands
    assert old.refuses_to_start and not new.refuses_to_start and old.plan and new.plan
    assert old.plan.deployment == new.plan.deployment and old.plan.loads == new.plan.loads
    text = str(lint(f"vllm serve {LLAMA} --swap-space 4", "0.33.0", gpu="H100"))
    assert "The server rejects these options at startup" in text


def test_a_number_of_gpus() -> None:
    for name in ("4xH100", "4x H100-SXM", "4 x NVIDIA H100", "H100:4"):
        (found,) = lint(f"vllm serve {LLAMA} -tp 4", "0.33.0", gpu=name).commands
        assert found.plan and found.plan.deployment.gpus_per_node == 4
    (small,) = lint(f"vllm serve {LLAMA} -tp 4", "0.33.0", gpu="2xH100").commands
    assert small.plan is None and small.not_planned_reason.endswith(
        "takes 4 GPUs, and --gpu says 2"
    )
    wide = (
        lint("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 2", "0.33.0", gpu="2xL40S")
        .commands[0]
        .plan
    )
    assert wide and "tensor_parallel_size" not in {step.argument for step in wide.steps}
    for name in ("0xH100", "4xH100:2", "4x", "H100:"):
        with pytest.raises(PlannerError, match=r"4xH100 for four|unknown GPU"):
            lint(f"vllm serve {LLAMA}", gpu=name)


CONFIG = """enable_attention_dp: true
enable_chunked_prefill: true
kv_cache_config: {free_gpu_memory_fraction: 0.8, dtype: fp8, enable_block_reuse: false}
cuda_graph_config:
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
"""
TRTLLM = (
    "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 8 --max_batch_size 128 --{}"
    " extra.yaml"
)


@pytest.mark.parametrize("kind", ["here-document", "tee", "beside", "config map"])
def test_the_file_of_tensorrt_llm_is_read(kind: str, tmp_path: Path) -> None:
    command = TRTLLM.format("extra_llm_api_options")
    if kind == "config map":
        container = {"image": "nvcr.io/nvidia/tensorrt-llm/release:1.2.0", "args": command.split()}
        pod = {"kind": "Pod", "spec": {"containers": [container]}}
        text = yaml.safe_dump_all([{"kind": "ConfigMap", "data": {"extra.yaml": CONFIG}}, pod])
    else:
        written = {
            "here-document": "cat > /tmp/extra.yaml << 'EOF'\n{}EOF\n",
            "tee": "tee extra.yaml <<-EOF\n{}EOF\n",
        }
        text = written.get(kind, "").format(CONFIG) + command
    if kind == "beside":
        (tmp_path / "extra.yaml").write_text(CONFIG)
    path = tmp_path / ("pod.yaml" if kind == "config map" else "serve.sh")
    path.write_text(text)
    (found,) = lint(str(path), "1.2.0", gpu="B200").commands
    assert found.plan, found.not_planned_reason
    deployment = found.plan.deployment
    assert (deployment.layout.tp, deployment.layout.dp, deployment.layout.ep) == (1, 8, 8)
    assert (deployment.args.gpu_memory_utilization, deployment.args.kv_cache_dtype) == (0.8, "fp8")
    assert deployment.args.enforce_eager and not deployment.args.enable_prefix_caching
    assert deployment.speculation and (
        deployment.speculation.method,
        deployment.num_draft_tokens,
    ) == ("mtp", 3)


def test_a_file_of_options_is_read_under_those_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(
        f"model: {LLAMA}\nmax-num-seqs: 64\nswap-space: 4\nmax_model_len: 8192\n"
    )
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve --config options.yaml --max-num-seqs 32\n")
    (found,) = lint(str(script), "0.33.0", gpu="H100").commands
    assert {one.name: one.verdict for one in found.checked.findings if one.needs_fix} == {
        "--swap-space": "removed"
    }
    assert found.plan
    args = found.plan.deployment.args
    assert (args.max_num_seqs, args.max_model_len) == (32, 8192)
    missing = lint("vllm serve m --config nowhere.yaml", "0.33.0")
    (unread,) = [one for one in missing.findings if one.verdict == "unread"]
    assert unread.name == "--config" and "nowhere.yaml" in unread.written
    assert "not known" in unread.why


def test_the_fewest_requests_in_flight_are_one_in_every_engine() -> None:
    command = "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel"
    (found,) = lint(command, "0.33.0", gpu="H200").commands
    assert (
        found.plan
        and next(one.workload.concurrency for one in found.plan.loads if one.workload) == 8
    )


def test_the_exit_says_fine_at_risk_or_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --gpu-memory-utilization 0.977"
    assert (
        lint(narrow, "0.20.2", gpu="H100").verdict == "at_risk"
        and lint(narrow, "0.20.2").verdict == "ok"
    )
    assert main(["lint", narrow, "--engine-version", "0.20.2", "--gpu", "H100"]) == 3
    assert main(["lint", "vllm serve m --enforce-eager", "--engine-version", "0.20.2"]) == 3
    assert (
        main(["lint", "vllm serve m --enforce-eager --swap-space 4", "--engine-version", "0.20.2"])
        == 1
    )
    assert main(["lint", "vllm serve m", "--engine-version", "0.20.2"]) == 0
    assert main(["lint", f"vllm serve {LLAMA}", "--engine-version", "0.20.2", "--gpu", "L4"]) == 1


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["lint", "vllm", "serve", "m", "--swap-space", "8", "--engine-version", "0.20.2"]) == 1
    )
    with pytest.raises(SystemExit):
        main(["lint", "vllm serve m", "--engine-verison", "0.20.2"])
    with pytest.raises(PlannerError, match="no server starts in this text"):
        lint("")
    assert main(["lint", "vllm serve m --max-num-seqs 8", "--engine-version", "0.20.2"]) == 0
    assert main(["lint", "vllm serve m --swap-space 8", "--engine-version", "0.20.2"]) == 1
    assert main(["lint", "ollama run m"]) == 2
    assert main(["lint", "vllm serve m", "--engine-version", "newest"]) == 2
    assert main(["lint", "nowhere.yaml"]) == 2
    assert main(["lint", "--", "--max-num-seqs 8"]) == 2
    capsys.readouterr()
    assert main(["lint", "--engine", "vllm", "--json", "--", "--max-num-seqs 8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["commands"][0]["findings"][0]["verdict"] == "ok" and told["mend"] is False


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Whatever would start a process, or reach out, ends the test."""
    watching.append(True)
    try:
        yield
    finally:
        watching.pop()


watching: list[bool] = []


def _watch(event: str, _arguments: tuple[object, ...]) -> None:
    if watching and event in (
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "socket.connect",
        "exec",
    ):
        raise AssertionError(event)


sys.addaudithook(_watch)

WORDS = st.sampled_from([
    "vllm serve ", "$(rm -rf ~)", "`id`", "'", '"', "\\", "\n", " --swap-space", "=4", "${A:-", "}",
    "$A", "A=$A$A;",
    "services:\n", "- ", ": ", "{", "[", "&x", "*x", "<<EOF\n", "EOF\n", "[Service]\nExecStart=",
    "FROM x\nCMD [",
    "]", "docker run ", "vllm/vllm-openai:v0.8.5 ", "--", "-O3 ", "{{", "\0", "\u202e", "\ud800",
    "#", "-e A ",
    "bash -c ", "vllm:gpu_cache_usage_perc ", " --max-num-seqs 99999999999999999999",
])  # fmt: skip


@given(st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=25).map("".join))
@settings(max_examples=150, deadline=None)
def test_hostile_text_never_ends_in_a_traceback_and_nothing_runs(text: str) -> None:
    with nothing_runs():
        try:
            found = lint(text, "0.20.2", to="0.33.0")
        except PlannerError as error:
            assert len(str(error)) <= 420
            return
        assert all(line.isprintable() for line in str(found).split("\n"))
        json.dumps(found.to_json())


def test_much_of_everything(tmp_path: Path) -> None:
    long = "vllm serve m " + " ".join(f"--flag-{number} {number}" for number in range(1_000))
    found = lint(long, "0.20.2")
    flags = [one for one in found.findings if one.kind == "flag"]
    assert len(flags) == 1_000 and {one.verdict for one in flags} == {"unknown"}
    same = lint("vllm serve m " + "--max-num-seqs 8 " * 10_000, "0.20.2")
    assert same.verdict == "ok" and len(str(same)) < 1000
    (tmp_path / "binary.sh").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(PlannerError, match="not UTF-8"):
        lint(str(tmp_path / "binary.sh"))
    with pytest.raises(PlannerError, match="grows beyond"):
        parse_statements("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 12)


def test_the_catalogs_speak_of_names_that_were_there() -> None:
    for engine in ("vllm", "sglang"):
        newest = get_cli_options(engine, load_flag_lists(engine).versions[-1])
        assert load_option_rules(engine)
        for name, change in load_engine_changes(engine).flags.items():
            if change.becomes and name != "--max-context-len-to-capture":
                option, dot, _ = change.becomes.partition(".")
                assert option in newest.spellings, name
                assert not dot or "json" in newest[option].kind, name
            assert (change.source is None) == (change.date is None), name
            if change.idle_from or change.falls_back or change.old_from:
                assert name.startswith("--")
        arguments = {option.argument for option in newest.by_spelling.values()}
        for version in load_flag_lists(engine).versions:
            arguments |= {
                option.argument for option in get_cli_options(engine, version).by_spelling.values()
            }
        for rule in load_option_rules(engine).values():
            for name in rule.when:
                assert (
                    name.isupper() or name in ("container", "hub", "role") or name in arguments
                ), name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("max_batch_size: many", "max_num_seqs"),
        (f"lora_config: {{max_loras: '{'9' * 5000}'}}", "max_loras"),
        ("kv_cache_config: {tokens_per_block: [1]}", "block_size"),
        ("kv_cache_config: {free_gpu_memory_fraction: all}", "gpu_memory_utilization"),
        (
            "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: three}",
            "num_speculative_tokens",
        ),
    ],
)
def test_settings_of_another_type_are_told(tmp_path: Path, settings: str, told: str) -> None:
    (tmp_path / "mine.yaml").write_text(settings)
    command = f"trtllm-serve meta-llama/Llama-3.1-8B-Instruct --config {tmp_path / 'mine.yaml'}"
    assert told in lint(command, gpu="H100").commands[0].not_planned_reason


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (
            "--speculative-algorithm EAGLE3 --speculative-num-draft-tokens '$(nproc)'",
            "num_speculative_tokens",
        ),
        ("--chunked-prefill-size 2147483648", "must be at most 100000000"),
    ],
)
def test_no_figure_of_a_command_is_too_large_or_too_odd(option: str, told: str) -> None:
    (one,) = lint(
        f"python -m sglang.launch_server --model-path {LLAMA} {option}", gpu="H100"
    ).commands
    assert told in one.not_planned_reason


def test_three_ranks_are_mended_by_two_or_four_and_what_still_does_not_start_says_so():
    """64 heads are cut over 2 or 4 GPUs; 141 GB of weights leave only the latter room on 80 GB cards."""
    found = lint(
        "vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 3 --swap-space 16",
        "0.33.0",
    )
    three = next(
        one for one in found.commands[0].checked.findings if one.name == "--tensor-parallel-size"
    )
    assert three.instead == "--tensor-parallel-size 2 or --tensor-parallel-size 4"
    assert "Fixed command, which does not start until" in str(found)


def test_workers_of_pools_are_not_told_what_servers_are() -> None:
    served = "--model-path Qwen/Qwen3-8B --host 0.0.0.0 --disable-cuda-graph --disaggregation-mode"
    line = f"python -m sglang.launch_server {served}"
    alarmed = [verdicts(f"{line} {role}", "0.5.10") for role in ("prefill", "decode")]
    assert alarmed == [{}, {"--disable-cuda-graph": "risky"}]
    found = lint(f"{line} prefill", "0.5.10", gpu="H100")
    assert found.commands[0].plan and not found.commands[0].plan.steps
    assert any("a prefill worker of pools is planned as a server" in note for note in found.notes)


OLD_SETTINGS = """use_cuda_graph: true
cuda_graph_batch_sizes: [1, 2, 4]
moe_backend: TRTLLM
kv_cache_dtype: fp8
cuda_graph_config: {padding_enabled: true}
enable_attention_dp: true
"""


def test_settings_that_tensorrt_llm_no_longer_reads_get_their_answer() -> None:
    text = (
        f"cat > e.yaml <<EOF\n{OLD_SETTINGS}EOF\ntrtllm-serve m --host 0.0.0.0"
        " --extra_llm_api_options e.yaml"
    )
    gone = {"use_cuda_graph": "removed", "cuda_graph_batch_sizes": "removed", "moe_backend": "removed",
            "kv_cache_dtype": "removed", "cuda_graph_config.padding_enabled": "renamed"}  # fmt: skip
    assert verdicts(text, "1.2.0") == gone
    assert verdicts(text, "0.20.0") == {}
    assert lint(text, "1.2.0").commands[0].refuses_to_start


def test_a_model_that_may_see_nothing_is_loaded_without_eyes() -> None:
    seeing, blind, alone = (
        lint(f"vllm serve Qwen/Qwen3-VL-32B-Instruct{more}", version, gpu="H200").commands[0].plan
        for more,
        version in (("", "0.20.2"), (" --limit-mm-per-prompt '{\"image\": 0, \"video\": 0}'", "0.20.2"),
                              (" --language-model-only", "0.20.2"))
    )  # fmt: skip
    assert seeing and blind and alone and blind.memory == alone.memory
    eyes = (
        sum(weight.num_elements for weight in seeing.deployment.model.architecture.vision_towers)
        * 2
    )
    assert seeing.memory.weights.mid - blind.memory.weights.mid == pytest.approx(eyes, rel=0.02)
    assert seeing.memory.activation.mid >= blind.memory.activation.mid


def test_a_large_share_of_memory_is_judged_by_the_gpu_where_one_is_named() -> None:
    """An L40S keeps 0.9 GiB outside of 0.98, more than vLLM takes there without NCCL; an RTX 4090 0.5 GiB."""
    command = (
        f"vllm serve {LLAMA} --max-model-len 8192 --max-num-seqs 32 --gpu-memory-utilization 0.98"
    )
    assert {gpu: lint(command, "0.33.0", gpu=gpu).verdict for gpu in (None, "L40S", "RTX-4090")} == {
        None: "at_risk", "L40S": "ok", "RTX-4090": "at_risk",
    }  # fmt: skip


def test_awq_that_is_asked_for_by_name_is_slow_and_of_a_bf16_checkpoint_refused() -> None:
    """vLLM logs `you specified quantization=awq explicitly, so forcing awq`."""
    for model, verdict in (
        ("casperhansen/llama-3.3-70b-instruct-awq", "risky"),
        (LLAMA, "contradicts"),
    ):
        found = lint(f"vllm serve {model} --quantization awq", "0.20.2").commands[0]
        assert [one.verdict for one in found.checked.findings] == [verdict]
        assert ("--quantization" in found.fixed.command.argv) == (verdict == "contradicts")


def test_a_line_break_in_double_quotes_ends_a_command_beside_a_variable_too() -> None:
    """Only one after a backslash joins the lines."""
    image = "docker run vllm/vllm-openai:v0.10.0 bash -c "
    serve = "vllm serve Qwen/Qwen3-8B --max-model-len 4096"
    (command,) = read_source(f'{image}"export HF_HOME=$CACHE\n{serve}"', None).commands
    assert command.argv[0] == "Qwen/Qwen3-8B" and "--max-model-len" in command.argv
    (joined,) = read_source(f'{image}"{serve} \\\n --max-num-seqs $SEQS\n"', None).commands
    assert "--max-num-seqs" in joined.argv


def test_a_context_that_yarn_extends_is_sized_on_the_gpu() -> None:
    """Qwen3-8B's config says 40,960; its model card extends it by YaRN."""
    rope = '{"rope_parameters":{"rope_type":"yarn","factor":4.0}}'
    asked = f"vllm serve Qwen/Qwen3-8B --max-model-len 65536 --hf-overrides '{rope}'"
    assert "contradicts" not in verdicts(asked, gpu="L40S").values()
    plain = "vllm serve Qwen/Qwen3-8B --max-model-len 65536"
    assert "contradicts" in verdicts(plain, gpu="L40S").values()
