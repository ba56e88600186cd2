#!/usr/bin/env python3
"""The codecs' conversions against an independent implementation: ml_dtypes.

usage: test_convert_ml_dtypes.py libfb_convert_shim.so

Exhaustive over all bf16 and fp16 patterns, all fp8 codes and all scales, for every implementation
this processor runs. Exits 77 (skipped) where numpy or ml_dtypes is missing.
"""
import ctypes
import sys

try:
    import ml_dtypes
    import numpy as np
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

BF16, FP16 = 1, 2
E4M3, E5M2 = 2, 3
ISAS = {0: "ref", 1: "avx2", 2: "avx512"}
SOURCE = {BF16: ml_dtypes.bfloat16, FP16: np.float16}
CODE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
CANONICAL_NAN = {BF16: 0x7FC0, FP16: 0x7E00}
ALL16 = np.arange(65536, dtype=np.uint16)
ROW = 64

np.seterr(all="ignore")


def pointer(array):
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def same(what, got, expected):
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        i = wrong[0]
        sys.exit(f"{what}: {wrong.size} differ; first at {i}: {got[i]:#x}, "
                 f"expected {expected[i]:#x}")


def bits_of(values, elem):
    """Bit patterns of fp32 values narrowed by ml_dtypes or numpy, with the canonical NaN."""
    bits = values.astype(SOURCE[elem]).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(CANONICAL_NAN[elem]), bits)


def check_widen_and_narrow(lib, elem):
    got = np.empty(65536, np.float32)
    lib.shim_widen(elem, pointer(ALL16), ctypes.c_size_t(65536), pointer(got))
    expected = ALL16.view(SOURCE[elem]).astype(np.float32)
    finite = ~np.isnan(expected)
    same("widen", got.view(np.uint32)[finite], expected.view(np.uint32)[finite])

    # every value of the type, its neighbours, the midpoints between values, and any bits
    near = expected.view(np.uint32)
    middle = (near & 0xFFFF0000) | 0x8000
    half = near + (1 << 12)
    anything = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    bits = np.concatenate([near, near + 1, near - 1, middle, middle + 1, middle - 1,
                           half, half + 1, half - 1, anything])
    values = bits.view(np.float32)
    narrowed = np.empty(values.size, np.uint16)
    lib.shim_narrow(elem, pointer(values), ctypes.c_size_t(values.size), pointer(narrowed))
    same("narrow", narrowed, bits_of(values, elem))


def rows_below(elem, anchor):
    """All elements of magnitude up to anchor, in rows that each begin with it."""
    x = ALL16[(ALL16 & 0x7FFF) <= anchor]
    x = np.concatenate([x, np.zeros(-x.size % (ROW - 1), np.uint16)]).reshape(-1, ROW - 1)
    return np.ascontiguousarray(np.insert(x, 0, anchor, axis=1))


def scale_of(elem, codec, anchor):
    """Scale and largest code magnitude of a group, from docs/formats.md."""
    bits = int(np.uint16(anchor).view(SOURCE[elem]).astype(np.float32).view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    top = 8 if codec == E4M3 else 15
    bump = mantissa > 0x600000
    edge = bump and exponent == (254 if elem == BF16 else 142)
    return max(0, exponent - top + bump), 0x77 if edge else 0x7E if codec == E4M3 else 0x7B


def check_encode(lib, isa, codec, elem, anchor):
    x = rows_below(elem, anchor)
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty(len(x), np.uint8)
    bad = lib.shim_encode(isa, codec, elem, len(x), ROW, pointer(x), pointer(codes),
                          pointer(scales))
    scale, limit = scale_of(elem, codec, anchor)
    what = f"encode {ISAS[isa]} codec {codec} elem {elem} maximum {anchor:#x}"
    # in fp64, so that what is expected owes nothing to the order of operations
    scaled = np.ldexp(x.view(SOURCE[elem]).astype(np.float64), 127 - scale)
    expected = scaled.astype(CODE[codec]).view(np.uint8)
    over = (expected & 0x7F) > limit
    expected = np.where(over, (expected & 0x80) | limit, expected)
    same(what + ": bad rows", np.array([bad]), np.array([0]))
    same(what + ": scales", scales, np.full(len(x), scale, np.uint8))
    same(what, codes.ravel(), expected.ravel())


def check_decode(lib, isa, codec, elem):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    finite = codes & 0x80 | (codes & 0x7F) % 0x7C
    scales = np.arange(256, dtype=np.uint8)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[:, None]
    for rows in (codes, finite):
        got = np.empty(rows.shape, np.uint16)
        lib.shim_decode(isa, codec, elem, 256, 256, pointer(rows), pointer(scales), pointer(got))
        values = rows.view(CODE[codec]).astype(np.float32) * factors
        same(f"decode {ISAS[isa]} codec {codec} elem {elem}", got.ravel(),
             bits_of(values.ravel(), elem))


def anchors(elem):
    """Maxima of every binade: its ends, and both sides of where the scale changes."""
    mantissa = 7 if elem == BF16 else 10
    largest = 0x7F7F if elem == BF16 else 0x7BFF
    step = 16 if elem == BF16 else 3
    change = (3 << mantissa) >> 2
    found = {1, 2, largest, largest - 1}
    for exponent in range(0, (largest >> mantissa) + 1, step):
        for low in (0, change, change + 1, (1 << mantissa) - 1):
            found.add(max(1, min(largest, (exponent << mantissa) + low)))
    return sorted(found)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lib = ctypes.CDLL(sys.argv[1])
    lib.shim_encode.restype = ctypes.c_uint32
    for elem in (BF16, FP16):
        check_widen_and_narrow(lib, elem)
    for isa, name in ISAS.items():
        if not lib.shim_has_isa(isa):
            print(f"skipped: this processor lacks {name}")
            continue
        for codec in (E4M3, E5M2):
            for elem in (BF16, FP16):
                for anchor in anchors(elem):
                    check_encode(lib, isa, codec, elem, anchor)
                check_decode(lib, isa, codec, elem)
        print(f"{name}: ok")


if __name__ == "__main__":
    main()
