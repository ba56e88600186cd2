"""ForebayConnector with a clock on its scheduler's side: what an engine's steps pay for it.

At shutdown it writes the times to the file $FOREBAY_TIMES, in seconds: of each request (its lookup
and what follows until it is scheduled) and of each step (the connector's part in it).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import forebay.vllm


class TimedConnector(forebay.vllm.ForebayConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.requests: dict[str, float] = {}
        self.steps: list[tuple[float, int, int]] = []
        self.output_s = 0.0

    def _note(self, request: Any, begun: float) -> None:
        spent = time.perf_counter() - begun
        self.requests[request.request_id] = self.requests.get(request.request_id, 0) + spent

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        begun = time.perf_counter()
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._note(request, begun)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        begun = time.perf_counter()
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._note(request, begun)

    def update_connector_output(self, connector_output: Any) -> None:
        begun = time.perf_counter()
        super().update_connector_output(connector_output)
        self.output_s += time.perf_counter() - begun

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        begun = time.perf_counter()
        meta = super().build_connector_meta(scheduler_output)
        spent = time.perf_counter() - begun + self.output_s
        self.output_s = 0.0
        new = len(scheduler_output.scheduled_new_reqs)
        self.steps.append((spent, len(scheduler_output.num_scheduled_tokens), new))
        return meta

    def shutdown(self) -> None:
        super().shutdown()
        if self.role == KVConnectorRole.SCHEDULER:
            with open(os.environ["FOREBAY_TIMES"], "w") as out:
                json.dump({"requests": list(self.requests.values()), "steps": self.steps}, out)
