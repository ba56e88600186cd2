"""Manifests: what two blocks must agree on to be interchangeable."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay import _native


class Rule(enum.IntEnum):
    """Which pages a hit of p pages needs."""

    FULL = 1  #: every page from 0
    WINDOW = 2  #: those that cover the last ``window_tokens``
    STATE = 3  #: page p - 1 alone


class Kind(enum.IntEnum):
    """What the rows of a section are."""

    K = 1
    V = 2
    LATENT = 3
    ROPE = 4
    INDEX = 5
    STATE = 6


class Elem(enum.IntEnum):
    """Element type of the engine's rows."""

    BF16 = 1
    FP16 = 2
    E4M3FN = 3
    E5M2 = 4
    E4M3FNUZ = 5
    BYTE = 6


class Codec(enum.IntEnum):
    """How rows are stored."""

    RAW = 1
    FP8_E4M3 = 2
    FP8_E5M2 = 3
    INT8 = 4


@dataclass(frozen=True)
class Section:
    """One kind of rows in a run of the space's layers."""

    kind: Kind
    row_elems: int  #: elements of one row: one token (state: one page), head and layer
    elem: Elem = Elem.BF16
    codec: Codec = Codec.RAW
    group: int = 0  #: elements that share a scale; 0: the whole row
    layer_first: int = 0  #: counted by place in the manifest's layers
    layer_count: int | None = None  #: None: all from layer_first on


@dataclass(frozen=True)
class Manifest:
    """Describes a space; docs/formats.md, "Manifest", has every field's meaning.

    Whatever differs between two servers and makes their KV differ must be in here: two equal
    manifests are one space.
    """

    model: str  #: "repository@revision", or a digest of the weights
    layers: Sequence[int]  #: the model's own indices, ascending
    sections: Sequence[Section]
    page_tokens: int = 64
    head_first: int = 0  #: KV heads [head_first, head_first + head_count) of head_total
    head_count: int = 1
    head_total: int | None = None  #: None: head_first + head_count
    rule: Rule = Rule.FULL
    window_tokens: int = 0
    tenant: str = "default"
    quantization: str = ""  #: of the weights at load time
    position: str = ""  #: position-encoding settings
    arrangement: str = ""  #: what raw rows hold where they are not canonical
    engine_block_tokens: int = 0  #: with an arrangement
    scales: Sequence[float] = field(default=())  #: static scales of the engine
    generation: int = 0  #: of weights that change in place
    private_id: bytes | None = None  #: [16] blocks are good for one process only

    def _native(self) -> _native.Manifest:
        """The C structure. ValueError: more than it holds."""
        for name, given, limit in (
            ("layers", len(self.layers), _native.MAX_LAYERS),
            ("sections", len(self.sections), _native.MAX_SECTIONS),
            ("scales", len(self.scales), _native.MAX_SCALES),
        ):
            if given > limit:
                raise ValueError(f"manifest: {given} {name}; at most {limit} are possible")
        m = _native.Manifest(
            tenant=_text("tenant", self.tenant, _native.MAX_TENANT_CHARS),
            model=_text("model", self.model),
            quantization=_text("quantization", self.quantization),
            position=_text("position", self.position),
            arrangement=_text("arrangement", self.arrangement),
            engine_block_tokens=self.engine_block_tokens,
            rule=self.rule,
            window_tokens=self.window_tokens,
            page_tokens=self.page_tokens,
            layer_count=len(self.layers),
            head_first=self.head_first,
            head_count=self.head_count,
            head_total=self.head_total or self.head_first + self.head_count,
            section_count=len(self.sections),
            scale_count=len(self.scales),
            generation=self.generation,
            is_private=self.private_id is not None,
        )
        for i, layer in enumerate(self.layers):
            m.layers[i] = layer
            if m.layers[i] != layer:  # ctypes wraps what it cannot hold
                raise ValueError(f"manifest: layer {layer}; expected 0 to 65535")
        for i, scale in enumerate(self.scales):
            m.scales[i] = scale
        for to, section in zip(m.sections, self.sections):
            count = section.layer_count
            to.kind, to.elem, to.codec = section.kind, section.elem, section.codec
            to.layer_first = section.layer_first
            to.layer_count = len(self.layers) - section.layer_first if count is None else count
            to.row_elems, to.group = section.row_elems, section.group
        if self.private_id is not None:
            if len(self.private_id) != len(m.private_id):
                raise ValueError(f"private_id of {len(self.private_id)} bytes; expected 16")
            ctypes.memmove(m.private_id, self.private_id, len(m.private_id))
        return m


def _text(name: str, text: str, limit: int = _native.MAX_TEXT_CHARS) -> bytes:
    encoded = text.encode()
    if len(encoded) > limit:
        raise ValueError(f"manifest: {name} of {len(encoded)} bytes; at most {limit} are possible")
    if b"\0" in encoded:
        raise ValueError(f"manifest: {name} has a NUL; expected text without")
    return encoded
