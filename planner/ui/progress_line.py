"""Draw progress on a terminal or in a notebook: one line, which is gone when the work is done."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from planner.core.progress import Step

REFRESH_S = 1.0
"""Seconds until the line appears, and until it is drawn again."""
CLEAR_LINE = "\r\033[K"
"""Takes a line of progress off a terminal."""


def draw_on_terminal(steps: Sequence[Step]) -> AbstractContextManager[None]:
    """Draw `steps` on stderr if it is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()

    def show(text: str) -> None:
        print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)

    return draw_steps(steps, show, shutil.get_terminal_size().columns - 1)


def draw_in_notebook(steps: Sequence[Step]) -> AbstractContextManager[None]:
    """Draw `steps` in the output of the cell; a widget would stay in the file, without its state."""
    shown: list[Any] = []

    def show(text: str) -> None:
        from IPython import display

        data = {"text/plain": text}
        if any(shown):
            shown[0].update(data, raw=True)
        elif text:
            shown[:] = [display.display(data, raw=True, display_id=True)]  # type: ignore[no-untyped-call]

    return draw_steps(steps, show)


@contextmanager
def draw_steps(
    steps: Sequence[Step], show: Callable[[str], object], columns: int = 100
) -> Iterator[None]:
    """Show a line of the steps every `REFRESH_S`, so that the time goes on in each; then none."""
    done, start = threading.Event(), time.monotonic()

    def draw() -> None:
        from tqdm import tqdm

        while not done.wait(REFRESH_S):
            for outer in steps[:1]:
                form = "[{elapsed}<{remaining}]" if outer.total else "[{elapsed}]"
                text = tqdm.format_meter(
                    outer.done, outer.total, time.monotonic() - start, columns,
                    ", ".join(map(_describe_step, steps)), bar_format=f"{form} {{desc}} {{bar}}",
                )  # fmt: skip
                show(text.rstrip())

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        show("")


def _describe_step(step: Step) -> str:
    """Describe how far a step is: "what-ifs 3/9: half the traffic"."""
    done = f" {step.done}/{step.total}" if step.total else f" {step.done}" if step.done else ""
    return f"{step.name}{done}{f': {step.item}' if step.item else ''}"
