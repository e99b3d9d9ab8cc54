"""A saved plan beside itself at today's prices, facts and measurements."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import small_fields

from planner import __version__
from planner.core.catalog import CATALOG_DIR
from planner.tools import plan_age
from planner.ui.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `headroom plan --out` wrote on a day of 2026."""
    folder = tmp_path_factory.mktemp("age")
    (folder / "small.yaml").write_text(yaml.safe_dump(small_fields()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SOURCE_DATE_EPOCH", "1788220800")
        assert main(["plan", str(folder / "small.yaml"), "--out", str(folder / "plan")]) == 0
    return folder / "plan"


def change(saved: Path, folder: Path, **changes: Any) -> str:
    """Write that plan with other fields; return its path."""
    data = json.loads((saved / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(data | changes))
    return str(folder / "plan.json")


@pytest.mark.parametrize("command", ["plan", "upgrade"])
def test_nothing_has_moved_where_nothing_changed(command: str, saved: Path, capsys) -> None:
    assert main([command, str(saved)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f"small, planned on {date(2026, 9, 1)} with Headroom {__version__}: it")
    assert any(row.startswith("Moved         nothing") for row in rows)
    assert main([command, str(saved), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["moved"] == [] and told["price"] is None and told["status"] == "met"
    assert {*told["quantities"]} >= {"$ per hour", "capacity, requests/s", "p95 TTFT, ms"}
    for then, now in told["quantities"].values():
        assert now == pytest.approx(then)


def test_what_moved_is_named_with_its_size(saved: Path, tmp_path: Path, capsys) -> None:
    data = json.loads((saved / "plan.json").read_text())
    facts = {**data["made"]["catalogs"], "prices": "0" * 16}
    halved = [usd / 2 for usd in data["usd_per_hour"]]
    made = {**data["made"], "headroom": "0.0.1", "catalogs": facts}
    path = change(saved, tmp_path, usd_per_hour=halved, made=made, price_source="half of it")
    assert main(["plan", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Moved         prices, Headroom itself" in lines
    assert any(line.startswith("Price         half of it -> ") for line in lines)
    (price,) = (line for line in lines if line.startswith("$ per hour"))
    assert price.endswith("+100.0%")


def test_a_plan_that_no_longer_meets_its_targets_is_said_so(saved: Path, tmp_path: Path) -> None:
    levels = json.loads((saved / "plan.json").read_text())["service_level"]
    tight = [{**level, "limit_ms": level["predicted_ms"][0] / 2} for level in levels]
    path = change(saved, tmp_path, service_level=tight)
    assert (main(["plan", path]), main(["upgrade", path])) == (4, 1)


def test_a_plan_of_before_says_that_it_does_not_know(saved: Path, tmp_path: Path, capsys) -> None:
    data = json.loads((saved / "plan.json").read_text())
    del data["made"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert main(["plan", str(tmp_path)]) == 0
    assert "Moved         unknown" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(saved: Path, tmp_path: Path, capsys) -> None:
    path = change(saved, tmp_path, question=None)
    for words, said in (
        (["plan", path], "does not state its question"),
        (
            ["plan", str(saved), "--set", "workload.rate=1"],
            "--set, --out, --all and --force take a scenario",
        ),
        (["plan", str(tmp_path / "none.json")], "cannot read"),
        (["upgrade", "edge-8b-24gb"], "name an engine version with --to"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_a_changed_catalog_moves_its_own_group(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(CATALOG_DIR, tmp_path / "catalogs")
    monkeypatch.setattr(plan_age, "CATALOG_DIR", tmp_path / "catalogs")
    digest = plan_age.digest_catalogs.__wrapped__
    before = digest()
    for name, group in (
        ("prices.yaml", "prices"),
        ("calibration/vllm.yaml", "measurements"),
        ("flags/lists.yaml", "engine facts"),
        ("gpus.yaml", plan_age.OTHER_CATALOGS),
        ("scenarios/chat-70b.yaml", None),
    ):
        with (tmp_path / "catalogs" / name).open("a") as file:
            file.write("# later\n")
        after = digest()
        assert [each for each in after if after[each] != before[each]] == [group] * bool(group)
        before = after
