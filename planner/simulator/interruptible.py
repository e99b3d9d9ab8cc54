"""Compiled functions that Ctrl-C may interrupt."""

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def make_interruptible(compiled: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """`compiled`, but never in the main thread: that is the one that handles signals, waits, and may be interrupted.

    Numba turns results into arrays by Python code of its own (0.68:
    `pythonapi.nrt_adapt_ndarray_to_python` unpickles their class). A signal that raises there, as
    Ctrl-C does, leaves it without one: a segmentation fault.
    """

    @wraps(compiled)
    def beside(*args: Any) -> ResultT:
        if current_thread() is not main_thread():
            return compiled(*args)
        jobs, answers = _start_worker(os.getpid()), SimpleQueue[tuple[Any, BaseException | None]]()
        jobs.put((compiled, args, answers))
        try:
            value, error = answers.get()
        except BaseException:  # the next does not wait for what was interrupted
            _start_worker.cache_clear()
            jobs.put(None)
            raise
        if error:
            raise error
        return value

    return beside


@lru_cache(maxsize=1)
def _start_worker(_process: int) -> SimpleQueue[Any]:
    """What a thread of this process does in turn; None ends it."""
    jobs: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_run_jobs, args=(jobs,), daemon=True).start()
    return jobs


def _run_jobs(jobs: SimpleQueue[Any]) -> None:
    while job := jobs.get():
        compiled, args, answers = job
        try:
            answers.put((compiled(*args), None))
        except BaseException as error:
            answers.put((None, error))
        del job, compiled, args, answers  # traffic takes memory, and the next may be far off
