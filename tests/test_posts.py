"""What people posted, second round: what stands between two files, two engines or two lines.

`data/posts` has posted files cut down to facts; the right answers are those of the threads.
"""

import json
import math
from pathlib import Path

import pytest
import yaml

from planner.calibration.benchmark_results import read_benchmark_results
from planner.calibration.user_fit import BenchmarkPoint
from planner.core.errors import PlannerError
from planner.engines.deployment import deploy_on
from planner.planning.scenario import parse_scenario
from planner.planning.table_rows import INPUT_COLUMNS, parse_cells, parse_measured_run
from planner.tools.diagnostics.diagnosis import Diagnosis, diagnose
from planner.tools.diagnostics.log_comparison import LogExplanation, explain_log_file
from planner.tools.lint.findings import LINT_EXIT_CODES
from planner.tools.lint.named_gpus import find_named_gpu
from planner.tools.lint.report import LintReport, lint, read_launched_deployment
from planner.ui.cli import main

POSTS = Path(__file__).parent / "data" / "posts"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)


def to_fix(report: LintReport) -> dict[str, str]:
    """Name -> verdict of all that needs a fix."""
    return {one.name: one.verdict for one in report.findings if one.needs_fix}


def write_service(command: str, image: str = "vllm/vllm-openai:v0.20.2", **more: object) -> str:
    service = {"image": image, "command": command, "gpus": "all", "ipc": "host", **more}
    return yaml.safe_dump({"services": {"llm": service}})


def write_deployment(args: list[str], *others: object, **more: object) -> str:
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.20.2",
        "args": ["Qwen/Qwen3-8B", *args],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        **more,
    }
    template = {"metadata": {"labels": {"app": "llm"}}, "spec": {"containers": [container]}}
    deployment = {"kind": "Deployment", "spec": {"template": template}}
    return yaml.safe_dump_all([deployment, *others])


def test_a_health_check_on_127_0_0_1_never_reaches_a_lan_address() -> None:
    report = lint(str(POSTS / "20_compose_health_lan.yml"))
    assert to_fix(report) == {"healthcheck": "contradicts"}
    assert LINT_EXIT_CODES[report.verdict] == 1


SERVICE = {
    "kind": "Service",
    "metadata": {"name": "llm", "labels": {"app": "llm"}},
    "spec": {
        "selector": {"app": "llm"},
        "ports": [{"name": "web", "port": 80, "targetPort": 8000}],
    },
}
NAMED = [{"containerPort": 8000, "name": "http"}]
UNREACHED = {
    "a published port of a container that listens elsewhere": (
        write_service("Qwen/Qwen3-8B --port 8080", ports=["80:8000"]),
        {"ports": "contradicts"},
    ),
    "a health check of another port": (
        write_service("Qwen/Qwen3-8B", healthcheck={"test": "curl -f http://localhost:8080/health"}),
        {"healthcheck": "contradicts"},
    ),
    "SGLang's default is 30000": (
        write_service(
            "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --host 0.0.0.0",
            "lmsysorg/sglang:v0.5.10", ports=["8000:8000"],
        ),
        {"ports": "contradicts"},
    ),
    "the container's own loopback": (
        write_service("Qwen/Qwen3-8B --host 127.0.0.1", ports=["8000:8000"]),
        {"--host": "contradicts"},
    ),
    "an address of the host in a network of its own": (
        write_service("Qwen/Qwen3-8B --host 192.168.1.50"),
        {"--host": "contradicts"},
    ),
    "docker run": (
        "docker run --gpus all --ipc=host -p 8000:8000 vllm/vllm-openai:v0.20.2 Qwen/Qwen3-8B --port 8001",
        {"ports": "contradicts"},
    ),
    "a probe by the name of a port": (
        write_deployment(["--port", "8080"], ports=NAMED, readinessProbe={"httpGet": {"port": "http"}}),
        {"readinessProbe": "contradicts"},
    ),
    "a probe by a name that no port has": (
        write_deployment([], ports=NAMED, readinessProbe={"httpGet": {"port": "metrics"}}),
        {"readinessProbe": "contradicts"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("text,found", UNREACHED.values(), ids=UNREACHED)
def test_where_a_server_listens_is_held_against_who_reaches_it(
    text: str, found: dict[str, str]
) -> None:
    assert to_fix(lint(text)) == found


PROXY = {"name": "proxy", "image": "nginx:1", "ports": [{"containerPort": 8000}]}
REACHED = {
    "ports and check as the server listens": write_service(
        "Qwen/Qwen3-8B --port 8080",
        ports=["127.0.0.1:80:8080/tcp", "9999:9999"],
        healthcheck={"test": ["CMD", "curl", "-f", "http://0.0.0.0:8080/health"]},
    ),
    "the host's network, behind a proxy of the host": write_service(
        "Qwen/Qwen3-8B --host 127.0.0.1", network_mode="host"
    ),
    "a check by a variable": write_service(
        "Qwen/Qwen3-8B --port 8080", healthcheck={"test": "curl localhost:$$PORT/health"}
    ),
    "an address that compose gives": write_service(
        "Qwen/Qwen3-8B --host 172.20.0.5", networks={"a": {"ipv4_address": "172.20.0.5"}}
    ),
    "a Service of another pod": write_deployment(
        ["--port", "8080"],
        {**SERVICE, "spec": {**SERVICE["spec"], "selector": {"app": "web"}}},  # type: ignore[dict-item]
    ),
    "a sidecar listens at the Service's port": write_deployment(
        ["--port", "8200", "--host", "127.0.0.1"], SERVICE
    ).replace("      containers:\n", f"      containers:\n      - {PROXY}\n"),
    "another program in the container": write_service(
        'sh -c "vllm serve Qwen/Qwen3-8B --port 8001 & exec nginx"',
        ports=["80:8000"],
        entrypoint="",
    ),
}


@pytest.mark.parametrize("text", REACHED.values(), ids=REACHED)
def test_who_is_reached_is_no_finding(text: str) -> None:
    assert not {"ports", "healthcheck", "--host", "--hostname", "Service llm"} & set(
        to_fix(lint(text))
    )


def test_a_serving_runtime_of_any_image_needs_shared_memory() -> None:
    report = lint(str(POSTS / "29_kserve_servingruntime.yaml"))
    assert to_fix(report) == {"/dev/shm": "risky"}
    assert LINT_EXIT_CODES[report.verdict] == 3


def test_kserve_joins_a_runtime_and_its_service() -> None:
    report = lint(str(POSTS / "30_kserve_runtime_upstream.yaml"))
    assert len(report.commands) == 1
    (one,) = report.commands
    assert str(one.checked.version) == "0.20.2"
    assert one.checked.command.setup
    assert one.checked.command.setup.num_gpus == 2
    assert one.need and one.need.deployment.layout.num_gpus == 2
    assert to_fix(report) == {
        "--enable-reasoning": "removed", "--no-such-option": "unknown", "/dev/shm": "risky",
    }  # fmt: skip


def test_the_gpu_that_a_file_names_is_planned_on() -> None:
    (one,) = lint(str(POSTS / "26_helm_values_extraargs.yaml")).commands
    assert one.plan
    assert one.plan.deployment.gpu.name == "L40S"
    assert one.plan.deployment.layout.num_gpus == 4


NAMING = {
    "node's label": ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}, "H100-SXM"),
    "shared by time": ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A10G-SHARED"}}, "A10G"),
    "Google's A100 has 40 GB": (
        {"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}}, "A100-SXM-40GB",
    ),
    "Amazon's instance": (
        {"nodeSelector": {"node.kubernetes.io/instance-type": "g6e.12xlarge"}}, "L40S",
    ),
    "Azure's instance": ({"instanceType": "Standard_NC24ads_A100_v4"}, "A100-PCIE-80GB"),
    "SkyPilot": ({"resources": {"accelerators": "H200:8"}}, "8xH200-SXM"),
    "SkyPilot, as a mapping": ({"resources": {"accelerators": {"L4": 2}}}, "2xL4"),
    "KubeAI": ({"resourceProfile": "nvidia-gpu-l4:1"}, "1xL4"),
    "the smallest of several": (
        {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "gpu", "operator": "In", "values": ["NVIDIA-H200", "NVIDIA-A100-SXM4-40GB"]}]}]},
        "A100-SXM-40GB",
    ),
    "what it does not want": (
        {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "gpu", "operator": "NotIn", "values": ["NVIDIA-L4"]}]}]}, "",
    ),
    "no GPU": ({"nodeSelector": {"pool": "gpu", "kubernetes.io/arch": "amd64"}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("node,gpu", NAMING.values(), ids=NAMING)
def test_gpus_are_found_by_what_clouds_call_them(node: dict[str, object], gpu: str) -> None:
    assert find_named_gpu(node) == gpu


def test_a_chart_with_the_command_in_its_image() -> None:
    """As vLLM's own chart, whose Service reaches `containerPort`."""
    command = ["vllm", "serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000"]
    values = {
        "image": {"repository": "vllm/vllm-openai", "tag": "v0.20.2", "command": command},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    }
    (one,) = lint(yaml.safe_dump({**values, "containerPort": 8000})).commands
    assert (str(one.checked.version), one.plan and one.plan.deployment.gpu.name) == ("0.20.2", "L4")


UNMODELLED = {
    "posted": (str(POSTS / "27_compose_dsv4_dspark.yml"), "4xH20"),
    "vLLM, without a GPU": (
        """vllm serve Qwen/Qwen3-8B --speculative-config '{"method":"dspark","num_speculative_tokens":3}'""",
        None,
    ),
    "SGLang": (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DSPARK",
        "H100",
    ),
    "a quantization at load": ("vllm serve Qwen/Qwen3-8B --quantization torchao", "H100"),
    "an unknown model": ("vllm serve /models/of-our-own", "H100"),
}


@pytest.mark.parametrize("what,gpu", UNMODELLED.values(), ids=UNMODELLED)
def test_what_is_not_planned_does_not_end_with_0(what: str, gpu: str | None) -> None:
    report = lint(what, gpu=gpu)
    assert LINT_EXIT_CODES[report.verdict] == 3
    assert "did you mean medusa" not in str(report)
    assert "Not planned" in str(report)


def read_runs(text: str, tmp_path: Path, engine: str) -> tuple[BenchmarkPoint, tuple[str, ...]]:
    path = tmp_path / "bench.txt"
    path.write_text(text, encoding="utf-8")
    deployment = deploy_on("openai/gpt-oss-20b", "H100", engine=engine)
    results = read_benchmark_results([path], deployment, to_fit=False)
    (point,) = results.points
    return point, results.notes


SGLANG_TABLE = (POSTS / "91_bench_table_sglang.txt").read_text(encoding="utf-8")
SGLANG_JSON = {
    "backend": "sglang-oai", "request_rate": 4.0, "completed": 100, "max_concurrency": 8,
    "total_input_tokens": 100_000, "total_output_tokens": 20_000, "mean_ttft_ms": 100.0,
    "mean_e2e_latency_ms": 2090.0, "mean_itl_ms": 11.0,
}  # fmt: skip
TRTLLM_TABLE = """
===========================================================
= REQUEST DETAILS
===========================================================
Number of requests:             100
Number of concurrent requests:  94.6049
Average Input Length (tokens):  128.0000
Average Output Length (tokens): 128.0000
===========================================================
= PERFORMANCE OVERVIEW
===========================================================
Request Throughput (req/sec):                     86.5373
Total Output Throughput (tokens/sec):             11076.7700
Average request latency (ms):                     1093.2284
Average time-to-first-token [TTFT] (ms):   162.6706
Average time-per-output-token [TPOT] (ms): 7.3272

[TPOT] P50    : 7.6079
[TTFT] P99    : 232.4339
"""
"""As trtllm-bench prints it; (1093.23 - 162.67) / 127 = 7.3272 is what it calls TPOT."""
TABLES = {
    # (8432.23 - 2731) / 1023
    "SGLang's table": ("sglang", SGLANG_TABLE, 2.731, 5.5731e-3, "E2E and TTFT"),
    "without E2E it is the mean gap": (
        "sglang", SGLANG_TABLE.replace("Mean E2E", "Some E2E"), 2.731, 5.71e-3, "ITL",
    ),
    # (2090 - 100) / 199
    "SGLang's JSON": ("sglang", json.dumps(SGLANG_JSON), 0.1, 10e-3, "E2E and TTFT"),
    "trtllm-bench": ("trtllm", TRTLLM_TABLE, 0.1626706, 7.3272e-3, ""),
    "trtllm-bench, worked out": (
        "trtllm", TRTLLM_TABLE.replace("Average time-per", "Time-per"), 0.1626706, 7.3272e-3, "E2E and TTFT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine,text,ttft,tpot,origin", TABLES.values(), ids=TABLES)
def test_tables_without_tpot_are_read(
    engine: str, text: str, ttft: float, tpot: float, origin: str, tmp_path: Path
) -> None:
    point, notes = read_runs(text, tmp_path, engine)
    assert point.ttft == pytest.approx(ttft)
    assert point.tpot == pytest.approx(tpot, rel=1e-4)
    assert [note.rpartition("means of ")[2] for note in notes if "TPOT" in note] == [origin] * bool(
        origin
    )


def test_a_missing_field_is_not_called_vllms(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"as a benchmark's result, field completed"):
        read_runs(SGLANG_TABLE.replace("Successful", "Some"), tmp_path, "sglang")


def diagnose_text(text: str, tmp_path: Path) -> Diagnosis:
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    return diagnose(log=path)


def test_a_retraction_with_a_full_cache_is_found_in_sglangs_words() -> None:
    diagnosis = diagnose(log=POSTS / "62_sglang_retraction.log")
    assert [one.mode for one in diagnosis.findings] == ["kv_preemption"]
    text = str(diagnosis)
    assert "schedule_conservativeness" in text
    assert "max_running_requests" in text
    assert "sglang:num_retracted" in text
    assert "kv_cache_dtype fp8_e4m3" in text
    assert "max_num_seqs" not in text
    assert "vllm" not in text
    assert diagnosis.exit_code == 1


DECODE = "Decode batch. #running-req: {}, #token: 9, token usage: {}, gen throughput (token/s): {}, #queue-req: {}\n"
RETRACT = "Decode out of memory happened. #retracted_reqs: {}, #new_token_ratio: 0.4 -> 0.7\n"
LOGS = {
    "older words": (DECODE.format(9, 0.97, 90, 2) * 2 + RETRACT.format(1), ["kv_preemption"]),
    "many, though the cache has room by now": (
        DECODE.format(9, 0.5, 90, 0) + RETRACT.format(4), ["kv_preemption"],
    ),
    "one, and nobody waits": (DECODE.format(9, 0.97, 90, 0) * 2 + RETRACT.format(1), []),
    "one, and the cache has room": (DECODE.format(9, 0.5, 90, 1) * 3 + RETRACT.format(1), []),
    "a slow last request": (DECODE.format(9, 0.5, 900, 0) + DECODE.format(1, 0.1, 90, 0), []),
}  # fmt: skip


@pytest.mark.parametrize("text,modes", LOGS.values(), ids=LOGS)
def test_occasional_retractions_are_fine(text: str, modes: list[str], tmp_path: Path) -> None:
    assert [one.mode for one in diagnose_text(text, tmp_path).findings] == modes


@pytest.mark.parametrize("text", ["hello world\nthis is no log\n", "", "GET / 200\n" * 9])
def test_what_is_no_engines_log_is_not_judged(text: str, tmp_path: Path) -> None:
    diagnosis = diagnose_text(text, tmp_path)
    assert diagnosis.exit_code == 3
    assert "No problem found" not in str(diagnosis)


@pytest.mark.parametrize(
    "line",
    ["[TRT-LLM] [I] Using LLM with PyTorch backend", "INFO vLLM is up", "server_args=ServerArgs()"],
)
def test_only_a_start_that_is_over_has_no_problem(line: str, tmp_path: Path) -> None:
    diagnosis = diagnose_text(line, tmp_path)
    assert diagnosis.exit_code == 3 and "No problem found" not in str(diagnosis)
    assert diagnose_text(f"{line}\nApplication startup complete.", tmp_path).exit_code == 0


ITERATION = (
    "[TRT-LLM] [I] iter = {}, global_rank = 0, rank = 0, {}currank_total_requests = 0/0, {} = {},"
    " timestamp = 2025-04-28 09:56:44, num_scheduled_requests{} {}, states = {{'num_ctx_requests': 1,"
    " 'num_ctx_tokens': {}, 'num_generation_tokens': {}}}{}\n"
)
"""TensorRT-LLM pulls 3914 and 16323, and what people's scripts read of 1.3."""
OLD_STEP = ITERATION.format(198, "", "elapsed_time", "0.005s", ":", 10, 0, 16, "")
FULL_STEP = ITERATION.format(
    2, "kv_cache_util = 0.970, ", "host_step_time", "20.0ms", " =", 20, 4, 16, ", num_active = 29,"
    " num_fetched = 3, num_dummy = 1, num_unscheduled = 9",
)  # fmt: skip


def test_tensorrt_llms_steps_are_read_as_far_as_they_tell(tmp_path: Path) -> None:
    untold = diagnose_text(OLD_STEP, tmp_path)
    assert untold.exit_code == 3 and "No problem found" not in str(untold)
    assert untold.stat_lines and untold.stat_lines.lines[0].tps == pytest.approx(16 / 0.005)
    full = diagnose_text(FULL_STEP, tmp_path)
    assert full.exit_code == 1 and [one.mode for one in full.findings] == ["kv_full"]
    assert "20 running and 9 waiting, the KV cache is 97% full" in str(full)
    assert full.stat_lines and full.stat_lines.lines[0].tps == pytest.approx(1000)


UNROUNDED_STEP = (
    "[TRT-LLM] [I] iter = 4, global_rank = 0, rank = 0, currank_total_requests = 0/16, host_step_time ="
    " 23.459672927856445ms, prev_device_step_time = 23.03519058227539ms, timestamp = 2025-08-01 02:03:04,"
    " num_scheduled_requests: 16, states = {'num_ctx_requests': 0, 'num_ctx_tokens': 0,"
    " 'num_generation_tokens': 16}\n"
)
"""As TensorRT-LLM 1.0's pyexecutor/py_executor.py prints it: (end_time - start_time) * 1000, not rounded."""


def test_the_time_of_a_tensorrt_llm_step_is_read_unrounded_and_may_be_zero(tmp_path: Path) -> None:
    (line,) = diagnose_text(UNROUNDED_STEP, tmp_path).stat_lines.lines  # type: ignore[union-attr]
    assert line.tps == pytest.approx(16 / 0.023459672927856445)
    for text in (OLD_STEP.replace("0.005s", "0.0s"), OLD_STEP.replace("0.005s", "9.5e-07s")):
        (line,) = diagnose_text(text, tmp_path).stat_lines.lines  # type: ignore[union-attr]
        assert math.isnan(line.tps) and line.running == 10


def test_a_full_cache_whose_queue_is_not_told_is_not_judged(tmp_path: Path) -> None:
    """As sgl-project/sglang issue 6778, whose lines were cut."""
    diagnosis = diagnose_text(
        "Decode batch. #running-req: 36, #token: 9, token usage: 0.96\n", tmp_path
    )
    assert diagnosis.exit_code == 3 and "96% full" in str(diagnosis)


def explain_text(text: str, tmp_path: Path, gpu: str | None = None) -> LogExplanation:
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    return explain_log_file(path, gpu)


def test_the_figures_of_a_refusal_are_held_against_the_plan() -> None:
    command = (
        "vllm serve mistralai/Mistral-Small-4-119B-2603 --tensor-parallel-size 2"
        " --gpu-memory-utilization 0.84"
    )
    planned = read_launched_deployment(command, "2xH100-NVL")
    explanation = explain_log_file(POSTS / "72_kaito_refused.log", "2xH100-NVL", planned)
    rows = {row.term: row for row in explanation.lines}
    assert rows["kv_needed"].value == pytest.approx(22.5)
    assert rows["kv_needed"].status == "PASS"  # as the plan has it
    assert rows["kv_available"].value == pytest.approx(17.39)
    assert rows["longest"].value == 810_208
    assert "--max-model-len 810208 starts" in explanation.suggestions
    assert "requests of 1,000 + 200 tokens" not in explanation.suggestions


MIXTRAL = (POSTS / "oom_with_command.log").read_text(encoding="utf-8")


def test_a_memory_error_names_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-log", str(POSTS / "oom_with_command.log")]) == 1
    text = capsys.readouterr().out
    assert "mistralai/Mixtral-8x22B-Instruct-v0.1 on 4 x" in text
    assert "TP4" in text
    assert "0.2 GiB short" in text  # 448 - 241.38 MiB
    assert "gpu_memory_utilization 0.94" in text  # 76.12 of 79.14 GiB are those of 0.95
    assert "fewer max_num_seqs" in text
    assert "an FP8 checkpoint" in text
    assert "max_model_len 5" in text  # shorter than 65,536


FAILED = {
    "only the error": ("RuntimeError: nobody knows this one\n", "Not compared with a plan"),
    "only a known error": (MIXTRAL.partition("ERROR")[2], "0.2 GiB short"),
    "a refusal without its model": (
        (POSTS / "72_kaito_refused.log").read_text(encoding="utf-8"), "--max-model-len 810208 starts",
    ),
    "SGLang's": ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "A higher --mem"),
}  # fmt: skip


def assert_failed_start_is_told(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    assert main(["explain-log", str(path)]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("text,told", FAILED.values(), ids=FAILED)
def test_a_failed_start_ends_with_1(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_failed_start_is_told(text, told, tmp_path, capsys)


PATHS = {
    "/models/Qwen_Qwen3-32B.w4a16": 4,
    "/root/.cache/hub/models--Qwen--Qwen3-32B-AWQ/snapshots/0123abc": 4,
    "./Qwen3-32B-FP8": 8,
    "/data/models/Qwen3-32B/": 16,
}


@pytest.mark.parametrize("path,bits", PATHS.items())
def test_paths_name_a_model_and_its_format(path: str, bits: int, tmp_path: Path) -> None:
    log = f"non-default args: {{'model': '{path}'}}\nAvailable KV cache memory: 40.0 GiB\n"
    model = explain_text(log, tmp_path, "H200").plan.deployment.model
    assert (model.quantization.weight_bits, len(model.architecture.layers)) == (bits, 64)
    (command,) = lint(f"vllm serve {path}", gpu="2xH200").commands
    assert command.plan
    assert command.plan.deployment.model.quantization.weight_bits == bits


@pytest.mark.parametrize("gpu", ["H100-NVL", "2xH100-NVL", "2 x H100 NVL", "H100-NVL:2"])
def test_a_number_of_gpus_has_one_form(gpu: str, tmp_path: Path) -> None:
    log = "non-default args: {'model': 'Qwen/Qwen3-32B'}\nAvailable KV cache memory: 20.0 GiB\n"
    assert explain_text(log, tmp_path, gpu).plan.deployment.gpu.name == "H100-NVL"


def test_a_download_at_each_start_outlasts_150_seconds() -> None:
    """vllm-project/aibrix issue 1054: an 8B that is downloaded at each start never came up."""
    report = lint(str(POSTS / "32_k8s_startup_probe.yaml"))
    assert to_fix(report) == {"startupProbe": "risky"}
    (finding,) = [one for one in report.findings if one.needs_fix]
    assert "1 Gbit/s (assumed)" in finding.why
    assert LINT_EXIT_CODES[report.verdict] == 3


CACHE = {"volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "c"}}]}
BUDGETS = {
    "15 minutes are enough": ({"periodSeconds": 10, "failureThreshold": 90}, {}, [], False),
    "a volume keeps the download": (
        {"periodSeconds": 5, "failureThreshold": 30}, CACHE, [{"name": "c", "mountPath": "/root/.cache"}], False,
    ),
    "nothing starts in 20 seconds": (
        {"periodSeconds": 5, "failureThreshold": 4}, CACHE, [{"name": "c", "mountPath": "/root/.cache"}], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("probe,pod,mounts,found", BUDGETS.values(), ids=BUDGETS)
def test_a_probes_budget_is_held_against_the_download(
    probe: dict[str, int], pod: dict[str, object], mounts: list[object], found: bool
) -> None:
    text = write_deployment(
        [], volumeMounts=mounts, startupProbe={**probe, "httpGet": {"port": 8000}}
    )
    document = yaml.safe_load(text)
    document["spec"]["template"]["spec"] |= pod
    assert ("startupProbe" in to_fix(lint(yaml.safe_dump(document)))) == found


@pytest.mark.parametrize(
    "command,version,told",
    [
        # logs of 0.20.0 and 0.20.2 from compose warn; the image of 0.10 ran the API server's module
        ("docker run --gpus all vllm/vllm-openai --model Qwen/Qwen3-8B", "0.20.2", True),
        ("docker run --gpus all vllm/vllm-openai --model Qwen/Qwen3-8B", "0.10.0", False),
        ("vllm serve --model Qwen/Qwen3-8B", "0.10.0", True),
        ("vllm serve Qwen/Qwen3-8B", "0.20.2", False),
        ("python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B", "0.20.2", False),
    ],
)
def test_the_model_by_an_option_is_deprecated(command: str, version: str, told: bool) -> None:
    whys = [one.why for one in lint(command, version).findings if one.name == "--model"]
    assert any("first word" in why for why in whys) == told


@pytest.mark.parametrize(
    "pin,told", [("", True), (" --revision abc", False), (" --code-revision abc", False)]
)
def test_remote_code_that_is_not_pinned_is_called_a_risk(pin: str, told: bool) -> None:
    report = lint(f"vllm serve Qwen/Qwen3-8B --trust-remote-code{pin}", "0.20.2")
    assert to_fix(report) == ({"--trust-remote-code": "risky"} if told else {})
    assert LINT_EXIT_CODES[report.verdict] == (3 if told else 0)
    folder = lint(f"vllm serve /models/Qwen3-8B --trust-remote-code{pin}", "0.20.2")
    assert folder.verdict == "ok"


UNMODELLED_OPTIONS = {
    "vLLM's kernels on Hopper": ("vllm serve Qwen/Qwen3-8B --attention-backend TRITON_ATTN", "H100", 3),
    # vLLM's own choice: docs/design/attention_backends.md
    "its own choice": ("vllm serve Qwen/Qwen3-8B --attention-backend FLASH_ATTN", "H100", 0),
    "its choice on another GPU": ("vllm serve Qwen/Qwen3-8B --attention-backend FLASH_ATTN", "B200", 3),
    # vLLM platforms/cuda.py: FlashInfer is preferred on 10.x only
    "its choice on RTX": ("vllm serve Qwen/Qwen3-8B --attention-backend FLASH_ATTN", "RTX-PRO-6000", 0),
    "its choice on Turing": ("vllm serve Qwen/Qwen3-0.6B --dtype half --attention-backend FLASHINFER", "T4", 0),
    "left to it": ("vllm serve Qwen/Qwen3-8B --attention-backend auto", "H100", 0),
    "for latents on Ampere": (
        "vllm serve deepseek-ai/DeepSeek-V2-Lite --attention-backend TRITON_MLA --max-model-len 8192", "A100-80GB", 0,
    ),
    "in a nested option": (
        "vllm serve Qwen/Qwen3-8B --attention-config.backend TRITON_ATTN", "H100", 3,
    ),
    "in its short form": ("vllm serve Qwen/Qwen3-8B -ac.backend TRITON_ATTN", "H100", 3),
    "in JSON": (
        "vllm serve Qwen/Qwen3-8B --attention-config '{\"backend\": \"TRITON_ATTN\"}'", "H100", 3,
    ),
    "its choice in JSON": (
        "vllm serve Qwen/Qwen3-8B --attention-config '{\"backend\": \"FLASH_ATTN\"}'", "H100", 0,
    ),
    "nothing was worked out": ("vllm serve Qwen/Qwen3-8B --attention-backend TRITON_ATTN", None, 0),
    "SGLang": (
        "sglang serve Qwen/Qwen3-8B --decode-attention-backend triton", "H100", 3,
    ),
    "SGLang's own choice": ("sglang serve Qwen/Qwen3-8B --attention-backend fa3", "H100", 0),
    # srt/server_args.py: trtllm_mha does not run on SM120, where FlashInfer is taken
    "SGLang's on RTX": ("sglang serve Qwen/Qwen3-8B --attention-backend flashinfer", "RTX-PRO-6000", 0),
    "SGLang's for latents": (
        "sglang serve deepseek-ai/DeepSeek-V2-Lite --attention-backend triton --context-length 8192", "A100-80GB", 0,
    ),
    "an image whose name holds tpu": (
        "docker run --gpus all --ipc=host team/vllm-structured-output:1 vllm serve Qwen/Qwen3-8B", None, 0,
    ),
    "an image whose name holds npu": (
        "docker run --gpus all --ipc=host team/vllm-input-check:1 vllm serve Qwen/Qwen3-8B", None, 0,
    ),
    "another processor": (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --device npu", None, 3,
    ),
    "an image for CPUs": ("docker run vllm/vllm-openai-cpu:v0.20.2 Qwen/Qwen3-8B --port 8000", None, 3),
}  # fmt: skip


@pytest.mark.parametrize("line,gpu,code", UNMODELLED_OPTIONS.values(), ids=UNMODELLED_OPTIONS)
def test_what_no_model_knows_is_said_where_it_counts(line: str, gpu: str | None, code: int) -> None:
    report = lint(line, gpu=gpu)
    assert LINT_EXIT_CODES[report.verdict] == code
    assert not [one for one in report.findings if one.verdict == "unknown"]
    assert ("not modelled" in str(report)) == (code == 3)


@pytest.mark.parametrize("backend,code", [("AUTO", 0), ("CUTLASS", 0), ("DEEPGEMM", 3)])
def test_the_kernels_of_tensorrt_llms_experts_are_read_in_their_mapping(
    backend: str, code: int, tmp_path: Path
) -> None:
    """llmapi/llm_args.py, MoeConfig: the default is CUTLASS in 1.0 and AUTO later."""
    settings = tmp_path / "mine.yaml"
    settings.write_text(f"moe_config: {{backend: {backend}}}\n", encoding="utf-8")
    report = lint(f"trtllm-serve Qwen/Qwen3-8B --extra_llm_api_options {settings}", gpu="H100")
    names = [one.name for one in report.findings if "not modelled" in one.why]
    assert names == ["moe_config"] * bool(code)


def test_two_kinds_of_gpu_are_said_and_not_planned() -> None:
    with pytest.raises(PlannerError, match="two kinds of GPU has no model here"):
        lint("vllm serve Qwen/Qwen3-8B -pp 2", gpu="RTX-5090,RTX-5070-Ti")


SLURM = {
    "a kind and a number": ("#SBATCH --gres=gpu:h100:4", "H100-SXM"),
    "in the step": ("srun -n 1 --gpus-per-node=l40s:2 true", "L40S"),
    "--gpus": ("#SBATCH --gpus a100:8", "A100"),
    "a number alone": ("#SBATCH --gres=gpu:4", ""),
    "another resource": ("#SBATCH --gres=shard:h100:4", ""),
}


@pytest.mark.parametrize("line,gpu", SLURM.values(), ids=SLURM)
def test_slurm_jobs_name_their_gpus(line: str, gpu: str) -> None:
    """slurm.schedmd.com, sbatch: --gres=gpu:kepler:2, --gpus=volta:3."""
    (one,) = lint(f"#!/bin/bash\n{line}\nsrun vllm serve Qwen/Qwen3-8B\n").commands
    assert (one.plan is not None) == bool(gpu)
    assert not one.plan or one.plan.deployment.gpu.name.startswith(gpu)


def test_sglang_starts_where_its_cache_is_shorter_than_the_context() -> None:
    """sglang issue 4048: 163,840 tokens are asked for, about 59,868 fit, and it serves."""
    line = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --mem-fraction-static 0.93"
    report = lint(line, gpu="L4")
    (one,) = report.commands
    assert one.plan and one.plan.memory.can_start and one.plan.capped_length
    # 2 x 32 layers x 8 heads x 128 x 2 bytes a token of a pool below 0.93 x 22.03 - 14.96 GiB
    assert one.plan.capped_length < (0.93 * 22.03 - 14.96) * 2**30 / 131_072
    assert to_fix(report) == {"--context-length": "risky"}
    vllm = "vllm serve meta-llama/Llama-3.1-8B-Instruct --gpu-memory-utilization 0.93"
    assert lint(vllm, gpu="L4").verdict == "mend"


def test_chunks_cannot_be_switched_off_in_the_first_releases_of_v1() -> None:
    """vLLM 0.8.5 to 0.11.0 engine/arg_utils.py: V1 always uses chunked prefills."""
    line = "vllm serve Qwen/Qwen3-8B --no-enable-chunked-prefill --max-num-batched-tokens 2048"
    (one,) = [
        each for each in lint(line, "0.10.0").findings if each.name == "--enable-chunked-prefill"
    ]
    assert one.verdict == "useless"
    assert lint(line, "0.10.0").verdict == "ok"
    assert lint(line, "0.20.2").verdict == "mend"


def test_a_folder_that_is_filled_in_may_hold_a_known_model() -> None:
    report = lint("vllm serve $HOME/models/Qwen3-8B", gpu="H100")
    assert report.commands[0].plan and report.verdict == "ok"
    assert lint("vllm serve $HOME/$MODEL", gpu="H100").verdict == "at_risk"


MEDIA = ['{"image": 2, "audio": 0}', "image=2,audio=0", '{"image": {"count": 2}, "audio": 0}']


@pytest.mark.parametrize("limits", MEDIA)
def test_limits_of_media_are_read_in_every_form(limits: str) -> None:
    model = "Qwen/Qwen2.5-VL-7B-Instruct"
    row = {"model": model, "gpu": "H100", "limit_mm_per_prompt": limits}
    cells, _ = parse_cells(row)
    deployment, _ = parse_measured_run(
        {**cells, "isl": 100.0, "osl": 10.0, "concurrency": 1}, Path(), []
    )
    assert deployment.media_limits == {"image": 2, "audio": 0}
    scenario = parse_scenario(
        {
            "question": "q", "model": model, "gpus": [{"gpu": "H100", "at_most": 1}],
            "workload": {"prompt_tokens": {"mean": 100}, "output_tokens": {"mean": 10}, "concurrency": 1},
            "service_level": {"ttft": {"p95": 2000}},
            "engine_args": {"limit_mm_per_prompt": yaml.safe_load(limits)},
        },
        "posted",
    )  # fmt: skip
    assert scenario.engine_args["limit_mm_per_prompt"] == "image=2,audio=0"


def test_predict_lists_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    text = capsys.readouterr().out
    assert ".yaml" not in text
    missing = [name for name in INPUT_COLUMNS if name not in text]
    assert not missing


def test_the_operators_runtime_names_its_options_beside_its_model() -> None:
    """As production-stack, src/gateway_inference_extension/configs/vllm/vllm-runtime.yaml."""
    spec = {
        "tensorParallelSize": 1, "gpuMemoryUtilization": "0.8", "deploymentStrategy": "RollingUpdate",
        "extraArgs": ["--max-num-seq", "1024"],
        "model": {"modelURL": "meta-llama/Llama-3.2-1B-Instruct", "maxModelLen": 4096},
    }  # fmt: skip
    (one,) = lint(yaml.safe_dump({"kind": "VLLMRuntime", "spec": spec}), "0.20.2").commands
    values = one.checked.argument_values
    assert (values["max_model_len"], values["gpu_memory_utilization"]) == (4096, 0.8)
    assert not [finding.name for finding in one.checked.findings if finding.needs_fix]


def test_the_variables_of_a_container_are_filled_in() -> None:
    container = {
        "image": "vllm/vllm-openai:v0.20.2",
        "args": ["--model=$(MODEL_ID)", "--tensor-parallel-size=1"],
        "env": [{"name": "MODEL_ID", "value": "google/gemma-2-2b-it"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }  # fmt: skip
    selector = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    spec = {"nodeSelector": selector, "containers": [container]}
    service = {**SERVICE, "spec": {**SERVICE["spec"], "selector": {"app": "gemma"}}}  # type: ignore[dict-item]
    pod = {"kind": "Pod", "metadata": {"labels": {"app": "gemma"}}, "spec": spec}
    (one,) = lint(yaml.safe_dump_all([pod, service])).commands
    assert one.plan
    assert one.plan.deployment.gpu.name == "L4"
    assert not [finding.name for finding in one.checked.findings if finding.needs_fix]


def test_a_task_of_dstack_has_its_variables_image_and_gpus() -> None:
    """As dstack.ai/docs/examples/inference/vllm."""
    task = {
        "type": "service", "image": "vllm/vllm-openai:v0.20.2", "env": ["MODEL=Qwen/Qwen3-32B", "HF_TOKEN"],
        "commands": ["vllm serve $MODEL --tensor-parallel-size $DSTACK_GPUS_NUM --max-model-len 8192"],
        "resources": {"gpu": "H100:2"},
    }  # fmt: skip
    report = lint(yaml.safe_dump(task))
    (one,) = report.commands
    assert one.plan
    assert (one.plan.deployment.layout.tp, one.plan.deployment.gpu.name) == (2, "H100-SXM")
    assert str(one.checked.version) == "0.20.2"
    assert report.verdict == "ok"


GUIDES = {
    # vllm-project/recipes: DeepSeek/DeepSeek-V3_1.md
    "what stands elsewhere": ("vllm serve ...\n  --enable-auto-tool-choice\n  --tool-call-parser hermes\n", {}),
    # OpenAI/GPT-OSS.md
    "another program that runs": ("mcp run -t sse server.py:mcp\nvllm serve m/n --tool-server a:1\n", {}),
    "lines that are cut off": (
        "vllm serve m/n\n  --max-num-seqs 8\n", {"--max-num-seqs": "contradicts"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("code,found", GUIDES.values(), ids=GUIDES)
def test_guides_leave_out_and_cut_off(code: str, found: dict[str, str]) -> None:
    assert to_fix(lint(code, "0.20.2")) == found


WRAPPED = {
    # as people paste them: broken at the width of a page
    "a refusal": (
        "ERROR [core.py:708] ValueError: \nTo serve at least one request with the models's max seq len"
        " (40960), \n(5.62 GiB KV cache is needed, which is larger than the available KV cache memory"
        " (4.50 GiB). \nBased on the available memory, the estimated maximum model length is 32768. \n",
        "--max-model-len 32768 starts",
    ),
    "in the middle of a word": (
        "(EngineCore pid=316) ValueError: To serve at least one request with the model's max seq len"
        " (100000), (4.26 GiB KV cach\ne is needed, which is larger than the available KV cache memory"
        " (4.25 GiB). Based on the available memory, the estimated maximum model length is 99664.\n",
        "--max-model-len 99664 starts",
    ),
    "an allocation": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.47 GiB.\n> GPU 0 has a total"
        " capacity of 23.57 GiB of which 2.66 GiB is free.\n> Including non-PyTorch memory, this process"
        " has 20.88 GiB memory in use.\n",
        "0.8 GiB short",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text,told", WRAPPED.values(), ids=WRAPPED)
def test_errors_are_known_however_their_lines_are_broken(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_failed_start_is_told(text, told, tmp_path, capsys)
    assert diagnose(log=tmp_path / "server.log").exit_code == 1


@pytest.mark.parametrize(
    "check,waits,found",
    [
        ({"start_period": "30s"}, True, True),  # and 3 x 30 s; an 8B needs 16 GB first
        ({"start_period": "10m", "interval": "10s"}, True, False),
        ({"start_period": "1m30s", "interval": "500ms"}, True, True),
        ({"start_period": "30s"}, False, False),  # nobody waits: it becomes healthy later
        ({"start_period": "${WAIT}"}, True, False),
    ],
)
def test_what_waits_for_a_service_gives_up(check: dict[str, str], waits: bool, found: bool) -> None:
    check = {"test": "curl -f http://localhost:8000/health", **check}
    document = yaml.safe_load(write_service("Qwen/Qwen3-8B", healthcheck=check))
    if waits:
        needs = {"llm": {"condition": "service_healthy"}}
        document["services"]["web"] = {"image": "web", "depends_on": needs}
    assert to_fix(lint(yaml.safe_dump(document))) == ({"healthcheck": "risky"} if found else {})


def test_a_file_that_is_no_yaml_says_so(tmp_path: Path) -> None:
    """As GoogleCloudPlatform/kubernetes-engine-samples, ai-ml/infw-gw: its lines are indented unevenly."""
    path = tmp_path / "serve.yaml"
    good = write_deployment([])
    path.write_text(f"{good}---\napiVersion: v1\n    kind: Service\n", encoding="utf-8")
    report = lint(str(path))
    assert LINT_EXIT_CODES[report.verdict] == 3
    # kubectl: "error converting YAML to JSON: yaml: line N: mapping values are not allowed in this context"
    line = good.count("\n") + 3
    assert f"line {line}: mapping values are not allowed" in report.unread[0].why


@pytest.mark.parametrize("tag,version", [("26.05-py3", "0.20.1"), ("25.09-py3", "")])
def test_the_month_of_nvidias_image_is_no_version(tag: str, version: str) -> None:
    line = f"docker run --gpus all nvcr.io/nvidia/vllm:{tag} vllm serve Qwen/Qwen3-8B"
    (one,) = lint(line).commands
    assert one.checked.command.version == version


BRANCHES = {
    "a default that a branch would change": ("N=7\nif [ $OFF ]; then\n  N=0\nfi\n", "${N}"),
    "a case": ('case "$MODE" in\n  on) N=8 ;;\n  off|no) N=0 ;;\nesac\n', "${N}"),
    "what is unset before": ("if [ -z $N ]; then N=9; fi\n", "9"),
    "after the branch": ("N=7\nif x; then N=0; fi\nN=5\n", "${N}"),
}


@pytest.mark.parametrize("script,value", BRANCHES.values(), ids=BRANCHES)
def test_what_a_branch_sets_anew_is_not_known(script: str, value: str) -> None:
    (one,) = lint(f"{script}vllm serve Qwen/Qwen3-8B --max-num-seqs $N").commands
    assert str(one.checked.argument_values["max_num_seqs"]) == value


def test_the_end_of_a_shells_options_is_no_script() -> None:
    """As vllm-project/aibrix, samples/deepseek-r1: command [/bin/bash, -lc, --] and args."""
    (one,) = lint("bash -lc -- 'ulimit -n 9; vllm serve Qwen/Qwen3-8B --no-such'").commands
    assert not one.checked.command.unread
    assert "--no-such" in to_fix(lint("bash -lc -- 'vllm serve m/n --no-such'"))


def test_an_abbreviation_shows_its_value() -> None:
    """KubeAI's catalog has it without its s, which argparse takes."""
    report = lint("vllm serve Qwen/Qwen3-8B --max-num-batched-token=8192 --enforce-eager")
    assert "--max-num-batched-token 8192" in str(report)
    assert "hunter1234" not in str(lint("vllm serve m/n --api-ke hunter1234 --enforce-eager"))


def test_a_shell_that_somebody_types_in_starts_no_server() -> None:
    """As vllm-project/recipes, Llama/Llama3.3-70B.md: docker run --entrypoint /bin/bash -it IMAGE."""
    shell = "docker run --gpus all --entrypoint /bin/bash -it vllm/vllm-openai:v0.20.2"
    report = lint(f"{shell}\nvllm serve Qwen/Qwen3-8B\n")
    assert len(report.commands) == 1 and not to_fix(report) and not report.unread
