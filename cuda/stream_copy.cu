// A sequential copy of 16-byte vectors: the yardstick for fill, evict, lookup and update, nothing else.
//
// A team of 32 lanes owns every gridDim-th run of 32 vectors; four loads are in flight a lane.

#include "common.cuh"

__global__ void stream_copy(float* target, const float* source, i64 vectors) {
    const i64 teams = (i64)gridDim.x * (BLOCK_THREADS / TEAM<1>);
    LANES(1) {
        const i64 first = team_number<1>() * TEAM<1> + lane, stride = teams * TEAM<1>;
        i64 at = first;
        for (; at + 3 * stride < vectors; at += 4 * stride) {
            Vec<4> vec[4];
            UNROLL
            for (int i = 0; i < 4; ++i) vec[i] = load<4>(source + 4 * (at + i * stride));
            UNROLL
            for (int i = 0; i < 4; ++i) store(target + 4 * (at + i * stride), vec[i]);
        }
        for (; at < vectors; at += stride) store(target + 4 * at, load<4>(source + 4 * at));
    }
}
