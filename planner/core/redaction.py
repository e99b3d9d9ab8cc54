"""Mask secrets in all that is printed: commands, findings, messages and addresses."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "..."
_SECRET_WORDS = "key|keys|token|password|passwd|passphrase|pwd|secret|credential|credentials|auth"
_SECRET_NAME = re.compile(rf"(?:^|[-_.])(?:{_SECRET_WORDS}|headers|apikey)$", re.IGNORECASE)
"""A name that ends so holds a secret: HF_TOKEN, --api-key, db_password, OTLP headers."""
_HARMLESS_NAME = re.compile(
    r"(?:^|[-_.])(?:(?:cache|sort|partition|primary|hash|public|label|group|eos|bos|pad|unk"
    r"|stop|num|max|min|per|each|first|next)[-_](?:key|keys|token))$|allowed-headers$",
    re.IGNORECASE,
)
_SECRET_OPTIONS = ("--api-key", "--hf-token", "--admin-api-key")
_MIN_ABBREVIATION = len("--api-")
_ADDRESS_LOGIN = re.compile(r"(?<=[A-Za-z0-9+.-])(://)[^\s/@'\"]+@")
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{4,}|sk-[\w-]{8,}|nvapi-[\w-]{8,}|gh[pousr]_\w{8,}|glpat-[\w-]{8,}"
    r"|xox[abpr]-[\w-]{8,}|AKIA[A-Z0-9]{12,})|\bBearer\s+[^\s'\"]+"
)
_NAMED_VALUE = re.compile(
    r"(?P<name>(?<![\w.-])-{0,2}[A-Za-z][\w.-]*)"
    r"(?P<sign>=|: ?|\s+(?=['\"]|\S*\d))(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\",;]+)"
)


def is_secret_name(name: str) -> bool:
    """Return whether an option, abbreviated or not, or a variable of this name holds a secret."""
    spelled = name.replace("_", "-").lower()
    is_abbreviated = len(spelled) >= _MIN_ABBREVIATION and any(
        option.startswith(spelled) for option in _SECRET_OPTIONS
    )
    return is_abbreviated or (
        bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(spelled)
    )


def redact_text(text: str) -> str:
    """Mask secrets in a line of text: logins of addresses, tokens, values of secret names."""

    def mask_value(match: re.Match[str]) -> str:
        name, sign, value = match["name"], match["sign"], match["value"]
        is_given = name.startswith("--") or sign == "=" or (sign[0] == ":" and len(name) > 5)
        masked = is_given and is_secret_name(name) and not _is_placeholder(value)
        return f"{name}{sign}{MASK}" if masked else match[0]

    text = _ADDRESS_LOGIN.sub(rf"\1{MASK}@", text)
    return _KNOWN_TOKENS.sub(MASK, _NAMED_VALUE.sub(mask_value, text))


def redact_words(words: Sequence[str]) -> tuple[str, ...]:
    """Mask the values of secret options in the words of a command."""
    masked, hides_next = list[str](), False
    for word in words:
        name, equals, value = word.partition("=")
        is_secret = name.startswith("-") and is_secret_name(name)
        if hides_next and not word.startswith("--"):
            masked.append(word if _is_placeholder(word) else MASK)
        elif is_secret and equals:
            masked.append(word if _is_placeholder(value) else f"{name}={MASK}")
        else:
            masked.append(redact_text(word))
        hides_next = is_secret and not equals
    return tuple(masked)


def redact_json(data: Any) -> Any:
    """Mask secrets in every text of nested lists and mappings."""
    if isinstance(data, str):
        return redact_text(data)
    if isinstance(data, Mapping):
        return {name: redact_json(value) for name, value in data.items()}
    return [redact_json(value) for value in data] if isinstance(data, list | tuple) else data


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Mask the values of secret variables."""
    return {
        name: MASK
        if is_secret_name(name) and value and not _is_placeholder(value)
        else redact_text(value)
        for name, value in environment.items()
    }


def _is_placeholder(value: str) -> bool:
    """Return whether a value stands for a secret that is filled in elsewhere."""
    return bool(
        re.fullmatch(r"['\"]?(\$\{?\w+(:?[-?][^}]*)?\}?|<[^<>]*>|\{\{.*\}\}|\.\.\.)['\"]?", value)
    )
