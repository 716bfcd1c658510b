"""Triton: how pages hold K/V. Writing a step's tokens into them, and what is read from them as numbers.

    cache [num_blocks, block_size, Hkv, D]        one token of one page is a row of Hkv * D elements

    page p   | token 0: head 0 | head 1 | ... | token 1: head 0 | ...
             ^ (p * block_size) * Hkv * D     ^ (p * block_size + 1) * Hkv * D     64-bit: caches pass 2^31 elements

`float8_e4m3fn` pages are handed over as bytes (uint8): architectures before 8.9 have no instruction for that type,
and Triton refuses it there, so the conversion is integer arithmetic on them. Writing is integer arithmetic everywhere:
it waits for memory anyhow, and is then equal bit by bit on all architectures.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

# How a cache holds its elements: constant `CACHE` of the kernels.
PLAIN = tl.constexpr(0)  # float16 or bfloat16, which the pointer's type says
INT8 = tl.constexpr(1)
FLOAT8 = tl.constexpr(2)  # bytes, decoded by integer arithmetic
FLOAT8_NATIVE = tl.constexpr(3)  # bytes, decoded by the hardware (8.9 and later)


@triton.jit
def find_sequence(query_start_loc_ptr, index, num_sequences, TILE: tl.constexpr):
    """The sequence that owns token `index` (TILE 0) or query tile `index` of TILE tokens, by binary search.

    Of sequences that start at one token the last is the one that has rows. Tiles: b's first is
    `query_start_loc[b] // TILE + b`, so it has at least as many as its rows fill, and all have at most `T // TILE + B`:
    a grid that needs no lengths.
    """
    low = tl.full([], 0, tl.int32)
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc_ptr + middle)
        if TILE > 0:
            first = first // TILE + middle
        if first <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def encode_float8(x):
    """float32 -> bits of float8_e4m3fn: saturating, ties to even, NaN to NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal (from 2^-6): round the 23 fraction bits to 3, carry into the exponent, change its bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal: beside 2^14 the last fraction bit of a float32 weighs 2^-9, as that of the result.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < (121 << 23), small, normal)
    code = tl.where(magnitude >= 0x43E00000, 0x7E, code)  # 448 and beyond
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def decode_float8(stored):
    """Bits of float8_e4m3fn -> float16, exact: the fields are moved, and the product corrects the bias by 15 - 7."""
    bits = stored.to(tl.uint16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    number = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def encode(x, CACHE: tl.constexpr, dtype: tl.constexpr):
    """float32 quotient -> what the cache holds."""
    if CACHE == PLAIN:
        return x.to(dtype)
    elif CACHE == INT8:
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # Beside 1.5 * 2^23 the last bit of a float32 weighs 1: the sum rounds to integers, ties to even.
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return encode_float8(x)


@triton.jit
def decode(stored, CACHE: tl.constexpr, dtype: tl.constexpr, STAGED: tl.constexpr):
    """What the cache holds -> `dtype` (float16 or bfloat16), without the scale; exact for quantised caches.

    As operand of a product all of it is needed by each of several warps that divide the rows, and Triton would have
    each of them convert it. STAGED stops that: what passes through opaque assembly is converted once, and then handed
    round in shared memory.
    """
    if CACHE == PLAIN:
        number = stored.to(dtype)
    elif CACHE == INT8:
        # The byte as the fraction of a float16 in [1024, 2048) instead of the hardware's slow integer conversion.
        bits = (stored.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        number = (bits.to(tl.float16, bitcast=True) - 1152.0).to(dtype)
    elif CACHE == FLOAT8:
        number = decode_float8(stored).to(dtype)
    else:
        number = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    if STAGED:
        number = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [number], dtype=number.dtype, is_pure=False, pack=2
        )
    return number


@triton.jit(do_not_specialize=["num_sequences", "block_table_stride"])
def write_kv_kernel(
    out_ptr,  # [T, Hq, D]
    key_ptr,  # [T, Hkv, D], rows `key_stride` elements apart
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    k_scale,
    v_scale,
    num_sequences,
    key_stride,
    value_stride,
    block_table_stride,
    ROW: tl.constexpr,  # Hkv * D
    OUT_ROW: tl.constexpr,  # Hq * D
    BLOCK_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, i): elements [i * BLOCK, (i + 1) * BLOCK) of token t's K/V; zero output if t is padding."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if token >= tl.load(query_start_loc_ptr + num_sequences):
        zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        for start in range(0, OUT_ROW, BLOCK * tl.num_programs(1)):
            tl.store(out_ptr + token * OUT_ROW + start + element, zero, mask=start + element < OUT_ROW)
        return
    sequence = find_sequence(query_start_loc_ptr, token, num_sequences, TILE=0)
    end = tl.load(query_start_loc_ptr + sequence + 1)
    position = tl.load(seq_lens_ptr + sequence) - (end - token)
    table = block_table_ptr + sequence.to(tl.int64) * block_table_stride
    page = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    slot = (page * BLOCK_SIZE + position % BLOCK_SIZE) * ROW
    mask = element < ROW
    key = tl.load(key_ptr + token * key_stride + element, mask=mask).to(tl.float32)
    value = tl.load(value_ptr + token * value_stride + element, mask=mask).to(tl.float32)
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    tl.store(k_cache_ptr + slot + element, encode(tl.div_rn(key, k_scale), CACHE, dtype), mask=mask)
    tl.store(v_cache_ptr + slot + element, encode(tl.div_rn(value, v_scale), CACHE, dtype), mask=mask)
