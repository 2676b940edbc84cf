// What a row's update is made of: the gradients of its lookups, their sum in rule 9's order, the optimizers' formulas.

#ifndef CDLRM_UPDATE_CUH
#define CDLRM_UPDATE_CUH

#include "common.cuh"

// --- the gradient of a lookup ---

// A lookup's gradient is the row of grad [., dim] that its bag wrote in the forward pass: lookup_row[lookup], or
// without it (one id a bag) sample * width + columns[feature].  Mean bags divide it by their length (`divisor`, one
// a lookup), then weighted lookups multiply it by their weight; each is rounded once.
struct Gradients {
    const int* lookup_row;
    const int* columns;
    int batch, width;
    const float* divisor;
    const float* per_sample;
    const float* grad;
    int dim;

    template <int VEC, int NV>
    DEVICE void load_of(Tile<VEC, NV>& tile, int lookup, int first) const {
        const i64 row = lookup_row ? lookup_row[lookup] : (i64)(lookup % batch) * width + columns[lookup / batch];
        load_tile(tile, row_at(grad, row, dim), first, dim);
        if (divisor) divide_tile(tile, divisor[lookup]);
        if (per_sample) scale_tile(tile, per_sample[lookup]);
    }
};

// --- sums: `sum(tile, first)` is a row's gradient in the columns from `first` on ---

struct LookupSum {  // of the lookups seg_lookup[begin, end)
    Gradients gradients;
    const int* seg_lookup;
    int begin, end;

    template <int VEC, int NV>
    DEVICE void operator()(Tile<VEC, NV>& sum, int first) const {
        sum_rows(sum, begin, end, [&](Tile<VEC, NV>& row, int at) { gradients.load_of(row, seg_lookup[at], first); });
    }
};

struct ChunkSum {  // of the chunk sums [begin, end)
    const float* sums;
    int dim, begin, end;

    template <int VEC, int NV>
    DEVICE void operator()(Tile<VEC, NV>& sum, int first) const {
        sum_rows(sum, begin, end, [&](Tile<VEC, NV>& row, int at) { load_tile(row, row_at(sums, at, dim), first, dim); });
    }
};

// --- whether to update at all ---

DEVICE bool is_suppressed(const int* flag, int number, const int* sticky) {
    return (flag && *flag == number) || (sticky && *sticky != 0);
}

// --- formulas (cdlrm/optim.py) ---

enum Optimizer { SGD = 0, ROW_WISE_ADAGRAD = 1, ADAGRAD = 2, ADAM = 3 };

struct Formula {
    float lr, decay, eps, rate1, rate2;
    const int* seg_table;  // the table of each row, for the formulas that count steps
    const double* factors;
    double lr64;
    const i64* steps;

    DEVICE float step_size(int row) const { return (float)(lr64 * factors[steps[seg_table[row]] + 1]); }
};

// g += decay * w in the columns from `first` on.
template <int VEC, int NV>
DEVICE void add_decay(Tile<VEC, NV>& g, const float* weight, int first, int dim, float decay) {
    if (decay == 0.0f) return;
    for_columns(g, first, dim, [&](Vec<VEC>& gradient, int column) {
        const Vec<VEC> w = load<VEC>(weight + column);
        UNROLL
        for (int i = 0; i < VEC; ++i) gradient.v[i] = gradient.v[i] + decay * w.v[i];
    });
}

// w = w - scale * g in the columns from `first` on.
template <int VEC, int NV>
DEVICE void subtract_scaled(float* weight, Tile<VEC, NV>& g, int first, int dim, float scale) {
    for_columns(g, first, dim, [&](Vec<VEC>& gradient, int column) {
        Vec<VEC> w = load<VEC>(weight + column);
        UNROLL
        for (int i = 0; i < VEC; ++i) w.v[i] = w.v[i] - scale * gradient.v[i];
        store(weight + column, w);
    });
}

// s = s + g * g; w = w - (lr * g) / (sqrt(s) + eps).
template <int VEC, int NV>
DEVICE void adagrad_tile(float* weight, float* state, Tile<VEC, NV>& g, int first, int dim, const Formula& formula) {
    for_columns(g, first, dim, [&](Vec<VEC>& gradient, int column) {
        Vec<VEC> w = load<VEC>(weight + column), s = load<VEC>(state + column);
        UNROLL
        for (int i = 0; i < VEC; ++i) {
            s.v[i] = s.v[i] + gradient.v[i] * gradient.v[i];
            w.v[i] = w.v[i] - (formula.lr * gradient.v[i]) / (sqrtf(s.v[i]) + formula.eps);
        }
        store(state + column, s);
        store(weight + column, w);
    });
}

// m = m + rate1 * (g - m); v = v + rate2 * (g * g - v); w = w - (step * m) / (sqrt(v) + eps); state is m, then v.
template <int VEC, int NV>
DEVICE void adam_tile(float* weight, float* state, Tile<VEC, NV>& g, int first, int dim, const Formula& formula,
                      float step) {
    for_columns(g, first, dim, [&](Vec<VEC>& gradient, int column) {
        Vec<VEC> w = load<VEC>(weight + column), m = load<VEC>(state + column), v = load<VEC>(state + dim + column);
        UNROLL
        for (int i = 0; i < VEC; ++i) {
            m.v[i] = m.v[i] + formula.rate1 * (gradient.v[i] - m.v[i]);
            v.v[i] = v.v[i] + formula.rate2 * (gradient.v[i] * gradient.v[i] - v.v[i]);
            w.v[i] = w.v[i] - (step * m.v[i]) / (sqrtf(v.v[i]) + formula.eps);
        }
        store(state + column, m);
        store(state + dim + column, v);
        store(weight + column, w);
    });
}

// s = s + mean(g * g); w = w - (lr / (sqrt(s) + eps)) * g.  The mean needs the whole row, so that a row wider than a
// tile is summed twice: first for the squares, then, the same bits again, to be applied.
template <int VEC, int NV, class Sum>
DEVICE void update_row_wise(float* weight, float* state, int dim, const Formula& formula, const Sum& sum) {
    constexpr int COLUMNS = Tile<VEC, NV>::COLUMNS;
    Tile<VEC, NV> g;
    PerLane<Vec<VEC>, VEC> squares;
    LANES(VEC) squares[lane] = Vec<VEC>{};
    for (int first = 0; first < dim; first += COLUMNS) {
        sum(g, first);
        add_decay(g, weight, first, dim, formula.decay);
        add_products(squares, g, g);
    }
    const float total = *state + team_lane_sum<VEC>(squares) / (float)dim;
    team_fence<VEC>();
    LANES(VEC) {
        if (lane == 0) *state = total;
    }
    const float scale = formula.lr / (sqrtf(total) + formula.eps);
    for (int first = 0; first < dim; first += COLUMNS) {
        if (dim > COLUMNS) {
            sum(g, first);
            add_decay(g, weight, first, dim, formula.decay);
        }
        subtract_scaled(weight, g, first, dim, scale);
    }
}

// Apply the formula to row number `row` of the segments, whose record is at weight and state.
template <int OPT, int VEC, int NV, class Sum>
DEVICE void update_row(float* weight, float* state, int dim, const Formula& formula, int row, const Sum& sum) {
    if constexpr (OPT == ROW_WISE_ADAGRAD) {
        update_row_wise<VEC, NV>(weight, state, dim, formula, sum);
    } else {
        const float step = OPT == ADAM ? formula.step_size(row) : formula.lr;
        for (int first = 0; first < dim; first += Tile<VEC, NV>::COLUMNS) {
            Tile<VEC, NV> g;
            sum(g, first);
            add_decay(g, weight, first, dim, formula.decay);
            if constexpr (OPT == SGD) subtract_scaled(weight, g, first, dim, step);
            if constexpr (OPT == ADAGRAD) adagrad_tile(weight, state, g, first, dim, formula);
            if constexpr (OPT == ADAM) adam_tile(weight, state, g, first, dim, formula, step);
        }
    }
}

#endif
