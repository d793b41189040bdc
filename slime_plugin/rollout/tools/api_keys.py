"""API keys: read once from the environment, and redacted wherever they could be shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import quote, quote_plus

from slime_plugin.errors import ConfigError


class Key:
    """A secret that prints as the name of its variable.

    >>> key = Key("fc-123", "FIRECRAWL_API_KEY")
    >>> key, key.redact("bad token fc-123")
    (Key($FIRECRAWL_API_KEY), 'bad token $FIRECRAWL_API_KEY')
    """

    __slots__ = ("_forms", "_secret", "_variable")

    def __init__(self, secret: str, variable: str) -> None:
        self._secret = secret
        self._variable = variable
        # Forms in which a service may echo it: plain, in JSON, in a URL.
        forms = {secret, json.dumps(secret)[1:-1], quote(secret), quote_plus(secret)}
        self._forms = sorted(forms, key=len, reverse=True)

    def __repr__(self) -> str:
        return f"Key(${self._variable})"

    def header(self) -> dict[str, str]:
        """HTTP header for the service."""
        return {"Authorization": f"Bearer {self._secret}"}

    def redact(self, text: str) -> str:
        """Replace the secret by the name of its variable."""
        for form in self._forms:
            text = text.replace(form, f"${self._variable}")
        return text


def read_key(variable: str, env: Mapping[str, str], where: str) -> Key:
    """Read a key from an environment variable. Error messages do not show it."""
    secret = env.get(variable, "").strip()
    if not secret:
        raise ConfigError(f"{where}: the environment variable {variable} is not set; it has to hold the service's key")
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError(f"{where}: {variable} holds characters that no key has; paste it again, on one line")
    return Key(secret, variable)
