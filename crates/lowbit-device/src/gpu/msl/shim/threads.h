// Between a kernel that clang compiled for this processor and what runs its threads (threads.cpp).
#pragma once

namespace msl {

// Of a simdgroup, and of a threadgroup at the most.
constexpr unsigned SIMD = 32, THREADS = 1024;

/// Where the threads of the running threadgroup are.
struct Grid {
    unsigned threads[3], threadgroups[3], threadgroup[3];
};

/// What the threads of a simdgroup gave at one place. Lives until they meet at the next place but one.
struct Lanes {
    alignas(16) char values[SIMD][16];
    /// What the first thread that goes on made of them, for the others.
    alignas(16) char folded[16];
    /// A bit per thread that came.
    unsigned present;
    bool has_folded;
};

/// A place in a kernel's source.
struct Place {
    const char* call;
    unsigned line, column;
};

}  // namespace msl

extern "C" {
const msl::Grid* msl_grid();
/// The running thread's index in its threadgroup.
unsigned msl_index();
/// The threadgroup's memory, from this byte on.
char* msl_shared(unsigned start);
/// Waits for all threads of the threadgroup.
void msl_barrier(msl::Place);
/// Waits for all threads of the simdgroup, each with a value of at most 16 bytes.
msl::Lanes* msl_exchange(msl::Place, const void* value, unsigned long bytes);
}
