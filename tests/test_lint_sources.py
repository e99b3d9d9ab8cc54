"""What `headroom lint` reads of files, and that it says what it does not read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.core.errors import PlannerError
from planner.tools.lint.report import LintReport, lint
from planner.ui.cli import main


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)


def to_fix(report: LintReport) -> dict[str, str]:
    """Name -> verdict of all that needs a fix."""
    return {one.name: one.verdict for one in report.findings if one.needs_fix}


POSTED = yaml.safe_load(
    (Path(__file__).parent / "data" / "posted.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("posted", POSTED, ids=lambda posted: posted["source"].rpartition("/")[2])
def test_deployments_that_people_published(posted: dict[str, Any]) -> None:
    report = lint(posted["text"], posted.get("version"))
    assert len(report.commands) == posted.get("commands", 1)
    assert to_fix(report) == posted["finds"]
    assert not posted.get("form") or all(
        "Qwen/Qwen3-8B" in one.checked.command.line for one in report.commands
    )


SEARCHED = yaml.safe_load(
    (Path(__file__).parent / "data" / "searched.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", SEARCHED, ids=lambda case: case["source"])
def test_nothing_that_was_searched_for_is_wrong_in_silence(case: dict[str, Any]) -> None:
    version, gpu = case.get("version"), case.get("gpu")
    try:
        report = lint(case["text"], version and str(version), engine=case.get("engine"), gpu=gpu)
        verdict, told = str(report.verdict), str(report)
    except PlannerError as error:
        verdict, told = "error", str(error)
    assert verdict == case["verdict"] and case["told"] in told and "zzSECRETzz" not in told


NOWHERE_NAMED = {
    "a custom resource": """
apiVersion: acme.io/v1
kind: ModelDeployment
spec:
  template:
    workers:
    - name: w
      container:
        image: vllm/vllm-openai:v0.20.2
        args: [--model, Qwen/Qwen3-8B, --no-such-flag, --max-model-len, "900000"]
        resources: {limits: {nvidia.com/gpu: 1}}
""",
    "a job of Nomad": """{"Job": {"ID": "llm", "TaskGroups": [{"Tasks": [{"Name": "vllm", "Driver": "docker",
 "Config": {"image": "vllm/vllm-openai:v0.20.2",
 "args": ["--model", "Qwen/Qwen3-8B", "--no-such-flag", "--max-model-len", "900000"]}}]}]}}""",
    "a drop-in of systemd": "[Service]\nExecStart=\nExecStart=/opt/vllm/bin/vllm \\\n    serve Qwen/Qwen3-8B \\\n"
    "    # kept\n    --no-such-flag \\\n    --max-model-len 900000\n",
}


@pytest.mark.parametrize("text", NOWHERE_NAMED.values(), ids=NOWHERE_NAMED)
def test_a_form_that_no_code_names_is_read(text: str) -> None:
    found = to_fix(lint(text, "0.20.2"))
    assert found == {"--no-such-flag": "unknown", "--max-model-len": "contradicts"}


WRONG = {
    "--enable-reasoning": "removed",
    "--no-such-flag": "unknown",
    "--tensor-parallel-size": "contradicts",
}
"""vLLM 0.20.2 has neither of two, and 3 divides no 32 heads."""
WORDS = ["Qwen/Qwen3-8B", "--enable-reasoning", "--no-such-flag", "--tensor-parallel-size", "3"]


def write_service(**service: object) -> str:
    service = {"image": "vllm/vllm-openai:v0.20.2", "gpus": "all", "ipc": "host", **service}
    return yaml.safe_dump({"services": {"llm": service}})


STARTED = {
    "entrypoint that hands on": {
        "entrypoint": ["/bin/bash", "-c", 'exec vllm serve "$$@"', "--"],
        "command": WORDS,
    },
    "entrypoint of several lines": {
        "entrypoint": ["bash", "-c", 'set -e\nexec vllm serve "$$@" --max-num-seqs 8\n', "--"],
        "command": WORDS,
    },
    "a text of several lines": {"command": "Qwen/Qwen3-8B\n" + "\n".join(WORDS[1:])},
    "a mounted script": {
        "entrypoint": ["/bin/sh", "/opt/start.sh"],
        "command": WORDS,
        "volumes": ["./mine.sh:/opt/start.sh:ro"],
    },
    "a mounted script alone": {
        "entrypoint": "/opt/whole.sh",
        "volumes": [{"type": "bind", "source": "./whole.sh", "target": "/opt/whole.sh"}],
    },
    "variables of .env": {"command": "${MODEL} ${REST} --tensor-parallel-size ${TP:-3}"},
    "variables of a file": {
        "entrypoint": ["sh", "-c", "exec vllm serve $$MODEL $$REST --tensor-parallel-size 3"],
        "env_file": [".env"],
    },
}  # fmt: skip
BESIDE = {
    "mine.sh": '#!/bin/sh\nexec vllm serve "$@"\n',
    "whole.sh": f"#!/bin/sh\nexec vllm serve {' '.join(WORDS)}\n",
    ".env": "MODEL=Qwen/Qwen3-8B\nREST='--enable-reasoning --no-such-flag'\n",
}


@pytest.mark.parametrize("service", STARTED.values(), ids=STARTED)
def test_a_compose_service_is_read_however_it_starts(
    service: dict[str, object], tmp_path: Path
) -> None:
    for name, text in {**BESIDE, "compose.yaml": write_service(**service)}.items():
        (tmp_path / name).write_text(text)
    assert to_fix(lint(str(tmp_path / "compose.yaml"))) == WRONG


def test_a_script_of_a_config_map_is_read_where_it_is_started() -> None:
    script = '#!/bin/bash\nexec vllm serve "$MODEL" --enable-reasoning --no-such-flag "$@"\n'
    container = {
        "image": "vllm/vllm-openai:v0.20.2",
        "command": ["/bin/bash", "/scripts/run.sh"],
        "args": ["--tensor-parallel-size", "3"],
        "env": [{"name": "MODEL", "value": "Qwen/Qwen3-8B"}],
        "resources": {"limits": {"nvidia.com/gpu": 3}},
    }
    pod = {"kind": "Pod", "spec": {"containers": [container], "hostIPC": True}}
    config = {"kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"run.sh": script}}
    report = lint(yaml.safe_dump_all([config, pod]))
    assert len(report.commands) == 1 and to_fix(report) == WRONG


@pytest.mark.parametrize(
    "text",
    [
        f'A="{" ".join(WORDS[1:3])}"\nA+=" {" ".join(WORDS[3:])}"\neval vllm serve {WORDS[0]} $A\n',
        f'sh -c \'exec vllm serve "$0" "$@"\' {" ".join(WORDS)}',
        f'M="${{1:-Qwen/Qwen3-8B}}"\nvllm serve "$M" {" ".join(WORDS[1:])}',
    ],
)
def test_what_a_shell_fills_in_is_filled_in(text: str) -> None:
    assert to_fix(lint(text, "0.20.2")) == WRONG


def test_a_hash_in_a_folded_text_is_no_comment() -> None:
    (found,) = [
        one
        for one in lint(write_service(command="Qwen/Qwen3-8B\n# --max-num-seqs 8\n")).findings
        if one.needs_fix
    ]
    assert found.written == "#" and "no comment" in found.why


UNREAD = {
    "/opt/start.sh": {"entrypoint": ["/opt/start.sh"], "command": WORDS},
    "${EXTRA}": {"command": "Qwen/Qwen3-8B --max-num-seqs 8 ${EXTRA}"},
    "--max-model-len": {"command": ["Qwen/Qwen3-8B", "--max-model-len=${LENGTH}"]},
    "${MODEL}": {"command": ["${MODEL}", "--max-num-seqs", "8"]},
    "env_file": {"command": ["Qwen/Qwen3-8B"], "env_file": "vllm.env"},
    "vllm.yaml": {"command": ["Qwen/Qwen3-8B", "--config", "vllm.yaml"]},
}


@pytest.mark.parametrize(("name", "service"), UNREAD.items())
def test_what_is_not_here_is_said_to_be_unread(
    name: str, service: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "compose.yaml").write_text(write_service(**service))
    report = lint(str(tmp_path / "compose.yaml"))
    (unread,) = [one for one in report.findings if one.verdict == "unread"]
    assert name in f"{unread.name} {unread.written}" and report.verdict == "at_risk"


@pytest.mark.parametrize("end", ["", "\\ ", "\\\n  # --max-num-seqs 8 \\"])
def test_options_that_a_line_cuts_off_are_still_read(end: str) -> None:
    text = f"vllm serve Qwen/Qwen3-8B \\\n  --enable-reasoning {end}\n  {' '.join(WORDS[2:])}\n"
    (report,) = lint(text, "0.20.2").commands
    found = [one for one in report.checked.findings if one.needs_fix]
    assert {one.name: one.verdict for one in found if one.kind == "flag"} == WRONG
    (cut,) = [one for one in found if one.kind == "setting"]
    assert cut.verdict == "contradicts" and "the shell takes these options for a command" in cut.why
    assert "--tensor-parallel-size 3" in report.fixed.command.line


def test_one_word_of_several_is_no_program() -> None:
    pod = {
        "kind": "Pod",
        "spec": {
            "containers": [
                {
                    "image": "vllm/vllm-openai:v0.20.2",
                    "command": ["vllm serve Qwen/Qwen3-8B"],
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                }
            ]
        },
    }
    assert to_fix(lint(yaml.safe_dump(pod))) == {"vllm serve": "contradicts"}
    with pytest.raises(PlannerError, match="no server starts"):
        lint("sh -c vllm serve Qwen/Qwen3-8B")  # the shell runs its first word


def test_what_a_text_sets_twice_is_known_only_where_it_runs() -> None:
    text = "N=7\nif [ $OFF ]; then N=0; fi\nvllm serve Qwen/Qwen3-8B --max-num-seqs {}\n"
    assert to_fix(lint(text.format("$N"))) == {"--max-num-seqs": "unread"}
    assert not to_fix(lint(text.format(8)))
    assert to_fix(lint(text.format("${NUM:+8}"))) == {"--max-num-seqs": "unread"}


def write_deployment(
    pod: dict[str, object], container: dict[str, object], service: str = "llm"
) -> str:
    container = {
        "name": "llm",
        "image": "vllm/vllm-openai:v0.20.2",
        "args": ["Qwen/Qwen3-32B", "--tensor-parallel-size", "2"],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
        **container,
    }
    spec = {"template": {"spec": {"containers": [container], **pod}}}
    return yaml.safe_dump_all(
        [
            {"kind": "Service", "metadata": {"name": service}},
            {"kind": "Deployment", "metadata": {"name": "llm"}, "spec": spec},
        ]
    )


SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}
MOUNT = {"name": "shm", "mountPath": "/dev/shm"}


@pytest.mark.parametrize(
    ("pod", "container", "found"),
    [
        ({}, {}, "/dev/shm"),  # vllm-project/vllm pull 19377: Kubernetes gives 64 MiB
        ({"volumes": [SHM]}, {"volumeMounts": [MOUNT]}, None),
        ({"volumes": [SHM]}, {"volumeMounts": [{**MOUNT, "mountPath": "/cache"}]}, "/dev/shm"),
        ({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "256Mi"}}]},
         {"volumeMounts": [MOUNT]}, "/dev/shm"),
        ({"volumes": [{"name": "shm", "hostPath": {"path": "/dev/shm"}}]}, {"volumeMounts": [MOUNT]}, None),
        ({"hostIPC": True}, {}, None),
        ({"hostIPC": True}, {"resources": {}}, "GPUs"),
        # a start with the weights on the machine took 84-150 s in public logs of this size
        ({"hostIPC": True}, {"livenessProbe": {"initialDelaySeconds": 30, "periodSeconds": 5}},
         "livenessProbe"),
        ({"hostIPC": True}, {"livenessProbe": {"initialDelaySeconds": 600}}, None),
        ({"hostIPC": True}, {"startupProbe": {"periodSeconds": 5, "failureThreshold": 6}}, "startupProbe"),
        ({"hostIPC": True},
         {"startupProbe": {"failureThreshold": 120}, "livenessProbe": {"periodSeconds": 5}}, None),
        ({"hostIPC": True}, {"readinessProbe": {"periodSeconds": 5}}, None),
    ],
)  # fmt: skip
def test_what_a_pod_gives_its_server(
    pod: dict[str, object], container: dict[str, object], found: str | None
) -> None:
    assert [*to_fix(lint(write_deployment(pod, container)))] == [found] * bool(found)


def test_a_service_named_vllm_sets_vllm_port() -> None:
    """vllm-project/vllm issue 34199 and pull 18209: the server ends over a VLLM_PORT with a URI."""
    whole = {"hostIPC": True}
    (found,) = [one for one in lint(write_deployment(whole, {}, "vllm")).findings if one.needs_fix]
    assert found.refused and "VLLM_PORT" in found.why
    assert not to_fix(lint(write_deployment(whole, {}, "vllm-server")))
    assert not to_fix(lint(write_deployment({**whole, "enableServiceLinks": False}, {}, "vllm")))
    port = {"env": [{"name": "VLLM_PORT", "value": "5555"}]}
    assert not to_fix(lint(write_deployment(whole, port, "vllm")))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--gpus all", ["/dev/shm"]),
        ("--gpus all --ipc=host", []),
        ("--gpus all --ipc host", []),
        ("--gpus all --shm-size 16g", []),
        ("--gpus all --shm-size=128m", ["/dev/shm"]),
        ("--gpus all -v /dev/shm:/dev/shm -v a:b", []),
        ("--runtime nvidia --ipc=host", []),
        ("--ipc=host", ["GPUs"]),
        ("--gpus '\"device=0\"' --ipc=host", ["GPUs"]),  # two ranks on one
    ],
)
def test_what_docker_gives_its_server(options: str, found: list[str]) -> None:
    line = f"docker run {options} vllm/vllm-openai:v0.20.2 --model Qwen/Qwen3-8B -tp 2"
    assert [*to_fix(report := lint(line))] == found
    if "--shm-size=128m" in options:
        assert "the container has 128 MiB of it" in " ".join(str(report).split())


@pytest.mark.parametrize(
    ("service", "found"),
    [
        ({"ipc": "private"}, ["/dev/shm"]),
        ({"ipc": "private", "shm_size": "16gb"}, []),
        ({"ipc": "private", "tmpfs": ["/dev/shm:size=8g"]}, []),
        ({"gpus": None}, ["GPUs"]),
        ({"gpus": None, "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}, []),
        ({"gpus": None, "runtime": "nvidia"}, []),
    ],
)
def test_what_compose_gives_its_server(service: dict[str, object], found: list[str]) -> None:
    text = write_service(**{"command": ["Qwen/Qwen3-8B", "-tp", "2"], **service})
    assert [*to_fix(lint(text))] == found


NOT_READ = {
    "Nomad": 'job "a" {\n task "b" {\n  config {\n   image = "vllm/vllm-openai:v0.20.2"\n  }\n }\n}\n',
    "PowerShell": "docker run --gpus all `\n  vllm/vllm-openai:v0.20.2 `\n  --model Qwen/Qwen3-8B",
    "cmd": "docker run --gpus all ^\r\n  vllm/vllm-openai:v0.20.2 --model Qwen/Qwen3-8B",
    "a guide": "# Serve\n\n```bash\nvllm serve Qwen/Qwen3-8B --no-such\n```\n",
    "many arguments": 'task "a" {\n' + "args = [\n" * 10**5,
}


@pytest.mark.parametrize("text", NOT_READ.values(), ids=NOT_READ)
def test_a_format_that_is_not_read_is_told(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.txt"
    path.write_text(text)
    assert main(["lint", str(path)]) == 3
    assert capsys.readouterr().out.startswith("Not judged: a ")


def write_two_services(first: object, second: object, **more: object) -> str:
    """Two servers, which are given these GPUs and take 0.45 and 0.6 of their memory."""
    services = {
        name: {
            "image": "vllm/vllm-openai:v0.20.2", "ipc": "host", **more,
            "command": f"--model Qwen/Qwen3-8B --max-model-len 8192 --gpu-memory-utilization {share}",
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        }
        for name, share, gpus in (("a", 0.45, first), ("b", 0.6, second))
    }  # fmt: skip
    return yaml.safe_dump({"services": services})


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"device_ids": ["0"]}, {"device_ids": ["0"]}, True),
        ({"device_ids": ["0"]}, {"device_ids": ["1"]}, False),
        # moby daemon/nvidia_linux.go: a count is that of the first GPUs, whoever has them already
        ({"count": 1}, {"count": 1}, True),
        ({"count": "all"}, {"device_ids": ["0"]}, True),
        ({"count": "all"}, {"device_ids": ["1"]}, False),
        ({"device_ids": ["GPU-8f2a"]}, {"device_ids": ["GPU-8f2a"]}, True),
    ],
)
def test_two_services_on_one_gpu_ask_for_more_than_all_of_it(
    first: object, second: object, shared: bool
) -> None:
    """0.45 + 0.6: vLLM refuses a share that is not free (v1/worker/utils.py, request_memory)."""
    text = write_two_services(first, second)
    option = {"--gpu-memory-utilization": "contradicts"} if shared else {}
    assert to_fix(lint(text)) == option
    report = lint(text, gpu="A100-80GB")
    assert [bool(one.plan and one.plan.memory.can_start) for one in report.commands] == [
        not shared
    ] * 2
    if shared:
        assert "with services.b on its GPU" in str(report)
        assert all("starts last" in one.not_planned_reason for one in report.commands)
    assert "0.95" not in str(report)


def test_services_of_other_profiles_never_run_together() -> None:
    here = {"device_ids": ["0"]}
    document = yaml.safe_load(write_two_services(here, here))
    for name, service in document["services"].items():
        service["profiles"] = [name]
    assert not to_fix(lint(yaml.safe_dump(document)))


def test_a_share_below_the_default_is_raised_only_to_start() -> None:
    served = "vllm serve Qwen/Qwen3-8B --max-model-len {} --gpu-memory-utilization {}"
    report = lint(served.format(8192, 0.45), "0.20.2", gpu="A100-80GB")
    assert not report.commands[0].fixed.diff
    report = lint(served.format(40960, 0.2), "0.20.2", gpu="A100-80GB")
    assert "gpu_memory_utilization: it starts" in str(report)


def test_detached_containers_of_a_script_share_their_gpu() -> None:
    run = "docker run -d --gpus '\"device=0\"' vllm/vllm-openai:v0.20.2 --model Qwen/Qwen3-8B\n"
    assert to_fix(lint(run + run)) == {"--gpu-memory-utilization": "contradicts"}
    assert not to_fix(lint(run + run.replace("=0", "=1")))
    assert not to_fix(lint((run + run).replace(" -d", "")))  # one after the other


def test_servers_in_the_background_of_a_script_share_their_gpus() -> None:
    """ovg-project/kvcached issue 210: the second finds the memory of all eight GPUs taken."""
    run = "{}vllm serve Qwen/Qwen3-8B --port {}{}\n"
    both = run.format("", 8000, " &") + run.format("", 8001, "")
    assert to_fix(lint(both)) == {"--gpu-memory-utilization": "contradicts"}
    assert not to_fix(lint(both.replace(" &", "")))  # one after the other
    apart = run.format("CUDA_VISIBLE_DEVICES=0 ", 8000, " &") + run.format(
        "CUDA_VISIBLE_DEVICES=1 ", 8001, " &"
    )
    assert not to_fix(lint(apart))
    assert to_fix(lint(apart.replace("=1", "=0")))
    away = "ssh a 'vllm serve Qwen/Qwen3-8B' &\nssh b 'vllm serve Qwen/Qwen3-8B' &\n"
    assert not to_fix(lint(away))
    parts = "vllm serve Qwen/Qwen3-8B -dp 2 --data-parallel-size-local 1{}\n"
    assert not to_fix(lint(parts.format(" &") + parts.format(" --headless")))


def test_lines_of_a_text_that_no_shell_reads_are_one_command() -> None:
    """As llama-swap's `cmd: |` (vllm issue 26431): it splits at blanks and line breaks alike."""
    command = "vllm serve Qwen/Qwen3-8B\n  --port 8000\n  --max-num-seqs 8\n"
    report = lint(yaml.safe_dump({"models": {"q": {"cmd": command, "ttl": 60}}}))
    assert not to_fix(report) and report.commands[0].checked.argument_values["max_num_seqs"] == 8


def test_an_image_of_somebodys_own_is_read_by_the_options_that_it_is_given() -> None:
    """As llm-d issue 139 and its LLMInferenceService: the tag is not the engine's version."""
    words = "--model Qwen/Qwen3-8B --max-num-seqs 8 --no-such-flag"
    line = f"docker run --gpus all --ipc=host ghcr.io/llm-d/llm-d-rocm:v0.6.0 {words}"
    (one,) = lint(line).commands
    assert to_fix(lint(line)) == {"--no-such-flag": "unknown"} and not one.checked.command.version
    container = {
        "name": "main",
        "image": "ghcr.io/llm-d/llm-d-cuda:v0.8.1",
        "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--max-num-seqs 8 --no-such-flag"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    spec = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "template": {"containers": [container]}}
    report = lint(yaml.safe_dump({"kind": "LLMInferenceService", "spec": spec}))
    assert to_fix(report) == {"--no-such-flag": "unknown"}
    assert "Qwen/Qwen3-8B" in report.commands[0].checked.command.line


def test_names_that_are_no_options_are_no_abbreviations_either() -> None:
    """KServe's `parallelism: {data: 8, expert: true}` is not `--data 8`."""
    parallelism = {"data": 8, "dataLocal": 8, "expert": True, "tensor": 1}
    args = ["--model", "Qwen/Qwen3-8B", "--max-num-seqs", "8"]
    container = {"image": "vllm/vllm-openai:v0.20.2", "args": args}
    spec = {"parallelism": parallelism, "template": {"containers": [container]}}
    assert "unknown" not in to_fix(lint(yaml.safe_dump({"kind": "X", "spec": spec}))).values()


@pytest.mark.parametrize("second", ["vllm serve Qwen/Qwen3-8B", "vllm bench serve --model m"])
def test_a_line_after_docker_run_is_a_command_of_its_own(second: str) -> None:
    first = "docker run --gpus all vllm/vllm-openai:v0.20.2 --model Qwen/Qwen3-8B --swap-space 4"
    report = lint(f"{first}\n{second}\n")
    assert to_fix(report) == {"--swap-space": "removed"}
    assert len(report.commands) == 1 + second.startswith("vllm serve")


def test_what_an_operator_makes_of_other_keys_is_not_known() -> None:
    resource = {
        "apiVersion": "inference.example.org/v1", "kind": "InferenceService",
        "spec": {"runtime": "vllm", "modelRef": "elsewhere", "parallelSlots": 6,
                 "vllmConfig": {"maxModelLen": 8192, "cacheTier": 2}},
    }  # fmt: skip
    report = lint(yaml.safe_dump(resource))
    (one,) = report.commands
    assert one.checked.argument_values["max_model_len"] == 8192
    assert to_fix(report) == dict.fromkeys(
        ("spec.modelRef", "parallelSlots", "vllmConfig.cacheTier"), "unread"
    )
    assert report.verdict == "at_risk"


def test_what_holds_options_and_is_not_read_is_told() -> None:
    chart = {"vllm": {"image": "vllm/vllm-openai", "extraArgs": {"nested": {"speed": "high"}}}}
    assert [*to_fix(lint(yaml.safe_dump(chart))).values()] == ["unread"]


def test_promql_is_read_in_any_text_and_with_an_underscore(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    page.write_text(
        "| a | `rate(vllm:num_preemptions[5m])` |\n| b | `vllm:no_such_metric_total` |\n"
    )
    assert to_fix(lint(str(page))) == {"vllm:no_such_metric_total": "unknown"}
    rules = "groups:\n- rules:\n  - expr: rate(vllm_request_success_total[5m]) == 0\n"
    (found,) = lint(rules).findings
    assert (found.verdict, found.instead) == ("unknown", "vllm:request_success_total")


def test_what_is_fixed_is_reached_from_outside() -> None:
    text = write_service(
        command="--model Qwen/Qwen3-8B --host 127.0.0.1 --swap-space 4", ports=["8000:8000"]
    )
    report = lint(text)
    (one,) = report.to_json()["commands"]
    assert "--host 0.0.0.0" in one["better"] and "127.0.0.1" not in one["better"]
    assert {each["rule"] for each in one["findings"] if each["name"] == "--host"} == {
        "a loopback that nobody reaches"
    }
