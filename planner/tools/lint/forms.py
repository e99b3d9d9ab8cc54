"""Names that the forms of deployment files share (`catalogs/flags/forms.yaml`)."""

from functools import cache

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.readers import read_yaml
from planner.engines.cli_options import FLAGS_DIR


class Forms(SourcedEntry):
    """The names of `catalogs/flags/forms.yaml`, whose head explains every field."""

    names: dict[str, tuple[str, ...]]
    spellings: dict[str, dict[str, str]]
    implies: dict[str, dict[str, bool | str]]
    lora: dict[str, dict[str, int]]
    lora_when: dict[str, tuple[str, ...]]


@cache
def load_forms() -> Forms:
    """Return the names."""
    return validate_entry(Forms, read_yaml(FLAGS_DIR / "forms.yaml"), "flags/forms.yaml")


@cache
def load_other_processors() -> tuple[str, ...]:
    """Return the words for processors other than the GPUs of the catalog, of `--device` and images."""
    return tuple(read_yaml(FLAGS_DIR / "unmodelled.yaml")["processors"]["words"])
