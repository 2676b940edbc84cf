// Evict: take trained records home from cache slots, after the last batch that updated them.
//
// One team owns record k of the list: it reads the record of slot slots[k], weights and optimizer state, and writes
// home row rows[k] (zero copy: the host's memory, through the link), or place k of a staging buffer (`staged`: gathered
// here, brought to the host by one copy afterwards).  Rows are distinct (rule 6), so that no two teams write one place.

#include "common.cuh"

template <int VEC>
__global__ void evict(const float* weight, int weight_stride, const float* state, int state_stride, float* home_weight,
                      int home_weight_stride, float* home_state, int home_state_stride, const i64* rows,
                      const int* slots, int count, int staged, int dim, int state_width) {
    const i64 k = team_number<VEC>();
    if (k >= count) return;
    const i64 home = staged ? k : rows[k];
    copy_floats<VEC>(row_at(home_weight, home, home_weight_stride), row_at(weight, slots[k], weight_stride), dim);
    if (state_width == 0) return;
    copy_floats<VEC>(row_at(home_state, home, home_state_stride), row_at(state, slots[k], state_stride), state_width);
}
