"""A saved plan is asked again: its scenario by plan, its command by lint."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import small_fields

from planner.planning.scenario import load_scenario
from planner.tools.lint.report import lint
from planner.ui.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `headroom plan --out` wrote on 2026-09-01, of vLLM 0.20.2."""
    folder = tmp_path_factory.mktemp("saved")
    fields = small_fields({"engine_version": "0.20.2"})
    (folder / "small.yaml").write_text(yaml.safe_dump(fields))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SOURCE_DATE_EPOCH", "1788220800")
        assert main(["plan", str(folder / "small.yaml"), "--out", str(folder / "plan")]) == 0
    return folder / "plan"


def change(saved: Path, folder: Path, **changes: Any) -> str:
    """Write that plan with other fields; return its path."""
    data = json.loads((saved / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(data | changes))
    return str(folder / "plan.json")


def read_table(shown: str) -> dict[str, tuple[str, str]]:
    """Read both columns of the table, by the fact's name."""
    head, *rows = shown[shown.rindex("\n\n") + 2 :].splitlines()
    then, now = head.index("saved "), head.index("now")
    return {row[:then].strip(): (row[then:now].strip(), row[now:].strip()) for row in rows if row}


@pytest.mark.slow
def test_a_saved_plan_is_planned_again_beside_itself(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(saved)]) == 0
    shown = capsys.readouterr().out
    table = read_table(shown)
    assert "saved 2026-09-01" in shown
    assert {"Verdict", "Deployment", "Cost", "p95 TTFT", "p95 TPOT"} <= {*table}
    assert all(then == now for then, now in table.values())
    halved = [usd / 2 for usd in json.loads((saved / "plan.json").read_text())["usd_per_hour"]]
    assert main(["plan", change(saved, tmp_path, usd_per_hour=halved, probability=0.5)]) == 0
    changed = read_table(capsys.readouterr().out)
    assert changed["Verdict"] == ("Meets targets, 50% likely", table["Verdict"][1])
    assert changed["Cost"][1] == table["Cost"][1] != changed["Cost"][0]


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_new_plan(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No L40S computes a token of an 8B model in a millisecond: 16 GB at 864 GB/s."""
    words = [
        "plan",
        str(saved),
        "--set",
        "service_level.tpot.p95=1",
        "--out",
        str(tmp_path / "new"),
    ]
    assert main(words) == 4
    assert "No plan meets the targets" in read_table(capsys.readouterr().out)["Verdict"][1]
    # and what nothing met is asked again too
    assert main(["plan", str(tmp_path / "new"), "--set", "service_level.tpot.p95=80"]) == 0


@pytest.mark.slow
def test_a_saved_plan_is_its_scenario(saved: Path, tmp_path: Path, capsys) -> None:
    scenario = load_scenario(saved)
    assert scenario == load_scenario(saved / "plan.json")
    assert (
        scenario.name == "small"
        and scenario.fields == load_scenario(saved.parent / "small.yaml").fields
    )
    for changes, said in (
        ({"question": None}, "no scenario in the field question"),
        ({"verdict": "good"}, "field verdict"),
    ):
        assert main(["plan", change(saved, tmp_path, **changes)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_saved_plan_is_linted_as_its_script(saved: Path, tmp_path: Path) -> None:
    """vLLM 0.18.0 brought --shutdown-timeout, and 0.14.0 asynchronous scheduling by default."""
    report, script = lint(str(saved)), lint(str(saved / "serve.sh"))
    judged, there = ([(f.name, f.verdict) for f in one.findings] for one in (report, script))
    assert judged == there and report.verdict == "ok"
    (command,) = report.commands
    assert command.plan and command.plan.deployment.gpu.name == "L40S"
    assert str(command.checked.version) == "0.20.2"
    drift = {one.name: one.verdict for one in lint(str(saved), to="0.11.0").upgrade_findings}
    assert drift["--shutdown-timeout"] == "unknown"
    assert drift["--async-scheduling"] == "default changed"
    assert main(["lint", str(saved / "plan.json"), "--to", "0.11.0"]) == 1
    assert main(["lint", change(saved, tmp_path, command="vllm serve")]) == 2
