// Gradient of per-sample weights: out[l] = the lane sum (rule 9) of the bag's gradient times the lookup's row.
//
// One team owns lookup l and reads the row of slots[l] before the update of the step changes it.  The bag's
// gradient is that of update.cuh without the lookup's own weight (per_sample is not read): grad, divided by the bag's
// length for mean bags.

#include "update.cuh"

template <int VEC>
__global__ void weight_grad(const float* weight, int weight_stride, const int* slots, int lookups,
                            const int* lookup_row, const int* columns, int batch, int width, const float* divisor,
                            const float* per_sample, const float* grad, int dim, float* out) {
    constexpr int NV = 4;
    const i64 lookup = team_number<VEC>();
    if (lookup >= lookups) return;
    const Gradients gradients = {lookup_row, columns, batch, width, divisor, nullptr, grad, dim};
    const float* row = row_at(weight, slots[lookup], weight_stride);
    PerLane<Vec<VEC>, VEC> products;
    LANES(VEC) products[lane] = Vec<VEC>{};
    for (int first = 0; first < dim; first += Tile<VEC, NV>::COLUMNS) {
        Tile<VEC, NV> g, w;
        gradients.load_of(g, (int)lookup, first);
        load_tile(w, row, first, dim);
        add_products(products, g, w);
    }
    const float sum = team_lane_sum<VEC>(products);
    LANES(VEC) {
        if (lane == 0) out[lookup] = sum;
    }
}
