"""What is printed can be posted anywhere: no planted secret is shown, in whatever form and by whatever name."""

import json
from pathlib import Path

import pytest
import yaml

from planner.core.errors import PlannerError
from planner.core.redaction import MASK, is_secret_name, redact_json, redact_text
from planner.engines.cli_options import load_recorded_names
from planner.tools.diagnostics.metrics_pages import read_metrics_page
from planner.tools.lint.report import lint
from planner.ui.cli import main
from planner.workload.traces import read_trace

VARIABLES = (
    "DB_PASS", "PGPASS", "DB_PW", "MYTOKEN", "HF_TOKEN_2", "TOKEN_HF", "SECRET_VALUE", "KEY1",
    "ACCESSKEY", "CREDS", "JWT", "COOKIE", "ADO_PAT", "PRIVATE_KEY_B64", "VLLM_API_KEY",
    "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DATABASE_URL", "SENTRY_DSN",
    "HTTP_PROXY", "MONGO_URI", "WEBHOOK", "UNHEARD_OF", "X", "MYSQL_ROOT_PASSWORD",
)  # fmt: skip
OPTIONS = ("--db-pass", "--pin", "--my-setting", "--api-key", "--hf-token", "--license")
FORMS = (
    "https://hooks.slack.com/services/T0/B0/{}",
    "https://discord.com/api/webhooks/12345/{}",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==;EndpointSuffix=core.windows.net",
    "Endpoint=sb://a.net/;SharedAccessKeyName=n;SharedAccessKey={}",
    "https://a.blob.core.windows.net/c?sv=2022-11-02&sp=r&sig={}%3D",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential={0}/20261128&X-Amz-Signature={0}",
    "https://storage.googleapis.com/b/o?X-Goog-Signature={}",
    "https://user:{}@host/path",
    "AIza{}AAAAAAAAAAAAAAAAAAAAAAAA", "hf_{}", "ghp_{}AAAA", "github_pat_{}AAAA", "glpat-{}AAAA",
    "xoxb-1-{}AAAA", "sk-ant-{}AAAA", "sk_live_{}AAAA", "pypi-AgEIcHlwaS5vcmc{}", "npm_{}AAAAAAAAAAAA",
    "ya29.{}AAAA", "GOCSPX-{}AAAA", "gsk_{}AAAAAAAAAA", "eyJhbGciOiJIUzI1NiJ9.{0}.{0}",
    "SG.{0}AAAAAAAAAAAA.{0}AAAAAAAAAAAA", "nvapi-{}AAAA", "Authorization: Bearer {}", '{{"password": "{}"}}',
    '{{"auth": {{"api_key": "{}"}}}}', "password={}",
)  # fmt: skip
"""What such secrets look like, by their owners' documentation; {} is the planted one."""
PLANTED = "Zq7"  # part of every secret below, and of nothing else


def find_planted(*texts: str) -> list[str]:
    return [text[max(0, at - 40) : at + 20] for text in texts if (at := text.find(PLANTED)) >= 0]


def write_compose(path: Path, salt: str) -> str:
    secrets = [f"{PLANTED}{salt}{number:03}" for number in range(100)]
    command = ["--model", "Qwen/Qwen3-8B", "--max-model-len", "4096"]
    for option in OPTIONS:
        command += [option, secrets.pop()]
    command += [f"--other-setting={secrets.pop()}", "--served-model-name", f"hf_{secrets.pop()}"]
    command += ["--hf-overrides", json.dumps({"password": secrets.pop()})]
    environment = {name: secrets.pop() for name in VARIABLES}
    # under a harmless name too
    environment |= {
        f"SGLANG_{number}": form.format(secrets.pop()) for number, form in enumerate(FORMS)
    }
    service = {
        "image": "vllm/vllm-openai:v0.18.0",
        "command": command,
        "environment": {**environment, "NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "DEBUG"},
    }
    path.write_text(yaml.safe_dump({"services": {"llm": service}}))
    return str(path)


@pytest.mark.parametrize("gpu", [None, "H100"])
def test_no_planted_secret_is_shown(gpu: str | None, tmp_path: Path) -> None:
    report = lint(write_compose(tmp_path / "compose.yml", "a"), gpu=gpu, to="0.33.0")
    (command,) = (one["command"] for one in report.to_json()["commands"])
    assert find_planted(str(report), json.dumps(report.to_json())) == []
    # what is harmless is shown
    assert "NCCL_DEBUG=INFO" in command and "VLLM_LOGGING_LEVEL=DEBUG" in command


def write_service(**fields: object) -> str:
    service = {
        "image": "vllm/vllm-openai:v0.18.0",
        "command": ["--model", "Qwen/Qwen3-8B"],
        **fields,
    }
    return yaml.safe_dump({"services": {"llm": service}})


SERVED = "vllm serve Qwen/Qwen3-8B"
PLACES = {
    "unit": {
        f"[Service]\nExecStart=/usr/bin/{SERVED} \u2014api-key @\n",
        f"[Service]\nEnvironment=PIN=@\nExecStart=/usr/bin/{SERVED} --served-model-name $PIN\n",
        f"[Service]\nExecStart=/usr/bin/{SERVED} --auth-user bob @\n",
        f"[Service]\nExecStart=/usr/bin/env PIN=@ {SERVED} --nothing @\n",
    },
    "line": {
        f"{SERVED} --auth @", f"{SERVED} --auth=@", f"{SERVED} @", "vllm serve @", "vllm serve --port 8000 @",
        f"{SERVED} --dtype @", f"{SERVED} --max-model-len @", f"{SERVED} --trust-remote-code @ @",
        f"{SERVED} --additional-config '{{\"license\": \"@\"}}'", f"{SERVED} --additional-config '{{\"a\": [\"@\"]}}'",
        f"{SERVED} --additional-config '{{\"x\": @'", f"{SERVED} --additional-config.license @",
        f"{SERVED} --speculative-config '{{\"key\": \"@\"}}'", f"{SERVED} --hf-overrides '{{\"a\": {{\"b\": \"@\"}}}}'",
        f"{SERVED} --default-chat-template-kwargs '{{\"who\": \"@\"}}'", f"{SERVED} --api-key @ --swap-space 4",
        f"PIN=@; {SERVED} --chat-template $PIN", f"PIN=@\n{SERVED} --served-model-name a-$PIN-b",
        f"export A=@; {SERVED} --download-dir /x/$A", f"curl -H @ http://x && {SERVED} --max-num-seqs 8",
        "docker run -e PIN=@ vllm/vllm-openai:v0.18.0 --model Qwen/Qwen3-8B",
        "docker run --label @ vllm/vllm-openai:v0.18.0 --model Qwen/Qwen3-8B --seed @",
        "docker run --gpus all bob:@@hub/vllm/vllm-openai:v0.18.0 --model Qwen/Qwen3-8B",
        f"docker login -p @ hub && {SERVED} --max-num-seqs 8", f"bash -c '{SERVED} --pin @'", f"sh -c @ {SERVED} --pin",
        f"{SERVED} --chat-template https://bob:@@host/x", f"{SERVED} \\\n --max-num-seqs 8\n --auth @",
        f"HF_TOKEN=@ {SERVED} --enforce-eager", f"DB=@ {SERVED} --enforce-eager", f"'{SERVED} --auth @'",
        f"srun --container-image=bob:@@hub/x {SERVED}", f"{SERVED} '--auth @'", f"{SERVED} '#@'",
        f"{SERVED} --tensor-parallel-size $(cat @)", f"{SERVED} --max-model-len ${{LEN:-@}}",
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --auth @", f"sudo -p @ {SERVED} --max-num-seqs 8",
        f"VLLM_API_KEY=@ VLLM_NO_SUCH=@ {SERVED}", f"{SERVED} --seed=@",
    },
    "yaml": {
        write_service(environment={"DB_PASSWORD": "@"}), write_service(environment={"X": "@"}),
        write_service(healthcheck={"test": ["CMD", "curl", "-u", "bob:@", "http://127.0.0.1:9000"]}),
        write_service(healthcheck={"test": "curl -H 'X-Key: @' http://127.0.0.1:9000"}),
        write_service(labels={"x": "@"}), write_service(entrypoint=["/run.sh", "@"]),
        write_service(entrypoint="sh -c @"),
        write_service(command=["--model", "Qwen/Qwen3-8B", "--auth-user", "bob", "@"]),
        write_service(command="--model Qwen/Qwen3-8B --api-key @"),
        write_service(image="bob:@@hub/vllm-openai:v0.18.0"),
        write_service(environment=["X"]).replace("- X", "- X: !@ x"),
        write_service(labels=["X"]).replace("- X", "- &@"),
        write_service(labels=["X"]).replace("- X", "- *@"), write_service(labels=["X"]).replace("- X", "- X: [@"),
        yaml.safe_dump({"kind": "Secret", "stringData": {"x": "@"}}) + "---\n" + write_service(user="@"),
        yaml.safe_dump({"vllm": {"extraArgs": {"auth": {"user": "@"}}}}),
        yaml.safe_dump({"vllmConfig": {"maxModelLen": 8192, "gpuMemoryUtilization": 0.9, "licenseText": "@"}}),
        yaml.safe_dump({"vllmConfig": {"maxModelLen": 8192, "gpuMemoryUtilization": 0.9, "license-text": "@"}}),
        yaml.safe_dump({"engine": "vllm", "modelRef": "m", "vllmConfig": {"maxModelLen": "@", "dtype": "@"}}),
        "services: {llm: {image: 'vllm/vllm-openai:v0.18.0', command: '--model Qwen/Qwen3-8B', @",
    },
    "json": {
        json.dumps({"image": "vllm/vllm-openai:v0.18.0", "args": ["--auth", "@"], "env": {"X": "@"}}), '{"args": "@',
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in PLACES.items() for text in sorted(texts)]
)
def test_text_that_was_not_understood_is_never_shown(
    kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = (
        text.replace("@@", "\0").replace("@", PLANTED + "abcdef").replace("\0", PLANTED + "abcdef@")
    )
    path = tmp_path / f"llm.{'service' if kind == 'unit' else kind}"
    path.write_text(planted)
    what = planted if kind == "line" else str(path)
    for more in ([], ["--gpu", "L40S"], ["--json", "--to", "0.33.0"]):
        assert main(["lint", what, *more]) in (0, 1, 2, 3)
        assert find_planted(*capsys.readouterr()) == []


REFUSALS = (
    ["plan", "edge-8b-24gb", "--api-key", "@"], ["plan", "edge-8b-24gb", "@"], ["@"],
    ["plan", "edge-8b-24gb", "--time-limit", "@"],
    ["plan", "edge-8b-24gb", "--set", "workload.rate=@"],
    ["plan", "edge-8b-24gb", "--set", "engine_args.enforce_eager=@"],
    ["plan", "edge-8b-24gb", "--set", "model=https://bob:@@hub/Qwen3-8B"], ["verify", "x", "--replicas", "@"],
)  # fmt: skip


@pytest.mark.parametrize("words", REFUSALS, ids=" ".join)
def test_our_own_refusals_repeat_no_value(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    planted = [
        word.replace("@@", "\0").replace("@", PLANTED).replace("\0", f"{PLANTED}@")
        for word in words
    ]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(planted))
    assert ended.value.code == 2 and find_planted(*capsys.readouterr()) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_in_any_of_its_forms_is_masked(form: str) -> None:
    secret = form.format(f"{PLANTED}00000000")
    for text in (secret, f"got {secret!r}, expected a number", f"{secret} {secret}"):
        assert find_planted(redact_text(text), json.dumps(redact_json({"x": [text]}))) == [], text
    with pytest.raises(PlannerError) as refused:
        raise PlannerError(f"a value, got {secret}")
    assert find_planted(str(refused.value)) == []


LINES = (
    *FORMS, *(f"{name}={{}}" for name in VARIABLES), "export HF_TOKEN='{}'", "{}", "{},{}", "user:{}:1000",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_error_quotes_no_line_of_another_kind_of_file(line: str, tmp_path: Path) -> None:
    """A file of secrets is named for a trace or a page by mistake, and the answer posted."""
    for name, read in (
        ("t.csv", read_trace),
        ("t.jsonl", read_trace),
        ("page.txt", read_metrics_page),
    ):
        path = tmp_path / name
        path.write_text(f"{line.format(*[f'{PLANTED}0000000'] * 2)}\nsecond\n", encoding="utf-8")
        try:
            read(path)
        except PlannerError as error:
            assert find_planted(str(error)) == []


@pytest.mark.parametrize("option", ["--max-model-len", "--gpu-memory-utilization"])
def test_why_a_command_is_not_planned_repeats_no_token(option: str) -> None:
    text = str(lint(f"vllm serve Qwen/Qwen3-8B {option} hf_{PLANTED}00000", gpu="H100"))
    assert "Not planned" in text and find_planted(text) == []


def test_a_long_or_cut_token_is_masked_whole() -> None:
    """jwt.io: three parts of base64url, of any length; a log may cut it anywhere."""
    long = f"eyJ{'a' * 3000}.{'b' * 3000}{PLANTED}.{PLANTED}"
    for token in (long, f"eyJ{'a' * 3000}{PLANTED}", f"eyJhbGciOiJSUzI1NiJ9{PLANTED}"):
        assert redact_text(f"got {token} here") == f"got {MASK} here"
    # github.blog, 2021-04-05: npm_ and 36 characters
    assert redact_text(f"npm_{'aB3' * 12}") == MASK


def test_masks_leave_what_is_read() -> None:
    for text in (
        "--max-num-batched-tokens 8192 --tokenizer-mode auto",
        "time_per_output_token=12.5 eos_token_id=2 max_tokens: 300",
        "revision 5f0b02c75b57c5855da9ae460ce51323ea669d8a",
        "--served-model-name sk-8b --port 8000",
        "Bearer tokens are checked; Basic checks too",
        "npm_config_registry=https://registry.npmjs.org npm_lifecycle_event npm_execpath",
    ):
        assert redact_text(text) == text
    known = load_recorded_names("environment", "vllm")
    assert [name for name in known if is_secret_name(name)] == ["VLLM_API_KEY"]
