"""What `planner.deploy` writes is accepted by the programs that will read it."""

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from launch_plans import TOKENIZER

from planner.core.errors import PlannerError
from planner.core.text import escape_to_one_line
from planner.deploy import LaunchSpec, build_launch
from planner.deploy import artifacts as deploy
from planner.engines.cli_options import get_cli_options
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import SpeculationConfig
from planner.hardware.prices import PriceSelection
from planner.latency.performance import Performance
from planner.planning.prediction import evaluate
from planner.planning.slo import SloTarget
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace
from planner.workload.workload import Workload

TARGETS = (
    SloTarget("ttft", "p99", 0.8),
    SloTarget("itl", "p95", 0.06),
    SloTarget("tpot", "mean", 0.05),
    SloTarget("e2e", "p50", 20.0),
)
WORKLOAD = Workload(
    LengthDistribution.from_lognormal(1000, 3000),
    LengthDistribution.from_lognormal(200, 500),
    rate=2.0,
    prefix_tokens=100,
)


def deployment(version: str = "0.20.2", engine_name: str = "vllm", **changes: object) -> Deployment:
    known = {
        "tp": 2,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "engine": engine_name,
        "engine_version": version,
    }
    named = {"model": "meta-llama/Llama-3.1-8B", "gpu": "H100"}
    return deploy_on(**{**named, **known, **changes})


def documents(served: Deployment) -> dict[str, str]:
    return deploy.render_artifacts(
        evaluate(served, WORKLOAD, PriceSelection({served.gpu.name: 4.0})), TARGETS
    )


def command(served: Deployment) -> LaunchSpec:
    return build_launch(evaluate(served, WORKLOAD))


VARIANTS = [
    {},
    {"pp": 2, "kv_cache_dtype": "fp8", "enforce_eager": True},
    {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8192,
    },
    {"speculation": SpeculationConfig("eagle3", 3, 0.7)},
    {"quantization": "fp8", "block_size": 32},
]


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
@pytest.mark.parametrize("changes", VARIANTS)
def test_every_flag_is_an_option_of_that_version_with_a_reason(version: str, changes: dict) -> None:
    found = command(deployment(version, **changes))
    known = get_cli_options("vllm", version).spellings
    assert {flag.name for flag in found.flags} <= known
    assert all(len(flag.reason) > 10 for flag in found.flags)
    # what argparse does: an exact option wins over any it is a prefix of, and no flag is given
    # twice
    assert len({flag.name for flag in found.flags}) == len(found.flags)
    assert shlex.split(str(found).replace("\\\n", " "))[:3] == [
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B",
    ]


def test_flags_that_guides_still_name_are_gone() -> None:
    gone = {
        "--swap-space",
        "--num-scheduler-steps",
        "--use-v2-block-manager",
        "--speculative-model",
        "--device",
        "--task",
    }
    for version in ("0.20.2", "0.33.0"):
        assert not gone & get_cli_options("vllm", version).spellings


def test_switching_a_default_off_is_spelled_as_the_version_spells_it() -> None:
    def off(version: str) -> str:
        names = [
            flag.name for flag in command(deployment(version, enable_prefix_caching=False)).flags
        ]
        return next(name for name in names if "prefix-caching" in name)

    assert off("0.20.2") == "--no-enable-prefix-caching"
    assert off("0.33.0") == "--disable-prefix-caching"


def test_speculation_travels_as_json() -> None:
    found = command(deployment(speculation=SpeculationConfig("ngram", 4, 0.5)))
    value = next(flag.value for flag in found.flags if flag.name == "--speculative-config")
    assert json.loads(value or "") == {"method": "ngram", "num_speculative_tokens": 4}


def test_only_what_an_engine_can_convert_is_converted() -> None:
    assert "--quantization fp8" in str(command(deployment(quantization="fp8")))
    text = str(command(deployment(quantization="awq")))
    assert "--quantization" not in text
    assert "${MODEL:?name its checkpoint quantized with awq}" in text


def test_an_older_version_is_not_given_flags_nobody_checked() -> None:
    assert "--shutdown-timeout" not in str(command(deployment("0.12.0")))


@pytest.mark.parametrize(("replica", "gpus", "port"), [("0", "0,1", "8000"), ("3", "6,7", "8003")])
def test_a_replica_starts_on_its_own_gpus_and_port(
    tmp_path: Path, replica: str, gpus: str, port: str
) -> None:
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "serve.sh").write_text(documents(deployment(replicas=4))["serve.sh"])
    done = subprocess.run(
        ["bash", tmp_path / "serve.sh", replica],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == gpus
    assert lines[lines.index("--port") + 1] == port
    assert lines[lines.index("--max-num-seqs") + 1] == "64"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_the_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    path = tmp_path / "headroom@.service"
    path.write_text(documents(deployment())["headroom@.service"])
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_benchmark_of_a_plan_that_reuses_a_traces_blocks_reuses_as_much() -> None:
    """A trace shares no one prefix: what its prompts find on average is what all of the benchmark's begin with."""
    reused = replace(WORKLOAD, prefix_tokens=0, prefix_hit_rate=0.4)
    prediction, cold = (
        evaluate(deployment(), load) for load in (reused, replace(reused, prefix_hit_rate=0.0))
    )
    assert (
        380 < prediction.effective_workload.mean_cached_tokens < 400
    )  # without those that are too long
    text = deploy.render_artifacts(prediction, TARGETS)["bench.sh"]
    prefix = int(prediction.effective_workload.mean_cached_tokens)
    assert f"PREFIX, LENGTHS = {prefix}, [" in text
    pairs = zip(
        deploy.predict_benchmark_ramp(prediction).values(),
        deploy.predict_benchmark_ramp(cold).values(),
        strict=True,
    )
    assert all(warm.get("ttft", "p50").mid < other.get("ttft", "p50").mid for warm, other in pairs)


def test_the_benchmark_sends_the_lengths_of_the_workload(tmp_path: Path) -> None:
    """By mean and p95, in tokens of the model; prompts share the prefix, and no two steps a prompt."""
    (tmp_path / "bench.sh").write_text(documents(deployment(max_model_len=65536))["bench.sh"])
    stub = tmp_path / "vllm"
    stub.write_text(
        '#!/bin/bash\n[[ "$*" == *"--dataset-name custom --dataset-path bench-prompts.jsonl --custom-output-len -1"* ]]'
        " && cat bench-prompts.jsonl >> sent\n"
    )
    stub.chmod(0o755)
    (tmp_path / "transformers.py").write_text(TOKENIZER)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "bench.sh"], cwd=tmp_path, env=path, check=True)
    sent = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    prompts = [["<s>", *each["prompt"].split()] for each in sent]
    lengths = np.array([[len(p) for p in prompts], [each["output_tokens"] for each in sent]])
    for side, mean, p95 in zip(lengths, (1000, 200), (3000, 500), strict=True):
        assert side.mean() == pytest.approx(mean, rel=0.03)
        assert np.quantile(side, 0.95) == pytest.approx(p95, rel=0.05)
    assert abs(np.corrcoef(lengths)[0, 1]) < 0.1
    assert len({tuple(p[:100]) for p in prompts if len(p) > 100}) == 1
    assert len({tuple(p) for p in prompts if len(p) > 110}) > 0.99 * (lengths[0] > 110).sum()


def test_the_benchmark_of_a_trace_sends_requests_of_it() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(50, 4000, 5000)
    trace = Trace(Path(), np.arange(5000) * 0.5, prompt, prompt // 10 + 1)
    sent = deploy.list_benchmark_lengths(evaluate(deployment(), Workload.from_trace(trace)))
    assert all(output == tokens // 10 + 1 for tokens, output in sent) and len(sent) == 100
    assert np.quantile([p for p, _ in sent], 0.95) == pytest.approx(
        np.quantile(prompt, 0.95), rel=0.02
    )


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        (
            "sglang",
            None,
            ["sglang.launch_server", "--tp-size", "--context-length", "--mem-fraction-static"],
        ),
        ("trtllm", None, ["trtllm-serve", "--tp_size", "--max_seq_len", "--config"]),
    ],
)
def test_other_engines_get_their_own_command(
    name: str, version: str | None, words: list[str]
) -> None:
    served = deployment(version, engine_name=name)
    text = documents(served)["serve.sh"]
    assert all(word in text for word in words)
    assert ("alerts.yml" in documents(served)) == (name == "sglang")


def test_a_version_without_the_option_is_one_clear_sentence() -> None:
    with pytest.raises(
        PlannerError, match=r"vllm 0\.10\.0 has no option --decode-context-parallel-size"
    ):
        command(deployment("0.10.0", tp=8, dcp=2, model="deepseek-ai/DeepSeek-V3"))


def test_a_short_name_is_served_under_itself_from_its_repository() -> None:
    """`vllm serve` takes a Hub id; clients keep the name that was written."""
    found = command(deploy_on("Llama-3.1-8B-Instruct", "L40S"))
    assert found.command[2] == "meta-llama/Llama-3.1-8B-Instruct"
    assert found.command[found.command.index("--served-model-name") + 1] == "Llama-3.1-8B-Instruct"


def test_the_line_that_is_printed_expands_the_variable_that_it_asks_for() -> None:
    """A checkpoint that has yet to be named: single quotes would hand the shell's own text to the engine."""
    found = command(deploy_on("meta-llama/Llama-3.1-8B-Instruct", "L40S", quantization="awq"))
    said = subprocess.run(
        ["bash", "-c", found.shell_lines[""]], capture_output=True, text=True, check=False
    )
    assert said.returncode != 0 and "MODEL: name its checkpoint" in said.stderr


NAMES = [
    """it's "quoted" `touch ran` $(touch ran) ${HOME}""",
    "two\nlines\r\ntouch ran\nExecStartPre=touch ran\n",
    "a # b: [c]  # d",
    "{{ 7 * 7 }} {% raw %} %i %% %n",
    "back\\slash\\n\\",
    "Ünï-模型 🚀 \u2028\x85\x7f",
    "![image](none.png) <b> | [link](u) **b**",
    "--option=1 ; touch ran",
    "9\u2029no\x85more  ",
]
ENGINES = {
    "vllm": "vllm",
    "sglang": "python",
    "trtllm": "trtllm-serve",
}


@cache
def plain(engine_name: str) -> tuple[Deployment, dict[float, Performance]]:
    """A deployment under its own name, and what its benchmark should measure."""
    base = deployment(None if engine_name != "vllm" else "0.20.2", engine_name)
    return base, deploy.predict_benchmark_ramp(evaluate(base, WORKLOAD))


@cache
def named(name: str, engine_name: str = "vllm") -> dict[str, str]:
    """What is written for a model of that name: one that serves as it does under its own."""
    base, predicted = plain(engine_name)
    with patch.object(deploy, "predict_benchmark_ramp", lambda _: predicted):
        return documents(replace(base, model=replace(base.model, name=name)))


def started(script: list[str], folder: Path, program: str) -> list[str]:
    """The arguments with which `script`, run by bash, starts the engine's program; nothing else may run."""
    (folder / "bin").mkdir(exist_ok=True)
    stub = folder / "bin" / program
    stub.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(folder / 'given'))}\n")
    stub.chmod(0o755)
    (folder / "transformers.py").write_text(TOKENIZER)
    path = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["bash", *script], env=path, cwd=folder, capture_output=True, check=True)
    assert not (folder / "ran").exists()
    return (folder / "given").read_bytes().decode().split("\0")[:-1]


CASES = [
    *(("vllm", name) for name in NAMES),
    *((other, "".join(NAMES)) for other in list(ENGINES)[1:]),
]


@pytest.mark.parametrize(("engine_name", "name"), CASES)
def test_the_engine_is_started_with_exactly_the_name(
    tmp_path: Path, engine_name: str, name: str
) -> None:
    written = named(name, engine_name)
    (tmp_path / "serve.sh").write_text(written["serve.sh"])
    execs = [line for line in written["headroom@.service"].splitlines() if line.startswith("Exec")]
    assert len(execs) == 1
    command = (
        execs[0]
        .removeprefix("ExecStart=")
        .replace(deploy.INSTALL_DIR, str(tmp_path))
        .replace("%i", "0")
        .split()
    )
    checkpoint = f"./{name}" if name.startswith("-") else name
    for script in ([str(tmp_path / "serve.sh")], command[1:]):
        arguments = started(script, tmp_path, ENGINES[engine_name])
        assert checkpoint in arguments
        if engine_name in ("vllm", "sglang"):
            place = [
                i for i, given in enumerate(arguments) if given.startswith("--served-model-name")
            ]
            served = arguments[place[0]].partition("=")[2] or arguments[place[0] + 1]
            assert (len(place), served) == (1, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_benchmark_asks_for_exactly_the_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "bench.sh").write_text(named(name)["bench.sh"])
    arguments = started([str(tmp_path / "bench.sh")], tmp_path, "vllm")
    assert (
        f"--model={'./' * name.startswith('-')}{name}" in arguments
        and f"--served-model-name={name}" in arguments
    )


@pytest.mark.parametrize("name", NAMES)
def test_alerts_ask_for_exactly_the_name(tmp_path: Path, name: str) -> None:
    text = named(name)["alerts.yml"]
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    for rule in rules:
        parts = rule["expr"].split("{model_name=")[1:]
        job = rule["expr"].split("up{job=")[1:]
        assert all(json.JSONDecoder().raw_decode(part)[0] == name for part in parts)
        assert parts or json.JSONDecoder().raw_decode(job[0])[0] == f"headroom/{name}"
    board = json.loads(named(name)["grafana.json"])
    assert board["title"].startswith(f"Headroom: {name} on TP2")
    assert (
        yaml.safe_load(named(name)["prometheus.yml"])["scrape_configs"][0]["job_name"]
        == f"headroom/{name}"
    )
    (tmp_path / "alerts.yml").write_text(text)
    if promtool := shutil.which("promtool"):
        done = subprocess.run(
            [promtool, "check", "rules", tmp_path / "alerts.yml"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_checklist_shows_the_name_as_text(name: str) -> None:
    from markdown_it import MarkdownIt

    heading = MarkdownIt().parse(named(name)["checklist.md"])[1].children or []
    assert {part.type for part in heading} <= {"text", "text_special"}
    shown = "".join(part.content for part in heading)
    assert shown.startswith(f"Before launch: {escape_to_one_line(name)} on TP2")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_scripts_pass_shellcheck(tmp_path: Path, name: str) -> None:
    for file in ("serve.sh", "bench.sh"):
        (tmp_path / file).write_text(named(name)[file])
        done = subprocess.run(
            ["shellcheck", tmp_path / file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
@pytest.mark.parametrize("name", NAMES)
def test_the_unit_is_read_without_complaint(tmp_path: Path, name: str) -> None:
    path = tmp_path / "headroom@.service"
    path.write_text(named(name)["headroom@.service"])
    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
@pytest.mark.parametrize("card", ["H100", "MI300X"])
def test_the_unit_is_little_exposed_and_sees_the_gpus(tmp_path: Path, card: str) -> None:
    served = deploy_on("meta-llama/Llama-3.1-8B", card, max_model_len=8192)
    path = tmp_path / "headroom@.service"
    path.write_text(unit := documents(served)["headroom@.service"])
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    settings = dict(
        line.split("=", 1) for line in unit.splitlines() if "=" in line and line[0] not in "#["
    )
    # each of these shuts /dev or /proc to what a GPU's runtime opens, or forbids the code that
    # engines compile
    assert (
        not {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "ProcSubset"}
        & settings.keys()
    )
    assert "MemoryDenyWriteExecute" not in settings and "PrivateNetwork" not in settings
    assert ("render" in settings.get("SupplementaryGroups", "")) == (
        card == "MI300X"
    )  # /dev/kfd is that group's
    assert settings["Environment"].count("%C/" + settings["CacheDirectory"]) == 2
