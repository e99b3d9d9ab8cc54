"""The /metrics page of a rehearsed server, by the names and buckets of its engine's version."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from planner.engines.deployment import Deployment
from planner.engines.metric_names import get_metric_names
from planner.memory.kv_cache import KvCachePool
from planner.tools.rehearsal.engine import LiveEngine, LiveRequest, LiveStep

COUNTERS = (
    "success", "preemptions", "prompt_tokens", "generation_tokens", "drafted", "accepted",
    "prefix_queries", "prefix_hits",
)  # fmt: skip
GAUGES = ("running", "waiting", "kv_usage")
HISTOGRAMS = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode")
TOKEN_HISTOGRAMS = ("prompt_lengths", "output_lengths", "step_tokens")
MAX_EDGE_TOKENS = 2**20


class RehearsalMetrics:
    """What a server has counted."""

    def __init__(self, deployment: Deployment, pool: KvCachePool, engines: Sequence[LiveEngine]):
        """Create the metrics that this engine version has."""
        engine, self.registry = deployment.engine, CollectorRegistry()
        known = get_metric_names(engine)
        self.prompt_tokens = self.generation_tokens = 0.0
        self._queries = self._hits = 0
        self._metrics: dict[str, Any] = {}
        self._labels = {"model_name": deployment.model.name, "engine": "0"}
        self._has_reasons = engine.name == "vllm"
        names, taken = known.names, set[str]()
        edges = [n * 10**k for k in range(7) for n in (1, 2, 5) if n * 10**k <= MAX_EDGE_TOKENS]
        for role in (*COUNTERS, *GAUGES, *HISTOGRAMS, *TOKEN_HISTOGRAMS, "waiting_by_reason"):
            name = names.get(role)
            if name is None or name in taken:  # SGLang's queries are its prompt tokens
                continue
            taken.add(name)
            buckets = known.buckets.get(role, edges if role in TOKEN_HISTOGRAMS else ())
            labels = [*self._labels]
            if role in COUNTERS:
                labels += ["finished_reason"] * (role == "success" and self._has_reasons)
                metric: Any = Counter(name, role, labels, registry=self.registry)
            elif buckets:
                metric = Histogram(name, role, labels, registry=self.registry, buckets=buckets)
            else:
                labels += ["reason"] * (role == "waiting_by_reason")
                metric = Gauge(name, role, labels, registry=self.registry)
            self._metrics[role] = metric
            if len(labels) == len(self._labels):
                metric.labels(**self._labels)  # zero until something happens
        self._set_gauges(engines)
        ProcessCollector(registry=self.registry)
        if name := names.get("cache_config"):
            args, layout = deployment.args, pool.layout
            Info(name.removesuffix("_info"), "cache config", registry=self.registry).info(
                {
                    "block_size": str(layout.block_size),
                    "cache_dtype": args.kv_cache_dtype or "auto",
                    "enable_prefix_caching": str(args.enable_prefix_caching),
                    "gpu_memory_utilization": str(args.gpu_memory_utilization),
                    "num_gpu_blocks": str(pool.num_blocks),
                }
            )

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens found in the prefix cache."""
        return self._hits / max(self._queries, 1)

    def count_step(
        self, engine: LiveEngine, step: LiveStep, now_s: float
    ) -> list[tuple[LiveRequest, int]]:
        """Finish a step, count what it did, and return the requests with new tokens."""
        drafted, accepted = engine.drafted, engine.accepted
        seen = {request: request.last_token_s for request, _ in step.rows}
        started = [request for request, _ in step.rows if request.first_token_s is None]
        yields = engine.finish(step, now_s)
        self._add("drafted", engine.drafted - drafted)
        self._add("accepted", engine.accepted - accepted)
        self._observe("step_tokens", sum(count for _, count in step.rows))
        for request, new in yields:
            self.generation_tokens += new
            self._add("generation_tokens", new)
            before_s = seen[request]
            if before_s is not None:
                self._observe("itl", now_s - before_s)
            elif request in started:
                self._count_first_token(request, now_s)
            if request.is_finished:
                self._count_answer(request)
        return yields

    def count_abort(self) -> None:
        """Count a request whose client has left."""
        if self._has_reasons:
            self._add("success", 1, finished_reason="abort")

    def _count_first_token(self, request: LiveRequest, now_s: float) -> None:
        self.prompt_tokens += request.num_prompt
        self._queries += request.num_prompt
        self._hits += request.num_cached
        for role in ("prompt_tokens", "prefix_queries"):
            self._add(role, request.num_prompt)
        self._add("prefix_hits", request.num_cached)
        self._observe("ttft", now_s - request.arrived_s)
        self._observe("queue", request.scheduled_s - request.queued_s)
        self._observe("prefill", now_s - request.scheduled_s)

    def _count_answer(self, request: LiveRequest) -> None:
        first_s, last_s = request.first_token_s or 0.0, request.last_token_s or 0.0
        self._observe("e2e", last_s - request.arrived_s)
        self._observe("decode", last_s - first_s)
        self._observe("prompt_lengths", request.num_prompt)
        self._observe("output_lengths", request.num_output)
        if request.num_output > 1:
            self._observe("tpot", (last_s - first_s) / (request.num_output - 1))
        reason = {"finished_reason": "length"} if self._has_reasons else {}
        self._add("success", 1, **reason)

    def _add(self, role: str, amount: float, **labels: str) -> None:
        if role in self._metrics:
            self._metrics[role].labels(**self._labels, **labels).inc(amount)

    def _observe(self, role: str, value: float) -> None:
        if role in self._metrics:
            self._metrics[role].labels(**self._labels).observe(value)

    def _set_gauges(self, engines: Sequence[LiveEngine]) -> None:
        """Let the gauges read the engines whenever the page is asked for."""

        def mean(values: Iterable[float]) -> float:
            return sum(values) / len(engines)

        reads = {
            "running": lambda: sum(len(engine.running) for engine in engines),
            "waiting": lambda: sum(len(engine.waiting) for engine in engines),
            "kv_usage": lambda: mean(engine.usage for engine in engines),
        }
        for role, read in reads.items():
            if role in self._metrics:
                self._metrics[role].labels(**self._labels).set_function(read)
        if by_reason := self._metrics.get("waiting_by_reason"):
            by_reason.labels(**self._labels, reason="capacity").set_function(reads["waiting"])
            by_reason.labels(**self._labels, reason="deferred").set(0)
