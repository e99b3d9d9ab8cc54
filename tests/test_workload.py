"""Lengths, traces and traffic."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.workload.length_distribution import LengthDistribution, RequestSide
from planner.workload.traces import read_trace
from planner.workload.workload import Workload

# Azure LLM inference trace 2023, conversation (github.com/Azure/AzurePublicDataset, CC-BY-4.0):
# published columns, its first requests, and the statistics of all 19,366 of them.
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_CONV = {"mean": 1154.7, "p50": 1020, "p95": 4083}
AZURE_CONV_P99 = 4142
# Mooncake, FAST25 conversation trace (Apache-2.0): field names and units; three requests that share
# their first block.
MOONCAKE = """{"timestamp": 0, "input_length": 1000, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1100, "output_length": 490, "hash_ids": [0, 2, 3]}
{"timestamp": 6000, "input_length": 600, "output_length": 10, "hash_ids": [0, 2]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mean_and_p95_give_the_lognormal() -> None:
    found = LengthDistribution.from_lognormal(1000, 2500)
    sigma = 1.6448536 - (1.6448536**2 - 2 * np.log(2.5)) ** 0.5
    assert found.mean == pytest.approx(1000, rel=1e-6)
    assert found.p50 == pytest.approx(1000 * np.exp(-(sigma**2) / 2), rel=0.01)
    assert found.p99 == pytest.approx(found.p50 * np.exp(2.3263 * sigma), rel=0.01)


def test_three_figures_of_a_real_trace_are_all_met_and_predict_its_p99() -> None:
    found = LengthDistribution.from_lognormal(
        AZURE_CONV["mean"], AZURE_CONV["p95"], AZURE_CONV["p50"], largest=AZURE_CONV_P99
    )
    assert found.mean == pytest.approx(AZURE_CONV["mean"], rel=1e-3)
    assert (found.p50, found.p95) == (pytest.approx(1020, rel=0.02), pytest.approx(4083, rel=0.02))
    assert found.p99 == pytest.approx(AZURE_CONV_P99, rel=0.02)
    mooncake = LengthDistribution.from_lognormal(12035, 39550, 6909)  # its p99: 85,400
    assert mooncake.p99 == pytest.approx(85400, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(mean=st.floats(20, 50_000), spread=st.floats(1.01, 3.8))
def test_any_lognormal_keeps_its_mean_under_slicing_and_sampling(
    mean: float, spread: float
) -> None:
    found = LengthDistribution.from_lognormal(mean, mean * spread)
    assert found.mean == pytest.approx(mean, rel=2e-3)
    edges = np.array([0, 0.3, 0.7, 0.9, 0.985, 1.0])
    assert found.compute_slice_means(edges) @ np.diff(edges) == pytest.approx(found.mean, rel=1e-9)
    assert np.all(np.diff(found.compute_slice_means(edges)) >= 0)
    assert found.compute_quantile(0.3) <= found.p50 <= found.p95 <= found.p99 <= found.max_tokens
    assert np.mean(found.values <= found.compute_quantile(0.8)) == pytest.approx(0.8, abs=0.01)
    drawn = found.sample(20_000, np.random.default_rng(0))
    assert drawn.min() >= 1 and drawn.mean() == pytest.approx(mean, rel=0.08)


def test_inferencex_lengths_are_uniform_between_ratio_and_one() -> None:
    found = LengthDistribution.from_uniform(1024, 0.8)
    assert found.mean == pytest.approx(1024 * 0.9)
    assert (found.compute_quantile(0), found.compute_quantile(1)) == (pytest.approx(819.2), 1024)
    assert LengthDistribution.from_uniform(1024, 1.0).p99 == 1024


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"mean": 0}, "at least 1 token"),
        ({"mean": 100, "p95": 90}, "p95 must lie between the mean"),
        ({"mean": 100, "p95": 500}, "3.87 x the mean"),
        ({"mean": 100, "p50": 120}, "p50 must not exceed"),
        ({"mean": 100, "p50": 90, "p95": 95}, "the mean lies between"),
        ({"mean": 100, "p50": 80, "p95": 300, "largest": 200}, "to max"),
    ],
)
def test_impossible_lengths_are_refused(figures: dict[str, float], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        LengthDistribution.from_lognormal(**figures)


def test_azure_trace(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "azure.csv", AZURE))
    assert trace.arrival == pytest.approx([0, 4.314579, 4.541877])
    assert trace.prompt.tolist() == [374, 396, 879] and trace.output.tolist() == [44, 109, 55]
    workload = Workload.from_trace(trace)
    assert workload.rate == pytest.approx(2 / 4.541877)
    assert workload.compute_total_tokens_quantile(1.0) == 934


def test_mooncake_trace_counts_blocks_that_came_before(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert trace.arrival.tolist() == [0, 3, 6]
    assert trace.prefix_hit_rate == pytest.approx((512 + 600) / 2700)


def test_plain_trace_with_poisson_arrivals_has_burstiness_one(tmp_path: Path) -> None:
    arrival = np.cumsum(np.random.default_rng(0).exponential(0.5, 4000))
    text = "arrival,prompt_tokens,output_tokens\n" + "".join(f"{t:.4f},100,20\n" for t in arrival)
    trace = read_trace(written(tmp_path, "plain.csv", text))
    assert trace.rate == pytest.approx(2, rel=0.05)
    assert trace.burstiness == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1.*TIMESTAMP"),
        ("arrival,prompt_tokens,output_tokens\n", "at least two"),
        ("arrival_time,created_at,isl,osl\n0,0,5,5\n", "line 1: found arrival_time or created_at for the time"),
        ("timestamp,input_length,output_length\n0,5,5\n1,5,5\n", "timestamp_ms or timestamp_s"),
        ("arrival,prompt_tokens,output_tokens\n0,5.5,5\n1,5,5\n", "line 2, field prompt_tokens: 5.5 is not a whole"),
        ("arrival,prompt_tokens,output_tokens\n0,5,0\n1,5,5\n", "1 request .1 more has no output token"),
        ("arrival,prompt_tokens,output_tokens\n0,5,5\n2,5,5\n1,5,5\n", "line 4, field arrival.*sort"),
        ("arrival,prompt_tokens,output_tokens\n-1,5,5\n2,5,5\n", "line 2, field arrival.*negative"),
        ("arrival,prompt_tokens,output_tokens\n0,5,5\n1,0,5\n", "line 3, field prompt_tokens: 0"),
        ("arrival,prompt_tokens,output_tokens\n0,5,5\n1,5,nan\n", "line 3, field output_tokens.*number"),
        ("arrival,prompt_tokens,output_tokens\n0,5,5\n\n1,5,5\n", "line 3, field arrival"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "line 3, field TIMESTAMP: yesterday"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: found nothing for the output tokens"),
        ('{"ts": 0, "isl": 5, "osl": 5}\n{"ts": 1, "isl": true, "osl": 5}\n',
         "line 2, field isl: None is not a number"),
        (MOONCAKE + "{oops\n", "line 4: not a JSON object"),
        (MOONCAKE.replace("[0, 2]", f"[0, {2**70}]"), "line 3, field hash_ids: expected whole numbers below"),
        ("arrival,prompt_tokens,output_tokens" + "\n2026-03-29,5,5" * 100 + "\n2026-03-30,5,5",
         "busiest hour arrive at the same time"),
        ("arrival,prompt_tokens,output_tokens\n0,5,5\n0.000000001,5,5", "broken.csv: .* arrive at the same time"),
    ],
)  # fmt: skip
def test_a_broken_trace_names_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        read_trace(written(tmp_path, "broken.csv", text))


PLAIN_TRACE = "arrival,prompt_tokens,output_tokens\n0,100,10\n1.5,200,20\n4,300,30\n"


@pytest.mark.parametrize(
    "text",
    [
        # Vidur, roughly
        "Arrived At,Num Prefill Tokens,num_decode_tokens\n0,100,10\n1.5,200,20\n4,300,30\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"  # BurstGPT
        "5,GPT-4,100,10,110,API log\n6.5,GPT-4,200,20,220,API log\n9,ChatGPT,300,30,330,API log\n",
        "request_timestamp,request_len,response_length\n5,100,10\n6.5,200,20\n9,300,30\n",
        "id\tarrival_time_ms\tprompt_len\toutput_len\n1\t0\t100\t10\n2\t1500\t200\t20\n3\t4000\t300\t30\n",
        "time;input_tokens;completion_tokens\n0;100;10\n1,5;200;20\n4;300;30\n",
        "timestamp,isl,osl\n1700000000000,100,10\n1700000001500,200,20\n1700000004000,300,30\n",
        (
            "start_time,input_length,generated_tokens\n2026-01-31T23:59:59+01:00,100,10\n2026-01-31T23:00:00.5Z,200,20\n2026-01-31"
            " 23:00:03+00:00,300,30\n"
        ),
        (
            '{"ts_us": 0, "prompt_tokens": 100, "completion_tokens": 10}\n\n'
            '{"ts_us": 1500000, "prompt_tokens": 200, "completion_tokens": 20}\n'
            '{"ts_us": 4000000, "prompt_tokens": 300, "completion_tokens": 30}\n'
        ),
        # RAGPulse: Mooncake's names, but seconds as text and hashes that name the parts of a prompt
        "".join(
            json.dumps(
                {
                    "timestamp": t,
                    "input_length": i,
                    "output_length": o,
                    "hash_ids": {"history": [1]},
                }
            )
            + "\n"
            for t, i, o in (("0", 100, 10), ("1.5", 200, 20), ("4", 300, 30))
        ),
    ],
)
def test_traces_under_other_names_and_units_are_the_same_trace(tmp_path: Path, text: str) -> None:
    plain = read_trace(written(tmp_path, "plain.csv", PLAIN_TRACE))
    found = read_trace(written(tmp_path, "other.csv", text))
    assert found.arrival == pytest.approx(plain.arrival, abs=1e-5)
    assert np.array_equal(found.prompt, plain.prompt)
    assert np.array_equal(found.output, plain.output)
    assert found.prefix_hit_rate == 0


def test_of_a_days_trace_the_busiest_hour_is_what_a_plan_has_to_carry(tmp_path: Path) -> None:
    """Six hours of 1,800 requests, but 7,200 in the fourth, with longer prompts."""
    rows = [
        (h * 3600 + k * 3600 / n, 900 if h == 3 else 100)
        for h in range(6)
        for n in (7200 if h == 3 else 1800,)
        for k in range(n)
    ]
    text = "arrival,prompt_tokens,output_tokens\n" + "".join(
        f"{at},{prompt},10\n" for at, prompt in rows
    )
    trace = read_trace(written(tmp_path, "day.csv", text))
    busiest = Workload.from_trace(trace.select_busiest_hour())
    assert trace.rate < 0.8 and busiest.rate == pytest.approx(2, rel=0.01)
    assert (busiest.num_requests, busiest.prompt.mean) == (7200, 900)
    assert busiest.assumptions == ("Of the 6 hours of day.csv the busiest is planned.",)
    few = read_trace(written(tmp_path, "few.csv", PLAIN_TRACE + "9000,100,10\n"))
    assert few.select_busiest_hour() is few


def test_requests_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    """BurstGPT's failed requests have no response tokens; lines are still counted as they stand in the file."""
    text = PLAIN_TRACE + "5,400,0\n6,500,50\n"
    found = Workload.from_trace(read_trace(written(tmp_path, "day.csv", text)))
    assert found.trace is not None and found.trace.prompt.tolist() == [100, 200, 300, 500]
    assert found.assumptions == ("1 request of day.csv without output is left out.",)
    with pytest.raises(PlannerError, match="line 7, field prompt_tokens: 0 must be"):
        read_trace(written(tmp_path, "bad.csv", text + "7,0,5\n"))


# Public traces that no shape was taken from: mean, p95 (ServeGen f891d11; Mooncake's synthetic
# trace; Azure code 2023; vidur 7d47513's arXiv summaries)
@pytest.mark.parametrize(
    ("side", "mean", "p95"),
    [
        ("prompt", 826.4, 2398), ("prompt", 273.5, 805), ("prompt", 15325.5, 48904.6), ("prompt", 2047.8, 7303.3),
        ("output", 47.3, 122), ("output", 128.9, 342), ("output", 291.4, 736.2), ("output", 181.4, 565),
    ],
)  # fmt: skip
def test_a_mean_foretells_the_p95_of_other_public_traces(
    side: RequestSide, mean: float, p95: float
) -> None:
    found = LengthDistribution.from_public_traces(mean, side)
    assert found.mean == pytest.approx(mean, rel=1e-3)
    assert 0.7 < found.p95 / p95 < 1.25  # were all lengths alike: 0.3 to 0.4


# Held out as above, with their p50: a lognormal through mean and p50 would have p95 of 5,615 and 947
@pytest.mark.parametrize(
    ("side", "mean", "p50", "p95"),
    [("prompt", 2047.8, 1469, 7303.3), ("output", 291.4, 167, 736.2)],
)
def test_the_quantiles_of_a_mean_fit_it_and_those_of_traces(
    side: RequestSide, mean: float, p50: float, p95: float
) -> None:
    """They are no lognormal's, as those of traces are none: the mean is that of all lengths shown."""
    found = LengthDistribution.from_public_traces(mean, side)
    assert found.p50 == pytest.approx(p50, rel=0.15) and found.p95 == pytest.approx(p95, rel=0.15)
    assert np.quantile(found.values, np.linspace(0, 1, 4001)).mean() == pytest.approx(
        mean, rel=0.01
    )
    assert "lognormal" not in str(found)


@pytest.mark.parametrize("side", ["prompt", "output"])
def test_typical_lengths_grow_smoothly_with_the_mean(side: RequestSide) -> None:
    means = np.geomspace(1, 100_000, 150)
    found = np.array(
        [
            [typical.p50, typical.p95, typical.p99, typical.max_tokens]
            for typical in (LengthDistribution.from_public_traces(mean, side) for mean in means)
        ]
    )
    steps = found[1:] / found[:-1]
    assert steps.min() >= 1 - 1e-9 and steps.max() < (means[1] / means[0]) ** 2.5
    assert (found[0] == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    mean=st.floats(1, 200_000),
    at_most=st.floats(2, 200_000),
    side=st.sampled_from(["prompt", "output"]),
)
def test_typical_lengths_keep_their_mean_and_their_limit(
    mean: float, at_most: float, side: RequestSide
) -> None:
    found = LengthDistribution.from_public_traces(mean, side, at_most)
    assert found.mean == pytest.approx(mean, rel=2e-3)
    assert found.max_tokens <= max(at_most, mean) * (1 + 1e-9)


def test_a_workload_needs_a_load() -> None:
    tokens = LengthDistribution.from_constant(10)
    with pytest.raises(PlannerError, match="or a concurrency"):
        Workload(tokens, tokens)
    with pytest.raises(PlannerError, match="rate must be a positive number, got 0"):
        Workload(tokens, tokens, rate=0)


def test_long_answers_weigh_more_in_the_decode_context() -> None:
    half = LengthDistribution.from_samples(np.array([100, 300]))
    assert Workload(
        LengthDistribution.from_constant(1000), half, rate=1
    ).mean_decode_context == pytest.approx(1000 + (100**2 + 300**2) / 2 / 2 / 200)


def test_tokens_in_the_other_order_equal_columns_and_an_array(tmp_path: Path) -> None:
    rows = [(f"2026-08-01T10:00:{k:02}.1", 100 + k, 10 + k) for k in range(0, 15, 5)]
    text = "created_at,started_at,tokens_prompt,tokens_completion\n"
    (tmp_path / "t.csv").write_text(text + "".join(f"{t},{t},{p},{o}\n" for t, p, o in rows))
    listed = [
        {"ts": k, "prompt_tokens": p, "completion_tokens": o} for k, (_, p, o) in enumerate(rows)
    ]
    (tmp_path / "t.json").write_text(json.dumps(listed))
    for name in ("t.csv", "t.json"):
        trace = read_trace(tmp_path / name)
        assert trace.prompt.tolist() == [100, 105, 110] and trace.output.tolist() == [10, 15, 20]
