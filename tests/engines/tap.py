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

from forebay import Rule
from forebay._native import CHAIN_BYTES
from forebay.vllm.worker import _ids

SLICE = 16
_lock = threading.Lock()


def _page(place: Any, layer: int, section: int, ids: Any, tokens: range) -> torch.Tensor:
    """[heads, tokens, channels] of a layer, copied."""
    manifest = place.part.manifest
    at = layer * place.cache.sections + section
    view, owner = place.cache.native[at], place.cache._owners[at]
    elem = owner.element_size()
    offset = owner.storage_offset() + (view.base - owner.data_ptr()) // elem
    blocks = (owner.untyped_storage().nbytes() // elem - offset) // view.block_stride
    size = place.block_tokens
    shape = (blocks, size, place.planes[1], manifest.sections[section].row_elems)
    strides = (view.block_stride, view.token_stride, view.head_stride, view.channel_stride)
    whole = owner.as_strided(shape, strides, offset)
    parts, token = [], tokens.start
    while token < tokens.stop:
        end = min(tokens.stop, (token // size + 1) * size)
        parts.append(whole[ids[token // size], token % size : token % size + end - token])
        token = end
    return torch.cat(parts).transpose(0, 1).contiguous()


def _digests(worker: Any, index: int, block_ids: Any, page: int, begin: int) -> dict[str, str]:
    """By layer, section, slice and head, of the tokens of a page from `begin` on."""
    place = worker.places[index]
    manifest = place.part.manifest
    size = manifest.page_tokens
    tokens = range(max(page * size, begin), (page + 1) * size)
    if manifest.rule == Rule.STATE:
        tokens = range((page + 1) * size - 1, (page + 1) * size)
    per_layer = _ids(place, block_ids)
    found = {}
    for layer in range(len(manifest.layers)):
        ids = per_layer[layer if len(per_layer) > 1 else 0]
        for section in range(len(manifest.sections)):
            rows = _page(place, layer, section, ids, tokens).view(torch.uint8).numpy()
            for head in range(place.planes[1]):
                for at in range(0, len(tokens), SLICE):
                    name = f"{manifest.layers[layer]}.{section}.{tokens.start + at}"
                    digest = hashlib.sha256(rows[head, at : at + SLICE].data)
                    found[f"{name}.{place.planes[0] + head}"] = digest.hexdigest()[:32]
    return found


def _write(worker: Any, what: str, chain: bytes, page: int, index: int, digests: Any) -> None:
    path = os.environ["FOREBAY_TAP"]
    line = {
        "what": what,
        "page": chain[page * CHAIN_BYTES : (page + 1) * CHAIN_BYTES].hex(),
        "space": index,
        "digests": digests,
    }
    with _lock, open(path, "a") as out:
        out.write(json.dumps(line) + "\n")


def _planted(worker: Any, store: Any, span: Any) -> torch.Tensor | None:
    """With $FOREBAY_PLANT, what of the engine's cache is wrong while page 1 is stored."""
    if not os.environ.get("FOREBAY_PLANT") or not span.first <= 1 < span.first + span.count:
        return None
    place = worker.places[span.space]
    ids = _ids(place, store.block_ids)[0]
    block = ids[place.part.manifest.page_tokens // place.block_tokens]
    return place.cache._owners[0][block]


def storing(worker: Any, store: Any, span: Any) -> None:
    planted = _planted(worker, store, span)
    if planted is not None:
        planted.neg_()


def stored(worker: Any, store: Any, span: Any, put: Any) -> None:
    planted = _planted(worker, store, span)
    if planted is not None:
        planted.neg_()
    for page in range(span.first, span.first + span.count):
        if put.statuses[page - span.first] == 0:
            digests = _digests(worker, span.space, store.block_ids, page, 0)
            _write(worker, "stored", store.chain, page, span.space, digests)


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
            _write(worker, "loaded", load.chain, page, index, digests)
