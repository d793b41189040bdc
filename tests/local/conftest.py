from __future__ import annotations

from tests.megatron.conftest import truth

__all__ = ["truth"]
