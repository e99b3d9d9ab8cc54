"""Traces of agents as they are recorded: OpenTelemetry's spans and WEKA's conversations, as specified."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.core.errors import PlannerError
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace, read_trace

START_NS = 1_760_000_000_000_000_000


def span(
    name: str, parent: str, second: float, tokens: tuple[int, int] | None = None, **more: object
) -> dict[str, Any]:
    """A span in OTLP's JSON: whole numbers are text (opentelemetry-proto, docs on JSON encoding)."""
    attributes: dict[str, object] = {**more}
    if tokens:
        attributes |= dict(
            zip(("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"), tokens, strict=True)
        )
    return {
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": name, "parentSpanId": parent, "name": name,
        "startTimeUnixNano": str(START_NS + round(second * 1e9)),
        "attributes": [
            {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
            for key, value in attributes.items()
        ],
    }  # fmt: skip


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(spans)}]}]}


AGENT = {"gen_ai.operation.name": "invoke_agent"}
READ = "gen_ai.usage.cache_read.input_tokens"
TREE = [
    # spans end, and are written, from the leaves to the root; the agents' own spans have sums
    span("call-1", "main", 0, (20_000, 100), **{READ: 0}),
    span("tool", "main", 3, **{"gen_ai.operation.name": "execute_tool"}),
    span("sub-call", "sub", 4, (8_000, 50), **{READ: 4_096}),
    span("sub", "main", 4, (8_000, 50), **AGENT),
    span("call-2", "main", 9, (21_000, 200), **{READ: 20_480}),
    span("main", "", 0, (49_000, 350), **AGENT),
]
"""A coding agent that asks, uses a tool, lets another agent work, and asks again."""


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def check_tree(trace: Trace) -> None:
    assert trace.arrival.tolist() == pytest.approx([0, 4, 9], abs=1e-3)
    assert trace.prompt.tolist() == [20_000, 8_000, 21_000]
    assert trace.output.tolist() == [100, 50, 200]  # the agents' own sums are no requests
    assert trace.hash_ids is not None
    assert [len(ids) for ids in trace.hash_ids] == np.ceil(
        trace.prompt / TRACE_BLOCK_TOKENS
    ).tolist()
    main, sub, again = trace.hash_ids
    assert again[:40] == main and again[40:] and sub[:8] == main[:8] and sub[8] not in main
    assert trace.prefix_hit_rate == pytest.approx((4_096 + 20_480 - 480) / 49_000, abs=0.01)


def test_a_tree_of_calls_in_one_document_and_in_lines(tmp_path: Path) -> None:
    """The collector's file exporter writes a line per batch; a tool may write one indented document."""
    check_tree(read_trace(write(tmp_path / "lines.jsonl", otlp(*TREE[:3]), otlp(*TREE[3:]))))
    (tmp_path / "document.json").write_text(json.dumps(otlp(*TREE), indent=2), encoding="utf-8")
    check_tree(read_trace(tmp_path / "document.json"))


def test_spans_as_a_console_exporter_writes_them(tmp_path: Path) -> None:
    """vLLM's own names of the attributes, and times as dates; what was cached is not in them."""
    rows = [
        {"name": "llm_request", "context": {"trace_id": "0x1", "span_id": f"0x{k}"}, "parent_id": None,
         "start_time": f"2026-03-29T12:00:0{k}.000000Z",
         "attributes": {"gen_ai.usage.prompt_tokens": 100 + k, "gen_ai.usage.completion_tokens": 9}}
        for k in range(3)
    ]  # fmt: skip
    trace = read_trace(write(tmp_path / "spans.jsonl", *rows))
    assert trace.prompt.tolist() == [100, 101, 102] and trace.arrival.tolist() == [0, 1, 2]
    assert trace.hash_ids is None
    assert "does not say what of its prompts was cached" in trace.assumptions[-1]


def test_conversations_of_the_kv_cache_tester(tmp_path: Path) -> None:
    """Blocks of 64 tokens become blocks of 512; subagents are requests of their own, in their place."""
    ids = list(range(1, 396))
    call = {"type": "s", "model": "m", "in": 25_259, "out": 86, "hash_ids": ids}
    inner = [
        {"t": 0.0, "in": 9969, "out": 247, "hash_ids": ids[:155]},
        {"t": 3.1, "in": 9969, "out": 5},
    ]
    nested = {"t": 5.0, "type": "subagent", "agent_id": "96624242", "requests": inner}
    one = {
        "id": "f64a8d4c-12d", "models": ["m"], "block_size": 64, "tool_tokens": 11899, "system_tokens": 2926,
        "requests": [
            {"t": 0.0, **call}, nested, {"t": 9.0, **call, "in": 25_600, "hash_ids": list(range(1, 401))},
        ],
    }  # fmt: skip
    trace = read_trace(write(tmp_path / "trace_0001.json", one))
    assert trace.prompt.tolist() == [25_259, 9_969, 9_969, 25_600]
    assert trace.arrival.tolist() == pytest.approx(
        [0, 5, 8.1, 9]
    )  # a subagent counts from its start
    assert trace.hash_ids is not None
    first, fresh, unknown, last = trace.hash_ids
    assert len(first) == 50 and first[:49] == last[:49] and first[49] != last[49]
    assert not set(fresh) & set(first) and not unknown  # it starts with a cache of its own
    two = read_trace(write(tmp_path / "two.jsonl", one, {**one, "id": "another"}))
    assert (
        len(two.prompt) == 8
        and "2 conversations of two.jsonl begin together" in two.assumptions[-1]
    )
    assert two.prefix_hit_rate == pytest.approx(trace.prefix_hit_rate)  # ids are each one's own


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (otlp(span("a", "", 0), span("b", "", 1)), "no span has both tokens"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": ["x"]}]}]}, "line 1: not spans"),
        ({"requests": [{"t": 0, "in": 3}]}, "needs out"),
        ({"requests": [{"in": 3, "out": 1}]}, "needs t"),
        ({"block_size": 0, "requests": [{"t": 0, "in": 3, "out": 1}]}, "field block_size"),
        (otlp(span("a", "", 0, (-5, 3)), span("b", "", 1, (5, 3))), "must be at least one token"),
    ],
)
def test_what_cannot_be_read_is_named(record: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=why):
        read_trace(write(tmp_path / "spans.json", record))


def test_the_hour_before_the_busiest_fills_the_caches(tmp_path: Path) -> None:
    """A quiet hour of which a busy one repeats every prompt: nothing is found cold, everything warm."""
    rows = [
        {"timestamp": ms, "input_length": 512, "output_length": 10, "hash_ids": [k % 50]}
        for k, ms in enumerate([*range(0, 3_600_000, 60_000), *range(3_600_000, 7_200_000, 20_000)])
    ]
    trace = read_trace(write(tmp_path / "mooncake.jsonl", *rows))
    busiest = trace.select_busiest_hour()
    assert busiest.num_uncounted == 60 and busiest.num_hours == 2
    assert busiest.prefix_hit_rate == 1.0
    assert busiest.rate == pytest.approx(1 / 20, rel=1e-3)
    assert "the one before it fills the caches" in busiest.assumptions[0]
