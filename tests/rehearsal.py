"""Drive a rehearsed server over HTTP in virtual time: the clock jumps whenever everyone waits."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from planner.planning.planned_replica import PlannedReplica
from planner.tools.rehearsal.server import RehearsalFaults, RehearsedServer
from planner.workload.workload import Workload

ResultT = TypeVar("ResultT")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock shows no time but that of its timers."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        loop = self

        class JumpingSelector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                # what was sent over the loopback interface has arrived
                events = super().select(0 if timeout is not None else 0.1)
                if not events:
                    loop.now_s += timeout or 0.0
                return events

        super().__init__(JumpingSelector())

    def time(self) -> float:
        return self.now_s


def run_in_virtual_time(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def send(port: int, method: str, path: str, body: object = None) -> tuple[str, list[float]]:
    """Return the answer to a request, and when each of its events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    clock, lines, times = asyncio.get_running_loop().time, [], []
    async for line in reader:
        lines.append(line.decode())
        if line.startswith(b'data: {"'):
            times.append(clock())
    writer.close()
    return "".join(lines), times


async def benchmark(port: int, workload: Workload, requests: int, seed: int = 1) -> dict[str, Any]:
    """Send traffic as `vllm bench serve --save-result --save-detailed` does; return its JSON."""
    rng, loop = np.random.default_rng(seed), asyncio.get_running_loop()
    prompt, output = (
        lengths.sample(requests, rng) for lengths in (workload.prompt, workload.output)
    )
    prefix = list(range(workload.prefix_tokens))
    at_s = np.cumsum(rng.exponential(1 / (workload.rate or np.inf), requests))
    slots = asyncio.Semaphore(workload.concurrency or requests)
    first_s = loop.time()

    async def ask(k: int) -> tuple[float, list[float]]:
        await asyncio.sleep(max(first_s + at_s[k] - loop.time(), 0))
        async with slots:
            own = rng.integers(1000, 10**6, max(prompt[k] - len(prefix), 0)).tolist()
            body = {
                "prompt": (prefix + own)[: prompt[k]], "max_tokens": int(output[k]),
                "ignore_eos": True, "stream": True,
            }  # fmt: skip
            start_s = loop.time()
            _, times = await send(port, "POST", "/v1/completions", body)
            return start_s, times

    answers = await asyncio.gather(*(ask(k) for k in range(requests)))
    start = np.array([start_s for start_s, _ in answers])
    first, last = (np.array([times[at] for _, times in answers]) for at in (0, -1))
    itl = np.concatenate([np.diff(times) for _, times in answers])
    many = output > 1
    measured = {
        "ttft": first - start, "tpot": ((last - first)[many]) / (output[many] - 1), "itl": itl,
        "e2el": last - start,
    }  # fmt: skip
    duration = float(last.max() - start.min())
    statistics: dict[str, float] = {}
    for name, values in measured.items():
        statistics[f"mean_{name}_ms"] = float(values.mean() * 1e3)
        for q in (50, 95, 99):
            statistics[f"p{q}_{name}_ms"] = float(np.percentile(values, q) * 1e3)
    return {
        **statistics, "completed": requests, "failed": 0, "duration": duration,
        "total_input_tokens": int(prompt.sum()), "total_output_tokens": int(output.sum()),
        "request_throughput": requests / duration, "output_throughput": output.sum() / duration,
        "request_rate": workload.rate or "inf", "max_concurrency": workload.concurrency,
        "burstiness": 1.0, "input_lens": prompt.tolist(), "output_lens": output.tolist(),
        "start_times": start.tolist(),
    }  # fmt: skip


@asynccontextmanager
async def serving(
    planned: PlannedReplica, faults: RehearsalFaults | None = None
) -> AsyncIterator[tuple[RehearsedServer, int]]:
    """Run a rehearsed server; yield it and its port."""
    server, sockets = RehearsedServer(planned, faults), bind_sockets(0, "127.0.0.1")
    http = HTTPServer(server.build_application())
    http.add_sockets(sockets)
    running = asyncio.create_task(server.run())
    try:
        yield server, sockets[0].getsockname()[1]
    finally:
        running.cancel()
        http.stop()
        await asyncio.gather(running, http.close_all_connections(), return_exceptions=True)


def rehearse(
    planned: PlannedReplica,
    faults: RehearsalFaults,
    workload: Workload,
    requests: int,
    folder: Path,
) -> dict[str, Any]:
    """Benchmark a rehearsed server; its JSON and its log, and two /metrics pages are in `folder`."""

    async def work() -> dict[str, Any]:
        async with serving(planned, faults) as (server, port):
            await send(port, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 2})
            for name in ("before", "after"):
                bench = await benchmark(port, workload, requests) if name == "after" else {}
                page, _ = await send(port, "GET", "/metrics")
                (folder / f"{name}.txt").write_text(page.partition("\r\n\r\n")[2])
            (folder / "vllm.log").write_text("\n".join(server.startup_lines))
            (folder / "bench.json").write_text(json.dumps(bench))
            return bench

    return run_in_virtual_time(work())
