"""The replay against what vLLM's own scheduler did, against queueing theory, and against its own slow path."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.planning.simulation_runs import list_requests
from planner.simulator.kernel_types import (
    NOTE_ENTRY,
    ROUTE_LEAST_LOADED,
    EngineRules,
    RequestBatch,
    RouterConfig,
    StepCostTable,
)
from planner.simulator.results import SimulationResult
from planner.simulator.schedule_cases import run_schedule_case
from planner.simulator.simulation import simulate_requests
from planner.workload.request_generator import (
    build_segment_blocks,
    build_shared_prefix_blocks,
    sample_arrivals,
)

SCHEDULES = Path(__file__).parent / "data" / "schedules"
VERSIONS = ("0.20.2", "0.33.0")
LINEAR = StepCostTable(
    5e-3 + 2e-5 * np.arange(2049), 4e-6 * np.arange(257), 1e-3, 1e-6, 5e-8, 2e-10
)
"""About an 8B model on an H100."""


def rules(**changes: object) -> EngineRules:
    """A small engine: 256 sequences, 2,048 tokens a step, 16-token blocks."""
    base = EngineRules(
        256, 2048, 3001, 8192, False, True, 0, False, False, False, np.array([[0, 16]])
    )
    return base._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", sorted(SCHEDULES.glob("*.json")), ids=lambda path: path.stem)
def test_schedule_is_vllms_step_for_step(case: Path, version: str, tmp_path: Path) -> None:
    data = json.loads(case.read_text())
    data["config"]["engine_version"] = version
    copy, log = tmp_path / "CASE.json", tmp_path / "STEPS.csv"
    copy.write_text(json.dumps(data))
    run_schedule_case(copy, log)
    assert (
        log.read_text().splitlines()
        == (SCHEDULES / f"{case.stem}.vllm-{version}.csv").read_text().splitlines()
    )


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Small engines under pressure: few blocks, few seats, prompts that share beginnings."""
    size, length = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([32, 128]))
    groups = [{"type": "full"}] + [{"type": "sliding_window", "window": w}
                                   for w in draw(st.lists(st.integers(2, 64), max_size=2))]  # fmt: skip
    requests: list[dict] = []
    for i in range(draw(st.integers(1, 12))):
        request = {
            "id": f"r{i}",
            "arrival_step": (
                (requests[-1]["arrival_step"] if requests else 0) + draw(st.integers(0, 5))
            ),
            "output_len": draw(st.integers(1, 40)),
            "priority": draw(st.integers(0, 2)),
        }
        names = st.sampled_from(["a", "b", *(f"out:{other['id']}" for other in requests)])
        pieces = draw(st.lists(st.tuples(names, st.integers(1, 24)), min_size=1, max_size=3))
        fits = [
            piece for k, piece in enumerate(pieces) if sum(t for _, t in pieces[: k + 1]) < length
        ]
        requests.append(request | {"prompt": fits or [["a", 1]]})
    most = max(
        -(-min(sum(t for _, t in r["prompt"]) + r["output_len"], length) // size) + 1
        for r in requests
    )
    return {
        "config": {
            "max_num_seqs": draw(st.integers(1, 8)),
            "max_num_batched_tokens": draw(st.sampled_from([8, 64, 256])),
            "num_blocks": 1 + len(groups) * most + draw(st.integers(0, 20)),
            "block_size": size,
            "max_model_len": length,
            "groups": groups,
            "enable_prefix_caching": draw(st.booleans()),
            "async_scheduling": draw(st.booleans()),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 4, 16])),
            "engine_version": draw(st.sampled_from(VERSIONS)),
        },
        "requests": requests,
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_nothing_is_lost(tmp_path_factory: pytest.TempPathFactory, case: dict) -> None:
    path = tmp_path_factory.getbasetemp() / "hypothesis.json"
    path.write_text(json.dumps(case))
    result = run_schedule_case(path)
    outcome, config = result.outcome, case["config"]
    assert np.isfinite(outcome.last_token).all(), "every request ends"
    assert outcome.totals[5] == config["num_blocks"] - 1, "every block taken is given back"
    assert (outcome.sent <= outcome.scheduled).all() and (
        outcome.scheduled < outcome.first_token
    ).all()
    made = np.minimum(result.output, config["max_model_len"] - result.prompt)
    computed = np.zeros(len(made))
    entries = outcome.get_notes(NOTE_ENTRY, 3).astype(int)
    np.add.at(computed, entries[:, 1], entries[:, 2])
    once = outcome.preemptions == 0
    assert (computed + outcome.cached == result.prompt + made - 1)[once].all(), (
        "each token is computed once"
    )
    assert (computed[~once] > 0).all()
    assert outcome.itl.sum() == (made - 1).sum(), "each token but the first ends one gap"


def alike(one: SimulationResult, other: SimulationResult) -> bool:
    """Equal to the last bit, request by request."""
    fields = ("sent", "scheduled", "first_token", "last_token", "preemptions", "itl")
    return all(
        np.array_equal(getattr(one.outcome, name), getattr(other.outcome, name)) for name in fields
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [160, 3001])
@pytest.mark.parametrize("concurrency", [0, 12])
@pytest.mark.parametrize("order", [{}, {"prefills_first": True, "token_ratio": 0.7}])
def test_shortcuts_change_nothing(
    overlap: bool, num_blocks: int, concurrency: int, order: dict
) -> None:
    rng = np.random.default_rng(7)
    prompt, output = rng.integers(1, 900, 200), rng.integers(1, 250, 200)
    engine = rules(
        async_scheduling=overlap, num_blocks=num_blocks, enable_prefix_caching=True, **order
    )
    arrival = sample_arrivals(200, 6.0, 1.0, rng)
    traffic = RequestBatch(arrival, prompt, output, concurrency=concurrency)
    fast = simulate_requests(engine, LINEAR, traffic)
    # sampling gauges rules out skipping over equal steps, naming blocks rules out only counting
    # them
    assert alike(fast, simulate_requests(engine, LINEAR, traffic, gauge_s=0.1))
    own, start = build_shared_prefix_blocks(prompt, output, np.zeros_like(prompt), 16)
    assert alike(
        fast, simulate_requests(engine, LINEAR, traffic._replace(content=own, content_start=start))
    )
    assert (fast.preemptions.sum() > 0) == (num_blocks == 160)


def list_steps(engine: EngineRules, prompt: list[int], output: list[int]) -> list[dict[int, int]]:
    """Request -> its tokens, step by step, of requests that arrive at once."""
    traffic = RequestBatch(np.zeros(len(prompt)), np.array(prompt), np.array(output))
    steps = simulate_requests(engine, LINEAR, traffic, log_steps=True).outcome
    entries = steps.get_notes(NOTE_ENTRY, 3).astype(int).tolist()
    return [
        {request: tokens for row, request, tokens in entries if row == step}
        for step in range(max(entries)[0] + 1)
    ]


def test_sglang_computes_prompts_alone_and_first() -> None:
    """SGLang 0.5.16 scheduler.py, get_next_batch_to_run; schedule_policy.py, PrefillAdder."""
    engine = rules(
        max_num_batched_tokens=100, prefills_first=True, token_ratio=0.7, async_scheduling=False
    )
    steps = list_steps(engine, [150, 60], [3, 2])
    assert steps == [{0: 100}, {0: 50, 1: 50}, {1: 10}, {0: 1, 1: 1}, {0: 1}]


def test_sglang_admits_what_running_requests_leave_and_retracts_the_longest_prompt() -> None:
    """24 blocks of 16 tokens hold one of the two to its end (schedule_batch.py, retract_decode)."""
    engine = rules(
        num_blocks=25, max_num_batched_tokens=160, async_scheduling=False, prefills_first=True
    )
    cautious = list_steps(engine._replace(token_ratio=0.7), [160, 112, 16], [80, 80, 60])
    assert cautious[:2] == [{0: 160}, {0: 1}], "160 + 0.7 x 80, and 112 + 80, are more than 384"
    assert next(k for k, step in enumerate(cautious) if 1 in step) == 80
    bold = list_steps(engine._replace(token_ratio=0.0), [160, 112], [150, 80])
    assert bold[:3] == [{0: 160}, {1: 112}, {0: 1, 1: 1}]
    again = [k for k, step in enumerate(bold) if step.get(0, 0) > 1]
    assert again == [0, 81, 82], (
        "of equal answers the longest prompt goes, until the other has ended"
    )


def test_one_seat_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: the mean wait is rho s / (2 (1 - rho)) for a constant service time s."""
    service, load, n = 0.1, 0.7, 200_000
    table = StepCostTable(np.full(2, service), np.zeros(2))
    arrival = sample_arrivals(n, load / service, 1.0, np.random.default_rng(1))
    result = simulate_requests(
        rules(max_num_seqs=1), table, RequestBatch(arrival, np.full(n, 10), np.ones(n))
    )
    assert result.queue.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.03)
    assert result.ttft.mean() == pytest.approx(result.queue.mean() + service)


def test_closed_loop_keeps_its_concurrency_and_obeys_littles_law() -> None:
    rng = np.random.default_rng(3)
    n, flight = 600, 24
    traffic = RequestBatch(
        np.zeros(n), rng.integers(50, 500, n), rng.integers(20, 200, n), concurrency=flight
    )
    result = simulate_requests(rules(), LINEAR, traffic)
    changes = np.concatenate([result.sent, result.outcome.last_token])
    in_flight = np.cumsum(np.repeat([1, -1], n)[np.lexsort((np.repeat([1, -1], n), changes))])
    assert in_flight.max() == result.max_running == flight
    assert result.request_tps * result.e2e.mean() == pytest.approx(flight, rel=0.05)


def test_latency_adds_up() -> None:
    """One request alone: a prefill step, then a decode step per token, each as long as the table says."""
    traffic = RequestBatch(
        np.zeros(1), np.array([100]), np.array([4]), request_s=0.02, prompt_token_s=1e-5
    )
    result = simulate_requests(rules(), LINEAR, traffic)
    one = 1e-3 + 1e-6 + 4e-6
    steps = [one + 5e-3 + 2e-5 * 100 + 2e-10 * 100 * 101 / 2] + [
        one + 5e-3 + 2e-5 + 5e-8 * c for c in (100, 101, 102)
    ]
    assert result.ttft[0] == pytest.approx(0.021 + steps[0])
    assert result.tpot[0] == pytest.approx(np.mean(steps[1:]))
    assert result.summarize("itl")["mean"] == pytest.approx(np.mean(steps[1:]))
    assert result.summarize("itl")["p50"] == pytest.approx(np.mean(steps[1:]), rel=0.01)


def test_the_front_end_takes_by_the_tokens_that_are_not_cached() -> None:
    """Two prompts of 100 tokens, the first 64 of them the same, one long after the other."""
    prompt, output = np.array([100, 100]), np.array([4, 4])
    content, start = build_shared_prefix_blocks(prompt, output, np.array([64, 64]), 16)
    sent = RequestBatch(np.array([0.0, 9.0]), prompt, output, content, start)
    free, slow = (
        simulate_requests(
            rules(enable_prefix_caching=True), LINEAR, sent._replace(prompt_token_s=each)
        )
        for each in (0.0, 1e-3)
    )
    assert slow.outcome.cached.tolist() == [0, 64]
    assert slow.ttft - free.ttft == pytest.approx([0.1, 0.036])


def test_windows_cap_what_attention_reads() -> None:
    window = StepCostTable(
        np.zeros(1),
        np.zeros(1),
        decode_windows=np.array([[64, 1.0]]),
        prefill_windows=np.array([[64, 1.0]]),
    )
    result = simulate_requests(
        rules(), window, RequestBatch(np.zeros(1), np.array([100]), np.array([2]))
    )
    assert result.ttft[0] == sum(min(query + 1, 64) for query in range(100))
    assert result.tpot[0] == 64


def test_pipeline_overlaps_steps() -> None:
    """Steps of one token each, for two requests: two pipeline stages serve both in the time that one takes for one."""
    table = StepCostTable(np.full(2, 0.1), np.zeros(2), stages=2)
    narrow, traffic = (
        rules(max_num_batched_tokens=1),
        RequestBatch(np.zeros(2), np.ones(2), np.full(2, 50)),
    )
    piped = simulate_requests(narrow, table, traffic)
    assert piped.tpot == pytest.approx([0.1, 0.1])
    alone = simulate_requests(narrow, table._replace(stages=1), traffic)
    assert piped.duration == pytest.approx(alone.duration / 2, rel=0.02)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("k", "rate"), [(3, 0.6), (5, 0.8)])
def test_speculation_yields_a_geometric_chain(k: int, rate: float, overlap: bool) -> None:
    """A chain draft of k tokens yields (1 - rate^(k+1)) / (1 - rate) tokens a step (Leviathan et al. 2023, eq. 1)."""
    engine = rules(num_speculative_tokens=k, acceptance_rate=rate, async_scheduling=overlap)
    n, output = 20, 2000
    traffic = RequestBatch(np.zeros(n), np.full(n, 16), np.full(n, output))
    result = simulate_requests(engine, StepCostTable(np.ones(1), np.zeros(1)), traffic)
    per_step = (output - 1) / (result.outcome.last_token - result.outcome.first_token)
    assert per_step.mean() == pytest.approx((1 - rate ** (k + 1)) / (1 - rate), rel=0.03)


def test_shared_prefix_is_computed_once() -> None:
    prompt, output = np.full(5, 200), np.full(5, 10)
    content = build_shared_prefix_blocks(prompt, output, np.array([150, 150, 0, 150, 7]), 16)
    engine = rules(enable_prefix_caching=True)
    result = simulate_requests(
        engine, LINEAR, RequestBatch(np.arange(5.0), prompt, output, *content)
    )
    assert result.outcome.cached.tolist() == [0, 144, 0, 144, 0], "whole blocks of 16"
    assert result.ttft[1] < result.ttft[0]


@pytest.mark.parametrize("prefix", [0, 320])
def test_groups_with_blocks_of_two_sizes_share_prefixes_and_a_pool(prefix: int) -> None:
    """As gemma-4 with an FP8 cache: windows in blocks of 16 tokens, full attention in blocks of 32; preempted, too."""
    groups = np.array([(64, 16), (64, 16), (0, 32)], np.int64)
    prompt, output = np.full(60, 400), np.full(60, 200)
    content = build_shared_prefix_blocks(prompt, output, np.full(60, prefix), 16)
    both = rules(
        enable_prefix_caching=True,
        max_num_seqs=60,
        max_num_batched_tokens=512,
        num_blocks=500,
        groups=groups,
    )
    found = simulate_requests(
        both,
        StepCostTable(np.ones(1), np.zeros(1)),
        RequestBatch(np.zeros(60), prompt, output, *content),
    )
    assert found.outcome.preemptions.sum() > 0 and found.outcome.totals[5] == 499
    assert np.isfinite(found.outcome.last_token).all()
    assert set(found.outcome.cached) <= {0, prefix}
    assert (found.outcome.cached[1:] == prefix).mean() > 0.5


def test_blocks_are_equal_where_all_before_is() -> None:
    texts = [
        [("a", 20), ("b", 30)],
        [("a", 20), ("b", 12)],
        [("b", 32)],
        [("a", 16), ("b", 16)],
        [("c", 32)],
    ]
    numbers, start = build_segment_blocks(texts, 16)
    rows = [numbers[s:e].tolist() for s, e in zip(start, [*start[1:], None], strict=True)]
    assert rows[1] == rows[0][:2] and len(rows[0]) == 3
    assert rows[3][0] == rows[0][0] and rows[3][1] != rows[0][1], (
        "b from its start, where the first has a's last 4 tokens"
    )
    assert not set(rows[2]) & set(rows[0]) and not set(rows[4]) & {
        n for row in rows[:4] for n in row
    }


def test_requests_wait_until_the_scheduler_looks_for_them() -> None:
    """SGLang's --scheduler-recv-interval: every so many decode steps, after every prompt, and whenever it is idle."""
    second = StepCostTable(np.ones(10), np.zeros(10))  # every step takes 1 s
    arrival, prompt, output = (
        np.array([0.0, 1.5, 1.5, 30.0]),
        np.array([10, 10, 10, 10]),
        np.array([20, 2, 2, 2]),
    )
    traffic = RequestBatch(arrival, prompt, output)
    found = {n: simulate_requests(rules(recv_interval=n), second, traffic).outcome for n in (1, 8)}
    np.testing.assert_allclose(found[1].first_token, [1, 3, 3, 31])
    np.testing.assert_allclose(
        found[8].first_token, [1, 10, 10, 31]
    )  # looks at 0, 1 and 9 s, and is idle at 30 s


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_are_those_of_vllm_bench(burstiness: float) -> None:
    times = sample_arrivals(50_000, 20.0, burstiness, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(50_000 / 20), "stretched to n / rate"
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03, abs=1e-9)
    assert not sample_arrivals(10, math.inf, 1.0, np.random.default_rng(0)).any()


def test_gauges_follow_the_load() -> None:
    traffic = RequestBatch(np.array([0, 0, 0, 9.0]), np.full(4, 64), np.full(4, 100))
    result = simulate_requests(rules(max_num_seqs=2), LINEAR, traffic, gauge_s=0.05)
    gauges = result.gauges.set_index("seconds")
    assert gauges.loc[0.5, ["running", "waiting"]].tolist() == [2, 1]
    assert gauges.loc[5.0].sum() == 0, "idle"
    assert gauges.loc[9.1, "kv_usage"] == pytest.approx(-(-64 // 16) / 3000, rel=0.5)
    assert "requests/s" in str(result) and len(list_requests(result)) == 4


def case(request: dict | None = None, **config: object) -> dict:
    """A sound case of two requests, changed."""
    base = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 20,
        "block_size": 16,
        "max_model_len": 512,
    }
    first = {"id": "first", "arrival_step": 3, "prompt_len": 20, "output_len": 5}
    return {
        "config": base | config,
        "requests": [first, first | {"id": "second"} | (request or {})],
    }


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (case({"arrival_step": 2}), ["second", "arrival_step", "2 comes after 3"]),
        (case({"output_len": 0}), ["second", "output_len", "0"]),
        (case({"prompt_len": 600}), ["second", "prompt", "600", "512"]),
        (case({"prompt_len": 300, "output_len": 100}), ["second", "can never fit", "25", "19"]),
        (case({"id": "first"}), ["first", "id", "2 requests"]),
        (case({"prompt": [["a", 3]]}), ["second", "either prompt_len or prompt"]),
        (case({"prompt_len": None, "prompt": [["out:third", 3]]}), ["second", "out:third"]),
        (case({"prompt_len": 100}, enable_chunked_prefill=False), ["second", "never be scheduled", "64"]),
        (case(policy="lifo"), ["config", "policy", "fcfs"]),
        (case(groups=[{"type": "sliding_window"}]), ["config", "window"]),
        (case(engine_version="0.1.0"), ["0.1.0"]),
        ({"config": case()["config"], "requests": []}, ["empty"]),
        ([], ["requests"]),
    ],
)  # fmt: skip
def test_bad_cases_are_told_in_one_sentence(bad: object, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "CASE.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(PlannerError) as error:
        run_schedule_case(path)
    message = str(error.value)
    assert "\n" not in message and all(word.casefold() in message.casefold() for word in words), (
        message
    )


@pytest.mark.parametrize(
    ("arrival", "prompt", "output", "words"),
    [
        ([0, 0, 0], [5, 9000, 5], [5, 5, 5], ["request 2", "9,000", "8,192"]),
        ([], [], [], ["no requests"]),
    ],
)
def test_requests_that_cannot_be_simulated_are_named(
    arrival: list, prompt: list, output: list, words: list[str]
) -> None:
    with pytest.raises(PlannerError) as error:
        simulate_requests(
            rules(),
            LINEAR,
            RequestBatch(np.array(arrival, float), np.array(prompt), np.array(output)),
        )
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "broken", [{"fixed_s": math.nan}, {"tokens_s": np.array([0.0, math.inf])}, {"fixed_s": -1.0}]
)
def test_a_step_that_takes_no_time_known_is_refused(broken: dict) -> None:
    with pytest.raises(PlannerError, match=f"field {next(iter(broken))}"):
        simulate_requests(
            rules(),
            LINEAR._replace(**broken),
            RequestBatch(np.zeros(1), np.full(1, 16), np.full(1, 4)),
        )


def crowd(seed: int) -> tuple[EngineRules, StepCostTable, RequestBatch, RouterConfig]:
    """Any engine, with few or plenty of blocks, seats and tokens a step, in bursts, open and closed loops, routed."""
    rng = np.random.default_rng(seed)

    def one(*options: float) -> int:
        return int(rng.choice(options))

    n, size, seats, budget = (
        int(rng.integers(2, 60)),
        one(1, 4, 16, 64),
        one(1, 3, 8, 40, 200),
        one(4, 16, 64, 256, 2048),
    )
    prompt, output = rng.integers(1, one(8, 100, 400), n), rng.integers(1, one(3, 30, 120), n)
    output = output if rng.random() < 0.8 else np.full(n, output[0])
    groups = [[[0, size]], [[0, size], [-3, size]], [[-2, size]], [[one(16, 50), size]]][
        int(rng.choice(4, p=[0.8, 0.1, 0.05, 0.05]))
    ]
    groups = groups + [[one(8, 32, 64, 100), size]] * one(0, 0, 0, 1, 2)
    least, long = (
        len(groups) * (int((prompt + output).max()) // size + 3),
        int((prompt + output).max()),
    )
    caching, many = bool(rng.random() < 0.5), one(0, 2, least, 4 * least, 30 * least)
    engine = EngineRules(
        seats, budget, least + many, one(4096, max(long - 3, prompt.max() + 1)), caching, True,
        one(0, 0, 5, 50),
        bool(rng.random() < 0.5), False, bool(rng.random() < 0.5), np.array(groups),
    )  # fmt: skip
    windows = np.array([[one(8, 32, 100), 2e-7]] * one(0, 0, 1, 2), float).reshape(-1, 2)
    table = StepCostTable(
        np.linspace(1e-3, 5e-3, 700),
        np.linspace(0, 1e-3, 64),
        1e-3,
        1e-6,
        1e-7,
        1e-8,
        1e-4,
        windows,
        windows[:1],
    )
    content, start = build_shared_prefix_blocks(
        prompt, output, np.where(rng.random(n) < 0.7, rng.integers(0, 100), 0), size
    )
    blocks = np.diff(start, append=len(content))
    for k in range(2, n if rng.random() < 0.5 else 0):  # what was said comes back as a prompt
        common = min(prompt[k] // size, blocks[k - 2])
        content[start[k] : start[k] + common] = content[start[k - 2] : start[k - 2] + common]
    told = {"content": content, "content_start": start} if rng.random() < 0.7 else {}
    arrival = np.sort(rng.random(n)) * rng.choice([0.0, 0.02, 0.2, 1.0, 5.0])
    flight = 0 if rng.random() < 0.6 else int(rng.integers(1, 2 * seats + 2))
    sent = RequestBatch(
        arrival, prompt, output, concurrency=flight, request_s=1e-3, prompt_token_s=1e-6, **told
    )
    replicas = one(1, 1, 1, 2, 3)
    shares = table._replace(shared_tokens_s=np.linspace(1e-3, 3e-3, 700))
    ranks = one(1, replicas)
    router = RouterConfig(replicas, ROUTE_LEAST_LOADED, ranks_per_clock=ranks)
    return engine, shares if ranks > 1 else table, sent, router


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6))
def test_who_drifts_fares_as_if_looked_at_in_every_step(seed: int) -> None:
    """Taking notes has the scheduler look at everybody: the same times, gaps, blocks and preemptions, to the bit."""
    engine, table, sent, router = crowd(seed)
    try:
        drifted = simulate_requests(engine, table, sent, router=router).outcome
    except PlannerError:  # one that never fits, whichever way it is replayed
        with pytest.raises(PlannerError):
            simulate_requests(engine, table, sent, router=router, log_steps=True)
        return
    apart = simulate_requests(engine, table, sent, router=router, log_steps=True).outcome
    for name in (
        "sent",
        "scheduled",
        "first_token",
        "last_token",
        "preemptions",
        "cached",
        "itl",
        "totals",
        "usage",
    ):
        np.testing.assert_array_equal(getattr(drifted, name), getattr(apart, name), name)


def test_a_prompt_of_one_rank_holds_all_that_share_its_experts() -> None:
    """Two ranks decode; a prompt of one lengthens the step of both, by what it takes alone and half of the rest."""
    table = LINEAR._replace(shared_tokens_s=1e-5 * np.arange(2049))
    sent = RequestBatch(
        np.array([0.0, 0.0, 0.5]), np.array([16, 16, 1600]), np.array([200, 200, 2])
    )
    ranks = RouterConfig(2, ROUTE_LEAST_LOADED, ranks_per_clock=2)
    found = simulate_requests(rules(), table, sent, router=ranks).outcome
    assert (found.last_token[0], found.first_token[0]) == (
        found.last_token[1],
        found.first_token[1],
    )
    alone = simulate_requests(rules(), table, RequestBatch(*(part[:1] for part in sent[:3])))
    longer = found.last_token[0] - alone.outcome.last_token[0]
    pairs = 1600 * 1601 / 2
    assert longer == pytest.approx(2e-5 * 1600 + 2e-10 * pairs - 1e-5 * 800, rel=0.02)


def test_ranks_that_do_the_same_take_the_time_of_one() -> None:
    """Eight ranks with a request each, of equal lengths: as one rank with one."""

    def run(n: int, router: RouterConfig | None) -> SimulationResult:
        lengths = np.full(3 * n, 500), np.full(3 * n, 50)
        return simulate_requests(
            rules(), LINEAR, RequestBatch(np.zeros(3 * n), *lengths, concurrency=n), router=router
        )

    ranks = RouterConfig(8, ROUTE_LEAST_LOADED, ranks_per_clock=8)
    assert run(8, ranks).e2e == pytest.approx(np.repeat(run(1, None).e2e, 8))
