"""The plan as a Grafana dashboard: what it expects and promises, drawn as bands behind what the engine reports."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml

from planner.core.templates import render_template


def render_dashboard(values: Mapping[str, Any]) -> str:
    """`grafana.json` of the plan whose `values` the templates get; its panels stand in `grafana.yaml.j2`."""
    title, panels = (
        values["title"],
        yaml.safe_load(render_template("deploy", "grafana.yaml", **values)),
    )
    uid = f"headroom-{hashlib.sha256(title.encode()).hexdigest()[:16]}"
    made = json.loads(
        render_template("deploy", "grafana.json", title=title, uid=uid, panels=panels)
    )
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
