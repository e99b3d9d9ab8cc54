"""Check numbers of a command against `catalogs/flags/values.yaml`: what no engine could start with."""

from collections.abc import Iterator
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.cli_options import FLAGS_DIR, ParsedCommandLine
from planner.tools.lint.findings import LintFinding


class ValueBounds(SourcedEntry):
    """One entry of `catalogs/flags/values.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    say: str
    least: int
    most: int | None = None
    also: tuple[int, ...] = ()
    times: int = 1
    from_: Version | None = Field(default=None, alias="from")
    before: Version | None = None

    def accepts(self, value: float) -> bool:
        """Return whether an engine takes the value."""
        if value in self.also:
            return True
        return self.least <= value <= (self.most or value) and value % self.times == 0

    def __str__(self) -> str:
        upper = f" to {self.most}" if self.most else " or more"
        return f"{self.say}: {self.least}{upper}" + f", a multiple of {self.times}" * (
            self.times > 1
        )


@cache
def load_value_bounds(engine: str) -> tuple[ValueBounds, ...]:
    """Return the bounds for all engines and for `engine`."""
    data = read_yaml(FLAGS_DIR / "values.yaml")
    return tuple(
        validate_entry(ValueBounds, entry, f"flags/values.yaml, entry {n} of {section}")
        for section in ("all", engine)
        for n, entry in enumerate(data.get(section, []), start=1)
    )


def check_numbers(
    parsed: ParsedCommandLine, engine: str, version: Version
) -> Iterator[LintFinding]:
    """Yield a finding for each number that this version of the engine refuses."""
    for option in parsed.options:
        value = option.value
        if option.option is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for bounds in load_value_bounds(engine):
            applies = (not bounds.from_ or version >= bounds.from_) and (
                not bounds.before or version < bounds.before
            )
            if applies and option.option.argument in bounds.arguments and not bounds.accepts(value):
                yield LintFinding(
                    "flag", option.option.name, str(option)[:300], "wrong value",
                    f"it takes {bounds}", refused=True,
                )  # fmt: skip
