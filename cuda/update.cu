// Segment update: the backward pass and the optimizer in one, in place, over a batch's lookups grouped by row.
//
// Row u of the batch's distinct rows is in cache slot seg_slot[u] and has the lookups seg_lookup[seg_start[u],
// seg_start[u + 1]), ascending.  Its gradient is +0 plus theirs in that order, in chunks of 256 whose sums are added
// in order (rule 9): a row that is hit 65,536 times does not hold up the step, and changes no bit of the result.
//
//   update_short  one team a row of at most 256 lookups (others are left out): sum, then the formula, in registers.
//   chunk_sums    one team a chunk [chunk_start[c], chunk_stop[c]) of a longer row: writes sums[c].
//   update_long   one team a longer row, u = long_rows[n]: adds its chunks' sums, then the formula.
//
// A row, a chunk sum and a table's step count have one owner each, so that nothing is atomic.  None writes anything
// where the update is suppressed (a gradient that is not finite), except that update_short then copies the
// step counts: next_steps[t] = steps[t] + (used[t] and not suppressed), from one array to another, since all
// teams of this step read the old counts.

#include "update.cuh"

constexpr int CHUNK = 256;

template <int OPT, int VEC, int NV>
__global__ void update_short(float* weight, int weight_stride, float* state, int state_stride, const int* seg_slot,
                             const int* seg_start, int distinct, const int* seg_lookup, const int* lookup_row,
                             const int* columns, int batch, int width, const float* divisor, const float* per_sample,
                             const float* grad, int dim, float lr, float decay, float eps, float rate1, float rate2,
                             const int* seg_table, const double* factors, double lr64, const i64* steps,
                             i64* next_steps, const unsigned char* used, int tables, const int* flag, int number,
                             const int* sticky) {
    const i64 u = team_number<VEC>();
    const bool suppressed = is_suppressed(flag, number, sticky);
    if (OPT == ADAM && next_steps && u < tables) {
        LANES(VEC) {
            if (lane == 0) next_steps[u] = steps[u] + (used[u] && !suppressed ? 1 : 0);
        }
    }
    if (suppressed || u >= distinct) return;
    const int begin = seg_start[u], end = seg_start[u + 1];
    if (end - begin > CHUNK) return;
    const Gradients gradients = {lookup_row, columns, batch, width, divisor, per_sample, grad, dim};
    const Formula formula = {lr, decay, eps, rate1, rate2, seg_table, factors, lr64, steps};
    const int slot = seg_slot[u];
    update_row<OPT, VEC, NV>(row_at(weight, slot, weight_stride),
                             OPT == SGD ? nullptr : row_at(state, slot, state_stride), dim, formula, (int)u,
                             LookupSum{gradients, seg_lookup, begin, end});
}

template <int VEC, int NV>
__global__ void chunk_sums(const int* chunk_start, const int* chunk_stop, int chunks, const int* seg_lookup,
                           const int* lookup_row, const int* columns, int batch, int width, const float* divisor,
                           const float* per_sample, const float* grad, int dim, float* sums, const int* flag,
                           int number, const int* sticky) {
    const i64 c = team_number<VEC>();
    if (c >= chunks || is_suppressed(flag, number, sticky)) return;
    const Gradients gradients = {lookup_row, columns, batch, width, divisor, per_sample, grad, dim};
    const LookupSum sum = {gradients, seg_lookup, chunk_start[c], chunk_stop[c]};
    for (int first = 0; first < dim; first += Tile<VEC, NV>::COLUMNS) {
        Tile<VEC, NV> total;
        sum(total, first);
        store_tile(row_at(sums, c, dim), total, first, dim);
    }
}

template <int OPT, int VEC, int NV>
__global__ void update_long(float* weight, int weight_stride, float* state, int state_stride, const int* seg_slot,
                            const int* long_rows, const int* long_chunks, int count, const float* sums, int dim,
                            float lr, float decay, float eps, float rate1, float rate2, const int* seg_table,
                            const double* factors, double lr64, const i64* steps, const int* flag, int number,
                            const int* sticky) {
    const i64 n = team_number<VEC>();
    if (n >= count || is_suppressed(flag, number, sticky)) return;
    const Formula formula = {lr, decay, eps, rate1, rate2, seg_table, factors, lr64, steps};
    const int u = long_rows[n], slot = seg_slot[u];
    update_row<OPT, VEC, NV>(row_at(weight, slot, weight_stride),
                             OPT == SGD ? nullptr : row_at(state, slot, state_stride), dim, formula, u,
                             ChunkSum{sums, dim, long_chunks[n], long_chunks[n + 1]});
}
