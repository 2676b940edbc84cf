// Outputs in float32, bf16 and fp16: a float32 value is rounded once, to nearest, ties to even.

#ifndef CDLRM_OUTPUT_CUH
#define CDLRM_OUTPUT_CUH

#include "common.cuh"

struct bf16 {
    unsigned short bits;
};

struct fp16 {
    unsigned short bits;
};

DEVICE bool is_nan(float x) {
    return x != x;
}

DEVICE bf16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return {(unsigned short)(is_nan(x) ? 0x7FC0 : rounded)};
}

DEVICE fp16 to_fp16(float x) {
#ifdef __CUDACC__
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return {half};
#else
    const u32 sign = __float_as_uint(x) >> 16 & 0x8000, bits = __float_as_uint(x) & 0x7FFFFFFF;
    u32 half;
    if (is_nan(x)) half = 0x7FFF;
    else if (bits >= 0x477FF000) half = 0x7C00;  // rounds to 2^16 or more: infinity
    else if (bits < 0x38800000) half = __float_as_uint(__uint_as_float(bits) + 0.5f) - __float_as_uint(0.5f);  // subnormal: units of 2^-24
    else half = (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
    return {(unsigned short)(sign | half)};
#endif
}

DEVICE void convert(float x, float& to) { to = x; }
DEVICE void convert(float x, bf16& to) { to = to_bf16(x); }
DEVICE void convert(float x, fp16& to) { to = to_fp16(x); }

template <class OUT, int VEC>
struct alignas(sizeof(OUT) * VEC) Outputs {
    OUT v[VEC];
};

template <class OUT, int VEC>
DEVICE void store_output(OUT* to, const Vec<VEC>& vec) {
    Outputs<OUT, VEC> outputs;
    UNROLL
    for (int i = 0; i < VEC; ++i) convert(vec.v[i], outputs.v[i]);
#ifdef __CUDACC__
    *reinterpret_cast<Outputs<OUT, VEC>*>(to) = outputs;
#else
    check_aligned(to, sizeof(outputs));
    memcpy(to, &outputs, sizeof(outputs));
#endif
}

#endif
