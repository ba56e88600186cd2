"""Watches a worker's transfers from inside (`tap` in the connector's configuration): digests of the
engine's own pages as they are stored, and after they were loaded, into the file $FOREBAY_TAP.

A digest is of 16 tokens of a layer, a section and a head, read through the engine's tensor by
strides.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import Any

import torch

from forebay import Elem, Rule
from forebay._native import CHAIN_BYTES
from forebay.vllm.worker import _ids

SLICE = 16
_lock = threading.Lock()


def _page(place: Any, layer: int, section: int, ids: Any, tokens: range) -> torch.Tensor:
    """[heads, tokens, channels] of a layer, copied."""
    made_of = place.part.manifest.sections[section]
    at = layer * place.cache.sections + section
    view, owner = place.cache.native[at], place.cache._owners[at]
    elem = 1 if made_of.elem == Elem.BYTE else owner.element_size()
    flat = torch.empty(0, dtype={1: torch.uint8, 2: torch.int16}[elem])
    flat.set_(owner.untyped_storage())
    offset = (view.base - flat.data_ptr()) // elem
    blocks = (flat.numel() - offset) // view.block_stride
    size = place.block_tokens
    shape = (blocks, size, place.planes[1], made_of.row_elems)
    strides = (view.block_stride, view.token_stride, view.head_stride, view.channel_stride)
    whole = flat.as_strided(shape, strides, offset)
    parts, token = [], tokens.start
    while token < tokens.stop:
        end = min(tokens.stop, (token // size + 1) * size)
        parts.append(whole[ids[token // size], token % size : token % size + end - token])
        token = end
    return torch.cat(parts).transpose(0, 1).contiguous()


def _digests(
    worker: Any, index: int, block_ids: Any, page: int, begin: int, origin: int = 0
) -> dict[str, str]:
    """By layer, section, slice and head, of the tokens of a page from `begin` on.

    origin  the token that `block_ids` begin with"""
    place = worker.places[index]
    manifest = place.part.manifest
    size = manifest.page_tokens
    tokens = range(max(page * size, begin), (page + 1) * size)
    if manifest.rule == Rule.STATE:
        tokens = range((page + 1) * size - 1, (page + 1) * size)
    per_layer = _ids(place, block_ids)
    there = range(tokens.start - origin, tokens.stop - origin)
    found = {}
    for layer in range(len(manifest.layers)):
        ids = per_layer[layer if len(per_layer) > 1 else 0]
        for section in range(len(manifest.sections)):
            rows = _page(place, layer, section, ids, there).view(torch.uint8).numpy()
            for head in range(place.planes[1]):
                for at in range(0, len(tokens), SLICE):
                    name = f"{manifest.layers[layer]}.{section}.{tokens.start + at}"
                    digest = hashlib.sha256(rows[head, at : at + SLICE].data)
                    found[f"{name}.{place.planes[0] + head}"] = digest.hexdigest()[:32]
    return found


def _write(what: str, page: bytes, index: int, digests: Any) -> None:
    path = os.environ["FOREBAY_TAP"]
    line = {"what": what, "page": page.hex(), "space": index, "digests": digests}
    with _lock, open(path, "a") as out:
        out.write(json.dumps(line) + "\n")


def _hash(chain: bytes, page: int) -> bytes:
    return chain[page * CHAIN_BYTES : (page + 1) * CHAIN_BYTES]


def _planted(worker: Any, span: Any) -> torch.Tensor | None:
    """With $FOREBAY_PLANT, what of the engine's cache is wrong while page 1 is stored."""
    pages = len(span.chain) // CHAIN_BYTES
    if not os.environ.get("FOREBAY_PLANT") or not span.position <= 1 < span.position + pages:
        return None
    place = worker.places[span.space]
    token = span.first_token + (1 - span.position) * place.part.manifest.page_tokens
    block = _ids(place, span.block_ids)[0][token // place.block_tokens]
    return place.cache._owners[0][block]


def storing(worker: Any, span: Any) -> None:
    planted = _planted(worker, span)
    if planted is not None:
        planted.neg_()


def stored(worker: Any, span: Any, put: Any) -> None:
    planted = _planted(worker, span)
    if planted is not None:
        planted.neg_()
    size = worker.places[span.space].part.manifest.page_tokens
    origin = span.position * size - span.first_token
    for at, status in enumerate(put.statuses):
        if status == 0:
            page = span.position + at
            digests = _digests(worker, span.space, span.block_ids, page, 0, origin)
            _write("stored", _hash(span.chain, at), span.space, digests)


def loaded(worker: Any, load: Any, whole: bool) -> None:
    if not whole:
        return
    for index, place in enumerate(worker.places):
        manifest = place.part.manifest
        size, pages = manifest.page_tokens, len(load.chain) // CHAIN_BYTES
        begin = load.local_tokens
        if manifest.rule == Rule.WINDOW:
            begin = max(begin, worker._first_token(place, load.block_ids))
        elif manifest.rule == Rule.STATE:
            begin = pages * size - size
        for page in range(begin // size, pages):
            digests = _digests(worker, index, load.block_ids, page, begin)
            _write("loaded", _hash(load.chain, page), index, digests)
