"""Batch step models, so that formulas for one case evaluate all cases at once.

Arrays have three axes: cases, decoding sequences (or whatever else varies), slices of a length
distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from planner.latency.step_model import StepModel

SCALAR_FIELDS = tuple(each.name for each in fields(StepModel) if each.type in (int, float))
"""Fields of a step model other than its tables."""


def stack_scalars(values: ArrayLike) -> np.ndarray:
    """Return [cases, 1, 1] from one number per case."""
    return np.asarray(values, float)[:, None, None]


@dataclass(frozen=True)
class PiecewiseLinear:
    """Functions given at some whole numbers from 0 on, linear in between, constant after the last.

    Functions with the same knots share `lines`.
    """

    lines: np.ndarray  # per set of knots, one after the other: index of the line above 0, 1, 2, ...
    heights: np.ndarray  # per function likewise: values of its lines at 0
    slopes: np.ndarray
    last: np.ndarray  # [cases, 1, 1] last knot
    start: np.ndarray  # [cases, 1, 1] where the entries in `lines` of each case start
    first: np.ndarray  # [cases, 1, 1] where the lines of each case start

    @classmethod
    def from_functions(
        cls, functions: Sequence[tuple[np.ndarray, np.ndarray]], case: np.ndarray
    ) -> Self:
        """Build from knots and values of each function; `case` [cases] has indices of functions."""
        grids = {id(knots): knots for knots, _ in functions}
        kind = np.array([list(grids).index(id(knots)) for knots, _ in functions])
        lines = [_index_segments(knots.tobytes()) for knots in grids.values()]
        sizes, ends = (np.array([len(each) for each in of]) for of in (lines, grids.values()))
        knots = np.concatenate([knots for knots, _ in functions])
        values = np.concatenate([values for _, values in functions])
        first, final = np.cumsum(ends[kind]) - ends[kind], np.cumsum(ends[kind]) - 1
        slopes = np.append(np.diff(values) / np.where(np.diff(knots) > 0, np.diff(knots), 1.0), 0.0)
        slopes[final] = 0.0
        start, last = (np.cumsum(sizes) - sizes)[kind], sizes[kind] - 1
        by_case = (values_of[case][:, None, None] for values_of in (last, start, first))
        return cls(np.concatenate(lines), values - slopes * knots, slopes, *by_case)

    def __call__(self, count: np.ndarray | float) -> np.ndarray:
        """Evaluate the function of every case at its counts, [cases, ...]."""
        at = np.minimum(count, self.last)
        line = self.lines.take(self.start + at.astype(np.intp))
        line += self.first
        at *= self.slopes.take(line)
        at += self.heights.take(line)
        return at


@lru_cache(maxsize=64)
def _build_integer_knots(count: int) -> np.ndarray:
    """Return knots at every whole number."""
    return np.arange(float(count))


@lru_cache(maxsize=64)
def _index_segments(knots: bytes) -> np.ndarray:
    """Return [last knot + 1] the index of the last knot up to each whole number."""
    grid = np.frombuffer(knots)
    return np.searchsorted(grid, np.arange(grid[-1] + 1), side="right") - 1


@dataclass(frozen=True, kw_only=True)
class StepModelBatch(StepModel):
    """Step models of all cases as one: numbers are [cases, 1, 1], arguments have three axes."""

    of_tokens: PiecewiseLinear = field(repr=False)
    of_rows: PiecewiseLinear = field(repr=False)
    of_sequences: PiecewiseLinear = field(repr=False)

    def interpolate_tokens_s(self, count: np.ndarray | float) -> np.ndarray:
        return self.of_tokens(count)

    def interpolate_rows_s(self, count: np.ndarray | float) -> np.ndarray:
        return self.of_rows(count)

    def interpolate_sequences_s(self, count: np.ndarray | float) -> np.ndarray:
        return self.of_sequences(count)


def batch_step_models(steps: Sequence[StepModel]) -> StepModelBatch:
    """Batch the step models of [cases]."""
    distinct = {id(step): step for step in steps}
    index = {name: k for k, name in enumerate(distinct)}
    case, models = np.array([index[id(step)] for step in steps]), list(distinct.values())
    numbers = np.array([attrgetter(*SCALAR_FIELDS)(step) for step in models], float)[case]
    tables: dict[str, Any] = {
        "of_tokens": PiecewiseLinear.from_functions(
            [(step.grid, step.grid_s) for step in models], case
        ),
        "of_rows": PiecewiseLinear.from_functions(
            [(_build_integer_knots(len(step.rows_s)), step.rows_s) for step in models], case
        ),
        "of_sequences": PiecewiseLinear.from_functions(
            [(_build_integer_knots(len(step.sequences_s)), step.sequences_s) for step in models],
            case,
        ),
        "decode_windows": _pad_windows([step.decode_windows for step in models], case),
        "prefill_windows": _pad_windows([step.prefill_windows for step in models], case),
    }
    tables |= {name: stack_scalars(numbers[:, k]) for k, name in enumerate(SCALAR_FIELDS)}
    return StepModelBatch(grid=np.empty(0), parts={}, rows_s=np.empty(0), basis="prior", **tables)


def _pad_windows(
    windows: Sequence[tuple[tuple[int, float], ...]], case: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return (window, seconds) pairs of every case, padded with windows that cost nothing.

    Windows and seconds are [cases, 1, 1].
    """
    count = max(map(len, windows))
    filled = np.array([(*each, *[(1.0, 0.0)] * (count - len(each))) for each in windows])
    filled = filled.reshape(len(windows), count, 2)[case]
    return tuple(
        (stack_scalars(filled[:, k, 0]), stack_scalars(filled[:, k, 1])) for k in range(count)
    )
