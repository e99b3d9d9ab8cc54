"""The command line says what is wrong in one sentence and never shows a traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.core.catalog import validate_entry
from planner.hardware.gpus import get_gpu
from planner.planning.scenario import list_scenarios, load_scenario
from planner.planning.search import search_deployments
from planner.tools.batch import answer_point
from planner.tools.fleet.allocation import FleetEntry
from planner.tools.sweep_points import read_sweep
from planner.ui.cli import REPLACEMENTS, main

GOOD = """\
question: How many?
model: meta-llama/Llama-3.1-8B-Instruct
gpus: [{gpu: L4, at_most: 4}]
workload: {prompt_tokens: {mean: 500}, output_tokens: {mean: 100}, rate: 1}
service_level: {ttft: {p99: 2000}}
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "chat-70"],
        ["report", "no/such.yaml"],
        ["report", "chat-70b", "--set", "rate"],
        ["check", "chat-70b", "--set", "rate"],
        ["check", "chat-70b", "--set", "workload.rate=0"],
        ["check", "no/such.yaml"],
        ["init", "scenario.txt"],
        ["init", "no/such/folder.yaml"],
        ["list", "models", "gpt-9"],
        ["list", "gpus", "Z9000"],
        ["explain-log", "no.log"],
        ["calibrate", "no.json", "--scenario", "chat-70b"],
        ["calibrate", "no.json"],
    ],
)
def test_wrong_arguments_end_with_one_sentence(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("headroom: ")


def test_benchmarks_of_a_slow_machine_change_the_plan(tmp_path, capsys):
    """An L4 takes 85 ms per token, where reading 16 GB at 300 GB/s takes 53: what is saved, the scenario plans with."""
    good = f"{GOOD}layout: {{tp: 1, pp: 1}}\n"  # what was measured
    (tmp_path / "mine.yaml").write_text(good)
    run = {
        "completed": 100, "total_input_tokens": 50_000, "total_output_tokens": 10_000,
        "request_rate": "inf",
        "burstiness": 1.0, "mean_ttft_ms": 300.0,
    }  # fmt: skip
    loads = [run | {"max_concurrency": many, "mean_tpot_ms": 85.0 + many} for many in (1, 2, 4, 8)]
    (tmp_path / "bench.json").write_text("\n".join(map(json.dumps, loads)))
    own = tmp_path / "own.yaml"
    arguments = [
        str(tmp_path / "bench.json"),
        "--scenario",
        str(tmp_path / "mine.yaml"),
        "--out",
        str(own),
    ]
    assert main(["calibrate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "L4 under vllm: 4 runs of meta-llama/Llama-3.1-8B" in printed
    errors = re.search(r"median error of mean TPOT: (.*)% before, (.*)% after", printed)
    assert errors and float(errors[2]) < float(errors[1]) / 3
    assert f"calibration: {own}" in printed
    before = search_deployments(load_scenario(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text(good + "calibration: own.yaml")
    after = search_deployments(load_scenario(tmp_path / "mine.yaml"))
    was, now = (plan.best.prediction.performance for plan in (before, after))
    assert now.basis == "measured" != was.basis
    more = after.best.deployment.layout.num_gpus > before.best.deployment.layout.num_gpus
    assert more or now.get("tpot", "mean").mid > 1.1 * was.get("tpot", "mean").mid
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(
        "model,gpu,isl,osl,concurrency\nmeta-llama/Llama-3.1-8B-Instruct,L4,500,100,4\n"
    )
    assert main(["predict", str(rows), "--out", str(out), "--calibration", str(own)]) == 0
    assert ",measured," in out.read_text()


def test_a_calibration_of_another_engine_is_refused(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(
        "L4: {coefficients: {memory: 0.7}, engine: sglang, source: mine, date: '2026-11'}"
    )
    (tmp_path / "mine.yaml").write_text(GOOD + "calibration: own.yaml")
    assert main(["report", str(tmp_path / "mine.yaml")]) == 2
    assert "own.yaml was measured under sglang, not vllm" in capsys.readouterr().err
    assert (
        main(
            ["predict", "rows.csv", "--out", "x.csv", "--calibration", str(tmp_path / "none.yaml")]
        )
        == 2
    )
    assert "none.yaml" in capsys.readouterr().err


def test_init_writes_a_scenario_that_check_understands_and_never_overwrites(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0 and main(["check", "scenario.yaml"]) == 0
    found = load_scenario("scenario.yaml")
    text = Path("scenario.yaml").read_text()
    assert found.gpus and found.workload.rate and found.workload.output.spread_source
    assert main(["init"]) == 2 and Path("scenario.yaml").read_text() == text
    assert "scenario.yaml exists" in capsys.readouterr().err
    assert main(["init", "$(id) my.yaml"]) == 0
    assert capsys.readouterr().out.endswith("then: headroom plan '$(id) my.yaml'\n"), (
        "a line to be pasted"
    )


def test_init_writes_a_sweep_and_a_fleet_that_are_understood(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["init", "sweep.yaml", "--kind", "sweep"])
        == main(["init", "fleet.yaml", "--kind", "fleet"])
        == 0
    )
    assert "headroom fleet fleet.yaml" in capsys.readouterr().out
    text = Path("sweep.yaml").read_text()
    assert len(read_sweep(Path("sweep.yaml")).points) == 14
    for asked in ("plan", "predict"):
        Path("sweep.yaml").write_text(re.sub("(?m)^answer: .*", f"answer: {asked}", text))
        swept = read_sweep(Path("sweep.yaml"))
        row = answer_point(swept, swept.points[1])
        assert row["status"] == "ok" and row["usd_per_month"] == pytest.approx(
            row["usd_per_hour"] * 365.25 * 24 / 12
        )
    grid, sample = text.split("grid:")[0], re.sub(r"(?m)^# ", "", text[text.index("# sample:") :])
    Path("sweep.yaml").write_text(grid + sample)
    drawn = read_sweep(Path("sweep.yaml"))
    assert len(drawn.points) == 1000 and {
        answer_point(drawn, point)["status"] for point in drawn.points[:6]
    } == {"ok"}
    whole = re.sub(r"(?m)^# (usd|power|owned)", r"\1", Path("fleet.yaml").read_text())
    fleet = validate_entry(FleetEntry, yaml.safe_load(whole), "fleet.yaml")
    assert (
        {*fleet.scenarios} <= {*list_scenarios()}
        and all(get_gpu(name) for name in fleet.stock)
        and fleet.power_at_most
        and {*fleet.owned} <= {*fleet.stock}
    )


def test_init_names_fields_that_exist(tmp_path, monkeypatch):
    """Each line that is commented out, put in for what it replaces, makes a scenario as well."""
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    lines = Path("scenario.yaml").read_text().splitlines()
    tried = 0
    for number, line in enumerate(lines):
        if field := re.match(r"( *)# (\w+: .+)", line):
            if field[2].startswith(("trace", "requests", "within")):
                continue
            changed = [*lines[:number], field[1] + field[2], *lines[number + 1 :]]
            if field[2].startswith("concurrency"):
                changed.remove("  rate: 2")
            Path("other.yaml").write_text("\n".join(changed))
            assert main(["check", "other.yaml"]) == 0, field[2]
            tried += 1
    assert tried >= 6


def test_check_says_what_was_understood(tmp_path, capsys):
    """70.6 billion parameters and 131,072 tokens: the model card of Llama 3.1 70B."""
    before = set(Path().iterdir())
    lengths = "workload.prompt_tokens={mean: 700}"
    assert main(["check", "chat-70b", "--set", "gpus.0.at_most=8", "--set", lengths]) == 0
    printed = capsys.readouterr().out
    for words in (
        "meta-llama/Llama-3.1-70B-Instruct: 70.55 B parameters, context 131,072",
        "up to 8 x H100-SXM (79.2 GiB",
        "5.53 requests/s, burstiness 0.84", "p95 TPOT of at most 40 ms",
        "20% of the capacity stays free",
        "Of the prompt lengths only the mean is given",
    ):  # fmt: skip
        assert words in printed
    assert set(Path().iterdir()) == before


def test_catalogs_are_listed_and_searched(capsys):
    """gpt-oss-120b's card: 116.83 B parameters, 5.13 B active beside its embedding; A100-SXM-40GB: 1,555 GB/s."""
    assert main(["list", "models", "GPT-oss*120b"]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert row.split()[:5] == ["openai/gpt-oss-120b", "116.83", "B", "5.71", "B"]
    assert main(["list", "gpus", "a100-sxm"]) == 0
    header, small, large = capsys.readouterr().out.splitlines()
    assert small.split()[:3] == ["A100-SXM-40GB", "39.4", "1,555"]
    assert header.index("USD/h") == small.index("2.90") == large.index("2.30")
    assert main(["list", "models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 150
    assert main(["list", "gpus", "Tesla T4"]) == 0 and capsys.readouterr().out.splitlines()[
        1
    ].startswith("T4 ")


def test_lists_in_json_name_what_the_catalogs_know(capsys):
    """The driver reports 140 GiB of a card sold as 141 GB; Qwen3-8B's card: 8.2 B parameters."""

    def read(*words):
        assert main(["list", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)[words[0]]

    (gpu,) = read("gpus", "h200-sxm")
    assert gpu["memory_gib"] == pytest.approx(140, rel=0.01)
    assert gpu["usd_per_hour"]["min"] <= gpu["usd_per_hour"]["median"] <= gpu["usd_per_hour"]["max"]
    models = {model["name"]: model for model in read("models", "qwen3-8b")}
    assert models["Qwen/Qwen3-8B"]["parameters"] == pytest.approx(8.19e9, rel=0.01)
    (scenario,) = read("scenarios", "edge-8b")
    assert scenario["name"] == "edge-8b-24gb" and scenario["question"].endswith("?")


def test_a_part_of_a_name_that_nothing_has_is_corrected_or_said_to_be_unknown(capsys):
    assert main(["list", "models", "qwn3"]) == main(["list", "models", "foo"]) == 2
    near, far = capsys.readouterr().err.splitlines()
    assert "did you mean Qwen3, " in near
    assert far == "headroom: unknown model 'foo'; nothing like it is known"


def test_a_command_that_went_is_one_line_with_what_takes_its_place(capsys):
    for name in ("models", "mcp"):
        assert main([name, "--json"]) == 2
    models, agents = capsys.readouterr().err.splitlines()
    assert models == "headroom: there is no command models: use `headroom list models`"
    assert "--json" in agents
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = {*re.findall(r"(?m)^  ([a-z-]+) ", capsys.readouterr().out)}
    for instead in REPLACEMENTS.values():
        assert {*re.findall(r"headroom (\S+)", instead.replace("`", " "))} <= commands


def test_help_needs_none_of_the_heavy_libraries():
    script = (
        "import sys, planner.ui.cli as cli; cli.build_parser(); print({'pandas', 'numpy',"
        " 'pydantic'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_models_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model has the plan that it has alone; what cannot be planned says why in its row."""
    question = {
        "model": "Qwen/Qwen3-0.6B", "quantization": ["checkpoint"],
        "gpus": [{"gpu": "L4", "at_most": 1}],
        "workload": {"rate": 0.2, "prompt_tokens": {"mean": 100}, "output_tokens": {"mean": 20}},
        "service_level": {"ttft": {"p95": 5000}},
    }  # fmt: skip
    file = tmp_path / "q.yaml"
    file.write_text(json.dumps(question))
    names = ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-405B", "acme/none-such-1b"]
    asked = ["plan", str(file), "--set", f"model={json.dumps(names)}"]
    assert main(asked) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [name for name in names if sum(name in row for row in rows)] == names
    assert "1 x L4" in rows[0].replace("\N{MULTIPLICATION SIGN}", "x") and "likely" in rows[0]
    assert any("no plan: " in row for row in rows) and any("not planned: " in row for row in rows)
    assert not any(row.startswith("Best") for row in rows)  # of one plan alone
    main([*asked, "--json"])
    both = json.loads(capsys.readouterr().out)["models"]
    main(["plan", str(file), "--json"])
    assert both[names[0]]["command"] == json.loads(capsys.readouterr().out)["command"]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 2
    assert "take one model" in capsys.readouterr().err
