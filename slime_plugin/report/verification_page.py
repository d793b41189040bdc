"""The result of ``memorywalker verify`` as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugin import __version__
from slime_plugin.report.templating import render


def verification_page(verification: Mapping[str, Any]) -> str:
    """Render what ``memorywalker verify --json`` prints."""
    split = " ".join(f"{name} {number}" for name, number in verification["split"].items() if number not in (False, 1))
    facts = {
        "configuration": verification["config"],
        "model": verification["model"],
        "device": verification["device"],
        "precision": verification["dtype"],
        "split": split or "one rank",
        "inputs": "small (--quick)" if verification["quick"] else "full",
        "memorywalker": __version__,
    }
    return render("verification_page.html", facts=facts, verification=verification)
