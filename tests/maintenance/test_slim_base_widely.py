"""What `test_slim_base.py` looks at in small, more widely."""

from pathlib import Path

import pytest
from test_slim_base import link_distributions, list_requirements, run


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("dask", "dask.distributed, distributed.client"),
        ("lab", "planner.ui.cockpit, planner.ui.lab_server, jupyterlab.labapp"),
        ("parquet", "pyarrow.parquet"),
        (
            "report",
            "planner.ui.pdf_report, planner.ui.notebook_runner, planner.ui.sweep_text, nbconvert, pypandoc, typst",
        ),
    ],
)
def test_an_extra_brings_what_its_commands_import(extra: str, modules: str, tmp_path: Path) -> None:
    site = link_distributions(list_requirements(extra), tmp_path / "site")
    done = run(site, tmp_path, "-c", f"import {modules}")
    assert done.returncode == 0, done.stderr
