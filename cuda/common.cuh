// Teams, rows and their vectors: what all kernels share.
//
// A team of lanes owns one record, bag or row: 8 lanes of four columns (VEC = 4) or 32 lanes of one column
// (VEC = 1).  Either way a step of a team covers 32 columns, and a tile is NV steps held in registers.
// On the device a thread is one lane.  The tests' emulator runs the same text with one call a team (ONE_CALL_A_TEAM):
// LANES is then a loop over the team's lanes, and PerLane has an element for each.
//
// VEC = 4 needs dim % 4 == 0 and rows that begin at multiples of 16 bytes.  Lanes beyond a row's last column
// hold +0: adding +0 to a sum that began at +0 changes no bit, since such a sum is never -0.
// Compile with --fmad=false: every product and every sum is rounded once.

#ifndef CDLRM_COMMON_CUH
#define CDLRM_COMMON_CUH

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;

#define DEVICE __device__ __forceinline__

constexpr int BLOCK_THREADS = 128;
constexpr int STEP_COLUMNS = 32;

template <int VEC>
constexpr int TEAM = STEP_COLUMNS / VEC;

#ifdef ONE_CALL_A_TEAM
#define LANES(VEC) for (int lane = 0; lane < TEAM<VEC>; ++lane)
#else
#define LANES(VEC) if (const int lane = threadIdx.x % TEAM<VEC>; true)
#endif

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define UNROLL_PRAGMA(TEXT) _Pragma(#TEXT)
#define UNROLL_BY(N) UNROLL_PRAGMA(unroll N)
#else
#define UNROLL
#define UNROLL_BY(N)
#endif

template <class T, int VEC>
struct PerLane {
#ifdef ONE_CALL_A_TEAM
    T value[TEAM<VEC>];
    T& operator[](int lane) { return value[lane]; }
#else
    T value;
    DEVICE T& operator[](int) { return value; }
#endif
};

template <int VEC>
DEVICE i64 team_number() {  // a host's threadIdx is the team's first lane
    return (i64)blockIdx.x * (BLOCK_THREADS / TEAM<VEC>) + threadIdx.x / TEAM<VEC>;
}

// --- vectors in memory ---

template <int VEC>
struct alignas(VEC * sizeof(float)) Vec {
    float v[VEC];
};

template <int VEC>
DEVICE Vec<VEC> load(const float* from) {
#ifdef __CUDACC__
    return *reinterpret_cast<const Vec<VEC>*>(from);
#else
    Vec<VEC> vec;
    check_aligned(from, sizeof(vec));
    memcpy(&vec, from, sizeof(vec));
    return vec;
#endif
}

template <int VEC>
DEVICE void store(float* to, const Vec<VEC>& vec) {
#ifdef __CUDACC__
    *reinterpret_cast<Vec<VEC>*>(to) = vec;
#else
    check_aligned(to, sizeof(vec));
    memcpy(to, &vec, sizeof(vec));
#endif
}

// Rows are far apart: number * stride passes 2^31.
template <class T>
DEVICE T* row_at(T* rows, i64 number, int stride) {
    return rows + number * stride;
}

// --- tiles ---

template <int VEC, int NV>
struct Tile {
    static constexpr int COLUMNS = NV * STEP_COLUMNS;
    PerLane<Vec<VEC>, VEC> step[NV];
};

// visit(vec, column) for every vector of the tile whose columns, from `first` on, are below `dim`.
template <int VEC, int NV, class Visit>
DEVICE void for_columns(Tile<VEC, NV>& tile, int first, int dim, Visit visit) {
    LANES(VEC) {
        UNROLL
        for (int s = 0; s < NV; ++s) {
            const int column = first + s * STEP_COLUMNS + lane * VEC;
            if (column < dim) visit(tile.step[s][lane], column);
        }
    }
}

template <int VEC, int NV>
DEVICE void clear(Tile<VEC, NV>& tile) {
    LANES(VEC) {
        UNROLL
        for (int s = 0; s < NV; ++s) tile.step[s][lane] = Vec<VEC>{};
    }
}

template <int VEC, int NV>
DEVICE void load_tile(Tile<VEC, NV>& tile, const float* row, int first, int dim) {
    clear(tile);
    for_columns(tile, first, dim, [&](Vec<VEC>& vec, int column) { vec = load<VEC>(row + column); });
}

template <int VEC, int NV>
DEVICE void store_tile(float* row, Tile<VEC, NV>& tile, int first, int dim) {
    for_columns(tile, first, dim, [&](Vec<VEC>& vec, int column) { store(row + column, vec); });
}

// each(a, b) for all columns of two tiles, also those beyond the row's last.
template <int VEC, int NV, class Each>
DEVICE void for_pairs(Tile<VEC, NV>& first, Tile<VEC, NV>& second, Each each) {
    LANES(VEC) {
        UNROLL
        for (int s = 0; s < NV; ++s) {
            UNROLL
            for (int i = 0; i < VEC; ++i) each(first.step[s][lane].v[i], second.step[s][lane].v[i]);
        }
    }
}

template <int VEC, int NV>
DEVICE void scale_tile(Tile<VEC, NV>& tile, float scale) {
    for_pairs(tile, tile, [&](float& value, float&) { value = scale * value; });
}

template <int VEC, int NV>
DEVICE void divide_tile(Tile<VEC, NV>& tile, float divisor) {
    for_pairs(tile, tile, [&](float& value, float&) { value = value / divisor; });
}

// sum += rows [at, at + ROWS), loaded together and added in order.
template <int ROWS, int VEC, int NV, class Load>
DEVICE void add_rows(Tile<VEC, NV>& sum, int at, Load load_row) {
    Tile<VEC, NV> row[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; ++r) load_row(row[r], at + r);
    UNROLL
    for (int r = 0; r < ROWS; ++r) for_pairs(sum, row[r], [](float& total, float& value) { total = total + value; });
}

// sum = +0 plus rows [begin, end) in order; load_row(tile, number) loads one.  A few loads are in flight at a
// time, as many as do not crowd the registers.
template <int VEC, int NV, class Load>
DEVICE void sum_rows(Tile<VEC, NV>& sum, int begin, int end, Load load_row) {
    constexpr int ROWS = NV == 4 ? 2 : 4;
    clear(sum);
    int at = begin;
    for (; at <= end - ROWS; at += ROWS) add_rows<ROWS>(sum, at, load_row);
    for (; at < end; ++at) add_rows<1>(sum, at, load_row);
}

// --- sums over lanes ---

// The team's lanes within its warp: teams of a warp need not be at the same place.
template <int VEC>
DEVICE u32 team_mask() {
    constexpr u32 LOWEST = 0xFFFFFFFFu >> (32 - TEAM<VEC>);
    return LOWEST << (threadIdx.x % 32 / TEAM<VEC> * TEAM<VEC>);
}

// The sum of 32 partial sums (lane i has those of columns i, i + 32, ...), folded by 16, 8, 4, 2, 1; known to
// every lane of the team.
template <int VEC>
DEVICE float team_lane_sum(PerLane<Vec<VEC>, VEC>& partial) {
#ifdef ONE_CALL_A_TEAM
    float sums[STEP_COLUMNS];
    for (int i = 0; i < STEP_COLUMNS; ++i) sums[i] = partial[i / VEC].v[i % VEC];
    for (int half = STEP_COLUMNS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    }
    return sums[0];
#else
    Vec<VEC>& vec = partial.value;
    UNROLL
    for (int half = TEAM<VEC> / 2; half > 0; half /= 2) {
        UNROLL
        for (int i = 0; i < VEC; ++i) vec.v[i] = vec.v[i] + __shfl_xor_sync(team_mask<VEC>(), vec.v[i], half);
    }
    UNROLL
    for (int half = VEC / 2; half > 0; half /= 2) {
        UNROLL
        for (int i = 0; i < half; ++i) vec.v[i] = vec.v[i] + vec.v[i + half];
    }
    return vec.v[0];
#endif
}

// Each lane's partial sums += a * b, in the order of its columns.
template <int VEC, int NV>
DEVICE void add_products(PerLane<Vec<VEC>, VEC>& partial, Tile<VEC, NV>& a, Tile<VEC, NV>& b) {
    LANES(VEC) {
        Vec<VEC>& sums = partial[lane];
        UNROLL
        for (int s = 0; s < NV; ++s) {
            UNROLL
            for (int i = 0; i < VEC; ++i) sums.v[i] = sums.v[i] + a.step[s][lane].v[i] * b.step[s][lane].v[i];
        }
    }
}

// What the team's lanes read before is read before any of them writes after.
template <int VEC>
DEVICE void team_fence() {
#ifndef ONE_CALL_A_TEAM
    __syncwarp(team_mask<VEC>());
#endif
}

// to[0, count) = from[0, count): whole vectors, four loads in flight a lane, then single floats.
template <int VEC>
DEVICE void copy_floats(float* to, const float* from, int count) {
    const int whole = count - count % VEC;
    for (int first = 0; first < whole; first += 4 * STEP_COLUMNS) {
        Tile<VEC, 4> tile;
        load_tile(tile, from, first, whole);
        store_tile(to, tile, first, whole);
    }
    LANES(VEC) {
        if (lane < count - whole) to[whole + lane] = from[whole + lane];
    }
}

#endif
