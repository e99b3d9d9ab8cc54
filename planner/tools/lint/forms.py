"""Names that the forms of deployment files share (`catalogs/flags/forms.yaml`)."""

from functools import cache

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.readers import read_yaml
from planner.engines.cli_options import FLAGS_DIR


class Forms(SourcedEntry):
    """The names of `catalogs/flags/forms.yaml`, whose head explains every field."""

    docker_switches: tuple[str, ...]
    docker_options: dict[str, str]
    runtime_kinds: tuple[str, ...]
    cluster_kinds: tuple[str, ...]
    model_keys: tuple[str, ...]
    model_holders: tuple[str, ...]
    engine_keys: tuple[str, ...]
    reference_keys: tuple[str, ...]
    gpu_keys: tuple[str, ...]
    gpu_counts: tuple[str, ...]
    json_keys: tuple[str, ...]
    implies: dict[str, dict[str, bool | str]]
    lora: dict[str, dict[str, int]]
    lora_when: dict[str, tuple[str, ...]]
    own_keys: tuple[str, ...]
    wrappers: dict[str, str]
    kserve_options: dict[str, str]


@cache
def load_forms() -> Forms:
    """Return the names."""
    return validate_entry(Forms, read_yaml(FLAGS_DIR / "forms.yaml"), "flags/forms.yaml")


@cache
def load_other_processors() -> tuple[str, ...]:
    """Return the words for processors other than the GPUs of the catalog, of `--device` and images."""
    return tuple(read_yaml(FLAGS_DIR / "unmodelled.yaml")["processors"]["words"])
