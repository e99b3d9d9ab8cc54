"""Progress of long work, and the time that it may take.

The work says which step it is at, and asks whether there is time for more. Whoever waits for it
opens a `watch_progress`, which says how steps are drawn and how long the work may take. Without one
nothing is drawn, and there is no limit.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Step:
    """A step of the work: what is done of it, of how much if that is known, and what is at work."""

    name: str
    total: int | None = None
    done: int = 0
    item: str = ""


@dataclass
class ProgressWatch:
    """Who waits for the work: how it is drawn, how long it may take, and what it left out."""

    # draws the steps at work, the outermost first, from when it is entered until it is left
    draw: Callable[[Sequence[Step]], AbstractContextManager[object]] = nullcontext
    limit_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    steps: list[Step] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # items by step
    is_interrupted: bool = False

    @property
    def stop_reason(self) -> str:
        """Why something was left out."""
        return (
            "interrupted"
            if self.is_interrupted
            else f"stopped after {float(f'{self.limit_s:.3g}'):g} s"
        )

    def describe_left_out(self) -> str:
        """Describe what was left out, and why; nothing if all was tried."""
        steps = (f"{name} ({', '.join(dict.fromkeys(k))})" for name, k in self.left_out.items())
        return f"{self.stop_reason}; not tried: {', '.join(steps)}" if self.left_out else ""


UNWATCHED = ProgressWatch()
_watch: ContextVar[ProgressWatch] = ContextVar("progress watch", default=UNWATCHED)
get_progress_watch = _watch.get


@contextmanager
def watch_progress(
    limit_s: float = math.inf,
    draw: Callable[[Sequence[Step]], AbstractContextManager[object]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ProgressWatch]:
    """Watch the work of this block, which may take `limit_s` seconds by `clock`."""
    token = _watch.set(ProgressWatch(draw or UNWATCHED.draw, limit_s, clock, clock()))
    try:
        yield get_progress_watch()
    finally:
        _watch.reset(token)


def is_out_of_time() -> bool:
    """Tell whether the work has taken its time, or was interrupted."""
    watch = get_progress_watch()
    return watch.is_interrupted or watch.clock() - watch.started > watch.limit_s


@contextmanager
def show_step(name: str, total: int | None = None) -> Iterator[Step]:
    """Show a step while this block runs, or the function that it decorates."""
    watch, step = get_progress_watch(), Step(name, total)
    with nullcontext() if watch.steps else watch.draw(watch.steps):
        watch.steps.append(step)
        try:
            yield step
        finally:
            watch.steps.remove(step)


def advance(item: str = "") -> None:
    """Count one more as done in the innermost step; `item` is at work now."""
    for step in get_progress_watch().steps[-1:]:
        step.done, step.item = step.done + 1, item


def try_each(
    attempt: Callable[[ItemT], ResultT | None], items: Mapping[str, ItemT], name: str
) -> Iterator[tuple[str, ResultT | None]]:
    """Yield the name and result of every item; None, and listed by the watch, if it is left out.

    An item is left out if its attempt says so, if the time is up before it, or if it or one before
    it is interrupted (Ctrl-C).
    """
    watch = get_progress_watch()
    with show_step(name, len(items)) as step:
        for step.item, item in items.items():
            result = None
            try:
                result = None if is_out_of_time() else attempt(item)
            except KeyboardInterrupt:
                if watch is UNWATCHED:
                    raise
                watch.is_interrupted = True
            if result is None:
                watch.left_out.setdefault(name, []).append(step.item)
            yield step.item, result
            step.done += 1
