"""Forebay: a pool of attention keys and values (KV) shared by inference servers.

    import forebay

    with forebay.Pool() as pool:
        space = pool.space(manifest)
        chain = forebay.chain(token_ids, space.page_tokens)
        with pool.lookup([space], chain) as hit:
            if hit:
                statuses = hit.get(0, cache, block_ids, block_tokens)

A thin layer over libforebay (``forebay.h``): the same calls, the same promises.
"""

from forebay._native import ForebayError, Status, lib
from forebay.cache import Cache, View
from forebay.chain import Extra, Multimodal, chain
from forebay.manifest import Codec, Elem, Kind, Manifest, Rule, Section
from forebay.pool import Hit, Pool, Put, Space

__version__ = lib.fb_version().decode()

__all__ = [
    "Cache",
    "Codec",
    "Elem",
    "Extra",
    "ForebayError",
    "Hit",
    "Kind",
    "Manifest",
    "Multimodal",
    "Pool",
    "Put",
    "Rule",
    "Section",
    "Space",
    "Status",
    "View",
    "chain",
]
