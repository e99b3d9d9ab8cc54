"""A rehearsed server is as fast as the simulation says, and speaks OpenAI's API."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from rehearsal import rehearse, run_in_virtual_time, send, serving

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import SpeculationConfig
from planner.planning.planned_replica import PlannedReplica
from planner.planning.simulation_runs import simulate_once
from planner.simulator.kernel_types import EngineRules
from planner.tools.rehearsal.engine import LiveEngine, LiveRequest
from planner.tools.rehearsal.server import (
    CompletionBody,
    RehearsalFaults,
    RehearsedServer,
    read_prompt,
)
from planner.ui.cli import main
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

DATA = Path(__file__).parent / "data"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CHAT = Workload(
    LengthDistribution.from_uniform(900, 0.5),
    LengthDistribution.from_uniform(60, 0.5),
    rate=3.0,
    prefix_tokens=320,
    prefix_hit_rate=1.0,
)


def deployed(**fields: Any) -> Deployment:
    args = {"engine_version": "0.33.0", "max_model_len": 4096, "max_num_seqs": 32, **fields}
    return deploy_on(MODEL, "L40S", **args)


def test_a_request_starts_when_a_slot_and_its_cache_are_free() -> None:
    """10 blocks of 16 tokens, 3 slots, steps of 64 tokens: two answers of 80 tokens take 5 blocks each."""
    rules = EngineRules(3, 64, 11, 160, True, True, 0, False, False, True, np.array([[0, 16]]))
    engine = LiveEngine(rules, lambda tokens: -(-tokens // 16))
    with pytest.raises(PlannerError, match="do not fit"):
        engine.check(LiveRequest([1] * 100, 61))
    first, second, third = (LiveRequest([10 * k + n for n in range(70)], 10) for k in range(3))
    engine.waiting.extend((first, second, third))
    steps = []
    while step := engine.schedule():
        steps.append([(request, count) for request, count in step.rows])
        assert sum(count for _, count in step.rows) <= 64 and engine.usage <= 1
        engine.finish(step)
    assert steps[0] == [(first, 64)] and steps[1] == [(first, 6), (second, 58)]
    started = next(k for k, rows in enumerate(steps) if third in [each for each, _ in rows])
    assert first not in [each for each, _ in steps[started]] and not engine.waiting
    # a longer prompt with the same start finds four whole blocks
    again = LiveRequest([*third.tokens[:70], 1], 1)
    assert engine.count_cached(again.tokens) == 64
    engine.waiting.append(again)
    assert engine.schedule().rows == ((again, 7),) and again.num_cached == 64


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": False}, {"max_num_seqs": 2}])
def test_latencies_are_those_of_the_simulation(fields: dict[str, Any], tmp_path: Path) -> None:
    deployment = deployed(**fields)
    planned = PlannedReplica.from_deployment(deployment, CHAT)
    measured = rehearse(planned, RehearsalFaults(), CHAT, 200, tmp_path)
    run = simulate_once(deployment, CHAT, 2000)
    assert measured["mean_tpot_ms"] == pytest.approx(run.summarize("tpot")["mean"] * 1e3, rel=0.03)
    if "max_num_seqs" in fields:  # overloaded: both serve what two slots serve
        assert measured["request_throughput"] == pytest.approx(run.request_tps, rel=0.05)
    else:
        assert measured["mean_ttft_ms"] == pytest.approx(
            run.summarize("ttft")["mean"] * 1e3, rel=0.1
        )


def test_the_page_agrees_with_the_client(tmp_path: Path) -> None:
    deployment = deployed()
    measured = rehearse(
        PlannedReplica.from_deployment(deployment, CHAT), RehearsalFaults(), CHAT, 60, tmp_path
    )
    page = (tmp_path / "after.txt").read_text()
    value = float(re.search(r"^vllm:time_to_first_token_seconds_sum\S+ (\S+)", page, re.M)[1])
    assert value == pytest.approx(measured["mean_ttft_ms"] * 60 / 1e3, rel=0.02, abs=0.1)
    assert re.search(r'finished_reason="length"\S+ 61\.0$', page, re.M)


def test_answers_are_those_of_openais_api() -> None:
    drafting = replace(deployed(), speculation=SpeculationConfig("ngram", 4, 0.7))

    async def work() -> None:
        async with serving(PlannedReplica.from_deployment(drafting, None)) as (server, port):
            server.api_key = "secret"
            text, _ = await send(port, "GET", "/v1/models")
            assert text.startswith("HTTP/1.1 401")
            server.api_key = None
            text, _ = await send(port, "GET", "/v1/models")
            assert json.loads(text.partition("\r\n\r\n")[2])["data"][0]["id"] == MODEL
            chat = {
                "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 40,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            text, _ = await send(port, "POST", "/v1/chat/completions", chat)
            events = [json.loads(line[6:]) for line in text.splitlines() if line[:7] == "data: {"]
            assert events[-1]["usage"]["completion_tokens"] == 40
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            said = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
            assert len(said) == 160 and text.rstrip("\r\n0").endswith("data: [DONE]")
            assert len(events) < 40  # drafted tokens come together
            whole = {"prompt": list(range(50)), "max_tokens": 7}
            text, _ = await send(port, "POST", "/v1/completions", whole)
            assert json.loads(text.partition("\r\n\r\n")[2])["usage"]["prompt_tokens"] == 50
            # the next turn of a chat finds the one before in the prefix cache
            turns = [*chat["messages"], {"role": "assistant", "content": said}, chat["messages"][0]]
            await send(port, "POST", "/v1/chat/completions", {**chat, "messages": turns})
            assert server.metrics.hit_rate > 0.2
            for body, status in (
                ({"prompt": [1] * 5000, "max_tokens": 1}, 400), ({"prompt": []}, 400),
                ({"model": "another", "prompt": "x"}, 404), ("no JSON object", 400),
            ):  # fmt: skip
                text, _ = await send(port, "POST", "/v1/completions", body)
                assert text.startswith(f"HTTP/1.1 {status}") and '"error"' in text

    run_in_virtual_time(work())


def test_a_client_that_leaves_frees_its_blocks() -> None:
    import asyncio

    async def work() -> None:
        async with serving(PlannedReplica.from_deployment(deployed(), None)) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": [1] * 500, "max_tokens": 3000, "stream": True})
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                f"{body}".encode()
            )
            await reader.readline()
            (engine,) = server.engines
            assert engine.running and engine.usage
            writer.close()
            await asyncio.sleep(5)
            assert not engine.running and not engine.usage

    run_in_virtual_time(work())


def test_what_is_not_played_is_said() -> None:
    windows = deploy_on("openai/gpt-oss-20b", "H100", engine_version="0.33.0", max_model_len=8192)
    (note,) = RehearsedServer(PlannedReplica.from_deployment(windows, None)).notes
    assert "prefix cache" in note
    plain = RehearsedServer(PlannedReplica.from_deployment(deployed(), None))
    assert not plain.notes and not plain.serves("an-adapter")
    adapters = RehearsedServer(PlannedReplica.from_deployment(deployed(max_loras=2), None))
    assert "adapters" in adapters.notes[0] and adapters.serves("an-adapter")


def test_what_cannot_be_rehearsed_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "edge-8b-24gb", "--port", "70000"]) == 2
    assert "--port is 0 to 65535" in capsys.readouterr().err
    tiny = PlannedReplica.from_deployment(deployed(gpu_memory_utilization=0.2), None)
    with pytest.raises(PlannerError, match="does not start"):
        rehearse(tiny, RehearsalFaults(), CHAT, 1, Path())


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.20.2"), ("vllm", "0.33.0"), ("sglang", "0.5.23")]
)
def test_metrics_are_among_those_that_this_version_has(engine: str, version: str) -> None:
    deployment = deploy_on(MODEL, "L40S", engine=engine, engine_version=version, max_model_len=4096)
    seen = yaml.safe_load((DATA / "metric_names.yaml").read_text())[f"{engine} {version}"]["names"]
    registry = RehearsedServer(PlannedReplica.from_deployment(deployment, None)).metrics.registry
    samples = {each.name for family in registry.collect() for each in family.samples}
    samples = {name for name in samples if name.startswith(engine) and name[-8:] != "_created"}
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in samples}
    assert len(names) > 10 and names <= {
        *seen,
        "vllm:cache_config_info",  # on the page of a server, not of its logger alone
    }
    assert {
        f"{engine}:time_to_first_token_seconds",
        f"{engine}:e2e_request_latency_seconds",
    } <= names


def test_bodies_of_any_form_and_length_are_refused_before_work() -> None:
    """A chat's content is a text or parts (OpenAI's API reference); the length is judged first."""
    server = RehearsedServer(PlannedReplica(deployed(), CHAT, None, ()))
    with_parts = [{"role": "user", "content": [{"type": "text", "text": "a" * 8}]}]
    body = CompletionBody.model_validate({"messages": with_parts})
    assert len(read_prompt(body, True, 4096)) == 1 + 2 + 1 + 1  # role, two tokens, end, assistant
    for messages in ([{"role": "user", "content": ["x"]}], [{"content": 3}], ["x"], [{"role": []}]):
        with pytest.raises(ValidationError):
            CompletionBody.model_validate({"messages": messages})
    long = "x" * (4 * server.rules.max_model_len + 8)
    for fields, is_chat in (
        ({"prompt": long}, False),
        ({"prompt": [1] * 5000}, False),
        ({"messages": [{"role": "user", "content": long}]}, True),
        ({"messages": [{"role": "user", "content": long[:9000]}] * 2}, True),
    ):
        with pytest.raises(ValueError, match="exceeds max_model_len 4,096"):
            read_prompt(CompletionBody.model_validate(fields), is_chat, 4096)
