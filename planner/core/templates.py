"""Jinja templates of the package; text of users stays within its line or is quoted by a filter."""

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

from planner.core.text import escape_markdown, escape_to_one_line, format_count
from planner.core.units import GIB


@cache
def _create_environment(
    folder: str, is_markdown: bool, *, trim_blocks: bool = True
) -> jinja2.Environment:
    """Create an environment whose output is escaped to one line unless a filter has quoted it.

    So no text of a user can leave the comment that shows it. In Markdown its markup is escaped too.
    """
    escape = escape_markdown if is_markdown else escape_to_one_line

    def as_yaml(text: object) -> str:
        # these end a line in YAML 1.1 only
        style = '"' if re.search("[\x85\u2028\u2029]", str(text)) else None
        dumped = yaml.safe_dump(text, width=math.inf, allow_unicode=True, default_style=style)
        return dumped.removesuffix("...\n").rstrip("\n")

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / folder / "templates"),
        extensions=["jinja2.ext.do"],
        trim_blocks=trim_blocks,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda shown: shown if isinstance(shown, Markup) else escape(shown),
    )
    environment.filters |= {
        "f": format,
        "ms": lambda f: f"{f * 1e3:.0f}",
        "gib": lambda f: f"{f / GIB:.1f}",
        "yaml": as_yaml,
        "plural": format_count,
    }
    # a code span has no escapes
    environment.filters["code"] = lambda text: Markup(escape_to_one_line(text).replace("`", "'"))
    # Prometheus expands Go templates in labels
    environment.filters["go"] = lambda text: text.replace("{{", '{{"{{"}}')
    environment.filters["promql"] = quote_promql
    environment.filters["scalar"] = lambda text: Markup(
        yaml.safe_dump(str(text), default_style='"', width=math.inf).removesuffix("\n")
    )
    environment.filters["json"] = json.dumps
    environment.filters["quote"] = lambda text: Markup(shlex.quote(text))
    return environment


def quote_promql(text: str) -> Markup:
    """Quote text as a PromQL string."""
    return Markup(json.dumps(text, ensure_ascii=False))


def render_template(folder: str, template: str, /, **values: Any) -> str:
    """Render a template of a folder of the package, such as "deploy"."""
    environment = _create_environment(folder, template.endswith(".md"))
    return environment.get_template(f"{template}.j2").render(**values)


def load_macros(folder: str, template: str, /, **known: Any) -> object:
    """Load the macros of a template of a folder of the package, which see the `known` names."""
    environment = _create_environment(folder, False, trim_blocks=False)
    return environment.get_template(f"{template}.j2").make_module(known)
