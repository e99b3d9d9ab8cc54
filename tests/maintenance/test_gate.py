"""The gate: no group of the pinned cohort is predicted worse than when it was pinned."""

import numpy as np
import pandas as pd
import pytest
from fits.cohort import predict_cohort
from fits.pooled_fit import MEASURED_RUNS_FILE, MEASUREMENT_NOISE, load_rows
from validation.serving_points import (
    COHORT_FILE,
    COHORT_GROUPS,
    compute_cohort_accuracy,
    load_cohort,
    load_peer_errors,
)

REPEATS = {"ttft": MEASUREMENT_NOISE[0], "tpot": MEASUREMENT_NOISE[1]}
"""Standard deviations of ln(measured) between repeats of a public point."""
SOURCE_COLUMNS = (
    "model",
    "gpu",
    "engine",
    "engine_version",
    "concurrency",
    "measured_tpot_ms",
    "curve",
    "source",
)


def measure_errors(rows, metric):
    """|ln(predicted / measured)| by row; NaN where it was not measured."""
    table = pd.DataFrame(rows)
    predicted, measured = (
        pd.to_numeric(table[name]) for name in (f"{metric}_mid_ms", f"measured_{metric}_ms")
    )
    return np.log(predicted / measured).abs()


LEAST_GROUP, MOST_GROWTH = 10, 1.1
"""A group of so many points may not be so much further off, beyond what repeats differ."""


def find_worse_groups(pinned, now, metric):
    """Groups whose mean error grew by a tenth, and more than repeats differ, with the worst points."""
    table = pd.DataFrame(pinned)
    before = measure_errors(pinned, metric).to_numpy()
    grown = measure_errors(now, metric).to_numpy() - before
    worse = []
    for by in COHORT_GROUPS:
        for group, points in table.groupby(by).groups.items():
            known = points[np.isfinite(grown[points])]
            if len(known) < LEAST_GROUP:
                continue
            noise = REPEATS[metric] / np.sqrt(len(known))
            if grown[known].mean() > max((MOST_GROWTH - 1) * before[known].mean(), noise):
                worst = sorted(known, key=lambda k: -grown[k])[:5]
                said = [
                    f"{table['model'][k]} on {table['gpu'][k]}, {table['concurrency'][k]} in flight:"
                    f" {pinned[k][f'{metric}_mid_ms']} -> {now[k][f'{metric}_mid_ms']} ms,"
                    f" measured {table[f'measured_{metric}_ms'][k]}"
                    for k in worst
                ]
                worse.append(f"{metric} of {by} {group}: " + "; ".join(said))
    return worse


@pytest.fixture(scope="module")
def pinned():
    return load_rows(COHORT_FILE)


def test_no_group_is_predicted_worse_than_when_it_was_pinned(pinned) -> None:
    """A change that is meant to move a group pins it anew with `make cohort`: its difference is then read in review."""
    now = predict_cohort(pinned)
    worse = [line for metric in REPEATS for line in find_worse_groups(pinned, now, metric)]
    assert not worse, "\n".join(worse)


def test_a_group_that_gets_worse_is_named_with_its_points(pinned) -> None:
    """The gate itself: a tenth more TPOT for one engine's points that were predicted too slow already."""
    now = [
        {**row, "tpot_mid_ms": f"{float(row['tpot_mid_ms']) * 1.1}"}
        if row["engine"] == "trtllm" and float(row["tpot_mid_ms"]) > float(row["measured_tpot_ms"])
        else row
        for row in pinned
    ]
    worse = find_worse_groups(pinned, now, "tpot")
    assert any(line.startswith("tpot of engine trtllm: ") and "measured" in line for line in worse)
    assert not find_worse_groups(pinned, pinned, "tpot")


def test_the_cohort_is_what_was_measured(pinned) -> None:
    """Its measured values are those of the runs' own file, and its models, GPUs and engines are the runs'."""
    measured = {
        tuple(row[name] for name in SOURCE_COLUMNS) for row in load_rows(MEASURED_RUNS_FILE)
    }
    assert len(pinned) >= 250
    assert all(tuple(row[name] for name in SOURCE_COLUMNS) in measured for row in pinned)
    assert len({row["gpu"] for row in pinned}) > 20 and len({row["model"] for row in pinned}) > 60


def test_errors_of_the_cohort_by_group(pinned) -> None:
    """What `make accuracy` shows: all points, by every group, with errors below those that peers publish."""
    table = compute_cohort_accuracy(load_cohort()).set_index(["by", "group"])
    assert (table["points"].groupby("by").sum() == len(pinned)).all()
    for engine in ("vllm", "trtllm", "sglang"):
        assert table.loc[("engine", engine), "TPOT median (%)"] < 15
    assert (
        table.loc[("engine", "vllm"), "TPOT mean (%)"] < load_peer_errors()["TPOT mean (%)"].min()
    )
    sizes = measure_errors(pinned, "tpot")[[row["engine"] == "vllm" for row in pinned]]
    assert np.expm1(sizes.median()) * 100 == pytest.approx(
        table.loc[("engine", "vllm"), "TPOT median (%)"], abs=2
    )
