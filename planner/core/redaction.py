"""Mask secrets in all that is printed: commands, findings, messages and addresses."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "..."
_SECRET_PART = re.compile(
    r"keys?|pass(?:phrase|code)|pwd|secrets|credentials?|creds?|auth|authorization|bearer|jwt"
    r"|cookies?|pat|dsn|webhook|signature|sig|sas|headers"
    r"|.*(?:token|password|passwd|pass|secret|apikey|accesskey|pw)"
)
"""A name with such a part holds a secret: HF_TOKEN_2, --api-key, DB_PASS, OTLP headers."""
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_HARMLESS_NAME = re.compile(
    r"(?:^|[-_.])(?:(?:cache|sort|partition|primary|hash|public|label|group|eos|bos|pad|unk|stop"
    r"|num|max|min|batched|per|each|first|next|input|output|prompt|inter|adapter|routing)[-_](?:key|keys|token)"
    r"|allowed-headers)$"
    # what is said about a secret, or counted in tokens, is none
    r"|[-_.](?:ids?|file|path|dir|name|ref|type|size|count|threshold|limit|length|len|latency|rate"
    r"|seconds|s|ms|budget|fields?|enabled|mode|method|spec|selector|map|max|min|sum|bucket|total|usage|ratio|num"
    r"|metrics|watermark|adaptive)$"
    # a switch takes no value
    r"|^--(?:no-)?(?:enable|disable|allow)-",
    re.IGNORECASE,
)
_PLAIN_NAME = re.compile(
    r"[a-z]{1,20}(?:[_.-][a-z]{1,20}){0,5}|[\w.-]{1,60}/[\w.-]{1,80}|[\d.]{1,12}"
    r"|[A-Z]{1,3}-?\d{1,4}[A-Z]{0,2}"
)
_SECRET_OPTIONS = ("--api-key", "--hf-token", "--admin-api-key")
_MIN_ABBREVIATION = len("--api-")
_ADDRESS_LOGIN = re.compile(r"(?<=[A-Za-z0-9+.-])(://)[^\s/@'\"]+@")
_KNOWN_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{4,}|api_org_\w{8,}|sk-[\w-]{8,}|nvapi-[\w-]{8,}"
    r"|gh[pousr]_\w{8,}|github_pat_\w{8,}|gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|imt|ffct)-[\w-]{8,}"
    r"|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{12,}"
    r"|AIza[\w-]{8,}|ya29\.[\w-]{8,}|GOCSPX-[\w-]{8,}"
    r"|eyJ[\w-]{8,}+(?:\.[\w-]*+){0,4}|pypi-AgE[\w-]{8,}|npm_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}+(?!_)|SG\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|[rs]k_(?:live|test)_\w{8,}|sq0(?:csp|atp)-[\w-]{8,}|dop_v1_\w{8,}|gsk_\w{8,}|r8_\w{16,}"
    r"|(?:AC|SK)[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}|\d{8,10}:[\w-]{35}"
    r"|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[^'\"]*)"
    r"|\b(?:Bearer|Basic)\s+(?=[^\s'\"]*\d)[^\s'\"]+|\bBearer\s+[^\s'\"]{8,}"
)
"""Forms of tokens, cut ones too: of the services that detect-secrets has plugins for (github.com/Yelp/detect-secrets,
list of plugins as of 2026-11-28), but IBM's and Artifactory's, and of hubs and clouds that serve models."""
_ADDRESS_SECRET = re.compile(
    r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/"
    r"|webhook\.office\.com/|(?:[?&;]|\b)(?:sig|x-amz-[a-z-]*(?:signature|credential|token)"
    r"|x-goog-(?:signature|credential)|accountkey|sharedaccess(?:key|signature)|_authtoken)=)"
    r"[^\s&;'\"]+",
    re.IGNORECASE,
)
"""Where an address or a connection string carries its secret."""
_NAMED_VALUE = re.compile(
    r"(?P<name>(?<![\w.-])-{0,2}[A-Za-z][\w.-]*)"
    r"(?P<sign>\\?['\"]?(?:=|: ?)|\s+(?=['\"]|\S*\d))"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\",;&]+)"
)


def is_secret_name(name: str) -> bool:
    """Return whether an option, abbreviated or not, or a variable of this name holds a secret."""
    spelled = name.replace("_", "-").lower()
    is_abbreviated = len(spelled) >= _MIN_ABBREVIATION and any(
        option.startswith(spelled) for option in _SECRET_OPTIONS
    )
    parts = () if _HARMLESS_NAME.search(spelled) else _NAME_PART.findall(name)
    return is_abbreviated or any(_SECRET_PART.fullmatch(part.lower()) for part in parts)


def redact_text(text: str) -> str:
    """Mask secrets in text: logins of addresses, tokens, signatures, values of secret names."""

    def mask_value(match: re.Match[str]) -> str:
        name, sign, value = match["name"], match["sign"], match["value"]
        is_given = (
            name.startswith("--")
            or "=" in sign
            or (":" in sign and (len(name) > 5 or sign[0] != ":"))
        )
        if is_given and is_secret_name(name) and not _is_placeholder(value):
            return f"{name}{sign}{MASK}"
        return f"{name}{sign}{_NAMED_VALUE.sub(mask_value, value)}"

    text = _ADDRESS_SECRET.sub(rf"\1{MASK}", _ADDRESS_LOGIN.sub(rf"\1{MASK}@", text))
    return _NAMED_VALUE.sub(mask_value, _KNOWN_TOKENS.sub(MASK, text))


def quote_value(value: object) -> str:
    """Return a value as an error quotes it: numbers, with a unit too, names like a GPU's, and no other text.

    >>> quote_value("20%"), quote_value("hunter2"), quote_value("L40S"), quote_value([1])
    ("'20%'", 'other text', "'L40S'", 'a list')
    """
    if isinstance(value, str):
        is_number = re.fullmatch(
            r"[-+]?[\d.,:/]*\s*(?:[a-z]{1,3}|%)?|(?-i:[A-Z]{1,3}-?\d{1,4}[A-Z]{0,2})|true|false|null|none",
            value,
            re.I,
        )
        return repr(value) if is_number and len(value) < 24 else "other text"
    return f"a {type(value).__name__}" if isinstance(value, Mapping | list | tuple) else repr(value)


def quote_name(name: str) -> str:
    """Return a name that nothing knows as an error shows it: plain words, numbers, and models; no other text."""
    return name if _PLAIN_NAME.fullmatch(name) else MASK


def redact_json(data: Any) -> Any:
    """Mask secrets in every text of nested lists and mappings."""
    if isinstance(data, str):
        return redact_text(data)
    if isinstance(data, Mapping):
        return {
            name: MASK
            if isinstance(value, str) and is_secret_name(str(name))
            else redact_json(value)
            for name, value in data.items()
        }
    return [redact_json(value) for value in data] if isinstance(data, list | tuple) else data


def _is_placeholder(value: str) -> bool:
    """Return whether a value stands for a secret that is filled in elsewhere."""
    return bool(
        re.fullmatch(r"['\"]?(\$\{?\w+(:?[-?][^}]*)?\}?|<[^<>]*>|\{\{.*\}\}|\.\.\.)['\"]?", value)
    )
