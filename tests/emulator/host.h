// Lets the host C++ compiler run the kernels of cuda/ unchanged: what CUDA predefines, and how a grid is run.
// One call of a kernel is one team (see cuda/common.cuh): threadIdx is the number of its first lane.  With
// ONE_CALL_A_LANE it is one thread, as on the device (lanes.h): slower, for tests of the kernels only.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <type_traits>
#include <utility>

#ifndef ONE_CALL_A_LANE
#define ONE_CALL_A_TEAM
#endif

#define __global__
#define __device__
#define __forceinline__ inline

struct HostIndex {
    unsigned x;
};

static thread_local HostIndex blockIdx, threadIdx, gridDim;
static std::atomic<const void*> fault{nullptr};  // the last address that a device would have refused

template <class TO, class FROM>
static inline TO bits_as(FROM from) {
    static_assert(sizeof(TO) == sizeof(FROM));
    TO to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
static inline double __longlong_as_double(long long x) { return bits_as<double>(x); }

static inline void check_aligned(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) fault = address;
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), const void* const* args, std::index_sequence<I...>) {
    kernel(*static_cast<const P*>(args[I])...);
}

#ifdef ONE_CALL_A_LANE
#include "lanes.h"
#endif

// Blocks [first, last) of `grid`, whose blocks have `threads` threads in teams of `team`; args as CUDA takes them,
// one address a parameter.
template <class... P>
static void run_blocks(void (*kernel)(P...), int threads, int team, long long first, long long last, int grid,
                       const void* const* args) {
    gridDim.x = grid;
    for (long long block = first; block < last; ++block) {
        blockIdx.x = (unsigned)block;
        const auto one = [&] { call(kernel, args, std::index_sequence_for<P...>{}); };
#ifdef ONE_CALL_A_LANE
        for (int warp = 0; warp < threads; warp += 32) run_warp(warp, one);
#else
        for (int lane = 0; lane < threads; lane += team) {
            threadIdx.x = lane;
            one();
        }
#endif
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

// The last fault and forget it: an address, or 1 for lanes that wait for lanes that do not come.
extern "C" __attribute__((visibility("default"))) const void* take_fault() {
    return fault.exchange(nullptr);
}
