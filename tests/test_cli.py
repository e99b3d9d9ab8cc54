"""The command line says what is wrong in one sentence and never shows a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner.catalog import CATALOGS
from planner.cli import main

GOOD = """\
question: How many?
model: meta-llama/Llama-3.1-8B-Instruct
gpus: [{gpu: L4, at_most: 4}]
workload: {prompt_tokens: {mean: 500}, output_tokens: {mean: 100}, rate: 1}
service_level: {ttft: {p99: 2000}}
"""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GOOD + "engin: vllm", ["engin", "unknown field", "did you mean engine"]),
        (GOOD.replace("gpu: L4", "gpu: H1000"), ["H1000", "did you mean"]),
        (GOOD.replace("rate: 1", "rate: 0"), ["workload.rate", "greater than 0"]),
        (GOOD.replace("Llama-3.1-8B-Instruct", "Llama-3.1-9B-Instruct"), ["Llama-3.1-9B", "did you mean"]),
        ("question: [", ["not valid YAML"]),
    ],
)
def test_a_wrong_scenario_ends_with_one_sentence(wrong, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "mine.yaml").write_text(wrong)
    assert main(["report", str(tmp_path / "mine.yaml"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in [*says, "mine"])
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "chat-70"],
        ["report", "no/such.yaml"],
        ["report", "chat-70b", "--set", "rate"],
        ["explain-log", "no.log"],
    ],
)
def test_wrong_arguments_end_with_one_sentence(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("planner: ")


def test_a_log_is_explained_and_gives_a_fragment_to_paste(capsys):
    log = CATALOGS / "validation" / "granite-3.1-8b-h100.log"
    assert main(["explain-log", str(log), "--gpu", "H100"]) == 0
    printed = capsys.readouterr().out
    assert "Furthest off is non_torch, by +0.19 GiB" in printed
    assert printed.splitlines()[-1].startswith("memory_calibration: {weights: ")


def test_scenarios_are_listed_with_their_questions(capsys):
    assert main(["scenarios"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) >= 6
    assert any(line.startswith("chat-70b") and line.endswith("?") for line in listed)


def test_help_needs_none_of_the_heavy_libraries():
    script = "import sys, planner.cli as cli; cli._parser(); print({'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_replay_writes_the_steps_that_vllm_took(tmp_path: Path) -> None:
    """A preemption case's step log is what the scheduler of vLLM 0.33.0 itself did, to the byte."""
    recorded, steps = Path(__file__).parent / "data" / "schedules", tmp_path / "steps.csv"
    case = str(recorded / "preemption_async.json")
    assert main(["replay", case, "--fixed-step-time", "1", "--step-log", str(steps)]) == 0
    assert steps.read_bytes() == (recorded / "preemption_async.vllm-0.33.0.csv").read_bytes()
