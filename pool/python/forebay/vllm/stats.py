"""Counters that go through vLLM's own hooks into its log and its metrics."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

#: name: what it counts
COUNTERS = {
    "lookups": "requests that were looked up",
    "lookups_unanswered": "lookups that got no answer in time, and were misses",
    "lookup_hit_tokens": "tokens that lookups found",
    "requests_not_pooled": "requests whose keys cannot be named",
    "loads": "loads that arrived whole, of each rank",
    "loads_failed": "loads that were given up and computed, of each rank",
    "loaded_bytes": "bytes of the engine's cache that were loaded",
    "load_seconds": "time of loads, from submission to the last byte",
    "pages_stored": "pages that were stored",
    "pages_there": "pages that were in the pool already",
    "pages_refused": "pages for which there was no room, or no answer",
    "pages_corrupt": "pages whose bytes did not match their sums",
    "stored_bytes": "bytes of the engine's cache that were stored",
    "draft_tokens_after_hits": "tokens guessed by a draft, in requests with a hit",
    "draft_tokens_taken_after_hits": "those of them that the model would have said, and took",
    "store_seconds": "time of stores, from submission to commit",
}


class Stats:
    """Counts of one side since they were last taken. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, n: float) -> None:
        if n:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + n

    def take(self) -> ForebayStats | None:
        if not self._counts:
            return None
        with self._lock:
            counts, self._counts = self._counts, {}
        return ForebayStats(data=counts)


class ForebayStats(KVConnectorStats):
    """Sums of `COUNTERS` over an interval."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(n, 6) if isinstance(n, float) else n for name, n in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class ForebayMetrics(KVConnectorPromMetrics):
    """The same counters for Prometheus: vllm:forebay_<name>_total."""

    def __init__(
        self,
        config: Any,
        metric_types: dict[Any, Any],
        labels: list[str],
        values: dict[int, list[object]],
    ) -> None:
        super().__init__(config, metric_types, labels, values)
        self._counters = {}
        for name, what in COUNTERS.items():
            counter = metric_types[Counter](
                name=f"vllm:forebay_{name}", documentation=what, labelnames=labels
            )
            self._counters[name] = {
                engine: counter.labels(*label) for engine, label in values.items()
            }

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, n in data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(n)
