// A warp whose 32 threads really are 32: each runs on a stack of its own until it shuffles, and a shuffle is
// answered when all threads of its mask have come to it.  It shows what one call a team cannot: a wrong mask, a
// wrong partner, a thread that left early.

#include <ucontext.h>

#include <functional>
#include <memory>

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done = true;
    unsigned mask = 0;  // of the shuffle that it waits for, 0 for none
    unsigned bits = 0;  // what it offers, then what it gets
    int partner = 0;

    static constexpr size_t STACK_BYTES = 64 << 10;
};

struct Warp {
    Lane lanes[32];
    ucontext_t scheduler;
    int current = 0;
    const std::function<void()>* body = nullptr;
};

static thread_local std::unique_ptr<Warp> warp;

static void lane_main() {
    (*warp->body)();
    warp->lanes[warp->current].done = true;
}

static inline unsigned meet(unsigned mask, unsigned bits, int lane_mask) {
    Lane& lane = warp->lanes[warp->current];
    lane.mask = mask;
    lane.bits = bits;
    lane.partner = warp->current ^ lane_mask;
    swapcontext(&lane.context, &warp->scheduler);
    return lane.bits;
}

static inline float __shfl_xor_sync(unsigned mask, float value, int lane_mask) {
    return __uint_as_float(meet(mask, __float_as_uint(value), lane_mask));
}

static inline void __syncwarp(unsigned mask) { meet(mask, 0, 0); }

// Answer the lanes whose whole mask is waiting with the same mask; whether there were any.
static inline bool answer() {
    unsigned bits[32], ready = 0;
    for (int i = 0; i < 32; ++i) {
        const Lane& lane = warp->lanes[i];
        bits[i] = lane.bits;
        bool all = lane.mask >> i & 1 && lane.mask >> lane.partner & 1;
        for (int k = 0; k < 32; ++k) all = all && (!(lane.mask >> k & 1) || warp->lanes[k].mask == lane.mask);
        ready |= (unsigned)all << i;
    }
    for (int i = 0; i < 32; ++i) {
        Lane& lane = warp->lanes[i];
        if (!(ready >> i & 1)) continue;
        lane.bits = bits[lane.partner];
        lane.mask = 0;
    }
    return ready != 0;
}

static inline void run_warp(int first_thread, const std::function<void()>& body) {
    if (!warp) warp.reset(new Warp);
    warp->body = &body;
    for (Lane& lane : warp->lanes) {
        lane.done = false;
        lane.mask = 0;
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = Lane::STACK_BYTES;
        lane.context.uc_link = &warp->scheduler;
        makecontext(&lane.context, lane_main, 0);
    }
    do {
        for (int i = 31; i >= 0; --i) {  // the last lane first: lane 0 is the one that writes
            Lane& lane = warp->lanes[i];
            if (lane.done || lane.mask) continue;
            warp->current = i;
            threadIdx.x = first_thread + i;
            swapcontext(&warp->scheduler, &lane.context);
        }
    } while (answer());
    for (const Lane& lane : warp->lanes) {
        if (!lane.done) fault = reinterpret_cast<const void*>(1);
    }
}
