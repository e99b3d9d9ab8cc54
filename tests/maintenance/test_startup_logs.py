"""The plan against the public start-up logs that the project ships."""

from validation.startup_logs import (
    compute_memory_residuals,
    load_published_logs,
    summarize_memory_accuracy,
)

from planner.core.catalog import CATALOG_DIR


def test_the_plan_agrees_with_public_logs() -> None:
    """Weights within 1%, the KV cache within 1% of the budget on average, and 80% intervals that hold most.

    Constants were fitted to these logs, so that the intervals may hold more.
    """
    found = compute_memory_residuals()
    assert len(found) == len(load_published_logs()) >= 20
    weights = (
        found["planned weights (GiB)"].map(lambda planned: planned.mid)
        / found["logged weights (GiB)"]
        - 1
    ).abs()
    assert weights.mean() < 0.01
    assert found["error (%)"].abs().mean() < 1
    assert 0.7 <= found["inside"].mean() <= 0.95
    assert f"{found['inside'].sum()} of the {len(found)}" in summarize_memory_accuracy(found)


def test_every_log_names_where_it_lies() -> None:
    for name, run in load_published_logs().items():
        assert "/" in run.source and run.date >= "2025", name
    assert "github.com/" in (CATALOG_DIR / "validation" / "granite-3.1-8b-h100.log").read_text()
