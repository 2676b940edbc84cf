// Lets the host C++ compiler run the kernels of cuda/ unchanged: what CUDA predefines, and how a grid is run.
// One call of a kernel is one team (see cuda/common.cuh): threadIdx is the number of its first lane.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline

struct HostIndex {
    unsigned x;
};

static thread_local HostIndex blockIdx, threadIdx, gridDim;
static std::atomic<const void*> misaligned{nullptr};  // the last address that a device would have refused

static inline void check_aligned(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) misaligned = address;
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), const void* const* args, std::index_sequence<I...>) {
    kernel(*static_cast<const P*>(args[I])...);
}

// Blocks [first, last) of `grid`, whose blocks have `threads` threads in teams of `team`; args as CUDA takes them,
// one address a parameter.
template <class... P>
static void run_blocks(void (*kernel)(P...), int threads, int team, long long first, long long last, int grid,
                       const void* const* args) {
    gridDim.x = grid;
    for (long long block = first; block < last; ++block) {
        blockIdx.x = (unsigned)block;
        for (int lane = 0; lane < threads; lane += team) {
            threadIdx.x = lane;
            call(kernel, args, std::index_sequence_for<P...>{});
        }
    }
}

// Whether the parameters are of the types in cdlrm/driver/signatures.py, one letter each: p, i, l, f, d.
template <class P>
constexpr char letter() {
    if (std::is_pointer_v<P>) return 'p';
    if (std::is_same_v<P, int>) return 'i';
    if (std::is_same_v<P, long long>) return 'l';
    return std::is_same_v<P, float> ? 'f' : std::is_same_v<P, double> ? 'd' : '?';
}

template <class... P>
constexpr bool takes(void (*)(P...), const char* letters) {
    const char own[] = {letter<P>()..., '\0'};
    size_t i = 0;
    while (own[i] != '\0' && own[i] == letters[i]) ++i;
    return own[i] == letters[i];
}

extern "C" __attribute__((visibility("default"))) const void* take_misaligned() {
    return misaligned.exchange(nullptr);
}
