"""`headroom review` comments on what a pull request does to a server."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import plan_memory
from planner.planning.scenario import load_scenario
from planner.tools.lint.review import review_change
from planner.ui.cli import main

BASE = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --max-num-seqs 64"
COMPOSE = """services:
  llm:
    image: vllm/vllm-openai:v0.20.2
    command: --model Qwen/Qwen3-8B {}
"""


def write_commits(folder: Path, *contents: str) -> list[Path]:
    """Commit each content of compose.yaml, and return a checkout of each commit's file."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    for k, content in enumerate(contents):
        (folder / "compose.yaml").write_text(content)
        git("add", "compose.yaml")
        git("commit", "-q", "-m", f"state {k}")
    paths = []
    for k in range(len(contents)):
        place = folder / f"side{k}"
        git("worktree", "add", "-q", "--detach", str(place), f"HEAD~{len(contents) - 1 - k}")
        paths.append(place / "compose.yaml")
    return paths


def test_a_scripted_pull_request_is_commented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shorter cache of each request: 4,096 tokens; an option that vLLM 0.20.2 no longer has."""
    old, new = write_commits(
        tmp_path,
        COMPOSE.format("--max-model-len 8192 --gpu-memory-utilization 0.80"),
        COMPOSE.format("--max-model-len 4096 --gpu-memory-utilization 0.90 --swap-space 4"),
    )
    assert main(["review", str(old), str(new), "--gpu", "H100"]) == 1
    comment = capsys.readouterr().out
    assert comment.startswith("### Needs a fix\n")
    assert "**New, removed**: `--swap-space 4`" in comment
    assert "| `--max-model-len` | `8192` | `4096` |" in comment
    for name in ("KV cache, tokens", "capacity, requests/s", "p95 TTFT, ms", "GPUs, \\$/h"):
        assert re.search(rf"^\| {re.escape(name)} \|", comment, re.MULTILINE), name
    sizes = [
        plan_memory(
            deploy_on(
                "Qwen/Qwen3-8B", "H100", engine_version="0.20.2", max_model_len=length,
                gpu_memory_utilization=utilization,
            )
        ).kv_available.mid
        for length, utilization in ((8192, 0.8), (4096, 0.9))
    ]  # fmt: skip
    row = next(line for line in comment.splitlines() if line.startswith("| KV cache, GiB"))
    assert [float(cell) for cell in re.findall(r"\| ([\d.]+)", row)] == pytest.approx(
        [size / 2**30 for size in sizes], rel=0.01
    )
    # the other way round the finding is gone, and nothing fails
    assert main(["review", str(new), str(old)]) == 0
    assert "- Gone, removed: `--swap-space 4`" in capsys.readouterr().out
    assert main(["review", str(old), str(new), "--fail-on", "never"]) == 0


def test_the_policy_decides_what_a_risk_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["review", BASE, f"{BASE} --gpu-memory-utilization 0.99", "--engine-version", "0.20.2"]
    codes = [main([*words, "--fail-on", policy]) for policy in ("fix", "risky", "never")]
    assert codes == [0, 3, 0] and "### New risk" in capsys.readouterr().out


def test_a_server_that_no_longer_fits_needs_a_fix() -> None:
    """Weights of 70 billion BF16 parameters are 131 GiB, an H100 has 80."""
    review = review_change(BASE, BASE.replace("Qwen/Qwen3-8B", "Qwen/Qwen2.5-72B"), gpu="H100")
    assert review.verdict == "mend" and "does not start" in review.to_markdown()


def test_what_was_wrong_before_is_no_finding() -> None:
    wrong = f"{BASE} --swap-space 4"
    review = review_change(wrong, f"{wrong} --port 8001", "0.20.2")
    assert review.verdict == "ok" and "No new risk" in review.to_markdown()


def test_an_empty_side_is_a_new_or_removed_server(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE.format("--max-model-len 4096"))
    assert ": new" in review_change(str(empty), str(file)).to_markdown()
    assert ": gone" in review_change(str(file), str(empty)).to_markdown()
    assert main(["review", str(empty), str(empty)]) == 2


def test_a_text_of_the_files_is_no_markup_mention_or_secret(tmp_path: Path) -> None:
    hostile = "x`|</td><img src=//a>|@octocat **b** [c](//d) #1"
    files = []
    for k, name in enumerate(("y", hostile)):
        fields = yaml.safe_load(COMPOSE.format("--max-model-len 4096"))
        fields["services"] = {f"llm @team {k and hostile}": fields["services"]["llm"]}
        (service,) = fields["services"].values()
        service["command"] = ["--model", "Qwen/Qwen3-8B", "--served-model-name", name]
        service["environment"] = {"HF_TOKEN": f"hf_abcdefgh{k}", "NOTE": name}
        files.append(tmp_path / f"{k}.yaml")
        files[-1].write_text(yaml.safe_dump(fields))
    comment = review_change(*map(str, files)).to_markdown()
    assert "hf_abcdefgh" not in comment and "octocat" in comment
    outside = re.sub(r"`[^`\n]*`", "", comment.replace("\\`", "").replace("\\|", ""))
    assert not re.search(r"@\w|#\d|(?<!\\)[<>*](?!\*|New|Risk|Fix|Gone)\w|(?<!\\)\]\(", outside), (
        outside
    )
    tables = [line for line in comment.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} <= {4, 5}


def test_a_file_of_the_pull_request_reads_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "outside.yaml").write_text("max-num-seqs: 31337\n")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/near.yaml").write_text("max-num-seqs: 42\n")
    old, new = tmp_path / "repo/old.sh", tmp_path / "repo/new.sh"
    old.write_text(f"{BASE}\n")
    for name, is_read in (("near.yaml", True), ("../outside.yaml", False)):
        new.write_text(f"vllm serve Qwen/Qwen3-8B --config {name}\n")
        comment = review_change(str(old), str(new)).to_markdown()
        assert ("42" in comment, "31337" in comment) == (is_read, False)


def test_the_workflow_that_init_writes_calls_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "review.yml"
    assert main(["init", str(path), "--kind", "review"]) == 0
    subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.github-workflows",
            str(path),
        ],
        check=True,
    )
    steps = yaml.safe_load(path.read_text())["jobs"]["review"]["steps"]
    scripts = [step["run"] for step in steps if "run" in step]
    (line,) = re.findall(r"headroom (review .*) > review\.md", "\n".join(scripts))
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "compose.yaml").write_text(COMPOSE.format("--max-model-len 4096"))
    environment = yaml.safe_load(path.read_text())["env"]
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: environment[name[1]], line))
    assert main(words) == 0
    # what a pull request may write reaches a shell only through variables
    assert not any("${{" in script for script in scripts)


def test_less_room_for_the_kv_cache_is_told() -> None:
    """0.35 of 79.2 GiB are 28 of the 50 GiB that weights and peak leave of 0.9: no change to pass over."""
    less = f"{BASE} --gpu-memory-utilization 0.55"
    review = review_change(f"{BASE} --gpu-memory-utilization 0.9", less, gpu="H100")
    comment = review.to_markdown()
    assert comment.startswith("### New risk\n") and review.get_exit_code("risky") == 3
    (fall,) = re.findall(r"KV cache falls by (\d+)%", comment)
    assert 0.5 < int(fall) / 100 < 0.6
    assert (
        not review_change(less, f"{BASE} --gpu-memory-utilization 0.9", gpu="H100")
        .servers[0]
        .losses
    )


def test_latencies_stand_beside_their_load() -> None:
    """The scenario's rate, or else the requests in flight that both sides take."""
    more = BASE.replace("64", "32")
    assert "cost with 32 requests in flight" in review_change(BASE, more, gpu="H100").to_markdown()
    scenario = load_scenario("edge-8b-24gb", {"workload.rate": 0.25})
    comment = review_change(BASE, more, gpu="H100", scenario=scenario).to_markdown()
    assert "cost at 0.25 requests/s" in comment


def test_a_slower_answer_is_a_risk_and_a_default_is_told() -> None:
    """More slots than before make steps longer at the same load; without an option its default counts."""
    fewer = f"{BASE} --max-num-batched-tokens 2048"
    comment = review_change(fewer, BASE, gpu="H100").to_markdown()
    assert "| `--max-num-batched-tokens` | `2048` | `8192` (default) |" in comment
    split = f"{BASE} --tensor-parallel-size 4"
    comment = review_change(split, BASE, gpu="H100").to_markdown()
    assert re.search(r"\*\*Risk\*\*: p95 TPOT rises by \d+%", comment)


def test_only_of_several_servers_the_heading_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "old.sh", tmp_path / "new.sh"
    old.write_text(f"{BASE}\n{BASE} --port 8001\n")
    new.write_text(f"{BASE}\n{BASE} --port 8002\n")
    assert (
        review_change(str(old), str(new))
        .to_markdown()
        .startswith("### No new risk (1 of 2 servers changed)")
    )
