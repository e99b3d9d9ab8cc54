"""`headroom plan`: its exit code, its JSON, the files that it writes, and that it leaves the user's own alone."""

import json
import math
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from numba import njit

from planner.ui.cli import main
from planner.ui.commands.options import watch_command

QUESTION: dict[str, Any] = {
    "question": "Does it hold?",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpus": [{"gpu": "H100-SXM", "at_most": 2}],
    "engine_version": "0.20.2",
    "workload": {"prompt_tokens": {"exactly": 500}, "output_tokens": {"exactly": 100}, "rate": 4},
    "service_level": {"ttft": {"p95": 5000}, "tpot": {"p95": 100}},
}
TIGHT = {"ttft": {"p95": 0.1}}
PREDICTED = {
    *("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"),
    *("output_tps", "kv_usage_p99", "preemptions_per_request"),
}
CANDIDATE = {
    "model", "quantization", "kv_cache_dtype", "engine", "engine_version", "gpu", "gpus",
    "gpus_rented", "layout", "pools", "engine_args", "speculation", "usd_per_hour", 
    "price_source", "usd_per_mtok_output", "power_w", "predicted", "service_level", "capacity_rps",
}  # fmt: skip
ANSWER = {
    *CANDIDATE, "scenario", "verdict", "reasons", "planned_rps", "headroom", "binding", "runner_up",
    "rejected", "command", "files",
}  # fmt: skip
"""The keys that the interface fixes; more may be there."""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(QUESTION, sort_keys=False))
    return path


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_plan_that_holds_ends_with_0_and_has_every_key(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(capsys, mine)
    assert (code, found["verdict"]) == (0, "holds")
    assert set(found) >= ANSWER and set(found["predicted"]) >= PREDICTED
    assert set(found["layout"]) >= {"tp", "pp", "dp", "ep", "replicas"}
    assert set(found["engine_args"]) >= {"max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    assert set(found["binding"]) == {"constraint", "sentence"}
    assert found["scenario"] == "mine" and found["model"] == QUESTION["model"]
    if found["runner_up"]:
        assert set(found["runner_up"]) >= CANDIDATE
    for level, asked_for in zip(found["service_level"], (5000, 100), strict=True):
        assert set(level) >= {"metric", "percentile", "limit_ms", "predicted_ms", "holds"}
        assert (
            level["limit_ms"] == asked_for
            and level["holds"]
            and level["predicted_ms"][2] <= asked_for
        )
    assert found["command"][:2] == ["vllm", "serve"] and QUESTION["model"] in found["command"]
    mid, low, high = found["capacity_rps"]
    assert found["planned_rps"] == 4 < low <= mid <= high
    assert found["headroom"] == pytest.approx(1 - 4 / mid)


def intervals(found: Any, where: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every list of numbers, with where it stands."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from intervals(value, f"{where} {key}")
    elif isinstance(found, list) and found and all(isinstance(part, int | float) for part in found):
        yield where, found
    elif isinstance(found, list):
        for part in found:
            yield from intervals(part, where)


def test_every_figure_is_a_middle_within_its_interval(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = asked(capsys, mine)
    stated = dict(intervals(found))
    assert len(stated) > 20
    for where, figure in stated.items():
        mid, low, high = figure
        assert 0 <= low <= mid <= high and math.isfinite(high), where
    for name in ("ttft", "tpot", "itl", "e2e"):
        points = found["predicted"][f"{name}_ms"]
        assert points["p50"][0] <= points["p95"][0] <= points["p99"][0]


def test_a_plan_at_risk_ends_with_3_and_says_why(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit between the middle and the pessimistic end of what it does."""
    _, found = asked(capsys, mine, "--set", "headroom=0", "--set", "gpus.0.at_most=1")
    mid, _, high = found["predicted"]["tpot_ms"]["p95"]
    limit = (mid + high) / 2
    code, risky = asked(capsys, mine, "--set", f"service_level={{tpot: {{p95: {limit}}}}}",
                        "--set", "gpus.0.at_most=1", "--set", "engine_args={max_num_seqs: 256}")  # fmt: skip
    assert (code, risky["verdict"]) == (3, "at_risk")
    assert any("p95 TPOT may reach" in reason for reason in risky["reasons"])


def test_nothing_that_meets_ends_with_4_and_the_nearest(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(capsys, mine, "--set", f"service_level={json.dumps(TIGHT)}")
    assert (code, found["verdict"]) == (4, "nothing_meets")
    assert found["predicted"]["ttft_ms"]["p95"][0] > 0.1 and found["reasons"]
    assert [level["holds"] for level in found["service_level"]] == [False]
    assert found["command"] is None and found["files"] == [] and found["runner_up"] is None
    assert main(["plan", str(mine), "--set", f"service_level={json.dumps(TIGHT)}"]) == 4
    told = capsys.readouterr().out
    assert "NO PLAN MEETS THE TARGETS" in told and "missed" in told and "Rent" not in told


def test_a_model_that_fits_nowhere_ends_with_4(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(capsys, mine, "--set", "gpus=[{gpu: L4, at_most: 1}]",
                        "--set", "model=meta-llama/Llama-3.1-70B-Instruct")  # fmt: skip
    assert (code, found["verdict"], found["binding"]["constraint"]) == (
        4,
        "nothing_meets",
        "memory",
    )
    assert found["rejected"]["memory"] >= 1 and "GiB" in found["binding"]["sentence"]


def test_the_next_command_asks_the_same_question_and_works(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    question = ["plan", str(mine), "--set", "workload={prompt_tokens: {exactly: 500}, "
                "output_tokens: {exactly: 100}, rate: 3}"]  # fmt: skip
    assert main(question) == 0
    rows = dict(re.findall(r"(?m)^  (Next|Details) +(headroom .*)$", capsys.readouterr().out))
    command = shlex.split(rows["Next"], comments=True)
    details = shlex.split(
        rows.get("Details", rows["Next"].replace("--out plan/", "--all")), comments=True
    )
    assert command[1:5] == question and main(command[1:]) == 0
    assert (tmp_path / "plan" / "plan.json").is_file()
    written = capsys.readouterr().out
    for script in re.findall(r"bash (\S+\.sh)", written):
        assert (tmp_path / script).is_file()
    assert details[1:5] == question and main(details[1:]) == 0
    assert "vllm serve" in capsys.readouterr().out


def test_files_are_written_whole_and_old_ones_leave(mine: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    _, found = asked(capsys, mine, "--out", out)
    assert {path.name for path in out.iterdir()} == {*found["files"], "plan.json"}
    assert {"serve.sh", "bench.sh", "alerts.yml", "checklist.md"} <= set(found["files"])
    assert json.loads((out / "plan.json").read_text()) == found
    (out / "notes.txt").write_text("mine")
    code, nothing = asked(capsys, mine, "--out", out, "--set", f"service_level={json.dumps(TIGHT)}")
    assert code == 4
    assert {path.name for path in out.iterdir()} == {"plan.json", "notes.txt"}
    assert json.loads((out / "plan.json").read_text()) == nothing


def test_compiling_is_told_once_and_not_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [njit(lambda x: x + 1), njit(lambda x: x + 2)]
    command = watch_command(lambda _: sum(kernel(1) for kernel in kernels))
    for _ in range(2):
        assert command(Namespace()) == 5
    told = capsys.readouterr()
    assert told.err.count("compiling") == 1, "of two kernels compiled once each"
    assert told.out == ""
