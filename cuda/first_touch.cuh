// Initial values of a row: a function of (key, table number, row, column) alone, the same bits as
// cdlrm/initial.py (uniform) and cdlrm/normal.py (normal), where the formulas and their sources are.
// float64 uses additions, products, quotients and square roots only, each rounded correctly on every device.

#ifndef CDLRM_FIRST_TOUCH_CUH
#define CDLRM_FIRST_TOUCH_CUH

#include "common.cuh"

struct Words {
    u32 a, b, c, d;
};

// Philox4x32-10.
DEVICE Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 key0, u32 key1) {
    UNROLL
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ key0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ key1;
        c3 = (u32)p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

struct RowSeed {
    i64 row;  // of its table
    u32 number, key0, key1;

    DEVICE Words words(int block) const { return philox(block, (u32)row, (u32)((u64)row >> 32), number, key0, key1); }
};

DEVICE float uniform(u32 word, float scale) {
    return (float)((int)(word >> 8) - (1 << 23)) * scale;
}

// --- the normal quantile (Wichura 1988, AS 241, PPND16), highest power first ---

DEVICE double horner(const double (&coefficients)[8], double x) {
    double y = coefficients[0];
    UNROLL
    for (int i = 1; i < 8; ++i) y = y * x + coefficients[i];
    return y;
}

DEVICE double centre(double q) {
    constexpr double N[8] = {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
                             13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080};
    constexpr double D[8] = {5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
                             5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0};
    const double r = 0.180625 - q * q;
    return q * horner(N, r) / horner(D, r);
}

DEVICE double tail(double r) {
    constexpr double N[8] = {7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770,
                             1.27045825245236838258,    3.64784832476320460504,   5.76949722146069140550,
                             4.63033784615654529590,    1.42343711074968357734};
    constexpr double D[8] = {1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966,
                             0.148103976427480074590,   0.689767334985100004550,   1.67638483018380384940,
                             2.05319162663775882187,    1.0};
    return horner(N, r) / horner(D, r);
}

DEVICE double far_tail(double r) {
    constexpr double N[8] = {2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.00124266094738807843860,
                             0.0265321895265761230930,  0.296560571828504891230,   1.78482653991729133580,
                             5.46378491116411436990,    6.65790464350110377720};
    constexpr double D[8] = {2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
                             7.86869131145613259100e-4,  0.0148753612908506148525,  0.136929880922735805310,
                             0.599832206555887937690,    1.0};
    return horner(N, r) / horner(D, r);
}

// Natural logarithm of a normal number x in (0, 1]: its exponent and an atanh series.
DEVICE double log_of(double x) {
    u64 bits = __double_as_longlong(x);
    int exponent = (int)(bits >> 52) - 1022;
    double m = __longlong_as_double((bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull);  // in [0.5, 1)
    if (m < 0.7071067811865476) {
        m = m * 2.0;
        exponent = exponent - 1;
    }
    const double z = (m - 1.0) / (m + 1.0);
    const double z2 = z * z;
    double series = 0.0;
    UNROLL
    for (int k = 12; k >= 0; --k) series = series * z2 + 1.0 / (2 * k + 1);
    return exponent * 0.6931471805599453 + 2.0 * z * series;
}

// Normal quantile of p in (0, 1).
DEVICE double quantile(double p) {
    const double q = p - 0.5;
    if (-0.425 <= q && q <= 0.425) return centre(q);
    const double r = sqrt(-log_of(q < 0.0 ? p : 1.0 - p));
    const double value = r <= 5.0 ? tail(r - 1.6) : far_tail(r - 5.0);
    return q < 0.0 ? -value : value;
}

DEVICE float normal(u32 high, u32 low) {
    const u64 bits = ((u64)high << 20) | (low >> 12);  // 52 of them, so that + 0.5 is exact
    return (float)quantile(((double)bits + 0.5) * 0x1p-52);
}

// --- columns of a row ---

// Columns [first, first + VEC) of a row; `kind` 0 is uniform, 1 normal.
template <int VEC>
DEVICE Vec<VEC> initial_columns(const RowSeed& seed, int kind, float scale, int first) {
    if (kind == 0) {
        const Words w = seed.words(first / 4);
        if constexpr (VEC == 4) return {uniform(w.a, scale), uniform(w.b, scale), uniform(w.c, scale), uniform(w.d, scale)};
        const u32 low = first % 2 ? w.b : w.a, high = first % 2 ? w.d : w.c;
        return {uniform(first % 4 < 2 ? low : high, scale)};
    }
    Vec<VEC> vec;
    UNROLL
    for (int i = 0; i < VEC; ++i) {
        const int column = first + i;
        const Words w = seed.words(column / 2);
        vec.v[i] = column % 2 ? normal(w.c, w.d) : normal(w.a, w.b);
    }
    return vec;
}

#endif
