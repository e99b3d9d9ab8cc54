"""What the templates of this folder make of values; a user's text stays within its line, or is quoted by a filter."""

import json
import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from planner.core.quantities import GIB, one_line


@cache
def _templates() -> jinja2.Environment:
    """Whatever a template shows stays within its line, which no comment can leave, unless a filter quoted it."""

    def as_yaml(text: Any) -> str:
        style = '"' if re.search("[\x85\u2028\u2029]", str(text)) else None  # ends of lines to YAML 1.1 alone
        said = yaml.safe_dump(text, width=math.inf, allow_unicode=True, default_style=style)
        return said.removesuffix("...\n").rstrip("\n")

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda shown: shown if isinstance(shown, Markup) else one_line(shown),
    )
    made.filters |= {"f": format, "ms": lambda f: f"{f * 1e3:.0f}", "gib": lambda f: f"{f / GIB:.1f}", "yaml": as_yaml}
    made.filters["markdown"] = lambda text: re.sub(r"([\\`*_\[\]<>&~$|])", r"\\\1", text)
    made.filters["go"] = lambda text: text.replace("{{", '{{"{{"}}')  # what Prometheus expands in labels
    made.filters["promql"] = quoted
    made.filters["scalar"] = lambda text: Markup(
        yaml.safe_dump(str(text), default_style='"', width=math.inf).removesuffix("\n")
    )
    made.filters["json"] = json.dumps
    made.filters["quote"] = lambda text: Markup(shlex.quote(text))
    return made


def quoted(text: str) -> Markup:
    """`text` as a string of PromQL."""
    return Markup(json.dumps(text, ensure_ascii=False))


def render(template: str, **values: Any) -> str:
    """What one of the `templates` makes of `values`."""
    return _templates().get_template(f"{template}.j2").render(**values)
