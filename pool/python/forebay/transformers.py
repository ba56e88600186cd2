"""Prompt prefixes for Hugging Face Transformers.

    from forebay.transformers import ForebayCache

    cache = ForebayCache(model, pool)
    output = cache.generate(**inputs, max_new_tokens=64)

or, around a generate of one's own:

    past = cache.prepare(inputs.input_ids)
    output = model.generate(**inputs, past_key_values=past, max_new_tokens=64)
    past.store(output)

The prefix of the prompt that the pool has is filled in before the prefill; the rest is computed,
and its whole pages are stored, also those of new tokens. One sequence at a time. Where the pool
misses, is late or is gone, everything is computed as without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import constants, file_download
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from forebay import identity as identities
from forebay._native import CHAIN_BYTES, ForebayError, Status
from forebay.cache import Cache, View
from forebay.chain import chain
from forebay.manifest import Codec, Elem, Kind, Manifest, Rule, Section
from forebay.pool import Hit, Pool, Space

PAGE_TOKENS = 64
CODECS = {"raw": Codec.RAW, "fp8_e4m3": Codec.FP8_E4M3, "int8": Codec.INT8}

_LATENT_GROUP = 128  # channels that share a scale, where an MLA latent is quantized
_PUT_PAGES = 256  # of one put: bounds what is reserved, and copied to the host, at a time
_LOOKUPS = 3  # of one prompt: each bad page shortens the next

# What may differ between a configuration and its file without a difference in the KV, or is said
# elsewhere in the manifest.
_CONFIG_APART = {
    "_name_or_path",
    "architectures",
    "dtype",
    "quantization_config",
    "rope_parameters",
    "transformers_version",
    "use_cache",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Group:
    """Layers of one rule and one geometry: a space."""

    layers: tuple[int, ...]  #: of the model
    devices: tuple[torch.device, ...]  #: [layers]
    window: int  #: tokens, the current one counted; 0: all are attended to
    heads: int
    dims: tuple[int, int]  #: of a key, of a value
    dtype: torch.dtype
    is_latent: bool  #: MLA: the "keys" are latents, the "values" the keys' rope part

    def sections(self, codec: Codec) -> list[Section]:
        """ValueError: not with this codec."""
        if self.dtype in (torch.bfloat16, torch.float16):
            elem = Elem.BF16 if self.dtype == torch.bfloat16 else Elem.FP16
            rows = self.dims
        else:
            elem, rows = Elem.BYTE, tuple(dim * self.dtype.itemsize for dim in self.dims)
            if codec != Codec.RAW:
                raise ValueError(
                    f"codec {codec.name.lower()} takes bfloat16 or float16 and the model's cache "
                    f'is {self.dtype}; load the model with dtype=torch.bfloat16, or use "raw"'
                )
        if not self.is_latent:
            return [Section(kind, row, elem, codec) for kind, row in zip((Kind.K, Kind.V), rows)]
        group = _LATENT_GROUP if codec != Codec.RAW and rows[0] > _LATENT_GROUP else 0
        return [
            Section(Kind.LATENT, rows[0], elem, codec, group),
            Section(Kind.ROPE, rows[1], elem),
        ]

    def first_page(self, pages: int) -> int:
        """The first of the pages that a hit of ``pages`` needs."""
        return max(0, pages - -(-self.window // PAGE_TOKENS)) if self.window else 0

    def allocate(self, pages: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[layers] keys and values of [1, heads, tokens, dim], on the host."""
        shape = (1, self.heads, pages * PAGE_TOKENS)
        return [
            tuple(torch.empty(*shape, dim, dtype=self.dtype) for dim in self.dims)
            for _ in self.layers
        ]


class ForebayCache:
    """A model's way into a pool.

    model     a decoder of text whose cache is keys and values of full or sliding attention
    pool      an open `forebay.Pool`
    codec     how blocks are stored: "raw" (bit for bit), "fp8_e4m3" or "int8"
    identity  names the weights; servers that give the same text share blocks. None: from the
              hub's commit, or from the files of the model's folder
    private   share with nobody, not even with the next process; for weights that no file has
    timeout   seconds a lookup may take

    ValueError: the model cannot be pooled; the text says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: Pool,
        *,
        codec: str = "raw",
        identity: str | None = None,
        private: bool = False,
        timeout: float = 0.2,
    ) -> None:
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r} is not one of {', '.join(CODECS)}")
        _check_model(model, bool(identity or private))
        self.model = model
        self.pool = pool
        self.timeout = timeout
        self._groups = _groups_of(model)
        self._manifests = _manifests(model, self._groups, CODECS[codec], identity, private)
        self._family: list[Space] = []  # until the tenant is known
        self._has_warned = False
        if pool.info()["connected"]:
            self._open()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForebayCache:
        return self  # copies of a prepared cache use the same pool

    def prepare(
        self, input_ids: Any, *, attention_mask: Any = None, extra: bytes = b""
    ) -> PooledCache:
        """A cache that holds as much of a prompt as the pool has, one token less than the prompt
        at most. Pass it to ``generate`` as ``past_key_values``, once.

        input_ids       [tokens] or [1, tokens], the same that ``generate`` is given
        attention_mask  of the same shape, to be checked: all ones
        extra           `forebay.Extra.encode`: what else the KV depends on, or who may share it
        """
        prompt = _ids(input_ids)
        if attention_mask is not None and not torch.as_tensor(attention_mask).bool().all():
            raise ValueError("attention_mask masks tokens; pass one prompt without padding")
        past = PooledCache(self, prompt, extra)
        if self._opened() and len(prompt) >= PAGE_TOKENS:
            try:
                self._load(past, chain(prompt, PAGE_TOKENS, extra=extra))
            except ForebayError as error:
                self._warn(str(error))
        return past

    def generate(self, input_ids: torch.Tensor, *, extra: bytes = b"", **options: Any) -> Any:
        """``model.generate`` with a prepared cache; stores what is new. Returns what it returns."""
        chunk = options.get("prefill_chunk_size", self.model.generation_config.prefill_chunk_size)
        for name in ("inputs_embeds", "position_ids"):
            if options.get(name) is not None:
                raise ValueError(f"{name} cannot be pooled: pages are named by token ids alone")
        if chunk is not None:
            raise ValueError(
                "prefill_chunk_size: generate would compute the prefix again behind itself; "
                "leave it out"
            )
        mask = options.get("attention_mask")
        past = self.prepare(input_ids, attention_mask=mask, extra=extra)
        past._stores_prompt = True
        output = self.model.generate(input_ids, past_key_values=past, **options)
        past.store(output)
        return output

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: computing what the pool does not give; said once", what)

    def _open(self) -> None:
        tenant = self.pool.info()["tenant"]
        self._family = [
            self.pool.space(Manifest(tenant=tenant, **fields)) for fields in self._manifests
        ]

    def _opened(self) -> bool:
        """Whether there are spaces. They need a tenant, which the first connection tells."""
        if not self._family:
            if not self.pool.info()["connected"]:
                self._warn("no daemon answers")
                return False
            try:
                self._open()
            except ForebayError as error:
                self._warn(str(error))
        return bool(self._family)

    def _load(self, past: PooledCache, hashes: bytes) -> None:
        pages = len(hashes) // CHAIN_BYTES
        for _ in range(_LOOKUPS):
            with self.pool.lookup(
                self._family, hashes[: pages * CHAIN_BYTES], timeout=self.timeout
            ) as hit:
                if not hit:
                    if hit.status != Status.MISS:
                        self._warn(f"lookup: {hit.status.name}")
                    return
                tensors = [
                    group.allocate(hit.pages - group.first_page(hit.pages))
                    for group in self._groups
                ]
                pages = min(
                    self._read(hit, index, tensors[index]) for index in range(len(self._groups))
                )
                firsts = [group.first_page(hit.pages) for group in self._groups]
            # Fewer pages need earlier ones of a window, which this hit may not have.
            if pages == hit.pages or not any(firsts):
                if pages:
                    past._fill(self._groups, tensors, firsts, pages)
                return
            if not pages:
                return

    def _read(self, hit: Hit, index: int, tensors: list[tuple[torch.Tensor, ...]]) -> int:
        """Pages of the hit up to the first that did not arrive."""
        first = self._groups[index].first_page(hit.pages)
        count = hit.pages - first
        blocks = [-1] * first + list(range(count))
        statuses = hit.get(index, _views(tensors), blocks, PAGE_TOKENS, pages=(first, count))
        good = next((at for at, status in enumerate(statuses) if status != Status.OK), count)
        if good < count:
            self._warn(f"get: {Status(statuses[good]).name}")
        return first + good

    def _store(self, past: PooledCache, ids: Sequence[int], extra: bytes) -> int:
        """Put the whole pages of the tokens that a cache begins with. Returns how many pages are
        new, counted in the space that got most."""
        pages = len(ids) // PAGE_TOKENS
        if not pages or not self._opened():
            return 0
        hashes = chain(ids[: pages * PAGE_TOKENS], PAGE_TOKENS, extra=extra)
        try:
            return max(
                self._put(past, space, group, hashes)
                for space, group in zip(self._family, self._groups)
            )
        except ForebayError as error:
            self._warn(str(error))
            return 0

    def _put(self, past: PooledCache, space: Space, group: _Group, hashes: bytes) -> int:
        last, stored = len(hashes) // CHAIN_BYTES, 0
        for at in range(past._first_page(group.layers), last, _PUT_PAGES):
            part = hashes[at * CHAIN_BYTES : min(last, at + _PUT_PAGES) * CHAIN_BYTES]
            parent = hashes[(at - 1) * CHAIN_BYTES : at * CHAIN_BYTES] if at else None
            with self.pool.put(space, part, position=at, parent=parent) as put:
                if put:
                    wanted = [n for n, status in enumerate(put.statuses) if status == Status.OK]
                    first, count = wanted[0], wanted[-1] - wanted[0] + 1
                    tensors = past._pages(group.layers, at + first, count)
                    blocks = [-1] * first + list(range(count))
                    put.encode(_views(tensors), blocks, PAGE_TOKENS, pages=(first, count))
                    stored += put.commit().count(Status.OK)
                if put.status not in (Status.OK, Status.MISS):
                    self._warn(f"put: {put.status.name}")
                    break
        return stored


class PooledCache(DynamicCache):
    """The cache of one sequence, made by `ForebayCache.prepare`.

    hit_tokens  of the prompt, that came from the pool

    Layers of sliding windows keep every token until it is stored.
    """

    def __init__(self, owner: ForebayCache, prompt: list[int], extra: bytes) -> None:
        super().__init__(config=owner.model.config)
        self.hit_tokens = 0
        self._owner = owner
        self._prompt = prompt
        self._extra = extra
        self._stores_prompt = False  # once it is computed, not only at the end
        self.activate_past_recording()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[0] != 1:
            raise ValueError(
                f"{key_states.shape[0]} sequences in a cache of one; prepare a cache for each "
                "prompt, with num_beams and num_return_sequences 1"
            )
        if layer_idx == 0:
            self._store_prompt()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        self._store_prompt()  # afterwards windows are short
        super().crop(tokens_to_remove)

    def store(self, output: Any = None) -> int:
        """Store whole pages that the pool lacks.

        output   what ``generate`` returned: also the pages of new tokens are stored. None: those
                 of the prompt
        returns  how many pages were new
        """
        if output is None:
            return self._store(self._prompt)
        ids = _ids(getattr(output, "sequences", output))
        if ids[: len(self._prompt)] != self._prompt:
            raise ValueError("the output does not begin with the prompt of this cache")
        return self._store(ids)

    def _store_prompt(self) -> None:
        if self._stores_prompt and self.get_seq_length() >= len(self._prompt):
            self._stores_prompt = False
            self._store(self._prompt)

    def _store(self, ids: list[int]) -> int:
        length = self.get_seq_length()
        ids = ids[:length]  # the last token of an output has no KV yet
        stored = self._owner._store(self, ids, self._extra)
        begun = length - len(ids) // PAGE_TOKENS * PAGE_TOKENS
        for layer in self.layers:
            if layer.is_sliding and layer.is_initialized:
                keep = max(layer.sliding_window - 1, begun)
                layer.keys = layer.keys[:, :, -keep:]
                layer.values = layer.values[:, :, -keep:]
        return stored

    def _begin(self, layers: Sequence[int]) -> int:
        """The first token that layers of one rule still have."""
        layer = self.layers[layers[0]]
        return layer.get_seq_length() - layer.keys.shape[-2]

    def _first_page(self, layers: Sequence[int]) -> int:
        """The first page that layers of one rule still have whole."""
        return -(-self._begin(layers) // PAGE_TOKENS)

    def _pages(
        self, layers: Sequence[int], first: int, count: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[layers] keys and values of [1, heads, tokens, dim], of pages, on the host."""
        at = first * PAGE_TOKENS - self._begin(layers)
        tokens = slice(at, at + count * PAGE_TOKENS)
        both = [(self.layers[index].keys, self.layers[index].values) for index in layers]
        return [tuple(states[:, :, tokens].detach().cpu() for states in one) for one in both]

    def _fill(
        self,
        groups: Sequence[_Group],
        tensors: Sequence[list[tuple[torch.Tensor, torch.Tensor]]],
        firsts: Sequence[int],
        pages: int,
    ) -> None:
        """Take what was read: of a group, pages from its first on."""
        length = min(pages * PAGE_TOKENS, len(self._prompt) - 1)
        for group, group_tensors, first in zip(groups, tensors, firsts):
            begin = first * PAGE_TOKENS
            since = max(begin, length - group.window + 1) if group.window else begin
            for index, device, states in zip(group.layers, group.devices, group_tensors):
                keys, values = (s[:, :, since - begin : length - begin].to(device) for s in states)
                layer = self.layers[index]
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                if group.window:
                    layer.cumulative_length = length
        self.hit_tokens = length


def _views(tensors: Sequence[Sequence[torch.Tensor]]) -> Cache:
    """[layers] keys and values of [1, heads, tokens, dim], as engine blocks of a page each."""
    return Cache([[_view(states) for states in layer] for layer in tensors])


def _view(states: torch.Tensor) -> View:
    if states.dtype == torch.float32:
        states = (states if states.stride(-1) == 1 else states.contiguous()).view(torch.uint8)
    blocks = states[0].unflatten(1, (-1, PAGE_TOKENS))
    return View.of(blocks, head=0, block=1, token=2, channel=3)


def _ids(tokens: Any) -> list[int]:
    """Token ids of one sequence, [tokens] or [1, tokens]."""
    tokens = torch.as_tensor(tokens)
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"token ids of shape {list(tokens.shape)}; expected one sequence, [tokens] or "
            "[1, tokens]: call once for each prompt of a batch"
        )
    return tokens.tolist()


# --- what a model is ---


def _check_model(model: PreTrainedModel, is_named: bool) -> None:
    """ValueError: its KV does not follow from token ids and weights alone."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise ValueError(
            f"{type(model).__name__} takes more than text, which token ids do not name; load its "
            "text decoder alone"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("the KV of bidirectional attention depends on later tokens")
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if kind == "longrope" or "dynamic" in kind:
            raise ValueError(
                f"RoPE of type {kind!r} turns keys by the length of the whole prompt, so pages of "
                "one prompt are not good for another"
            )
    if getattr(model, "peft_config", None) and not is_named:
        raise ValueError(
            "the model has adapters, which its name does not tell; give identity= that names "
            "weights and adapters, or private=True"
        )


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Of parameters for all layers, or for each type of layers."""
    each = [parameters, *parameters.values()]
    return [p["rope_type"] for p in each if isinstance(p, dict) and "rope_type" in p]


def _groups_of(model: PreTrainedModel) -> list[_Group]:
    """Run one token, to see what the layers of the cache really are.

    ValueError: a layer is no keys and values of full or sliding attention.
    """
    config = model.config
    past = DynamicCache(config=config)
    for index, (layer, name) in enumerate(zip(past.layers, get_layer_types_and_kwargs(config)[0])):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"layer {index} is {name!r} ({type(layer).__name__}), whose state is more than "
                "keys and values of each token; only full, sliding and chunked attention can be "
                "pooled"
            )
    with torch.no_grad():
        model(
            torch.zeros(1, 1, dtype=torch.long, device=model.device),
            past_key_values=past,
            use_cache=True,
        )
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(past.layers):
        if not layer.is_initialized or layer.keys.shape[-2] != 1 or layer.values.shape[-2] != 1:
            raise ValueError(f"layer {index} does not keep one row a token in its cache")
        if layer.keys.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"layer {index} keeps {layer.keys.dtype}; bfloat16, float16 and float32 can be "
                "pooled"
            )
        window = layer.sliding_window if layer.is_sliding else 0
        dims = (layer.keys.shape[-1], layer.values.shape[-1])
        kinds.setdefault((window, layer.keys.shape[1], dims, layer.keys.dtype), []).append(index)
    latent = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    return [
        _Group(
            layers=tuple(layers),
            devices=tuple(past.layers[index].keys.device for index in layers),
            window=window,
            heads=heads,
            dims=dims,
            dtype=dtype,
            is_latent=heads == 1 and dims == latent,
        )
        for (window, heads, dims, dtype), layers in kinds.items()
    ]


def _manifests(
    model: PreTrainedModel, groups: list[_Group], codec: Codec, identity: str | None, private: bool
) -> list[dict[str, Any]]:
    """Fields of each group's manifest, but for the tenant."""
    if identity is None and not private:
        identity = _identity(model)
    if identity is None and not private:
        _log.warning(
            "%s: neither the hub's commit nor the files of the weights are known; its blocks are "
            "this process's own. Give identity= to share them.",
            model.config.name_or_path or type(model).__name__,
        )
    is_private = private or identity is None
    shared = {
        "model": identity or "",
        "quantization": _quantization(model.config),
        "position": _text(getattr(model.config, "rope_parameters", None)),
        "page_tokens": PAGE_TOKENS,
        "private_id": os.urandom(16) if is_private else None,
    }
    return [
        {
            **shared,
            "layers": group.layers,
            "sections": group.sections(codec),
            "head_count": group.heads,
            "rule": Rule.WINDOW if group.window else Rule.FULL,
            "window_tokens": group.window,
        }
        for group in groups
    ]


def _identity(model: PreTrainedModel) -> str | None:
    """Of the weights and the configuration that the model was loaded with; None: not known."""
    name = model.config.name_or_path
    if not name:
        return None
    folder, text = name, ""
    if not os.path.isdir(folder):
        folder = _snapshot(name, getattr(model.config, "_commit_hash", None))
        if folder is None:
            return None
        text = identities.of_repository(name, os.path.basename(folder))
    try:
        text = text or identities.of_folder(folder)
        stored = type(model.config).from_pretrained(folder).to_diff_dict()
    except (OSError, ValueError):
        return None
    loaded = model.config.to_diff_dict()
    changed = {
        key: loaded.get(key)
        for key in sorted({*loaded, *stored} - _CONFIG_APART)
        if loaded.get(key) != stored.get(key)
    }
    return f"{text}+{_digest(changed)}" if changed else text


def _snapshot(name: str, commit: str | None) -> str | None:
    """Folder of the hub's commit that was loaded; None: not known, or not the only one."""
    repository = file_download.repo_folder_name(repo_id=name, repo_type="model")
    folder = os.path.join(constants.HF_HUB_CACHE, repository, "snapshots")
    commits = os.listdir(folder) if os.path.isdir(folder) else []
    if commit is None and len(commits) == 1:
        commit = commits[0]
    return os.path.join(folder, commit) if commit in commits else None


def _quantization(config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    return f"{settings.get('quant_method', 'unknown')}:{_digest(settings)}"


def _text(settings: Any) -> str:
    """Canonical, for a manifest; a digest where it is too long for one."""
    if not settings:
        return ""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
    return text if len(text) <= 255 else "sha256:" + _digest(settings)


def _digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
