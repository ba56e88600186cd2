"""The C library: where it is, whether it fits, and its declarations.

Structures and functions are those of ``forebay.h``, one for one; ``tests/python/test_native.py``
compares them with what a C compiler makes of that header. Nothing here holds state but the loaded
library itself.
"""

from __future__ import annotations

import ctypes
import enum
import os
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

VERSION = (0, 1)  #: of the header that this file follows

CHAIN_BYTES = 32
KEY_BYTES = 32
SPACE_ID_BYTES = 16
DIGEST_BYTES = 32
MAX_FAMILY = 16
MAX_LAYERS = 1024
MAX_SECTIONS = 32
MAX_SCALES = 2048
MAX_TEXT_CHARS = 255
MAX_TENANT_CHARS = 63
CHAIN_MAX_EXTRA = 4096
HIT_MAX_LEASES = 16
PUT_MAX_PAGES = 4096


class Status(enum.IntEnum):
    """What a call, or one page of it, came to (``enum fb_status``)."""

    OK = 0
    MISS = 1
    AGAIN = 16
    EXISTS = 17
    BUSY = 18
    EINVAL = 19
    EGEOMETRY = 20
    ELIMIT = 21
    ENOENT = 22
    ESTATE = 23
    EPERM = 24
    ENOMEM = 25
    ETIMEDOUT = 26
    ECANCELED = 27
    ECORRUPT = 28
    ENONFINITE = 29
    EUNSUPPORTED = 30
    ECONN = 64
    EPROTO = 65
    EVERSION = 66
    EIO = 96
    EFATAL = 112


class Error(Structure):
    _fields_ = [("status", c_uint32), ("text", c_char * 320)]


class Section(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("elem", c_uint32),
        ("codec", c_uint32),
        ("layer_first", c_uint32),
        ("layer_count", c_uint32),
        ("row_elems", c_uint32),
        ("group", c_uint32),
    ]


class Manifest(Structure):
    _fields_ = [
        ("tenant", c_char * (MAX_TENANT_CHARS + 1)),
        ("model", c_char * (MAX_TEXT_CHARS + 1)),
        ("quantization", c_char * (MAX_TEXT_CHARS + 1)),
        ("position", c_char * (MAX_TEXT_CHARS + 1)),
        ("arrangement", c_char * (MAX_TEXT_CHARS + 1)),
        ("engine_block_tokens", c_uint32),
        ("rule", c_uint32),
        ("window_tokens", c_uint32),
        ("page_tokens", c_uint32),
        ("layer_count", c_uint32),
        ("layers", c_uint16 * MAX_LAYERS),
        ("head_first", c_uint32),
        ("head_count", c_uint32),
        ("head_total", c_uint32),
        ("section_count", c_uint32),
        ("sections", Section * MAX_SECTIONS),
        ("scale_count", c_uint32),
        ("scales", c_float * MAX_SCALES),
        ("generation", c_uint64),
        ("is_private", c_bool),
        ("private_id", c_uint8 * 16),
    ]


class Layout(Structure):
    _fields_ = [
        ("plane_count", c_uint32),
        ("layer_count", c_uint32),
        ("page_tokens", c_uint32),
        ("section_count", c_uint32),
        ("sections", Section * MAX_SECTIONS),
        ("plane_bytes", c_uint64),
        ("block_bytes", c_uint64),
        ("code_bytes", c_uint64),
        ("source_bytes", c_uint64),
        ("segment_offset", c_uint64 * (MAX_LAYERS + 1)),
    ]


class PagedView(Structure):
    _fields_ = [
        ("base", c_void_p),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("channel_stride", c_int64),
    ]


class TokenMap(Structure):
    _fields_ = [
        ("block_ids", POINTER(c_int64)),
        ("block_count", c_uint64),
        ("first_token", c_uint64),
        ("block_tokens", c_uint32),
    ]


class Transfer(Structure):
    _fields_ = [
        ("space", c_uint32),
        ("page_first", c_uint32),
        ("page_count", c_uint32),
        ("token_first", c_uint64),
        ("token_count", c_uint64),
        ("plane_first", c_uint32),
        ("plane_count", c_uint32),
        ("layer_first", c_uint32),
        ("layer_count", c_uint32),
        ("head_first", c_uint32),
        ("views", POINTER(PagedView)),
        ("map", TokenMap),
        ("layer_maps", POINTER(TokenMap)),
    ]


class PutPart(Structure):
    _fields_ = [
        ("plane_first", c_uint32),
        ("plane_count", c_uint32),
        ("layer_first", c_uint32),
        ("layer_count", c_uint32),
    ]


class OpenOptions(Structure):
    _fields_ = [("spin_ns", c_uint64), ("connect_ns", c_uint64)]


class PoolInfo(Structure):
    _fields_ = [
        ("connected", c_bool),
        ("tenant", c_char * (MAX_TENANT_CHARS + 1)),
        ("incarnation", c_uint64),
        ("deadlines_missed", c_uint64),
        ("calls_skipped", c_uint64),
        ("reconnects", c_uint64),
        ("bytes_mapped", c_uint64),
    ]


class MultimodalItem(Structure):
    _fields_ = [("digest", c_uint8 * DIGEST_BYTES), ("offset", c_int64)]


class ChainExtra(Structure):
    _fields_ = [
        ("adapter", c_char_p),
        ("multimodal", POINTER(MultimodalItem)),
        ("multimodal_count", c_uint32),
        ("embeddings", c_char_p),
        ("salt", c_char_p),
    ]


STRUCTURES = {
    "fb_error": Error,
    "fb_section": Section,
    "fb_manifest": Manifest,
    "fb_layout": Layout,
    "fb_paged_view": PagedView,
    "fb_token_map": TokenMap,
    "fb_transfer": Transfer,
    "fb_put_part": PutPart,
    "fb_open_options": OpenOptions,
    "fb_pool_info": PoolInfo,
    "fb_multimodal_item": MultimodalItem,
    "fb_chain_extra": ChainExtra,
}

# Opaque objects and arrays of statuses travel as plain pointers.
_P = c_void_p
_STATUSES = POINTER(c_uint32)
_FUNCTIONS = {
    "fb_version": (c_char_p, []),
    "fb_status_name": (c_char_p, [c_uint32]),
    "fb_status_text": (c_char_p, [c_uint32]),
    "fb_open": (c_uint32, [c_char_p, POINTER(OpenOptions), POINTER(_P), POINTER(Error)]),
    "fb_close": (None, [_P]),
    "fb_pool_get_info": (None, [_P, POINTER(PoolInfo)]),
    "fb_pool_space_open": (c_uint32, [_P, POINTER(Manifest), POINTER(_P), POINTER(Error)]),
    "fb_pool_space_id": (_P, [_P]),
    "fb_pool_space_layout": (POINTER(Layout), [_P]),
    "fb_pool_key": (None, [_P, c_char_p, c_char_p]),
    "fb_chain_pages": (
        c_uint32,
        [c_char_p, _P, c_uint32, c_uint32, c_char_p, c_size_t, c_char_p],
    ),
    "fb_chain_extra_encode": (
        c_uint32,
        [POINTER(ChainExtra), c_char_p, c_size_t, POINTER(c_size_t)],
    ),
    "fb_lookup": (
        c_uint32,
        [_P, POINTER(_P), c_uint32, c_char_p, c_uint32, c_uint32, c_uint64, POINTER(_P)],
    ),
    "fb_attach": (
        c_uint32,
        [
            _P,
            POINTER(_P),
            c_uint32,
            c_char_p,
            c_uint32,
            POINTER(c_uint64),
            c_uint32,
            c_uint64,
            POINTER(_P),
        ],
    ),
    "fb_hit_pages": (c_uint32, [_P]),
    "fb_hit_leases": (c_uint32, [_P, POINTER(c_uint64)]),
    "fb_hit_release": (None, [_P]),
    "fb_hit_map": (c_uint32, [_P, c_uint32, c_uint32, POINTER(_P)]),
    "fb_get": (c_uint32, [_P, POINTER(Transfer), c_uint64, _STATUSES]),
    "fb_prefetch": (
        c_uint32,
        [_P, POINTER(_P), c_uint32, c_char_p, c_uint32, c_uint64],
    ),
    "fb_put_begin": (
        c_uint32,
        [
            _P,
            _P,
            c_char_p,
            c_uint32,
            c_char_p,
            c_uint64,
            POINTER(PutPart),
            c_uint64,
            POINTER(_P),
            _STATUSES,
        ],
    ),
    "fb_put_encode": (c_uint32, [_P, POINTER(Transfer), _STATUSES]),
    "fb_put_commit": (c_uint32, [_P, c_uint64, _STATUSES]),
    "fb_put_abort": (None, [_P]),
    "fb_reject": (c_uint32, [_P, _P, c_char_p, c_uint32, c_uint64]),
    "fb_hint_pages": (
        c_uint32,
        [_P, _P, c_char_p, c_uint32, c_uint32, c_uint32, c_uint64, _STATUSES],
    ),
}


def _candidates() -> list[str]:
    named = os.environ.get("FOREBAY_LIBRARY")
    if named:
        return [named]
    file = f"libforebay.so.{VERSION[0]}"
    # The second for systems whose ldconfig has not run since the library was installed.
    return [file, f"/usr/local/lib/{file}"]


def _open_library() -> ctypes.CDLL:
    failures = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            failures.append(f"{path}: {error}")
    raise ImportError(
        "libforebay could not be loaded; install it (cmake --install) or name its file in "
        "$FOREBAY_LIBRARY. Tried " + "; ".join(failures)
    )


def _check_version(library: ctypes.CDLL) -> None:
    text = library.fb_version().decode()
    found = tuple(int(part) for part in text.split(".")[:2])
    if found != VERSION:
        raise ImportError(
            f"libforebay is version {text}, this package needs {VERSION[0]}.{VERSION[1]}; "
            "install the two from one release"
        )


def load() -> ctypes.CDLL:
    """Find the library, check its version, declare its functions. Calls release the GIL."""
    library = _open_library()
    try:
        library.fb_version.restype = c_char_p
        _check_version(library)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError as error:
        raise ImportError(
            f"what was loaded as libforebay lacks one of its functions: {error}; install library "
            "and package from one release, and see that $FOREBAY_LIBRARY, if set, names the library"
        ) from None
    return library


lib = load()


class ForebayError(Exception):
    """A call that could not be made as asked. ``status`` is a `Status`."""

    def __init__(self, status: int, text: str | None = None) -> None:
        self.status = Status(status)
        super().__init__(text or lib.fb_status_text(status).decode())


def check(status: int, error: Error | None = None) -> None:
    """Raise what the library reported, unless it is `Status.OK`."""
    if status != Status.OK:
        raise ForebayError(status, error.text.decode() if error is not None else None)
