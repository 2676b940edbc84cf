// Pooled lookup, the forward pass: one launch for all bags of a group.
//
// One team owns bag q = feature * batch + sample.  Its lookups are [starts[q], starts[q + 1]), or q alone without
// `starts` (one id a bag).  It reads the rows of their slots in order and writes the output row
// sample * width + columns[feature]:  +0 + row + row ...,  each row times per_sample[lookup] if given; a bag of a
// feature with mean[feature] is then divided by its length; an empty bag is 0.  The sum is kept in registers, a
// tile of columns at a time; wider rows are read tile after tile, each column once.

#include "output.cuh"

template <int VEC, int NV, class OUT>
__global__ void lookup(const float* weight, int weight_stride, const int* slots, const int* starts, const int* columns,
                       const unsigned char* mean, const float* per_sample, OUT* out, int dim, int batch, int features,
                       int width) {
    const i64 bag = team_number<VEC>();
    if (bag >= (i64)batch * features) return;
    const int feature = (int)bag / batch, sample = (int)bag % batch;
    const int begin = starts ? starts[bag] : (int)bag;
    const int end = starts ? starts[bag + 1] : begin + 1;
    const bool divides = starts && mean && mean[feature] && end > begin;
    OUT* to = row_at(out, (i64)sample * width + columns[feature], dim);
    for (int first = 0; first < dim; first += Tile<VEC, NV>::COLUMNS) {
        Tile<VEC, NV> sum;
        sum_rows(sum, begin, end, [&](Tile<VEC, NV>& row, int lookup) {
            load_tile(row, row_at(weight, slots[lookup], weight_stride), first, dim);
            if (per_sample) scale_tile(row, per_sample[lookup]);
        });
        if (divides) divide_tile(sum, (float)(end - begin));
        for_columns(sum, first, dim, [&](Vec<VEC>& vec, int column) { store_output(to + column, vec); });
    }
}
