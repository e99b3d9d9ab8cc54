"""Bounded reading of YAML, JSON, CSV and text files."""

import csv
import io
import json
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from planner.core.errors import PlannerError
from planner.core.files import check_finished, make_file_error
from planner.core.redaction import MASK, quote_name
from planner.core.units import MIB

MAX_NESTING_DEPTH = 100
"""Levels of nested lists and mappings."""
MAX_YAML_VALUES = 2**16
"""Values of a YAML file; reading as many takes about a second."""
MAX_YAML_LETTERS = 4 * MIB
"""Letters of its texts, each counted wherever an alias repeats it."""
MAX_JSON_BYTES = 800 * 10**6
"""Memory that the values of a JSON file may take."""
MAX_CSV_CELLS_PER_LINE = 1000


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a letter, escaped and read, which is none without the other half."""


def open_bounded(path: Path, max_bytes: int, prefix: str = "") -> BinaryIO:
    """Open a regular file for reading; `PlannerError` if it is none or exceeds `max_bytes`."""
    check_finished(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"it is {'a directory' if stat.S_ISDIR(status.st_mode) else 'no regular file'}"
            )
        if status.st_size > max_bytes:
            raise ValueError(
                f"it has {status.st_size / MIB:,.1f} MiB, and at most {max_bytes / MIB:g} are read"
            )
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise make_file_error(error, f"cannot read {prefix}{path}") from None


def read_text(path: Path, max_bytes: int = 16 * MIB, errors: str = "strict") -> str:
    """Read a UTF-8 file of at most `max_bytes`; `PlannerError` for any other."""
    try:
        with open_bounded(path, max_bytes) as file:
            return file.read(max_bytes).decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise PlannerError(
            f"cannot read {path}: byte {error.start + 1:,} is not UTF-8 text"
        ) from None
    except OSError as error:
        raise make_file_error(error, f"cannot read {path}") from None


def read_csv_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each CSV line that is not blank; `PlannerError` if invalid."""
    with (
        open_bounded(path, max_bytes) as raw,
        io.TextIOWrapper(raw, "utf-8-sig", newline="") as file,
    ):
        lines = csv.reader(file)
        try:
            for cells in filter(None, lines):
                if len(cells) > MAX_CSV_CELLS_PER_LINE:
                    raise ValueError(
                        f"{len(cells):,} cells in line {lines.line_num:,}, and at most"
                        f" {MAX_CSV_CELLS_PER_LINE:,} are"
                    )
                yield lines.line_num, cells
        except OSError as error:
            raise make_file_error(error, f"cannot read {path}") from None
        except UnicodeDecodeError:
            raise PlannerError(f"{path.name} is not a CSV: it is no UTF-8 text") from None
        except (csv.Error, ValueError) as error:
            raise PlannerError(f"{path.name} is not a CSV that can be read: {error}") from None


class _Yaml12Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Read scalars as YAML 1.2 does: yes, 1:30 and 2024-01-01 are text, 010 is 10, 1e3 a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    depth = values = 0

    def descend_resolver(self, parent: yaml.Node, index: object) -> None:
        self.depth += 1
        self.values += 1
        if self.depth > MAX_NESTING_DEPTH:
            raise _make_yaml_error(f"it is nested deeper than {MAX_NESTING_DEPTH} levels", parent)
        if self.values > MAX_YAML_VALUES:
            raise _make_yaml_error(f"it has more than {MAX_YAML_VALUES:,} values", parent)

    def ascend_resolver(self) -> None:
        self.depth -= 1

    def get_single_node(self) -> Any:
        """Compose the document; reject duplicate keys and aliases that expand beyond the limits."""
        root = super().get_single_node()
        level, depth, size, letters = [root], 0, 0, 0
        while level:
            depth += 1
            inside: list[yaml.Node] = []
            for node in level:
                parts = node.value if isinstance(node, yaml.CollectionNode) else ()
                size += len(parts)
                letters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
                is_large = size > MAX_YAML_VALUES or letters > MAX_YAML_LETTERS
                if depth > MAX_NESTING_DEPTH + 1 or is_large:
                    raise _make_yaml_error("its aliases stand for too much", node)
                if isinstance(node, yaml.MappingNode):
                    _reject_duplicate_keys(key for key, _ in parts)
                    parts = chain.from_iterable(parts)
                inside += parts
            level = inside
        return root

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = node.value.replace("_", "")
        if len(digits) > 20 or abs(int(digits)) > 2**53:
            raise _make_yaml_error(
                f"{digits:.40} is beyond 2^53, the largest whole number that is read", node
            )
        return int(digits)


_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _Yaml12Loader.construct_yaml_int)
for _tag, _pattern, _first_letters in (
    ("merge", r"<<", ["<"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Yaml12Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first_letters
    )


def _reject_duplicate_keys(keys: Iterable[yaml.Node]) -> None:
    seen = set()
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _make_yaml_error(f"{quote_name(key.value)} is given twice", key)
            seen.add(key.value)


def _make_yaml_error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of at most 512 KiB and 65,536 values; `PlannerError` if it is invalid."""
    return parse_yaml(read_text(path, MIB // 2), path.name)


def read_yaml_sections(path: Path, *sections: str) -> dict[str, Any]:
    """Read a YAML file of mappings by section; `PlannerError` names a section that is none."""
    data = read_yaml(path)
    for name in sections:
        if not isinstance(data, dict) or not isinstance(data.get(name), dict | list):
            raise PlannerError(f"{path.name}, section {name}: expected names, or names with values")
    return dict(data)


def parse_yaml(text: str, location: str) -> Any:
    """Parse YAML; `location` names it in the `PlannerError` for invalid text."""
    try:
        return yaml.load(text, Loader=_Yaml12Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        if error.problem == "found unhashable key":
            problem = "a list or a mapping stands where a name has to"
        problem = re.sub(
            r"'[^'<]*\w[^']*'", f"'{MASK}'", problem
        )  # a tag or an anchor may be a password
        raise PlannerError(f"{location} is not valid YAML: {line}{problem}") from None
    # PyYAML's constructors of tags raise more than YAMLError
    except UnicodeEncodeError:
        raise PlannerError(f"{location} is no Unicode text") from None
    except (ValueError, LookupError, AttributeError):
        raise PlannerError(
            f"{location} is not valid YAML: a value is none of the type that its tag (!!...) says"
        ) from None
    except yaml.YAMLError:
        raise PlannerError(f"{location} is not valid YAML: a letter that YAML lacks") from None


def parse_json(text: str, location: str) -> Any:
    """Parse JSON; `location` names it in the `PlannerError` for invalid or too large text."""
    try:
        values = sum(map(text.count, ",[{{{"))  # an object takes the memory of three values
        if (taken := 2 * sys.getsizeof(text) + 100 * values) > MAX_JSON_BYTES:
            raise ValueError(
                f"{values:,} values would take {taken:.2g} bytes, and at most {MAX_JSON_BYTES:.0e}"
                " are given"
            )
        data = json.loads(text, object_pairs_hook=_build_json_object)
        if _SURROGATE.search(text) and _LONE_SURROGATE.search(json.dumps(data, ensure_ascii=False)):
            raise ValueError("a text has half of a letter, which is no Unicode text")
        level: list[Any] = [[data]]
        for _ in range(MAX_NESTING_DEPTH + 1):
            parts = (
                part
                for whole in level
                for part in (whole.values() if isinstance(whole, dict) else whole)
            )
            if not (level := [part for part in parts if isinstance(part, dict | list)]):
                return data
    except ValueError as error:
        raise PlannerError(f"{location} is not JSON: {error}") from None
    except RecursionError:
        pass
    raise PlannerError(f"{location} is nested deeper than {MAX_NESTING_DEPTH} levels")


def _build_json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise `ValueError` for a duplicate key."""
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        raise ValueError(
            next(
                f"{quote_name(key)!r} is given twice"
                for number, (key, _) in enumerate(pairs)
                if key in dict(pairs[:number])
            )
        )
    return json_object
