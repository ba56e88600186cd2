"""The connector as vLLM sees it: two halves, of which an instance has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from forebay.vllm.messages import Handshake, StepMeta, WorkerMeta
from forebay.vllm.scheduler import Scheduler
from forebay.vllm.settings import parse
from forebay.vllm.stats import ForebayMetrics, ForebayStats, Stats
from forebay.vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

#: Engines have this where they take failed loads by request.
_TransferResults = getattr(base, "KVConnectorTransferResults", None)


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares KV with every engine of the pool. docs/engines/vllm.md tells how to use it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: Any = None,
    ) -> None:
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        except TypeError:  # engines before the third argument
            super().__init__(vllm_config, role)  # type: ignore[call-arg]
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = parse(extra)
        self.stats = Stats()
        self.scheduler: Scheduler | None = None
        self.worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = Scheduler(vllm_config, settings, self.stats)
        else:
            self.worker = Worker(
                vllm_config, kv_cache_config, settings, self.stats, _TransferResults is not None
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is lost is a miss later

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake:
        assert self.worker is not None
        return self.worker.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        self.worker.submit_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        assert self.worker is not None
        self.worker.submit_stores(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self.worker is not None
        sent, loaded, _ = self.worker.take_finished()
        return sent or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self.worker is not None and _TransferResults is not None
        sent, loaded, failed = self.worker.take_finished()
        return _TransferResults(sent, loaded, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        assert self.worker is not None
        return self.worker.take_meta()

    def _step(self) -> StepMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        return meta

    # --- scheduler ---

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        assert self.scheduler is not None
        self.scheduler.handshake(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.block_pool = gpu_block_pool

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()  # a window's first block is loaded in part: let the engine clear it before

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.stored(connector_output.kv_connector_worker_meta)
        self.scheduler.loaded(
            connector_output.finished_recving or (),
            getattr(connector_output, "failed_recving", None) or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return self.scheduler.request_finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return self.scheduler.request_finished(request), None

    def reset_cache(self) -> bool:
        if self.scheduler is not None:
            self.scheduler.reset()
        return True

    # --- both ---

    def shutdown(self) -> None:
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> ForebayStats | None:
        return self.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats:
        return ForebayStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ForebayMetrics:
        return ForebayMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False  # nothing happens layer by layer
