"""Render a plan as a Grafana dashboard: expected values and SLOs behind the engine's metrics."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml

from planner.core.templates import render_template


def render_dashboard(values: Mapping[str, Any]) -> str:
    """Return `grafana.json` for the template `values`; its panels are in `grafana.yaml.j2`."""
    title = values["title"]
    panels = yaml.safe_load(render_template("deploy", "grafana.yaml", **values))
    uid = f"headroom-{hashlib.sha256(title.encode()).hexdigest()[:16]}"
    dashboard = json.loads(
        render_template("deploy", "grafana.json", title=title, uid=uid, panels=panels)
    )
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
