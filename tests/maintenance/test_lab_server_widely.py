"""What `test_lab_server.py` looks at in small, more widely."""

import sys
import urllib.request
from pathlib import Path

import pytest
from lab_answers import serving

from planner.ui.lab_server import CONTENT_POLICY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ([], CONTENT_POLICY),
        (["--ServerApp.tornado_settings={'headers': {'Content-Security-Policy': 'own'}}"], "own"),
    ],
)
def test_a_users_own_content_policy_replaces_ours(options, policy, tmp_path):
    with (
        serving([sys.executable, "-m", "planner", "lab", str(tmp_path), *options], ROOT) as address,
        urllib.request.urlopen(f"{address}/tree/start.ipynb", timeout=20) as page,
    ):
        assert page.headers["Content-Security-Policy"] == policy
