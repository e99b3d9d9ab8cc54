"""Run notebooks without a browser: in parallel with Papermill, in a few kernels that are reused."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import papermill
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync

from planner.core.errors import PlannerError
from planner.core.progress import advance, show_step
from planner.ui.notebook_files import provide_jupyter_folders


class _SharedKernel(AsyncKernelManager):
    """A kernel in which several notebooks run; `last` is the client of the latest."""

    last: AsyncKernelClient | None = None

    def client(self, **kwargs: Any) -> Any:
        self.last = super().client(**kwargs)
        return self.last


@show_step("chapters")
@provide_jupyter_folders()
def execute_notebooks(
    notebooks: Sequence[Path],
    parameters: Mapping[str, Any],
    work: Path,
) -> list[Path]:
    """Run copies of `notebooks` in the folder `work`, with the `parameters` that each has.

    Returns the copies; raises `PlannerError` if one fails.
    """
    idle = SimpleQueue[_SharedKernel]()
    kernels = [
        _SharedKernel(
            kernel_name="python3",  # with socket files rather than ports, where possible
            **({} if os.name == "nt" else {"transport": "ipc", "ip": str(work / str(k))}),
        )
        for k in range(min(len(notebooks), os.cpu_count() or 1, 4))
    ]
    pool = ThreadPoolExecutor(len(kernels))
    for kernel in kernels:
        idle.put(kernel)
    running = {
        pool.submit(_run_notebook, notebook, parameters, work, idle): notebook
        for notebook in notebooks
    }
    try:
        for future in as_completed(running):
            notebook = running[future]
            try:
                future.result()
            except papermill.PapermillExecutionError as error:
                message = f"notebook {notebook.stem} failed: {error.ename}: {error.evalue}"
                raise PlannerError(
                    error.evalue if error.ename == "PlannerError" else message
                ) from None
            except RuntimeError as error:  # the kernel died or never answered
                raise PlannerError(f"notebook {notebook.stem} could not be run: {error}") from None
            now = [path.stem for other, path in running.items() if other.running()]
            advance(f"of {len(running)}; at work: {', '.join(now)}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for kernel in kernels:
            run_sync(kernel.shutdown_kernel)(now=True)
    return [work / notebook.name for notebook in notebooks]


def _run_notebook(
    notebook: Path, parameters: Mapping[str, Any], work: Path, idle: SimpleQueue[_SharedKernel]
) -> None:
    # papermill fills its parameters into paths, as str.format does
    source, target = (
        str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, work / notebook.name)
    )
    known, kernel = papermill.inspect_notebook(source), idle.get()
    try:
        papermill.execute_notebook(
            source,
            target,
            parameters={key: value for key, value in parameters.items() if key in known},
            cwd=str(Path.cwd()),
            progress_bar=False,
            request_save_on_cell_execute=False,
            extra_arguments=["--log-level=CRITICAL"],
            km=kernel,
        )
    finally:
        if kernel.last:
            kernel.last.stop_channels()
        idle.put(kernel)
