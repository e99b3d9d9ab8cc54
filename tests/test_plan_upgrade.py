"""`headroom upgrade` states a plan at another version as a plan of that version does."""

import json
from pathlib import Path
from typing import Any

import pytest
from shipped import answer_of

from planner.answers import serialize_answer
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.memory.memory_plan import get_memory_plan
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools.lint.plan_upgrade import compare_plan_versions
from planner.ui.cli import main


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The written plan of a shipped scenario, on vLLM 0.20.2."""
    folder = tmp_path_factory.mktemp("plan")
    fields = serialize_answer(answer_of(search_deployments(load_scenario("edge-8b-24gb"))))
    assert fields["engine_version"] == "0.20.2"
    (folder / "plan.json").write_text(json.dumps(fields))
    return folder


def test_memory_is_that_of_a_plan_at_the_new_version(plan: Path) -> None:
    upgrade = compare_plan_versions(plan, "0.33.0")
    rows = {row.title: row for row in upgrade.rows}
    memory = get_memory_plan(upgrade.after)
    assert upgrade.after.engine.version == "0.33.0"
    assert rows["KV cache, tokens"].measured.mid == pytest.approx(
        memory.pool.reported_tokens, rel=0.01
    )
    assert rows["KV cache, GiB"].measured.mid == pytest.approx(memory.kv_available.mid / GIB)
    assert rows["weights, GiB"].expected == rows["weights, GiB"].measured
    assert rows["$ per M output tokens"].expected.mid > 0
    assert upgrade.exit_code == 0 and "still meets every target" in str(upgrade)


def test_defaults_options_and_metrics_of_the_new_version_are_told(plan: Path) -> None:
    """vLLM 0.11.0: no asynchronous scheduling by default, no --shutdown-timeout, an older name of ITL."""
    upgrade = compare_plan_versions(plan, "0.11.0")
    assert upgrade.changed_arguments["async_scheduling"] == (True, False)
    assert "--shutdown-timeout" in {
        finding.name for finding in upgrade.findings if finding.needs_fix
    }
    assert upgrade.renamed_metrics["vllm:inter_token_latency_seconds"] == (
        "vllm:time_per_output_token_seconds"
    )
    rows = {row.title: row for row in upgrade.rows}
    assert rows["p95 TPOT, ms"].measured.mid > rows["p95 TPOT, ms"].expected.mid
    assert upgrade.exit_code == 1


def test_the_same_version_changes_nothing(plan: Path) -> None:
    upgrade = compare_plan_versions(plan, "0.20.2")
    assert not upgrade.changed_arguments and not upgrade.renamed_metrics
    assert not any(finding.needs_fix for finding in upgrade.findings)
    assert all(row.expected == row.measured for row in upgrade.rows)


def test_a_plan_without_its_question_is_compared_in_memory(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = json.loads((plan / "plan.json").read_text())
    del fields["question"]
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert main(["upgrade", str(tmp_path / "plan.json"), "--to", "0.33.0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "KV cache, tokens" in told["quantities"] and told["planned_anew"] is None


def test_an_unknown_version_is_told(plan: Path) -> None:
    with pytest.raises(PlannerError, match=r"engine_version 0\.2\.0 of vllm is not known"):
        compare_plan_versions(plan, "0.2.0")
