// Finite: a gradient with NaN or infinity must not reach the tables, and the host must not wait to know.
//
// check_finite reads the whole gradient once; any lane that meets such a value writes the step's `number` to *flag, to
// *sticky (stays set: later updates are suppressed until the host has told the user) and to *host_flag (mapped host
// memory, which the host reads after an event).  Every writer writes the same number.  The updates of the step read
// *flag and *sticky and leave their rows alone.
//
// combine_flags: one thread; *flag = number where one of two other flags holds its own number (accumulated backward
// passes that become one update).

#include "common.cuh"

DEVICE void raise_flag(int* flag, int number) {
    if (flag == nullptr) return;
#ifdef __CUDACC__
    *(volatile int*)flag = number;
#else
    __atomic_store_n(flag, number, __ATOMIC_RELAXED);
#endif
}

DEVICE bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000) != 0x7F800000;
}

__global__ void check_finite(const float* grad, i64 count, int number, int* flag, int* sticky, int* host_flag) {
    const i64 stride = (i64)gridDim.x * BLOCK_THREADS;
    const i64 vectors = (u64)grad % 16 == 0 ? count / 4 : 0;
    LANES(1) {
        const i64 first = team_number<1>() * TEAM<1> + lane;
        bool finite = true;
        UNROLL_BY(4)
        for (i64 at = first; at < vectors; at += stride) {
            const Vec<4> vec = load<4>(grad + 4 * at);
            UNROLL
            for (int i = 0; i < 4; ++i) finite = finite && is_finite(vec.v[i]);
        }
        for (i64 at = 4 * vectors + first; at < count; at += stride) finite = finite && is_finite(grad[at]);
        if (!finite) {
            raise_flag(flag, number);
            raise_flag(sticky, number);
            raise_flag(host_flag, number);
        }
    }
}

__global__ void combine_flags(const int* first, int first_number, const int* second, int second_number, int* flag,
                              int number) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    if (*first == first_number || *second == second_number) raise_flag(flag, number);
}
