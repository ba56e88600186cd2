"""The declarations in forebay._native against what a C compiler makes of forebay.h; loading."""

import ctypes
import os
import subprocess
import sys

import pytest

import forebay
from daemon import LIBRARY, ROOT
from forebay import _native

ENUMS = {
    "FB": _native.Status,
    "FB_RULE": forebay.Rule,
    "FB_SECTION": forebay.Kind,
    "FB_ELEM": forebay.Elem,
    "FB_CODEC": forebay.Codec,
}
# How C calls a number that is no member.
UNKNOWN = {
    "fb_status_name": (_native.Status, "FB_UNKNOWN"),
    "fb_rule_name": (forebay.Rule, "?"),
    "fb_section_kind_name": (forebay.Kind, "?"),
    "fb_elem_name": (forebay.Elem, "?"),
    "fb_codec_name": (forebay.Codec, "?"),
}
CONSTANTS = {
    "FB_VERSION_MAJOR": _native.VERSION[0],
    "FB_VERSION_MINOR": _native.VERSION[1],
    "FB_CHAIN_BYTES": _native.CHAIN_BYTES,
    "FB_KEY_BYTES": _native.KEY_BYTES,
    "FB_SPACE_ID_BYTES": _native.SPACE_ID_BYTES,
    "FB_DIGEST_BYTES": _native.DIGEST_BYTES,
    "FB_MAX_FAMILY": _native.MAX_FAMILY,
    "FB_MAX_LAYERS": _native.MAX_LAYERS,
    "FB_MAX_SECTIONS": _native.MAX_SECTIONS,
    "FB_MAX_SCALES": _native.MAX_SCALES,
    "FB_MAX_TEXT_CHARS": _native.MAX_TEXT_CHARS,
    "FB_MAX_TENANT_CHARS": _native.MAX_TENANT_CHARS,
    "FB_CHAIN_MAX_EXTRA": _native.CHAIN_MAX_EXTRA,
    "FB_HIT_MAX_LEASES": _native.HIT_MAX_LEASES,
    "FB_PUT_MAX_PAGES": _native.PUT_MAX_PAGES,
    "FB_LOOKUP_READ_AHEAD": forebay.pool.READ_AHEAD,
}


def compile_c(source, output, *flags):
    path = output.with_suffix(".c")
    path.write_text(source)
    subprocess.run(["cc", "-std=gnu11", f"-I{ROOT}", path, "-o", output, *flags], check=True)


def expressions():
    """C expressions, and the values that Python has for them."""
    for name, structure in _native.STRUCTURES.items():
        yield f"sizeof(struct {name})", ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            yield f"offsetof(struct {name}, {field})", getattr(structure, field).offset
            yield f"sizeof(((struct {name} *)0)->{field})", getattr(structure, field).size
    yield from CONSTANTS.items()
    for prefix, enum in ENUMS.items():
        for member in enum:
            yield f"{prefix}_{member.name}", member.value


def test_declarations_are_those_of_the_header(tmp_path):
    expected = dict(expressions())
    prints = "".join(f'    printf("%lld {text}\\n", (long long)({text}));\n' for text in expected)
    compile_c(
        "#include <stddef.h>\n#include <stdio.h>\n"
        '#include "pool/client/forebay.h"\n'
        f"int main(void)\n{{\n{prints}    return 0;\n}}\n",
        tmp_path / "values",
    )
    lines = subprocess.check_output([tmp_path / "values"], text=True).splitlines()
    compiled = {text: int(value) for value, text in (line.split(" ", 1) for line in lines)}
    assert compiled == expected


@pytest.mark.parametrize("function", UNKNOWN)
def test_enums_are_complete(function):
    enum, unknown = UNKNOWN[function]
    name = getattr(ctypes.CDLL(LIBRARY), function)
    name.restype = ctypes.c_char_p
    known = {value for value in range(256) if name(value).decode() != unknown}
    assert known == {int(member) for member in enum}


def test_functions_are_exported():
    library = ctypes.CDLL(LIBRARY)
    assert [name for name in _native._FUNCTIONS if not hasattr(library, name)] == []


# --- loading, in processes of their own ---


def import_error(library):
    """What an import says with that library."""
    result = subprocess.run(
        [sys.executable, "-c", "import forebay"],
        env={**os.environ, "FOREBAY_LIBRARY": str(library)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    return last


def test_import_without_library(tmp_path):
    text = import_error(tmp_path / "nowhere.so")
    assert "nowhere.so" in text
    assert "install it" in text and "$FOREBAY_LIBRARY" in text


def test_import_of_a_file_that_is_no_library(tmp_path):
    (tmp_path / "text.so").write_text("no library\n" * 100)
    text = import_error(tmp_path / "text.so")
    assert "text.so" in text and "invalid ELF header" in text
    assert "install it" in text and "$FOREBAY_LIBRARY" in text


def test_import_of_another_version(tmp_path):
    library = tmp_path / "other.so"
    compile_c('const char *fb_version(void) { return "9.9.0"; }\n', library, "-shared", "-fPIC")
    text = import_error(library)
    assert "9.9.0" in text and "0.1" in text
    assert "install the two from one release" in text


@pytest.mark.parametrize(
    "version",
    ["", 'const char *fb_version(void) { return "0.1.0"; }'],
    ids=["without-version", "without-functions"],
)
def test_import_of_another_library(tmp_path, version):
    library = tmp_path / "other.so"
    compile_c(f"{version}\nint other;\n", library, "-shared", "-fPIC")
    text = import_error(library)
    assert "lacks one of its functions" in text
    assert "install library and package from one release" in text
