#!/usr/bin/env python3
"""Computes docs/vectors.json again from docs/formats.md alone, and compares.

    check_vectors.py [docs/vectors.json]

Shares nothing with the C code: hashlib, cbor2 and numpy do the work, CRC32C and the codecs are
written out here. Exit status: 0 all agree, 1 something differs, 77 a package is missing.
"""
import hashlib
import json
import struct
import sys
from fractions import Fraction

try:
    import cbor2
    import ml_dtypes
    import numpy as np
except ImportError as e:
    print(f"skipped: needs the Python packages cbor2, numpy and ml_dtypes ({e.name} is missing)")
    sys.exit(77)

BF16, FP16, E4M3FN, E5M2, E4M3FNUZ, BYTE = range(1, 7)
RAW, FP8_E4M3, FP8_E5M2, INT8 = range(1, 5)
STATE = 6
ELEM_BYTES = {BF16: 2, FP16: 2, E4M3FN: 1, E5M2: 1, E4M3FNUZ: 1, BYTE: 1}
FLOAT = {BF16: ml_dtypes.bfloat16, FP16: np.float16}
MASK64 = (1 << 64) - 1

failures = 0
checks = 0


def check(what, got, expected):
    global failures, checks
    checks += 1
    if got != expected:
        failures += 1
        print(f"{what}: computed {str(got)[:100]}, the file says {str(expected)[:100]}")


def sha256(data):
    return hashlib.sha256(data).digest()


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


# --- chain and key ---


def deterministic(value):
    return cbor2.dumps(value, canonical=True)


def check_extra(x):
    fields = {}
    if x["adapter"]:
        fields[1] = bytes.fromhex(x["adapter"])
    if x["multimodal"]:
        fields[2] = [[bytes.fromhex(i["digest"]), i["offset"]] for i in x["multimodal"]]
    if x["embeddings"]:
        fields[3] = bytes.fromhex(x["embeddings"])
    if x["salt"]:
        fields[4] = x["salt"]
    encoded = deterministic(fields) if fields else b""
    check(f"extra '{x['name']}'", encoded.hex(), x["cbor"])


def check_chain(i, c):
    tag = b"fb.chain\x01"
    previous = bytes.fromhex(c["previous"]) if c["previous"] else sha256(tag)
    extra = bytes.fromhex(c["extra"])
    ids = c["tokens"]
    data = tag + previous + struct.pack(f"<I{len(ids)}I", len(ids), *ids)
    data += struct.pack("<I", len(extra)) + extra
    check(f"chain {i}", sha256(data).hex(), c["hash"])


def check_key(i, k):
    data = b"fb.key\x01" + bytes.fromhex(k["space"]) + bytes.fromhex(k["chain"])
    check(f"key {i}", sha256(data).hex(), k["key"])


# --- manifest ---


def check_manifest(what, m):
    encoded = deterministic({
        1: 1, 2: m["tenant"], 3: m["model"], 4: m["quantization"], 5: m["position"],
        6: m["arrangement"], 7: m["engine_block_tokens"], 8: m["rule"], 9: m["window_tokens"],
        10: m["page_tokens"], 11: m["layers"], 12: m["heads"], 13: m["sections"],
        14: bytes.fromhex(m["scales"]), 15: m["generation"], 16: bytes.fromhex(m["private"]),
    })
    check(f"{what}: encoding", encoded.hex(), m["cbor"])
    check(f"{what}: space id", sha256(encoded)[:16].hex(), m["space"])


# --- codecs; each takes one group and returns codes, scale bytes and decoded bits ---


def bits_of(f32):
    return int(np.float32(f32).view(np.uint32))


def f32_of(bits):
    return np.uint32(bits).view(np.float32)


def round_f32(x):
    """The float32 nearest to a Fraction, ties to even. Only for results in range."""
    if x == 0:
        return np.float32(0)
    a, e = abs(x), -149
    while a >= Fraction(2) ** (e + 24):
        e += 1
    q, r = divmod(a, Fraction(2) ** e)
    half = Fraction(2) ** e / 2
    q = int(q) + (1 if r > half or (r == half and q % 2) else 0)
    v = q * Fraction(2) ** e
    if v >= Fraction(2) ** 128:
        return np.float32(np.inf) if x > 0 else np.float32(-np.inf)
    return np.float32(float(v) if x > 0 else -float(v))


def fp8_group(codec, elem, x):
    dtype, top, largest = {
        FP8_E4M3: (ml_dtypes.float8_e4m3fn, 8, 0x7E),
        FP8_E5M2: (ml_dtypes.float8_e5m2, 15, 0x7B),
    }[codec]
    wide = x.astype(np.float32)
    max_bits = max(bits_of(v) & 0x7FFFFFFF for v in wide)
    above = (max_bits & 0x7FFFFF) > 0x600000
    scale = max(0, (max_bits >> 23) - top + above)
    if above and max_bits >> 23 == (254 if elem == BF16 else 142):
        largest = 0x77
    scaled = wide * f32_of((127 - scale + 127) << 23)
    codes = scaled.astype(dtype).view(np.uint8)
    magnitude = np.minimum(codes & 0x7F, largest)
    codes = (codes & 0x80) | magnitude
    factor = f32_of(scale << 23 if scale else 1 << 22)
    decoded = (codes.view(dtype).astype(np.float32) * factor).astype(FLOAT[elem])
    return codes.tobytes(), bytes([scale]), decoded


def int8_value(elem, code, step, low):
    """fma(code, step, low): one rounding. The product is +0 or more, so a zero is +0."""
    exact = Fraction(int(code)) * Fraction(float(step)) + Fraction(float(low))
    return round_f32(exact).astype(FLOAT[elem])


def int8_group(codec, elem, x):
    wide = x.astype(np.float32)
    # numeric order, with -0 below +0
    order = sorted(wide, key=lambda v: (float(v), not np.signbit(v)))
    lo, hi = order[0], order[-1]
    bits = bits_of(lo)
    low = f32_of((bits + 0xFFFF if bits >> 31 else bits) & 0xFFFF0000)
    if elem == FP16 and low < -65504:
        low = f32_of(bits & 0xFFFF0000)
    step, inverse = np.float32(0), np.float32(0)
    if hi > low:
        span = hi - low
        up = (bits_of(span * (np.float32(1) / np.float32(255))) + 0xFFFF) & 0xFFFF0000
        step = f32_of(max(up, 1 << 23))
        inverse = np.float32(1) / step
    limit = 255
    while not np.isfinite(int8_value(elem, limit, step, low)):
        limit -= 1
    y = (wide - low) * inverse
    y = np.where(y > 0, np.rint(y), np.float32(0))
    codes = np.minimum(y, np.float32(limit)).astype(np.uint8)
    stored = struct.pack("<HH", bits_of(low) >> 16, bits_of(step) >> 16)
    decoded = np.array([int8_value(elem, c, step, low) for c in codes], dtype=FLOAT[elem])
    return codes.tobytes(), stored, decoded


# --- block ---

TABLE = np.array([mix64(0x666F7265626179 + j) >> 32 for j in range(4096)], dtype=np.uint32)


def position_keys(words):
    laps = (words + 4095) // 4096
    lap_keys = [0] + [mix64(~lap & MASK64) >> 32 for lap in range(1, laps)]
    keys = [TABLE + np.uint32(k) for k in lap_keys]
    return np.concatenate(keys)[:words]


def segment_sum(data, key, plane, layer):
    words = np.frombuffer(data, dtype="<u4") + position_keys(len(data) // 4)
    products = words[0::2].astype(np.uint64) * words[1::2].astype(np.uint64)
    seed = mix64(int.from_bytes(key[:8], "little") ^ mix64((plane << 32 | layer) + 1))
    return (seed + int(products.sum(dtype=np.uint64))) & MASK64


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def padded(data, align=128):
    return data + bytes(-len(data) % align)


SPECIAL = {
    BF16: [0, 0x8000, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x0080, 0x7F7F],
    FP16: [0, 0x8000, 0x0001, 0x8001, 0x3C00, 0xBC00, 0x0400, 0x7BFF],
}


def element(elem, row, channel, number):
    g = mix64(number)
    if ELEM_BYTES[elem] == 1:
        return g >> 56
    if row < 2:
        return SPECIAL[elem][channel % 8] if row else 0
    if elem == BF16:
        return g >> 63 << 15 | 120 + (g >> 32 & 15) << 7 | g & 127
    return g >> 63 << 15 | 8 + (g >> 32 & 15) << 10 | g & 1023


def make_rows(section, heads, tokens, number):
    """[layer, head, row, channel] of one section, and the number of the element after it."""
    _, elem, _, _, layers, width, _ = section
    shape = (layers, heads, tokens, width)
    bits = [element(elem, i // width % tokens, i % width, number + i)
            for i in range(int(np.prod(shape)))]
    dtype = np.uint16 if ELEM_BYTES[elem] == 2 else np.uint8
    return np.array(bits, dtype=dtype).reshape(shape), number + len(bits)


def encode_section(section, rows):
    """Codes and scales, padded; and the decoded rows."""
    _, elem, codec, _, _, width, group = section
    if codec == RAW:
        return padded(rows.tobytes()), rows
    quantize = int8_group if codec == INT8 else fp8_group
    codes, scales, decoded = b"", b"", []
    for row in rows:
        for at in range(0, width, group or width):
            x = row[at:at + (group or width)].view(FLOAT[elem])
            c, s, d = quantize(codec, elem, x)
            codes, scales = codes + c, scales + s
            decoded.append(d.view(np.uint16))
    return padded(codes) + padded(scales), np.concatenate(decoded).reshape(rows.shape)


def check_block(i, b):
    m = b["manifest"]
    what = f"block {i}"
    check_manifest(what, m)
    layers, heads, tokens = len(m["layers"]), m["heads"][1], m["page_tokens"]
    header = bytearray(bytes.fromhex(b["header_start"]).ljust(4096, b"\0"))
    key = bytes(header[32:64])
    number, inputs = b["input_first"], []
    for section in m["sections"]:
        rows, number = make_rows(section, heads, tokens, number)
        inputs.append(rows)

    decoded = [np.zeros_like(rows) for rows in inputs]
    planes, plane_sums, segments = [], [], iter(b["segments"])
    for plane in range(heads):
        data, total = b"", 0
        for layer in range(layers):
            segment = b""
            for n, section in enumerate(m["sections"]):
                at = layer - section[3]
                if 0 <= at < section[4]:
                    arrays, decoded[n][at, plane] = encode_section(section, inputs[n][at, plane])
                    segment += arrays
            value = segment_sum(segment, key, plane, layer)
            segment += padded(struct.pack("<Q", value))
            expected = next(segments)
            name = f"{what}, plane {plane}, layer {layer}"
            offset = 4096 + sum(map(len, planes)) + len(data)
            check(f"{name}: offset", offset, expected["offset"])
            check(f"{name}: bytes", len(segment), expected["bytes"])
            check(f"{name}: sum", f"{value:016x}", expected["sum"])
            if expected["hex"]:
                check(f"{name}: content", segment.hex(), expected["hex"])
            data, total = data + segment, (total + value) & MASK64
        planes.append(padded(data, 4096))
        plane_sums.append(total)

    check_header(what, b, header, len(planes[0]), plane_sums)
    for n, rows in enumerate(decoded):
        check(f"{what}: decoded section {n}", sha256(rows.tobytes()).hex(),
              b[f"section_{n}_decoded_sha256"])
    check(f"{what}: all bytes", sha256(bytes(header) + b"".join(planes)).hex(), b["block_sha256"])


def check_header(what, b, header, plane_bytes, plane_sums):
    m, i = b["manifest"], b["input_first"] // 1000000
    block_bytes = 4096 + plane_bytes * len(plane_sums)
    start = b"FBBLOCK1" + struct.pack("<II", 1, 2) + bytes.fromhex(m["space"]) + header[32:96]
    start += struct.pack("<QQQIIIIQ", 7 + i, block_bytes, plane_bytes, len(plane_sums),
                         len(m["layers"]), m["page_tokens"], 0, 1000 + i)
    start += struct.pack(f"<{len(plane_sums)}Q", *plane_sums)
    crc = crc32c(start)
    check(f"{what}: header CRC", crc, b["header_crc"])
    start = start[:132] + struct.pack("<I", crc) + start[136:]
    check(f"{what}: header", start.hex(), b["header_start"])
    check(f"{what}: block_bytes", block_bytes, b["block_bytes"])
    check(f"{what}: plane_bytes", plane_bytes, b["plane_bytes"])
    header[132:136] = struct.pack("<I", crc)


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "docs/vectors.json", encoding="utf-8") as f:
        vectors = json.load(f)
    np.seterr(all="ignore")
    for x in vectors["extra"]:
        check_extra(x)
    for i, c in enumerate(vectors["chain"]):
        check_chain(i, c)
    for i, k in enumerate(vectors["keys"]):
        check_key(i, k)
    for i, m in enumerate(vectors["manifests"]):
        check_manifest(f"manifest {i}", m)
    for i, b in enumerate(vectors["blocks"]):
        check_block(i, b)
    print(f"{checks} checks, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
