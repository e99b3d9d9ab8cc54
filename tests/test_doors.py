"""Every door shuts: secrets stay in, other servers' answers are bounded, and what breaks ends in one line."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from packaging.version import Version
from shipped import sampled

from planner.core import http
from planner.core.catalog import StrictEntry
from planner.core.errors import PlannerError
from planner.core.readers import parse_json, parse_yaml, read_yaml_sections
from planner.engines.deployment import deploy_on
from planner.engines.layout import ParallelLayout
from planner.planning.planned_replica import load_planned_replica
from planner.planning.scenario_schema import ScenarioEntry, _EngineArgs
from planner.planning.table_rows import ENGINE_ARG_COLUMNS, INPUT_COLUMNS
from planner.simulator.schedule_cases import ScheduleCaseConfig, read_schedule_case
from planner.tools.batch import _run_on_workers, predict_row
from planner.tools.diagnostics import diagnose
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG, explain_log_file
from planner.tools.diagnostics.metrics_pages import measure_replica, read_metrics_page
from planner.tools.fleet.allocation import FleetEntry
from planner.tools.lint.report import lint
from planner.tools.sweep_points import DeploymentEntry
from planner.ui import cli
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

PAGE = "".join(
    f"{line}\n"
    for line in (
        "vllm:request_success_total 10",
        'vllm:time_to_first_token_seconds_bucket{le="1"} 5',
        'vllm:time_to_first_token_seconds_bucket{le="2"} 9',
        "vllm:time_to_first_token_seconds_sum 9",
        "vllm:time_to_first_token_seconds_count 10",
        "vllm:num_requests_running 2",
    )
)


def test_a_histogram_without_its_last_bucket_ends_at_its_count(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text(PAGE)
    ttft = measure_replica([read_metrics_page(tmp_path / "m.txt")]).histograms["ttft"]
    assert ttft.find_quantile_bucket(0.95) == (2.0, float("inf"))
    assert ttft.bound_fraction_above(5.0)[0] == 0.0 and ttft.mean == 0.9


def serve_bytes(payload: bytes, pause_s: float = 0.0) -> str:
    """The address of a server that answers so, a byte at a time with a pause."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):  # the reader may hang up first
            connection.recv(4096)
            for byte in payload if pause_s else [payload]:
                connection.sendall(bytes([byte]) if isinstance(byte, int) else byte)
                time.sleep(pause_s)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/metrics"


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + PAGE.encode(), "is cut short"),
        (b"garbage\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "IncompleteRead"),
        (b"HTTP/1.1 302 F\r\nLocation: ftp://127.0.0.1/a\r\n\r\n", "ftp"),
        (b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\n\r\n", "not allowed"),
        (b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 0\r\n\r\n", r"\x1b[31mred"),
        (b"", "without response"),
    ],
)
def test_a_broken_answer_is_refused_in_a_line(payload: bytes, told: str) -> None:
    with pytest.raises(PlannerError) as refused:
        read_metrics_page(serve_bytes(payload))
    assert told in str(refused.value) and str(refused.value).isprintable()


def test_a_drip_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FETCH_DEADLINE_S", 0.5)
    with pytest.raises(PlannerError, match=r"no whole answer within 0\.5 s"):
        read_metrics_page(serve_bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", 0.05))


PLAN = {"layout": {"tp": 1, "replicas": 1}, "engine_args": {}, "quantization": "none", "gpu": "H100",
        "checkpoint": "meta-llama/Llama-3.1-8B-Instruct", "engine": "vllm",
        "engine_version": "0.20.2", "speculation": None}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"service_level": [{"metric": "speed", "percentile": "p95", "limit_ms": 1}]}, "metric"),
        ({"service_level": [{"metric": "ttft", "percentile": "p42", "limit_ms": 1}]}, "percentile"),
        ({"layout": {"tp": 1, "replicas": 0}}, "replicas"),
        ({"engine_args": []}, "engine_args"),
        ({"speculation": "eagle"}, "must be fields with values"),
        ({"planned_rps": -1}, "planned_rps"),
    ],
)
def test_a_plan_that_no_planner_wrote_is_refused(
    fields: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    assert load_planned_replica(path).deployment.gpu.name == "H100-SXM"
    path.write_text(json.dumps({**PLAN, **fields}))
    with pytest.raises(PlannerError, match=f"is not a plan.json of this planner.*{told}"):
        load_planned_replica(path)


def list_unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Whole numbers of a JSON schema that may be a thousand million."""
    if isinstance(schema, dict) and schema.get("type") == "integer":
        bound = schema.get("maximum", schema.get("exclusiveMaximum", 10**9))
        yield from [path] * (bound >= 10**9)
    for name, part in enumerate(schema) if isinstance(schema, list) else schema.items():
        if isinstance(part, dict | list):
            yield from list_unbounded(part, f"{path}.{name}")


@pytest.mark.parametrize(
    "entry", [ScenarioEntry, _EngineArgs, DeploymentEntry, ScheduleCaseConfig, FleetEntry]
)
def test_a_file_has_no_count_of_a_thousand_million(entry: type[StrictEntry]) -> None:
    unbounded = {*list_unbounded(entry.model_json_schema())}
    assert unbounded <= {".properties.engine_args.additionalProperties.anyOf.0"}  # `_EngineArgs`


@pytest.mark.parametrize(
    "column", [name for name, kind in INPUT_COLUMNS.items() if kind in ("size", "count")]
)
def test_a_row_has_no_count_of_a_thousand_million(column: str) -> None:
    row = {"model": "Qwen/Qwen3-8B", "gpu": "H100", "isl": "9", "osl": "9", "concurrency": "1"}
    answer = predict_row({**row, column: "1000000000"})
    assert answer["error"] in (
        f"{column}: expected a whole number from {least} to 100,000,000, got '1000000000'"
        for least in (0, 1)
    )
    if column in ENGINE_ARG_COLUMNS:
        with pytest.raises(PlannerError, match=f"{column} is 1000000000; it must be [01] to 1"):
            deploy_on("Qwen/Qwen3-8B", "H100", **{column: 10**9})


def test_a_case_of_too_many_blocks_is_refused_before_they_are_listed(tmp_path: Path) -> None:
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 10**6, "num_blocks": 99, "block_size": 1,
              "max_model_len": 10**8, "enable_prefix_caching": True}  # fmt: skip
    request = {"id": "a", "arrival_step": 0, "output_len": 5, "prompt": [["x", 10**8 - 9]]}
    (tmp_path / "c.json").write_text(json.dumps({"config": config, "requests": [request]}))
    with pytest.raises(PlannerError, match=r"1e\+08 steps or blocks"):
        read_schedule_case(tmp_path / "c.json")


def test_one_bound_of_adapters_and_ranks_everywhere() -> None:
    lengths = LengthDistribution.from_constant(9), LengthDistribution.from_constant(9)
    with pytest.raises(PlannerError, match="adapters must be 0 to 10,000"):
        Workload(*lengths, rate=1.0, adapters=2**31)
    with pytest.raises(PlannerError, match="dcp 1000000"):
        ParallelLayout(dcp=10**6)


@pytest.mark.parametrize(
    "words",
    [
        ["lint", "vllm serve Qwen/Qwen3-8B", "--to", "0.6.0"],
        ["lint", "vllm serve Qwen/Qwen3-8B --dtype.nan half"],
        ["lint", f"vllm serve Qwen/Qwen3-8B '--a {'a' * 310}'"],
    ],
)
def test_lint_answers_what_once_ended_it(words: list[str]) -> None:
    assert cli.main(words) in (0, 1)


def break_with(error: BaseException) -> Callable[[object], int]:
    def run(_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("a\x1b[31mb\nc"), "a bug of the planner"),
        (MemoryError(), "too little memory"),
        (OSError(28, "No space left on device", "/tmp"), "/tmp: No space left on device"),
        (RecursionError("deep"), "a bug of the planner"),
    ],
)
def test_what_no_command_expects_has_a_line_and_a_code_of_its_own(
    error: Exception,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("planner.ui.commands.data.format_columns", break_with(error))
    assert cli.main(["list", "scenarios"]) == cli.EXIT_FAILURE == 70
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and said.rstrip("\n").isprintable()


def run_planner(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "planner", *words], text=True, check=False,
        cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, **options,
    )  # type: ignore[call-overload]  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_told(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run_planner("list", "gpus", "H100", stdout=full)
    assert (done.returncode, done.stderr) == (70, "headroom: No space left on device\n")
    done = run_planner("list", "gpus", "H100", preexec_fn=lambda: os.close(1))
    assert done.returncode == 70 and done.stderr.startswith("headroom: stdout is closed")


def test_any_encoding_and_date_variable_is_taken_or_refused() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert (
        run_planner("list", "gpus", "H100", env=ascii_only, stdout=subprocess.DEVNULL).returncode
        == 0
    )
    done = run_planner("list", "gpus", env={**os.environ, "SOURCE_DATE_EPOCH": "x"})
    assert done.returncode == 2 and done.stderr.startswith("headroom: SOURCE_DATE_EPOCH")


def test_ctrl_c_while_modules_load_is_one_line() -> None:
    code = "import sys; sys.modules['planner.ui.cli'] = None\nfrom planner.__main__ import run\n"
    code += "import builtins; real = builtins.__import__\n"
    code += "def load(*a, **k):\n    if a[0] == 'planner.ui.cli': raise KeyboardInterrupt\n"
    code += "    return real(*a, **k)\nbuiltins.__import__ = load\nrun()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "headroom: interrupted\n")


@pytest.mark.parametrize(
    "option",
    ["--max-num-seqs -5", "--pipeline-parallel-size 0", "--port 99999999", "--block-size 8",
     "--kv-cache-dtype foo", "--max-model-len 0", "--quantization squeezellm",
     "--attention-backend XFORMERS"],
)  # fmt: skip
def test_values_that_no_engine_takes_are_findings(option: str) -> None:
    report = lint(f"vllm serve Qwen/Qwen3-8B {option}", "0.20.2")
    assert report.verdict == "mend" and report.commands[0].refuses_to_start


@pytest.mark.parametrize("value", ["auto", "-1", "8k"])
def test_a_context_that_the_engine_chooses_is_no_finding(value: str) -> None:
    assert lint(f"vllm serve Qwen/Qwen3-8B --max-model-len {value}", "0.20.2").verdict == "ok"


def test_a_format_that_a_gpu_lacks_is_a_finding() -> None:
    command = "vllm serve Qwen/Qwen3-0.6B --dtype {}"
    assert lint(command.format("bfloat16"), "0.10.0", gpu="T4").verdict == "mend"
    assert lint(command.format("float16"), "0.10.0", gpu="T4").verdict == "ok"
    assert lint(command.format("bfloat16"), "0.10.0", gpu="L4").verdict == "ok"


def test_a_draft_without_its_number_of_tokens_is_no_proposal() -> None:
    for options in ("--speculative-model a/b", "--num-speculative-tokens 5"):
        (report,) = lint(f"vllm serve Qwen/Qwen3-8B {options}", "0.20.2").commands
        assert "--speculative-config" not in report.fixed.command.argv


COMPOSE = """
services:
  llm:
    image: vllm/vllm-openai:v0.20.2
    entrypoint: {}
    command: [Qwen/Qwen3-8B, --enable-reasoning, --no-such-flag, --tensor-parallel-size, "3"]
    ipc: host
    deploy:
      resources:
        reservations:
          devices: [{{driver: nvidia, count: 3, capabilities: [gpu]}}]
"""


@pytest.mark.parametrize(
    "entrypoint",
    ['[bash, -c, "exec vllm serve \\"$$@\\"", --]', '[sh, -c, "vllm serve $$@", sh]',
     '[bash, -ec, "vllm serve $$1 $${2} $$3 $$4 $$5", x]', '[vllm, serve]'],
)  # fmt: skip
def test_a_script_gets_the_words_that_follow_it(entrypoint: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(COMPOSE.format(entrypoint))
    findings = {f.name: f.verdict for f in lint(str(tmp_path / "compose.yml")).findings}
    assert findings == {"--enable-reasoning": "removed", "--no-such-flag": "unknown",
                        "--tensor-parallel-size": "contradicts"}  # fmt: skip


@pytest.mark.parametrize("entrypoint", ["[/start.sh]", "[bash, /scripts/run.sh]", '"./go"'])
def test_a_script_that_is_not_read_is_said(entrypoint: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(COMPOSE.format(entrypoint))
    report = lint(str(tmp_path / "compose.yml"))
    assert [finding.verdict for finding in report.findings] == ["unread"]
    assert report.verdict == "at_risk" and "was not read" in str(report)


STAT_LINE = (
    "(APIServer pid=1) INFO 05-19 10:13:11 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0"
    " tokens/s, Avg generation throughput: 1055.3 tokens/s, Running: {} reqs, Waiting: {} reqs, GPU"
    " KV cache usage: {}%, Prefix cache hit rate: 0.0%\n"
)
SGLANG_LINE = (
    "[2025-09-01 10:00:00] Decode batch. #running-req: {}, #token: 190000, token usage: {}, cuda"
    " graph: True, gen throughput (token/s): 1500.0, #queue-req: {}, \n"
)


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (STAT_LINE.format(18, 43, "95.9") + STAT_LINE.format(20, 23, "98.4"), "kv_full"),
        (SGLANG_LINE.format(40, "0.97", 30), "kv_full"),
        (STAT_LINE.format(64, 90, "41.0"), "oversubscribed"),
        (SGLANG_LINE.format(48, "0.30", 200), "oversubscribed"),
        (STAT_LINE.format(18, 0, "97.0") + STAT_LINE.format(0, 0, "0.0"), "healthy"),
        (SGLANG_LINE.format(40, "0.55", 0), "healthy"),
    ],
)
def test_periodic_lines_say_why_requests_wait(lines: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(lines)
    diagnosis = diagnose(log=tmp_path / "server.log")
    assert diagnosis.to_json()["verdict"] == [verdict]
    assert "periodic line" in str(diagnosis)


EXCERPT = """
INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config:
  model='LGAI-EXAONE/EXAONE-4.0-32B-FP8', dtype=torch.bfloat16, max_seq_len=4096,
  tensor_parallel_size=1, quantization=fp8, enforce_eager=True, enable_prefix_caching=True
INFO [scheduler.py:205] Chunked prefill is enabled with max_num_batched_tokens=2048.
INFO [gpu_model_runner.py:2653] Model loading took 30.9891 GiB and 7.776333 seconds
INFO [gpu_worker.py:298] Available KV cache memory: 10.31 GiB
INFO [kv_cache_utils.py:1087] GPU KV cache size: 42,224 tokens
"""
"""Of a public log from an L40S, whose server ran with a utilization of 0.95."""


def test_an_excerpt_that_hides_its_utilization_implies_it(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(EXCERPT)
    explained = explain_log_file(tmp_path / "vllm.log", "L40S")
    assert explained.plan.deployment.args.gpu_memory_utilization == 0.95
    assert "Inferred: gpu_memory_utilization 0.95" in str(explained)
    assert explained.plan.pool.reported_tokens == pytest.approx(42_224, rel=0.01)
    assert all(line.value > 0 for line in explained.lines)


def test_a_model_can_be_named_for_a_log_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(
        EXCERPT.replace("model='LGAI-EXAONE/EXAONE-4.0-32B-FP8',", "")
    )
    with pytest.raises(PlannerError, match="does not name its model"):
        explain_log_file(tmp_path / "vllm.log", "L40S")
    model = "LGAI-EXAONE/EXAONE-4.0-32B-FP8"
    explained = explain_log_file(tmp_path / "vllm.log", "L40S", model=model)
    assert explained.plan.deployment.model.name == model


def test_a_log_that_ends_badly_clears_no_assumption(tmp_path: Path) -> None:
    lines = EXCERPT.partition("INFO [gpu_worker")[0]
    lines += "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    (tmp_path / "vllm.log").write_text(lines)
    explained = explain_log_file(tmp_path / "vllm.log", "L40S")
    assert "no assumption was off" not in str(explained)


def test_an_option_of_replay_that_does_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = str(tmp_path / "steps.csv")
    assert cli.main(["replay", "--scenario", "edge-8b-24gb", "--step-log", steps]) == 2
    assert "--step-log is written for a CASE.json only" in capsys.readouterr().err


def test_no_pinned_version_has_a_known_hole() -> None:
    """Advisories that pip-audit reported in public, by the release that closes them; checked on 2026-11-26."""
    root = Path(__file__).parents[1]
    pins = dict(
        line.strip().lower().replace("-", "_").split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    with (root / "tests/data/advisories.csv").open() as file:
        for row in csv.DictReader(file):
            pinned = pins[row["package"].lower()]
            assert Version(pinned) >= Version(row["fixed_in"]), row["advisory"]


@pytest.mark.parametrize("text", ["- x", "", "sizes: 3", "a: {b: c}"])
def test_a_catalog_without_a_section_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "fields.yaml").write_text(text)
    with pytest.raises(PlannerError, match=r"fields\.yaml, section sizes: expected names"):
        read_yaml_sections(tmp_path / "fields.yaml", "sizes")


@pytest.mark.parametrize("text", ["just text\n", "a: [1\n b: {", "", None])
def test_a_configuration_that_is_not_understood_is_not_ok(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    command = "vllm serve Qwen/Qwen3-8B --config c.yaml"
    report = lint(command, gpu="H100")
    assert report.verdict == "at_risk" and "what it sets is not known" in str(report)
    assert cli.main(["lint", command]) == 3


def test_a_pipe_is_no_file_of_commands(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["lint", str(tmp_path / "pipe")]) == 2


UNDERSTOOD_BY_NOBODY = {
    "text": b"hello world\nthis is no log\n",
    "bytes": bytes(range(256)),
    "none": b"",
}
COMMANDS_THAT_READ = (
    "lint {}", "diagnose --log {}", "diagnose {}", "explain-log {}", "profile {}", "check {}", "plan {}",
    "fleet {}", "verify {}", "verify chat-70b --log {}",
    "verify chat-70b --bench {}", "verify chat-70b --metrics {}", "predict {} --out o.csv",
    "calibrate {} --scenario chat-70b --out o.yaml",
    "plan chat-70b --set workload.trace={}", "diagnose --log x --plan {}", "report {}",
    "report {} chat-70b", "replay {}", "replay --scenario {}", "lab {}",
    "lint x --scenario {}", "explain-log {0} --command {0}", "calibrate {} --out o.yaml",
)  # fmt: skip
READS_NO_FILE = {"init", "list"}


def test_every_command_is_asked_about_what_it_does_not_understand() -> None:
    lists = cli.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    (commands,) = (action.choices for action in lists)
    asked = {command.split()[0] for command in COMMANDS_THAT_READ}
    assert {*commands} - READS_NO_FILE == asked  # type: ignore[misc]


@pytest.mark.parametrize("kind", UNDERSTOOD_BY_NOBODY)
@pytest.mark.parametrize("ending", sampled(["txt", "yaml", "csv", "json", "log"], ["yaml"]))
def test_no_command_is_content_with_what_it_does_not_understand(
    kind: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"file.{ending}"
    (tmp_path / name).write_bytes(UNDERSTOOD_BY_NOBODY[kind])
    (tmp_path / "x").write_text("INFO vllm\n")
    for command in COMMANDS_THAT_READ:
        try:
            code = cli.main(command.format(name).split())
        except SystemExit as end:
            code = int(end.code or 0)
        assert code in (2, 3), f"{command}: exit {code}"


LONG_NAME = "x" * 300  # file systems take 255 bytes


@pytest.mark.parametrize(
    "command",
    [f"verify {LONG_NAME}",
     f"diagnose --log a.log --plan {LONG_NAME}", f"init {LONG_NAME}.yaml", f"plan {LONG_NAME}.yaml",
     f"lint {LONG_NAME}", f"explain-log {LONG_NAME}", f"plan chat-70b --set workload.trace={LONG_NAME}"],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_unusable_input(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text("INFO vllm\n")
    assert cli.main(command.split()) == 2


@pytest.mark.parametrize("value", ["NaN", "inf", "-1", "1e3", "many"])
def test_a_log_with_a_value_that_no_engine_has_is_refused(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EXAMPLE_LOG.read_text()
    (tmp_path / "a.log").write_text(
        f"Defaulting max_num_batched_tokens to {value} for usage context.\n{log}"
    )
    assert cli.main(["verify", "chat-70b", "--log", str(tmp_path / "a.log")]) in (1, 2, 3)
    error = capsys.readouterr().err
    assert "bug" not in error and (not error or "max_num_batched_tokens" in error)


@pytest.mark.parametrize(
    ("text", "told"),
    [("[1, 2]: 3", "where a name has to"), ("a: !!timestamp x", "its tag"), ("a: !!bool x", "its tag"),
     ("a: &a [*a]", "stand for too much"),
     (f"a: &a {'x' * 9000}\nb: [{'*a, ' * 9000}]", "stand for too much"),  # 81 MB of text
     ("\n".join(["a: &a [x, x]", *(f"{b}: &{b} [*{a}, *{a}]" for a, b in pairwise(ascii_lowercase))]),
      "stand for too much")],
)  # fmt: skip
def test_yaml_is_refused_in_plain_words(text: str, told: str) -> None:
    with pytest.raises(PlannerError, match=told):
        parse_yaml(text, "a.yaml")


@pytest.mark.parametrize(
    "login", ["tcp://user:secret@", "tcp://user:sec/ret@", "user:sec@ret@", "ret:"]
)
def test_an_address_of_a_scheduler_has_no_login(login: str) -> None:
    with pytest.raises(PlannerError, match="without a login") as refused:
        next(_run_on_workers(lambda _: {}, [], f"{login}10.0.0.1:8786", 1))
    assert "ret" not in str(refused.value)


def test_json_with_half_a_letter_is_refused_and_with_a_whole_one_read() -> None:
    assert parse_json('{"a": "\\ud83d\\ude00"}', "a.json") == {"a": "\U0001f600"}
    with pytest.raises(PlannerError, match="half of a letter"):
        parse_json('{"a": ["\\ud800"]}', "a.json")


def test_one_bound_of_gpus_and_spares_before_work(tmp_path: Path) -> None:
    """No NVLink domain has over 256 GPUs; 320 decode DeepSeek-V3 (arXiv 2412.19437, 3.4.2)."""
    assert ParallelLayout(dp=320, ep=320).num_gpus == 320
    with pytest.raises(PlannerError, match="at most 256"):
        ParallelLayout(tp=257)
    plan = json.loads(json.dumps(PLAN))
    for change in ({"spare_replicas": 2**31}, {"layout": {**plan["layout"], "replicas": 2**31}}):
        (tmp_path / "plan.json").write_text(json.dumps({**plan, **change}))
        with pytest.raises(PlannerError, match="replicas"):
            load_planned_replica(tmp_path / "plan.json")
