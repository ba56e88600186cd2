"""What of a model's cache goes into which space, and where the engine keeps it.

The layers of one rule and one geometry form a space, whatever cache groups the engine's allocator
made of them. A worker finds this once, when the engine hands it its caches; the scheduler is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.cache import Cache, View
from forebay.manifest import Codec, Elem, Kind, Manifest, Rule, Section
from forebay.vllm import arrangement
from forebay.vllm.settings import CODECS, Settings

_ELEMS = {
    torch.bfloat16: Elem.BF16,
    torch.float16: Elem.FP16,
    torch.float8_e4m3fn: Elem.E4M3FN,
    torch.float8_e5m2: Elem.E5M2,
    torch.float8_e4m3fnuz: Elem.E4M3FNUZ,
}
_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_GROUP = 128  # of an MLA latent, where a codec quantizes it


class Refused(Exception):
    """This engine cannot be pooled; the text says why."""


@dataclass(frozen=True)
class Part:
    """A space as the scheduler needs to know it."""

    manifest: Manifest  #: without the model's identity
    groups: tuple[int, ...]  #: the engine's cache group of each layer
    block_tokens: int  #: of the engine's allocator


@dataclass
class Place:
    """The same for a worker."""

    part: Part
    cache: Cache
    planes: tuple[int, int]  #: that this rank holds
    split: int  #: blocks of the kernel in one of the allocator
    block_tokens: int  #: of the kernel


@dataclass
class _Layer:
    index: int
    group: int
    spec: Any
    module: Any
    tensor: Any
    key: tuple[Any, ...] = field(default=())


def fails_by_block(parts: Iterable[Part], cache_config: Any) -> bool:
    """Whether an engine can be told which blocks of a load failed, and use those before them. Not
    where those before may be null: then all is computed. An engine of several cache groups, pooled
    or not, does not take it."""
    full = all(part.manifest.rule == Rule.FULL for part in parts)
    return full and len(cache_config.kv_cache_groups) == 1


def check_engine(config: Any) -> None:
    """Refused: an engine that no space describes."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Refused("pipeline parallelism is not supported")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Refused(f"context parallelism ({name}) is not supported")


def find(
    config: Any, cache_config: Any, caches: dict[str, Any], settings: Settings, rank: int
) -> list[Place]:
    """Spaces of the layers whose caches a worker was given. Refused: some cannot be pooled."""
    check_engine(config)
    layers = _layers(config, cache_config, caches)
    if not layers:
        raise Refused("it has no layers with a cache")
    world = config.parallel_config.tensor_parallel_size
    finder = _Finder(config, cache_config, settings, rank, world)
    finder.page_tokens = _page_tokens(layers, settings.page_tokens, finder)
    kinds: dict[tuple[Any, ...], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault((*layer.key, finder.strided(layer)), []).append(layer)
    return [finder.place(members) for members in kinds.values()]


def _layers(config: Any, cache_config: Any, caches: dict[str, Any]) -> list[_Layer]:
    from vllm.model_executor.models.utils import extract_layer_index

    modules = config.compilation_config.static_forward_context
    own = config.model_config.hf_text_config.num_hidden_layers
    layers = []
    for group, entry in enumerate(cache_config.kv_cache_groups):
        for name in entry.layer_names:
            index = extract_layer_index(name)
            spec = entry.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {name: spec})[name]
            # Layers of a draft come after the model's own, or under a name of their own: their KV
            # depends on the token after a page, so that no page of them can be shared.
            draft = index >= own or name.startswith("draft_model.")
            if not draft and name in caches and name in modules:
                layer = _Layer(index, group, spec, modules[name], caches[name])
                layer.key = _key(name, layer)
                layers.append(layer)
    return sorted(layers, key=lambda layer: layer.index)


def _key(name: str, layer: _Layer) -> tuple[Any, ...]:
    """What layers of one space have in common."""
    spec, kind = layer.spec, type(layer.spec).__name__
    if kind == "MambaSpec":
        if getattr(spec, "mamba_cache_mode", "") != "align":
            raise Refused(
                "recurrent layers need --mamba-cache-mode align, so that there is a state at the "
                "end of a block"
            )
        return (Rule.STATE, spec.block_size, tuple(spec.shapes), tuple(spec.dtypes))
    if kind in _FULL:
        rule: tuple[Any, ...] = (Rule.FULL, 0)
    elif kind == "SlidingWindowSpec":
        rule = (Rule.WINDOW, spec.sliding_window)
    else:
        raise Refused(f"layer {name} keeps its cache as {kind}, which no space describes")
    value_size = getattr(spec, "head_size_v", None) or spec.head_size
    return (*rule, kind, spec.block_size, spec.num_kv_heads, spec.head_size, value_size, spec.dtype)


def _page_tokens(layers: list[_Layer], wanted: int, finder: _Finder) -> int:
    """One size for all: one that divides the blocks of recurrent state, and that the blocks divide
    whose insides are not known."""
    page = wanted
    for layer in layers:
        if layer.key[0] == Rule.STATE:
            while layer.spec.block_size % page:
                page //= 2
    opaque = {finder.kernel_tokens(a) for a in layers if not finder.strided(a)}
    page = max([page, *opaque])
    whole = all(page % tokens == 0 for tokens in opaque)
    if not whole or any(a.spec.block_size % page for a in layers if a.key[0] == Rule.STATE):
        raise Refused(f"no page is of whole blocks of {sorted(opaque)} tokens, and of its state")
    return page


class _Finder:
    def __init__(
        self,
        config: Any,
        cache_config: Any,
        settings: Settings,
        rank: int,
        world: int,
    ) -> None:
        self.config = config
        self.num_blocks = cache_config.num_blocks
        self.settings = settings
        self.page_tokens = 0  #: until it is known
        self.rank = rank
        self.world = world
        self.found: dict[tuple[Any, ...], arrangement.Found] = {}

    def place(self, layers: list[_Layer]) -> Place:
        if layers[0].key[0] == Rule.STATE:
            return self._state(layers)
        if not self.strided(layers[0]):
            return self._opaque(layers)
        return self._attention(layers)

    # --- recurrent state ---

    def _state(self, layers: list[_Layer]) -> Place:
        """A rank's bytes are its own: rank r is plane r, in a space that names their number."""
        views, row = [], 0
        for layer in layers:
            tensor = layer.tensor
            if isinstance(tensor, (list, tuple)) or tensor.element_size() != 1:
                raise Refused("the engine keeps recurrent state in more than one tensor a layer")
            row = tensor.shape[-1]
            if tensor[0].numel() != row or tensor.stride(-1) != 1:
                raise Refused("the engine's recurrent state is not contiguous")
            views.append([View(tensor.data_ptr(), tensor.stride(0), 0, 0, 1, owner=tensor)])
        spec = layers[0].spec
        kind = getattr(spec.mamba_type, "name", spec.mamba_type)
        manifest = self._manifest(
            layers,
            Rule.STATE,
            sections=[Section(Kind.STATE, row, Elem.BYTE)],
            heads=(self.world, self.world),
            arrangement=f"vllm {kind} {_short((spec.shapes, spec.dtypes))}",
            engine_block_tokens=spec.block_size,
        )
        part = Part(manifest, tuple(layer.group for layer in layers), spec.block_size)
        return Place(part, Cache(views), (self.rank, 1), 1, spec.block_size)

    # --- attention ---

    def strided(self, layer: _Layer) -> bool:
        return layer.key[0] == Rule.STATE or self._arrangement(layer).strided

    def kernel_tokens(self, layer: _Layer) -> int:
        """Tokens of a block as the kernel has it; several may be one of the allocator's."""
        split, rest = divmod(layer.tensor.shape[0], self.num_blocks)
        if rest or layer.spec.block_size % split:
            raise Refused(
                f"a cache of {layer.tensor.shape[0]} blocks for {self.num_blocks} blocks of "
                f"{layer.spec.block_size} tokens"
            )
        tokens: int = layer.spec.block_size // split
        return tokens

    def _attention(self, layers: list[_Layer]) -> Place:
        spec = layers[0].spec
        latent = _is_latent(layers[0])
        total, planes = (1, (0, 1)) if latent else self._heads(spec.num_kv_heads)
        first, second = _rows(layers[0])
        elem = self._elem(layers[0])
        codec = CODECS[self.settings.codec] if elem in (Elem.BF16, Elem.FP16) else Codec.RAW
        manifest = self._manifest(
            layers,
            layers[0].key[0],
            window_tokens=layers[0].key[1],
            sections=_sections(latent, first, second, elem, codec),
            heads=(total, total),
            scales=_scales(layers),
        )
        views = []
        for layer in layers:
            found, size = self._arrangement(layer), layer.tensor.element_size()
            views.append(
                [
                    View(
                        layer.tensor.data_ptr() + p.offset * size,
                        p.block,
                        p.token,
                        p.head,
                        p.channel,
                        owner=layer.tensor,
                    )
                    for p in (found.first, found.second)
                    if p is not None
                ]
            )
        return self._paged(layers, manifest, views, planes)

    def _opaque(self, layers: list[_Layer]) -> Place:
        """Whole blocks, byte for byte, in a space of those whose kernels write the same. A rank's
        bytes are its own, but every rank has the same latent."""
        ranks, planes = (1, (0, 1)) if _is_latent(layers[0]) else (self.world, (self.rank, 1))
        views, row = [], 0
        tokens = self.kernel_tokens(layers[0])
        for layer in layers:
            tensor, size = layer.tensor, layer.tensor.element_size()
            block = tensor[0]
            last = sum((n - 1) * s for n, s in zip(block.shape, block.stride()))
            row, rest = divmod(block.numel() * size, tokens)
            if last + 1 != block.numel() or rest:
                raise Refused("blocks of an unknown arrangement are not contiguous")
            stride = tensor.stride(0) * size
            views.append([View(tensor.data_ptr(), stride, row, 0, 1, owner=tensor)])
        marks = {self._arrangement(layer).fingerprint for layer in layers}
        manifest = self._manifest(
            layers,
            layers[0].key[0],
            window_tokens=layers[0].key[1],
            sections=[Section(Kind.LATENT if ranks < self.world else Kind.K, row, Elem.BYTE)],
            heads=(ranks, ranks),
            scales=_scales(layers),
            arrangement=f"vllm {type(layers[0].module.impl).__name__} {_short(sorted(marks))}",
            engine_block_tokens=tokens,
        )
        return self._paged(layers, manifest, views, planes)

    def _paged(
        self,
        layers: list[_Layer],
        manifest: Manifest,
        views: list[list[View]],
        planes: tuple[int, int],
    ) -> Place:
        size, tokens = layers[0].spec.block_size, self.kernel_tokens(layers[0])
        part = Part(manifest, tuple(layer.group for layer in layers), size)
        return Place(part, Cache(views), planes, size // tokens, tokens)

    def _heads(self, of_rank: int) -> tuple[int, tuple[int, int]]:
        """KV heads of the model, and the planes that this rank holds. Ranks beyond the number of
        heads hold copies."""
        total = self.config.model_config.get_total_num_kv_heads()
        if of_rank * self.world == total:
            return total, (self.rank * of_rank, of_rank)
        if of_rank == 1 and self.world > total and self.world % total == 0:
            return total, (self.rank * total // self.world, 1)
        if self.world == 1:
            return of_rank, (0, of_rank)
        raise Refused(f"{of_rank} KV heads a rank, {self.world} ranks, {total} heads in the model")

    def _elem(self, layer: _Layer) -> Elem:
        stored = _stored_dtype(layer)
        if stored not in _ELEMS:
            raise Refused(f"a cache of {stored}; expected 16-bit or 8-bit floats")
        return _ELEMS[stored]

    def _arrangement(self, layer: _Layer) -> arrangement.Found:
        """By the engine's own kernel; once for layers that are alike."""
        tensor, module = layer.tensor, layer.module
        first, second = _rows(layer)
        alike = (
            type(module.impl),
            tuple(tensor.shape[1:]),
            tensor.stride(),
            tensor.dtype,
            first,
            second,
            _scales([layer]),
        )
        if alike not in self.found:
            tokens = 2 * self.kernel_tokens(layer)
            self.found[alike] = arrangement.find(
                _writer(layer, tokens),
                tensor,
                (tokens, *first),
                (tokens, *second),
                self.config.model_config.dtype,
                _stored_dtype(layer),
            )
        return self.found[alike]

    # --- manifests ---

    def _manifest(
        self,
        layers: list[_Layer],
        rule: Rule,
        *,
        sections: list[Section],
        heads: tuple[int, int],
        window_tokens: int = 0,
        scales: tuple[float, ...] = (),
        arrangement: str = "",
        engine_block_tokens: int = 0,
    ) -> Manifest:
        model = self.config.model_config
        return Manifest(
            model="",
            tenant=self.settings.tenant,
            layers=tuple(layer.index for layer in layers),
            sections=tuple(sections),
            page_tokens=self.page_tokens,
            head_count=heads[0],
            head_total=heads[1],
            rule=rule,
            window_tokens=window_tokens,
            quantization=str(model.quantization or ""),
            position=_position(model.hf_text_config),
            arrangement=arrangement,
            engine_block_tokens=engine_block_tokens,
            scales=scales,
        )


def _is_latent(layer: _Layer) -> bool:
    return type(layer.spec).__name__ == "MLAAttentionSpec"


def _rows(layer: _Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, channels) of the two kinds of rows."""
    spec = layer.spec
    if _is_latent(layer):
        rank = layer.module.kv_lora_rank
        return (1, rank), (1, spec.head_size - rank)
    value = getattr(spec, "head_size_v", None) or spec.head_size
    return (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads, value)


def _scales(layers: list[_Layer]) -> tuple[float, ...]:
    """Static scales of caches in 8 bits."""
    scales = []
    for layer in layers:
        if layer.tensor.element_size() == 1:
            scales += [float(layer.module._k_scale_float), float(layer.module._v_scale_float)]
    return tuple(scales)


def _sections(
    latent: bool, first: tuple[int, int], second: tuple[int, int], elem: Elem, codec: Codec
) -> list[Section]:
    if not latent:
        return [Section(Kind.K, first[1], elem, codec), Section(Kind.V, second[1], elem, codec)]
    group = _GROUP if codec != Codec.RAW and first[1] % _GROUP == 0 else 0
    return [
        Section(Kind.LATENT, first[1], elem, codec, group),
        Section(Kind.ROPE, second[1], elem, Codec.RAW),
    ]


def _stored_dtype(layer: _Layer) -> torch.dtype:
    """Of the cache's elements; some engines keep 8-bit floats in tensors of bytes."""
    name = getattr(layer.module, "kv_cache_dtype", "auto")
    if layer.tensor.dtype in (torch.uint8, torch.int8):
        return torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    return layer.tensor.dtype


def _writer(
    layer: _Layer, tokens: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Calls the engine's kernel for rows that are to go to slots 0, 1, ..."""
    module, device = layer.module, layer.tensor.device
    slots = torch.arange(tokens, device=device)
    latent = _is_latent(layer)
    if not hasattr(module.impl, "do_kv_cache_update"):
        raise Refused(
            f"{type(module.impl).__name__} has no call that only writes the cache, so that its "
            "arrangement cannot be found"
        )

    def write(first: torch.Tensor, second: torch.Tensor, cache: torch.Tensor) -> None:
        first, second = first.to(device), second.to(device)
        if latent:
            module.impl.do_kv_cache_update(
                first.squeeze(1), second, cache, slots, module.kv_cache_dtype, module._k_scale
            )
            return
        # Static scales divide what is written; the marks must arrive as they are.
        first, second = first * module._k_scale_float, second * module._v_scale_float
        module.impl.do_kv_cache_update(module, first, second, cache, slots)

    return write


def _position(config: Any) -> str:
    """Position-encoding settings; some are too long for a manifest, so a digest."""
    names = (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "max_position_embeddings",
    )
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return _short(json.dumps(values, sort_keys=True, default=str))


def _short(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:32]
