"""Keep secrets out of what a run writes about itself: values that are known, and texts that look like keys.

>>> redact_text("GET /search?api_key=0123456789 with Bearer abc.def-ghi")
'GET /search?api_key=[redacted] with Bearer [redacted]'
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
SET = "set"
"""Stands for the value of an environment variable that may be a secret."""
MIN_SECRET = 6
"""Characters. A shorter value is no key, and would be found inside of other words."""
KEY_VARIABLE = "key_variable"
"""The name of every setting that names the environment variable of a key."""

_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SECRET_PARTS = frozenset({"key", "token", "secret", "password", "passwd", "credential", "credentials", "apikey"})
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|fc|ghp|gho|ghu|ghs|ghr|github_pat|glpat|xox[abprs]|wandb_v1)[-_][A-Za-z0-9_-]{10,}"
    r"|\b(?:hf|pk|rk|r8)_(?=[A-Za-z]*\d)[A-Za-z0-9]{10,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])",
    re.DOTALL,
)
"""Keys by their own form: private keys, those of well-known services, JSON web tokens, Weights & Biases' 40 digits."""
_NAMED = re.compile(
    r"""(?P<name>(?<![\w-])[\w.-]*(?:api[_-]?key|apikey|secret|password|passwd|(?:access|auth|hf|bearer)[_-]?token)"""
    r"""|\btoken|\bauthorization)(?P<between>["']?\s*[:=]\s*["']?|\s+)"""
    r"""(?P<value>(?!Bearer\b|Basic\b|None\b|null\b)[^\s"',;&}{]{6,})""",
    re.IGNORECASE,
)
"""A value after its name: ``api_key=...``, ``"password": "..."``, ``--auth-token ...``."""
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
_USER_IN_URL = re.compile(r"(?<=://)[^\s/@:]+:[^\s/@]+(?=@)")


def is_secret_variable(name: str, keys: Collection[str] = ()) -> bool:
    """Whether the value of an environment variable may be a secret.

    >>> is_secret_variable("WANDB_API_KEY"), is_secret_variable("NCCL_DEBUG"), is_secret_variable("MINE", ["MINE"])
    (True, False, True)
    """
    return name in keys or any(word in name.upper() for word in _SECRET_NAMES)


def secret_values(environment: Mapping[str, str], keys: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that may hold a secret."""
    return {
        name: value.strip()
        for name, value in environment.items()
        if is_secret_variable(name, keys) and len(value.strip()) >= MIN_SECRET
    }


def redact_text(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Replace ``secrets`` (by variable) by the names of their variables, and whatever looks like a key."""
    by_length = sorted((secrets or {}).items(), key=lambda item: -len(item[1]))
    for name, value in by_length:
        text = text.replace(value, f"${name}")
    text = _USER_IN_URL.sub(REDACTED, _SCHEME.sub(rf"\1 {REDACTED}", _FORMS.sub(REDACTED, text)))
    return _NAMED.sub(_redact_named, text)


def _redact_named(match: re.Match[str]) -> str:
    value = match["value"]
    is_number = re.fullmatch(r"[\d.,]+\W*", value) is not None and match["name"].lower() == "token"
    by_blank = match["between"].isspace() and not match["name"].startswith("-")  # prose: "the secret ingredient"
    return (
        match[0]
        if value.startswith(("$", REDACTED)) or is_number or by_blank
        else (f"{match['name']}{match['between']}{REDACTED}")
    )


def redact_words(words: Sequence[str], secrets: Mapping[str, str] | None = None) -> list[str]:
    """Redact a command line: also the values of flags and settings that are named like a secret.

    >>> redact_words(["--wandb-key", "abc", "rollout.turn_tokens=40", "tools.0.api_key=abc"])
    ['--wandb-key', '[redacted]', 'rollout.turn_tokens=40', 'tools.0.api_key=[redacted]']
    """
    found, hides_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if hides_next and not word.startswith("--"):
            found.append(REDACTED)
        elif equals and _is_secret_name(name):
            found.append(f"{name}={REDACTED}")
        else:
            found.append(redact_text(word, secrets))
        hides_next = word.startswith("-") and not equals and _is_secret_name(word)
    return found


def redact_values(value: Any, secrets: Mapping[str, str] | None = None) -> Any:
    """Redact the texts of nested JSON, and the values of keys that are named like a secret.

    >>> redact_values({"url": "http://x", "api_key": "abc", "key_variable": "MY_KEY"})
    {'url': 'http://x', 'api_key': '[redacted]', 'key_variable': 'MY_KEY'}
    """
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if _is_secret_name(str(key)) and isinstance(part, str) and part
            else redact_values(part, secrets)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(part, secrets) for part in value]
    return redact_text(value, secrets) if isinstance(value, str) else value


def key_variables(cell: Any) -> Iterator[str]:
    """Yield the environment variables that a configuration names for its keys."""
    if isinstance(cell, Mapping):
        for key, part in cell.items():
            if key == KEY_VARIABLE and isinstance(part, str):
                yield part
            else:
                yield from key_variables(part)
    elif isinstance(cell, list | tuple):
        for part in cell:
            yield from key_variables(part)


def _is_secret_name(name: str) -> bool:
    """``--wandb-key`` and ``tools.0.api_key``, but not ``key_variable`` and ``max-tokens``."""
    last = name.rpartition(".")[2]
    return not last.endswith("variable") and not _SECRET_PARTS.isdisjoint(re.split(r"[^a-z]+", last.lower()))
