"""Read calls of agents and chats from where they are recorded: OpenTelemetry spans, WEKA's conversations.

Both become rows of a trace: time, prompt and output tokens, and which blocks of prompts are equal.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from planner.core.errors import PlannerError

INPUT_TOKEN_KEYS = (
    "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens",
    "llm.token_count.prompt",
)  # fmt: skip
"""Attributes of prompt tokens, cached ones among them: OpenTelemetry's conventions for GenAI, until
1.26 and so vLLM's own spans; OpenLLMetry; OpenInference (opentelemetry.io/docs/specs/semconv/gen-ai,
vLLM tracing.py, github.com/Arize-ai/openinference)."""
OUTPUT_TOKEN_KEYS = (
    "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens",
    "llm.token_count.completion",
)  # fmt: skip
CACHED_TOKEN_KEYS = (
    "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
)  # fmt: skip
"""Attributes of prompt tokens that were found in a cache."""
AGENT_OPERATION, CONVERSATION_KEY = "invoke_agent", "gen_ai.conversation.id"


@dataclass(frozen=True)
class AgentCall:
    """One request: its cells as they were recorded, and where they stand."""

    time: object
    prompt: object
    output: object
    line: int
    chain: Hashable  # the agent or conversation whose prompts grow from call to call
    cached: float | None = None  # prompt tokens found in a cache, if recorded
    block_ids: tuple[Hashable, ...] = ()  # of its prompt, if recorded
    block_tokens: int = 0


@dataclass(frozen=True)
class _Span:
    key: tuple[str, str]  # trace, span
    parent: tuple[str, str]
    start: object
    attributes: Mapping[str, Any]
    line: int

    def find(self, keys: Sequence[str]) -> Any:
        """Find the value of the first of `keys` that it has."""
        return next((self.attributes[key] for key in keys if key in self.attributes), None)


def is_agent_record(record: object) -> bool:
    """Tell whether a JSON object holds spans or a conversation, not one request."""
    if not isinstance(record, dict):
        return False
    is_span = "attributes" in record and {"parent_id", "parentSpanId", "context"} & {*record}
    is_conversation = isinstance(record.get("requests"), list)
    return "resourceSpans" in record or bool(is_span) or is_conversation


def list_agent_calls(records: Iterable[tuple[int, Any]], name: str) -> list[AgentCall]:
    """List the calls in the `records` of a file, each with its line.

    Of a tree of spans those count that no other span with tokens is part of: an agent's own span
    has the sum of its calls. Raises `PlannerError` naming line and field for what cannot be read.
    """
    spans: dict[tuple[str, str], _Span] = {}
    calls: list[AgentCall] = []
    for line, record in records:
        where = f"{name}, line {line}"
        if not is_agent_record(record):
            raise PlannerError(f"{where}: expected spans or a conversation, as before it")
        if isinstance(record.get("requests"), list):
            calls += _list_conversation_calls(record, line, where)
        else:
            spans |= {span.key: span for span in _flatten_spans(record, line, where)}
    calls += _list_span_calls(spans)
    if not calls:
        raise PlannerError(
            f"{name}: no span has both tokens of a prompt and of an answer; accepted are"
            f" {', '.join(INPUT_TOKEN_KEYS)} and the like"
        )
    return calls


def _list_conversation_calls(
    record: Mapping[str, Any], line: int, where: str, start: float = 0.0, name: str = ""
) -> list[AgentCall]:
    """List the requests of one conversation of WEKA's kv-cache-tester, those of its subagents too.

    The fields are t (seconds since it began), in, out and hash_ids. A subagent has them anew, from
    its own start on, and ids of its own unless their scope is global (trace format specification of
    github.com/callanjfox/kv-cache-tester).
    """
    is_global = record.get("hash_id_scope") == "global"
    own = "" if is_global else f"{line}:{record.get('id', '')}{name}"
    tokens, calls = record.get("block_size", 64), list[AgentCall]()
    if type(tokens) is not int or tokens < 1:
        raise PlannerError(f"{where}, field block_size: expected tokens, got {tokens!r:.40}")
    for place, request in enumerate(record["requests"]):
        if not isinstance(request, dict):
            raise PlannerError(f"{where}, field requests: expected objects, got {request!r:.40}")
        at = request.get("t")
        if isinstance(at, bool) or not isinstance(at, int | float):
            raise PlannerError(
                f"{where}, field requests: needs t, a number of seconds, got {at!r:.40}"
            )
        if isinstance(request.get("requests"), list):
            inner = {**record, **request}
            begins = 0.0 if is_global else start + at
            calls += _list_conversation_calls(inner, line, where, begins, f"{name}/{place}")
            continue
        if missing := {"in", "out"} - {*request}:
            raise PlannerError(f"{where}, field requests: needs {', '.join(sorted(missing))}")
        ids = request.get("hash_ids") or ()
        blocks = tuple((own, str(block)) for block in ids) if isinstance(ids, list) else ()
        cells = start + at, request["in"], request["out"]
        calls.append(AgentCall(*cells, line, own, block_ids=blocks, block_tokens=tokens))
    return calls


def _flatten_spans(record: Mapping[str, Any], line: int, where: str) -> Iterator[_Span]:
    """Yield the spans of a line: OTLP's JSON, or one span as the SDKs' console exporter writes it."""
    try:
        if "resourceSpans" not in record:
            context = record.get("context") or {}
            ids = (
                str(context.get("trace_id", record.get("traceId", ""))),
                str(context.get("span_id", record.get("spanId", ""))),
            )
            parent = str(record.get("parent_id") or record.get("parentSpanId") or "")
            start = record.get("start_time", record.get("startTimeUnixNano"))
            attributes = record["attributes"]
            if isinstance(attributes, list):
                attributes = _read_attributes(attributes)
            yield _Span(ids, (ids[0], parent), start, dict(attributes), line)
            return
        for resource in record["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    trace = str(span.get("traceId", ""))
                    parent = str(span.get("parentSpanId", ""))
                    yield _Span(
                        (trace, str(span.get("spanId", ""))), (trace, parent),
                        span.get("startTimeUnixNano"),
                        _read_attributes(span.get("attributes", ())), line,
                    )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        raise PlannerError(f"{where}: not spans as OpenTelemetry writes them") from None


def _read_attributes(pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of OTLP's JSON, whose whole numbers are text."""
    values = {pair["key"]: pair.get("value") or {} for pair in pairs}
    return {
        key: next((each for each in value.values()), None) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _list_span_calls(spans: Mapping[tuple[str, str], _Span]) -> list[AgentCall]:
    """List the spans with tokens that no other span with tokens is part of."""
    used = [
        span for span in spans.values()
        if span.find(INPUT_TOKEN_KEYS) is not None and span.find(OUTPUT_TOKEN_KEYS) is not None
    ]  # fmt: skip
    sums = {above.key for span in used for above in _list_ancestors(span, spans)}
    calls = []
    for span in used:
        if span.key in sums:
            continue
        agents = (
            above.key for above in _list_ancestors(span, spans)
            if above.attributes.get("gen_ai.operation.name") == AGENT_OPERATION
        )  # fmt: skip
        chain = next(agents, span.attributes.get(CONVERSATION_KEY) or span.key[0])
        cells = span.find(INPUT_TOKEN_KEYS), span.find(OUTPUT_TOKEN_KEYS)
        cached = span.find(CACHED_TOKEN_KEYS)
        calls.append(
            AgentCall(
                span.start, *cells, span.line, chain, None if cached is None else _count(cached)
            )
        )
    return calls


def _list_ancestors(span: _Span, spans: Mapping[tuple[str, str], _Span]) -> list[_Span]:
    """List the spans that a span is part of, from the nearest on."""
    above, seen = list[_Span](), {span.key}
    while (parent := spans.get(span.parent)) and parent.key not in seen:
        seen.add(parent.key)
        above.append(span := parent)
    return above


def _count(value: object) -> float:
    """Return a number of tokens; 0 for what is none."""
    try:
        number = float(str(value))
    except ValueError:
        return 0.0
    return number if 0 <= number < math.inf else 0.0


def number_blocks(calls: Sequence[AgentCall], block_tokens: int) -> list[tuple[int, ...]] | None:
    """Number the blocks of the prompts of `calls`, which are in order of time; None if not known.

    Recorded blocks are joined to blocks of `block_tokens`. Of a call that says how many tokens were
    cached, so many are those of its agent's prompt before, or of the latest prompt if it has none.
    """
    numbers = count()
    if any(call.block_ids for call in calls):
        known: dict[tuple[Hashable, ...], int] = {}
        joined = []
        for call in calls:
            each = max(block_tokens // call.block_tokens, 1) if call.block_tokens else 1
            ids = call.block_ids
            parts = (ids[k : k + each] for k in range(0, len(ids), each))
            joined.append(
                tuple(
                    known[part] if part in known else known.setdefault(part, next(numbers))
                    for part in parts
                )
            )
        return joined
    if all(call.cached is None for call in calls):
        return None
    chains: dict[Hashable, tuple[int, ...]] = {}
    latest: tuple[int, ...] = ()
    rows = []
    for call in calls:
        size = math.ceil(_count(call.prompt) / block_tokens)
        kept = chains.get(call.chain, latest)[: min(int((call.cached or 0) // block_tokens), size)]
        latest = chains[call.chain] = (*kept, *(next(numbers) for _ in range(size - len(kept))))
        rows.append(latest)
    return rows
