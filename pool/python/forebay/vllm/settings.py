"""The connector's part of vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from forebay.manifest import Codec

CODECS = {
    "raw": Codec.RAW,
    "fp8_e4m3": Codec.FP8_E4M3,
    "fp8_e5m2": Codec.FP8_E5M2,
    "int8": Codec.INT8,
}


@dataclass(frozen=True)
class Settings:
    """``kv_connector_extra_config``; every key is optional."""

    socket: str | None = None  #: of the tenant; None: $FOREBAY_SOCKET, else the default one
    tenant: str = "default"
    codec: str = "raw"
    page_tokens: int = 64
    min_prefix_tokens: int = 64  #: shorter gains are not loaded
    model: str | None = None  #: identity, instead of what is found out
    lookup_timeout: float | None = None  #: seconds; None: the library's 2 ms
    load_timeout: float | None = None  #: seconds; None: the library's, by bytes and bandwidth
    store: bool = True  #: False: read only
    report_keys: str | None = None  #: a directory for reports that `forebay why` compares
    tap: str | None = None  #: tests: a module that workers call: `storing`, `stored`, `loaded`


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
}


def parse(extra: dict[str, Any]) -> Settings:
    """ValueError: an unknown key or a wrong value, by name."""
    known = {f.name for f in fields(Settings)}
    unknown = sorted(set(extra) - known)
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config: {', '.join(unknown)} is not a key of ForebayConnector; "
            f"there are {', '.join(sorted(known))}"
        )
    for f in fields(Settings):
        value: Any = extra.get(f.name, f.default)
        kinds = _KINDS[str(f.type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"kv_connector_extra_config: {f.name} is {value!r}; expected {f.type}")
    settings = Settings(**extra)
    for timeout in (settings.lookup_timeout, settings.load_timeout):
        if timeout is not None and timeout <= 0:
            raise ValueError(
                f"kv_connector_extra_config: a timeout of {timeout}; expected seconds, more than 0"
            )
    if settings.codec not in CODECS:
        raise ValueError(
            f'kv_connector_extra_config: codec "{settings.codec}"; expected one of '
            f"{', '.join(CODECS)}"
        )
    if settings.page_tokens < 1 or settings.min_prefix_tokens < 0:
        raise ValueError(
            f"kv_connector_extra_config: page_tokens {settings.page_tokens}, min_prefix_tokens "
            f"{settings.min_prefix_tokens}; expected 1 or more, and 0 or more"
        )
    return settings
