// Fill: bring records into cache slots, before the batch that needs them computes.
//
// One team owns record k of the list and writes the record of slot slots[k], weights and optimizer state.
//   k < copied   it is copied from its home: home row rows[k] (zero copy: the team reads the host's memory
//                through the link, whole vectors, each once), or place k of a staging buffer (`staged`: already
//                brought to the device by one copy, here only scattered).
//   otherwise    the row was never trained, so that it has no home yet: its initial weights are computed here and
//                cost the link nothing.  rows[k] is the group's row; table t has the rows [bases[t], bases[t+1]),
//                kinds[t] 0 uniform or 1 normal, and numbers[t], keys[2t], keys[2t+1], scales[t] of first_touch.cuh.
// Slots are distinct (rule 6), so that no two teams write one place.

#include "first_touch.cuh"

// The table that has `row`: the last whose first row is not above it (empty tables have none).
DEVICE int table_of(i64 row, const i64* bases, int tables) {
    int low = 0, high = tables;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (bases[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

template <int VEC>
__global__ void fill(float* weight, int weight_stride, float* state, int state_stride, const float* home_weight,
                     int home_weight_stride, const float* home_state, int home_state_stride, const i64* rows,
                     const int* slots, int copied, int count, int staged, int dim, int state_width, const i64* bases,
                     const int* kinds, const int* numbers, const u32* keys, const float* scales, int tables,
                     float initial_state) {
    const i64 k = team_number<VEC>();
    if (k >= count) return;
    float* to = row_at(weight, slots[k], weight_stride);
    float* state_to = state_width ? row_at(state, slots[k], state_stride) : nullptr;
    if (k < copied) {
        const i64 home = staged ? k : rows[k];
        copy_floats<VEC>(to, row_at(home_weight, home, home_weight_stride), dim);
        if (state_width) copy_floats<VEC>(state_to, row_at(home_state, home, home_state_stride), state_width);
        return;
    }
    const int t = table_of(rows[k], bases, tables);
    const RowSeed seed = {rows[k] - bases[t], (u32)numbers[t], keys[2 * t], keys[2 * t + 1]};
    LANES(VEC) {
        for (int c = lane * VEC; c < dim; c += STEP_COLUMNS) {
            store(to + c, initial_columns<VEC>(seed, kinds[t], scales[t], c));
        }
        for (int c = lane; c < state_width; c += TEAM<VEC>) state_to[c] = initial_state;
    }
}
