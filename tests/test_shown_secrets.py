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


def test_what_is_harmless_is_shown() -> None:
    line = "NCCL_DEBUG=INFO VLLM_LOGGING_LEVEL=DEBUG vllm serve Qwen/Qwen3-8B --swap-space 4"
    (command,) = (one["command"] for one in lint(line, "0.18.0").to_json()["commands"])
    assert command.startswith("NCCL_DEBUG=INFO VLLM_LOGGING_LEVEL=DEBUG vllm serve Qwen/Qwen3-8B")


PLACES = yaml.safe_load(
    (Path(__file__).parent / "data" / "planted.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in PLACES.items() for text in texts]
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


@pytest.mark.parametrize("line", [
    "ValueError: could not reach {}", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {}",
    "huggingface_hub.errors.RepositoryNotFoundError: 401 for {}", "RuntimeError: {}",
])  # fmt: skip
def test_what_a_log_says_beside_what_is_known_is_not_shown(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"INFO Model loading took 14.99 GiB memory\n{line.format('Zq7plainwords')}\n")
    for words in (["explain-log", str(log)], ["explain-log", str(log), "--gpu", "L40S", "--model", "Qwen/Qwen3-8B"],
                  ["diagnose", "--log", str(log)]):  # fmt: skip
        for form in ([], ["--json"]):
            main([*words, *form])
            out = capsys.readouterr()
            assert not find_planted(out.out, out.err)
