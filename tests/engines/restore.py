"""A connector without a pool: keeps the engine's own blocks of every prompt, byte for byte, and
puts them back when the prompt comes again. What an engine says then is what it must say after a
hit of the same length in the pool. For models of full attention, one prompt at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass
class Meta(KVConnectorMetadata):
    save: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    load: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)


class RestoreConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.page_tokens = self._kv_transfer_config.kv_connector_extra_config["page_tokens"]
        self.seen: set[tuple[int, ...]] = set()
        self.meta = Meta()
        self.caches: dict[str, torch.Tensor] = {}
        self.saved: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.loaded: set[str] = set()

    # --- scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        prompt = tuple(request.prompt_token_ids)
        tokens = len(prompt) // self.page_tokens * self.page_tokens
        if prompt not in self.seen or num_computed_tokens or not tokens:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            prompt = tuple(request.prompt_token_ids)
            (ids,) = blocks.get_block_ids()
            self.meta.load.append((request.request_id, prompt, list(ids)))

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        for new in scheduler_output.scheduled_new_reqs:
            prompt = tuple(new.prompt_token_ids)
            if prompt not in self.seen:
                self.seen.add(prompt)
                self.meta.save.append((prompt, list(new.block_ids[0])))
        meta, self.meta = self.meta, Meta()
        return meta

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, prompt, ids in self._get_connector_metadata().load:
            for cache, blocks in zip(self.caches.values(), self.saved[prompt], strict=True):
                cache[ids] = blocks[: len(ids)]
            self.loaded.add(request_id)

    def wait_for_save(self) -> None:
        for prompt, ids in self._get_connector_metadata().save:
            self.saved[prompt] = [cache[ids].clone() for cache in self.caches.values()]

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        loaded, self.loaded = self.loaded, set()
        return None, loaded or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass
