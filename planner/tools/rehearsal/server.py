"""Serve the OpenAI API and /metrics as one replica of a plan would, without a model."""

import asyncio
import json
import math
import random
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from time import time
from typing import Any

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from planner.core.errors import PlannerError
from planner.core.units import GIB, MIB
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.planned_replica import PlannedReplica
from planner.simulator.simulation import build_engine_rules
from planner.tools.rehearsal.engine import LiveEngine, LiveRequest
from planner.tools.rehearsal.metrics import RehearsalMetrics

CHARACTERS_PER_TOKEN = 4
"""Of a text: about what tokenizers make of English. Prompts of token ids count exactly."""
WORDS = (" the", " and", " for", " one", " two", " all", " any", " may", " new", " way", ".\n\n ")
WORD_OF_TOKEN = {hash(word): word for word in WORDS}
"""What answers consist of, a token each, as a prompt that repeats them would have it."""
STAT_LINE_S = 10
"""Between two periodic lines of the log, as in vLLM."""
MAX_LAG_S = 0.5
"""Behind the plan's pace, from which on the machine that rehearses is too slow."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions in OpenAI's API."""


MAX_BODY_BYTES_PER_TOKEN = 24
"""Of a request, besides 1 MiB: six bytes for a character that JSON escapes, or a token's id."""


@dataclass(frozen=True)
class RehearsalFaults:
    """How the server differs from its plan."""

    slowdown: float = 1.0
    kv_fraction: float = 1.0
    max_num_seqs: int | None = None
    prefix_hit_fraction: float = 1.0  # of the requests whose prefix is cached


class ContentPart(BaseModel):
    """A part of a message; only texts count."""

    text: str | None = None


class Message(BaseModel):
    """A message of a chat."""

    role: str = ""
    content: str | list[ContentPart] | None = None


class CompletionBody(BaseModel):
    """The fields of a request that matter here."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | list[int] | list[str] | None = None
    messages: list[Message] = Field(default_factory=list)
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None


def split_into_tokens(text: str) -> list[int]:
    """Return a token for every `CHARACTERS_PER_TOKEN` characters."""
    step = CHARACTERS_PER_TOKEN
    return [hash(text[at : at + step]) for at in range(0, len(text), step)]


class RehearsedServer:
    """One replica of a plan: its engines (data-parallel ranks), run by the event loop."""

    def __init__(
        self,
        planned: PlannedReplica,
        faults: RehearsalFaults | None = None,
        log: Callable[[str], None] = lambda line: None,
        api_key: str | None = None,
    ):
        """Create the server; raise `PlannerError` if the planned replica does not start."""
        faults = faults or RehearsalFaults()
        self.deployment, self.log, self.api_key = planned.deployment, log, api_key
        memory = get_memory_plan(self.deployment)
        if not memory.can_start:
            raise PlannerError(f"the planned replica does not start: {memory.reason}")
        self.pool = replace(
            memory.pool, num_blocks=max(int(memory.pool.num_blocks * faults.kv_fraction), 2)
        )
        layout, self.step_model = (
            self.pool.layout,
            build_step_model(self.deployment, planned.workload),
        )
        self.slowdown, self._random = faults.slowdown, random.Random(0)
        rules = build_engine_rules(self.deployment, self.pool)
        rules = rules._replace(
            max_num_seqs=faults.max_num_seqs or rules.max_num_seqs,
            # a prefix of several groups is not one list of blocks
            enable_prefix_caching=rules.enable_prefix_caching and len(layout.groups) == 1,
        )
        self.rules = rules
        self.engines = [
            LiveEngine(
                rules,
                layout.count_request_blocks,
                faults.prefix_hit_fraction,
                lambda: self._random.choice(list(WORD_OF_TOKEN)),
            )
            for _ in range(self.deployment.layout.dp)
        ]
        self.metrics = RehearsalMetrics(self.deployment, self.pool, self.engines)
        self._outputs = planned.workload.output.values if planned.workload else None
        self._arrivals = [asyncio.Event() for _ in self.engines]
        self._num_requests = 0
        self._is_late = False
        self._tokens_logged = (0.0, 0.0)

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.deployment.model.name

    @property
    def notes(self) -> list[str]:
        """What is not played."""
        args, notes = self.deployment.args, []
        if args.enable_prefix_caching and not self.rules.enable_prefix_caching:
            notes.append("the prefix cache of a model with several kinds of KV cache")
        if args.max_loras:
            notes.append("what adapters cost; requests may name any")
        if args.kv_offloading_size:
            notes.append("the KV cache in host memory")
        return [f"not played: {note}" for note in notes]

    def serves(self, model: str | None) -> bool:
        """Return whether requests for `model` are answered: the model, or an adapter."""
        return model in (None, self.model_name) or self.deployment.args.max_loras > 0

    @property
    def startup_lines(self) -> list[str]:
        """What vLLM logs of its arguments and its KV cache as it starts."""
        length, args = self.rules.max_model_len, self.deployment.args
        given = {
            "model": self.model_name,
            "max_model_len": length,
            "tensor_parallel_size": self.deployment.layout.tp,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "max_num_seqs": self.rules.max_num_seqs,
            "max_num_batched_tokens": self.rules.max_num_batched_tokens,
        }
        kv_bytes = self.pool.num_blocks * self.pool.bytes_per_block
        weights = get_memory_plan(self.deployment).weights.mid
        return [
            f"non-default args: {given}",
            f"Model loading took {weights / GIB:.2f} GiB memory",
            f"Available KV cache memory: {kv_bytes / GIB:.2f} GiB",
            f"GPU KV cache size: {self.pool.reported_tokens:,} tokens",
            f"Maximum concurrency for {length:,} tokens per request:"
            f" {self.pool.max_concurrency_x:.2f}x",
        ]

    async def run(self) -> None:
        """Run the engines until cancelled."""
        for line in (*self.notes, *self.startup_lines):
            self.log(line)
        async with asyncio.TaskGroup() as tasks:
            for rank in range(len(self.engines)):
                for _ in range(self.step_model.stages):  # each works on a step of its own
                    tasks.create_task(self._run_engine(rank))
            tasks.create_task(self._log_statistics())

    async def _run_engine(self, rank: int) -> None:
        engine, arrival, loop = self.engines[rank], self._arrivals[rank], asyncio.get_running_loop()
        start_s = end_s = loop.time()
        while True:
            # asynchronous scheduling chooses a step when the one before starts
            queued_by_s = start_s if self.rules.async_scheduling else math.inf
            step = engine.schedule(loop.time(), queued_by_s)
            if step is None:
                arrival.clear()
                if engine.running or not engine.waiting:  # until a step ends, or a request comes
                    await arrival.wait()
                start_s = end_s = loop.time()
                continue
            cost = self.step_model.estimate_step(step.chunks, step.contexts).seconds
            start_s, end_s = end_s, end_s + cost * self.slowdown  # however late the loop wakes up
            await asyncio.sleep(max(end_s - loop.time(), 0))
            if loop.time() - end_s > MAX_LAG_S and not self._is_late:
                self._is_late = True
                self.log(
                    f"this machine is over {MAX_LAG_S:g} s behind the plan: from here on latencies"
                    " are longer than planned"
                )
            for request, new in self.metrics.count_step(engine, step, loop.time()):
                request.announce(new)
            if self.step_model.stages > 1:
                arrival.set()

    async def _log_statistics(self) -> None:
        while True:
            await asyncio.sleep(STAT_LINE_S)
            totals = self.metrics.prompt_tokens, self.metrics.generation_tokens
            rates = [
                (n - before) / STAT_LINE_S
                for n, before in zip(totals, self._tokens_logged, strict=True)
            ]
            self._tokens_logged = totals
            for rank, engine in enumerate(self.engines):
                if any(rates) or engine.running or engine.waiting:
                    self.log(
                        f"Engine {rank:03}: Avg prompt throughput: {rates[0]:.1f} tokens/s, Avg"
                        f" generation throughput: {rates[1]:.1f} tokens/s, Running:"
                        f" {len(engine.running)} reqs, Waiting: {len(engine.waiting)} reqs, GPU KV"
                        f" cache usage: {engine.usage:.1%}, Prefix cache hit rate:"
                        f" {self.metrics.hit_rate:.1%}"
                    )

    def choose_output_tokens(self, body: CompletionBody, prompt_tokens: int) -> int:
        """Choose the length of an answer: that of the plan's traffic, within the request's limits."""
        limit = body.max_completion_tokens or body.max_tokens
        if limit is None:
            room = max(self.rules.max_model_len - prompt_tokens, 1)
            limit = room if body.messages else min(DEFAULT_COMPLETION_TOKENS, room)
        if body.ignore_eos or self._outputs is None:
            return limit
        drawn = int(self._random.choice(np.asarray(self._outputs)))
        return min(max(drawn, body.min_tokens, 1), limit)

    async def generate(self, tokens: Sequence[int], max_output: int) -> AsyncIterator[list[str]]:
        """Yield the tokens of an answer as steps compute them; raise `PlannerError` if it is too long."""
        rank = self._num_requests % len(self.engines)
        self._num_requests += 1
        engine, loop, news = self.engines[rank], asyncio.get_running_loop(), asyncio.Queue[int]()
        request = LiveRequest(
            list(tokens), max_output, arrived_s=loop.time(), announce=news.put_nowait
        )
        engine.check(request)
        uncached = len(tokens) - engine.count_cached(tokens)
        step = self.step_model
        await asyncio.sleep(step.request_s + step.prompt_token_s * uncached)
        request.queued_s = loop.time()
        engine.waiting.append(request)
        self._arrivals[rank].set()
        try:
            at = request.num_prompt
            while at < request.num_prompt + max_output:
                new = await news.get()
                yield [WORD_OF_TOKEN[token] for token in request.tokens[at : at + new]]
                at += new
        finally:
            if not request.is_finished:
                engine.abort(request)
                self.metrics.count_abort()

    def build_application(self) -> Application:
        """Build the web application."""
        kinds: list[Any] = [
            (r"/v1/completions", CompletionHandler, {"server": self, "is_chat": False}),
            (r"/v1/chat/completions", CompletionHandler, {"server": self, "is_chat": True}),
            (r"/v1/models", ModelsHandler, {"server": self}),
            (r"/health", HealthHandler, {"server": self}),
            (r"/metrics", MetricsHandler, {"server": self}),
        ]
        return Application(kinds, log_function=lambda handler: None)


class RehearsalHandler(RequestHandler):
    """Base of all handlers: errors as engines send them."""

    def initialize(self, server: RehearsedServer, is_chat: bool = False) -> None:
        """Remember the server."""
        self.server, self.is_chat = server, is_chat

    def check_key(self) -> None:
        """Answer 401 to a request without the API key."""
        key = self.server.api_key
        if key and self.request.headers.get("Authorization") != f"Bearer {key}":
            raise HTTPError(HTTPStatus.UNAUTHORIZED, reason="Unauthorized")

    def send_problem(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error in OpenAI's form."""
        self.set_status(status)
        kind = {HTTPStatus.NOT_FOUND: "NotFoundError"}.get(status, "BadRequestError")
        self.finish({"error": {"message": message, "type": kind, "code": int(status)}})


class HealthHandler(RehearsalHandler):
    """/health."""

    def get(self) -> None:
        """Answer 200 with an empty body."""


class MetricsHandler(RehearsalHandler):
    """/metrics."""

    def get(self) -> None:
        """Answer with the metrics of this engine version."""
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.write(generate_latest(self.server.metrics.registry))


class ModelsHandler(RehearsalHandler):
    """/v1/models."""

    def get(self) -> None:
        """Answer with the one model."""
        self.check_key()
        model = {
            "id": self.server.model_name,
            "object": "model",
            "owned_by": self.server.deployment.engine.name,
            "max_model_len": self.server.rules.max_model_len,
        }
        self.write({"object": "list", "data": [model]})


class CompletionHandler(RehearsalHandler):
    """/v1/completions and /v1/chat/completions."""

    _answering: "asyncio.Task[Any] | None" = None

    async def post(self) -> None:
        """Generate an answer, streamed or whole."""
        self.check_key()
        try:
            length = self.server.rules.max_model_len
            if len(self.request.body) > length * MAX_BODY_BYTES_PER_TOKEN + MIB:
                raise ValueError(f"the body is larger than {length:,} tokens can be")
            body = CompletionBody.model_validate_json(self.request.body)
            tokens = read_prompt(body, self.is_chat, length)
        except (ValidationError, ValueError) as error:
            self.send_problem(HTTPStatus.BAD_REQUEST, str(error)[:500])
            return
        if not self.server.serves(body.model):
            self.send_problem(HTTPStatus.NOT_FOUND, f"The model `{body.model}` does not exist.")
            return
        self._answering = asyncio.current_task()
        output = self.server.choose_output_tokens(body, len(tokens))
        answer = self.server.generate(tokens, output)
        try:
            await (self._stream if body.stream else self._answer)(body, len(tokens), output, answer)
        except PlannerError as error:
            self.send_problem(HTTPStatus.BAD_REQUEST, str(error))
        except (StreamClosedError, asyncio.CancelledError):  # the client has left
            pass
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    def on_connection_close(self) -> None:
        """Stop the answer that nobody waits for."""
        if self._answering:
            self._answering.cancel()

    def _describe(self, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chunk and self.is_chat else kind,
            "created": int(time()),
            "model": self.server.model_name,
        }

    async def _answer(
        self, body: CompletionBody, prompt: int, output: int, answer: AsyncIterator[list[str]]
    ) -> None:
        text = "".join([token async for tokens in answer for token in tokens])
        content = {"message": {"role": "assistant", "content": text}}
        choice = {
            "index": 0,
            **(content if self.is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": get_finish_reason(body, output),
        }
        usage = count_usage(prompt, output)
        self.write({**self._describe(False), "choices": [choice], "usage": usage})

    async def _stream(
        self, body: CompletionBody, prompt: int, output: int, answer: AsyncIterator[list[str]]
    ) -> None:
        head, sent = self._describe(True), 0
        async for tokens in answer:
            if not sent:
                self.set_header("Content-Type", "text/event-stream; charset=utf-8")
                if self.is_chat:
                    await self._send(head, [{"index": 0, "delta": {"role": "assistant"}}])
            sent += len(tokens)
            text = "".join(tokens)
            choice = {
                "index": 0,
                **({"delta": {"content": text}} if self.is_chat else {"text": text}),
                "finish_reason": get_finish_reason(body, output) if sent == output else None,
            }
            await self._send(head, [choice])
        if (body.stream_options or {}).get("include_usage"):
            await self._send({**head, "usage": count_usage(prompt, output)}, [])
        self.write("data: [DONE]\n\n")

    async def _send(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        self.write(f"data: {json.dumps({**head, 'choices': choices})}\n\n")
        await self.flush()


def read_prompt(body: CompletionBody, is_chat: bool, max_tokens: int) -> list[int]:
    """Return the tokens of a prompt or of messages; raise `ValueError` for none or too many."""
    if is_chat:
        tokens = list[int]()
        for message in body.messages:
            content = message.content
            parts = content if isinstance(content, list) else [ContentPart(text=content)]
            text = "".join(part.text or "" for part in parts)
            _check_length(len(tokens) + len(text) // CHARACTERS_PER_TOKEN, max_tokens)
            tokens += [hash(message.role), *split_into_tokens(text), hash("end")]
        if tokens:
            return [*tokens, hash("assistant")]
        raise ValueError("messages: at least one is needed")
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        _check_length(len(prompt) // CHARACTERS_PER_TOKEN, max_tokens)
        return split_into_tokens(prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        _check_length(len(prompt), max_tokens)
        return [token for token in prompt if isinstance(token, int)]
    raise ValueError("prompt: a text or a list of token ids is needed, one per request")


def _check_length(num_tokens: int, max_tokens: int) -> None:
    """Raise `ValueError` for a prompt that is too long, before its tokens are made."""
    if num_tokens > max_tokens:
        raise ValueError(f"a prompt of {num_tokens:,} tokens exceeds max_model_len {max_tokens:,}")


def get_finish_reason(body: CompletionBody, output: int) -> str:
    """Return whether the answer ended by itself or at its limit."""
    return "length" if output == (body.max_completion_tokens or body.max_tokens) else "stop"


def count_usage(prompt: int, output: int) -> dict[str, int]:
    """Return the `usage` of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
