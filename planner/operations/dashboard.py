"""The plan as a Grafana dashboard: what it expects and promises, drawn as bands behind what the engine reports."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml

from planner.operations.rendering import render

SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, ACROSS = 8, 7, 3
"""Of a panel, in Grafana's grid of 24 columns, and how many stand in a row."""


def dashboard(values: Mapping[str, Any]) -> str:
    """`grafana.json` of the plan whose `values` the templates get; its panels stand in `grafana.yaml.j2`."""
    title = values["title"]
    panels = yaml.safe_load(render("grafana.yaml", **values))
    made = {
        "uid": f"headroom-{hashlib.sha256(title.encode()).hexdigest()[:16]}",
        "title": f"Headroom: {title}",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "annotations": {"list": []},
        "panels": [_panel(place, panel) for place, panel in enumerate(panels)],
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _panel(place: int, panel: Mapping[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "red" if "least" in panel else "green", "value": None}]
    colors = {"expected": "yellow", "limit": "red", "least": "green"}
    steps += [{"color": color, "value": panel[name]} for name, color in colors.items() if name in panel]
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["about"],
        "gridPos": {"x": place % ACROSS * WIDTH, "y": place // ACROSS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + k), "datasource": SOURCE, "expr": query["expr"], "legendFormat": query["legend"]}
            for k, query in enumerate(panel["queries"])
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel["unit"],
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"thresholdsStyle": {"mode": "line+area"}},
            },
            "overrides": [],
        },
    }
