"""ForebayConnector for which the engine's kernel arranges its cache in no way that strides give."""

from __future__ import annotations

from typing import Any

import forebay.vllm
from forebay.vllm import arrangement


def _fit(*marks: Any) -> None:
    return None


class OpaqueConnector(forebay.vllm.ForebayConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        arrangement._fit = _fit  # type: ignore[assignment]
        super().__init__(vllm_config, role, kv_cache_config)
