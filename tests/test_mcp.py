"""`headroom mcp` answers the SDK's own client over stdio with what the commands answer."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from planner.answers.serialization import build_plan_json
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG
from planner.tools.lint.report import lint
from planner.ui.mcp_server import TOOLS, build_server, find_catalog_dates

ROOT = Path(__file__).parents[1]
AUDIT = """
import os, sys
def record(event, args):
    path = str(args[0]) if event == "open" else ""
    is_watched = event in ("socket.connect", "socket.getaddrinfo") or "unnamed" in path
    if is_watched:
        with open(os.environ["AUDIT_FILE"], "a") as file:
            file.write(f"{event} {args}\\n")
sys.addaudithook(record)
"""
"""A `sitecustomize` that records addresses and the unnamed file that a process opens."""


CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plan", {"scenario": "edge-8b-24gb", "set": {"workload.rate": 0.3}}),
    ("lint", {"what": "vllm serve Qwen/Qwen3-8B --swap-space 4", "engine_version": "0.20.2"}),
    ("diagnose", {"log": str(EXAMPLE_LOG)}),
    ("explain_log", {"log": str(EXAMPLE_LOG), "gpu": "H100"}),
    ("predict", {"row": {"model": "Qwen/Qwen3-8B", "gpu": "L40S", "isl": 500, "osl": 100,
                         "concurrency": 4, "enable_prefix_caching": False}}),
    ("lint", {"what": "serve.sh"}),
)  # fmt: skip
WRONG_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plan", {"scenario": "no-such-scenario"}),
    ("plan", {}),
    ("plan", {"scenario": "edge-8b-24gb", "sett": {}}),
    ("predict", {"row": {"model": "Qwen/Qwen3-8B"}}),
    ("list_gpus", {"pattern": "zzzz"}),
    ("no_such_tool", {}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script to lint, and beside it a file that the script names and nobody else."""
    folder = tmp_path_factory.mktemp("mcp")
    for name in ("hook", "work"):
        (folder / name).mkdir()
    (folder / "hook/sitecustomize.py").write_text(AUDIT)
    (folder / "unnamed.yaml").write_text("max-num-seqs: 31337\n")
    (folder / "work/serve.sh").write_text("vllm serve Qwen/Qwen3-8B --config ../unnamed.yaml\n")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Any]:
    """The results of all calls, by one server process."""
    path = os.pathsep.join((str(folder / "hook"), str(ROOT)))
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "planner", "mcp"], cwd=folder / "work",
        env={"PYTHONPATH": path, "AUDIT_FILE": str(folder / "audit.txt")},
    )  # fmt: skip

    async def call_all() -> list[Any]:
        async with Client(server) as client:
            return [await client.call_tool(*one) for one in (*CALLS, *WRONG_CALLS)]

    return anyio.run(call_all)


def test_a_scripted_client_plans_lints_and_diagnoses(results: list[Any]) -> None:
    done = results[: len(CALLS)]
    assert not any(result.is_error for result in done)
    plan, linted, diagnosis, explanation, prediction, _ = (one.structured_content for one in done)
    expected = build_plan_json(
        search_deployments(load_scenario("edge-8b-24gb", {"workload.rate": 0.3}))
    )
    basis = plan["basis"]
    assert plan == json.loads(json.dumps(expected)) | {"basis": basis}
    assert basis["catalogs_date"] >= "2026-11" and "prices.yaml" in basis["sources"]
    _, low, high = plan["predicted"]["ttft_ms"]["p95"]
    assert 0 < low < high and "quotes from" in plan["price_source"]
    report = lint("vllm serve Qwen/Qwen3-8B --swap-space 4", "0.20.2").to_json()
    assert linted["commands"] == report["commands"] and linted["verdict"] == "mend"
    assert linted["commands"][0]["findings"][0]["refused"]
    assert "findings" in diagnosis and explanation["figures"]["kv_tokens"]["logged"] > 0
    # 8.19 billion BF16 parameters
    assert prediction["weights_gib"] == pytest.approx(8.19e9 * 2 / 2**30, rel=0.01)
    assert prediction["ttft_ms_mean_lo"] < prediction["ttft_ms_mean"]


def test_an_error_is_one_sentence(results: list[Any]) -> None:
    texts = [result.content[0].text for result in results[len(CALLS) :]]
    assert all(result.is_error for result in results[len(CALLS) :])
    assert not any("\n" in text or "Error executing" in text for text in texts)
    assert "no-such-scenario" in texts[0] and "expected one of scenario, set" in texts[2]


def test_no_address_and_no_file_that_nobody_named_is_opened(
    results: list[Any], folder: Path
) -> None:
    assert "31337" not in json.dumps(results[len(CALLS) - 1].structured_content)
    assert (folder / "unnamed.yaml").exists() and not (folder / "audit.txt").exists()


def test_every_tool_is_declared_as_reading_only() -> None:
    async def list_tools() -> list[Any]:
        async with Client(build_server()) as client:
            return list((await client.list_tools()).tools)

    tools = anyio.run(list_tools)
    assert {tool.name for tool in tools} == {*TOOLS} == {
        "plan", "predict", "lint", "diagnose", "explain_log", "list_models", "list_gpus",
    }  # fmt: skip
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)


def test_lists_name_what_the_catalogs_know() -> None:
    (gpu,) = TOOLS["list_gpus"]("h200-sxm")["gpus"]
    assert gpu["memory_gib"] == pytest.approx(140, rel=0.01)  # of a card sold as 141 GB
    assert gpu["usd_per_hour"]["min"] <= gpu["usd_per_hour"]["median"] <= gpu["usd_per_hour"]["max"]
    models = {model["name"]: model for model in TOOLS["list_models"]("qwen3-8b")["models"]}
    assert models["Qwen/Qwen3-8B"]["parameters"] == pytest.approx(8.19e9, rel=0.01)
    assert find_catalog_dates("prices.yaml")["prices.yaml"] >= "2026-09"


OUTSIDE_TEXT = "swordfish,1,2"


def call_in_process(
    calls: list[tuple[str, dict[str, Any]]], root: Path, *, allows_addresses: bool = False
) -> list[Any]:
    async def call_all() -> list[Any]:
        async with Client(build_server(root, allows_addresses=allows_addresses)) as client:
            return [await client.call_tool(*one) for one in calls]

    return anyio.run(call_all)


def test_no_file_outside_the_folder_is_read_by_any_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / "root").mkdir()
    monkeypatch.chdir(root)
    outside = tmp_path / "outside.csv"
    outside.write_text(f"{OUTSIDE_TEXT}\n{OUTSIDE_TEXT}\n")
    (root / "link.csv").symlink_to(outside)
    scenario = (ROOT / "catalogs/scenarios/edge-8b-24gb.yaml").read_text()
    (root / "mine.yaml").write_text(f"{scenario}\n")
    (root / "compose.yml").write_text(
        "services: {a: {image: 'vllm/vllm-openai:v0.18.0', env_file: ../outside.csv,"
        " command: --model Qwen/Qwen3-8B --config ../outside.csv}}"
    )
    calls: list[tuple[str, dict[str, Any]]] = []
    for path in (str(outside), "../outside.csv", "link.csv", f"{root}/../outside.csv"):
        calls += [
            ("plan", {"scenario": path}),
            ("plan", {"scenario": "mine.yaml", "set": {"workload.trace": path}}),
            ("predict", {"row": {"model_config": path, "gpu": "H100"}}),
            ("predict", {"row": {"model": path, "gpu": "H100"}}),
            ("lint", {"what": path}),
            ("lint", {"what": f"vllm serve {path} --config {path}"}),
            ("diagnose", {"pages": [path]}),
            ("diagnose", {"log": path}),
            ("diagnose", {"log": "compose.yml", "plan": path}),
            ("explain_log", {"log": path}),
            ("explain_log", {"log": str(EXAMPLE_LOG), "scenario": path}),
            ("explain_log", {"log": str(EXAMPLE_LOG), "gpu": "H100", "command": path}),
        ]
    for call, result in zip(calls, call_in_process(calls, root), strict=True):
        answer = json.dumps([part.text for part in result.content])
        assert "swordfish" not in answer + json.dumps(result.structured_content), call
        assert result.is_error or call[0] == "lint", call
    (linted,) = call_in_process([("lint", {"what": "compose.yml"})], root)
    assert "swordfish" not in json.dumps(linted.structured_content)
    assert linted.structured_content["verdict"] == "at_risk"  # not judged, and said


def test_addresses_are_asked_only_where_the_server_is_told_so(tmp_path: Path) -> None:
    asked = list[str]()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        calls = [("diagnose", {"pages": [f"http://127.0.0.1:{server.server_port}/metrics"]})]
        (refused,) = call_in_process(calls, tmp_path)
        assert refused.is_error and asked == [] and "--addresses" in refused.content[0].text
        call_in_process(calls, tmp_path, allows_addresses=True)
        assert asked == ["/metrics"]
        server.shutdown()


def test_what_is_no_log_is_not_healthy(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello world\nthis is no log\n")
    (result,) = call_in_process([("diagnose", {"log": str(tmp_path / "a.log")})], tmp_path)
    assert result.structured_content["verdict"] == ["not_judged"]
