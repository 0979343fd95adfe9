// Runs the threads of threadgroups as fibers of one thread of this process: they run one after the other, and change at barriers
// and simdgroup functions alone. Refuses what Metal leaves undefined: threads that meet at different places, or wait for a
// thread that does not come.
#include "threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#ifndef __x86_64__
#error "threads change by x86-64 instructions alone"
#endif

namespace msl {
namespace {

// Bytes of a thread's stack, of its guard below, and of threadgroup memory.
constexpr size_t STACK = 256 << 10, GUARD = 4 << 10, SHARED = 32 << 10;

/// Where threads wait for each other. When all have come, the next generation begins.
struct Meeting {
    unsigned come, expected;
    unsigned long generation;
    Place place;
};

struct Fiber {
    void* top;
    char* stack;
    /// What it waits for, and its generation at that time.
    const Meeting* meeting;
    unsigned long generation;
    bool ended;
};

struct Simdgroup {
    Meeting meeting;
    Lanes lanes[2];
};

}  // namespace

/// A processor for one threadgroup at a time.
struct Machine {
    Grid grid;
    unsigned count, running, left;
    bool reverse;
    void (*kernel)(void**);
    void** buffers;
    void* host;
    Fiber fibers[THREADS];
    Meeting all;
    Simdgroup simdgroups[THREADS / SIMD];
    alignas(256) char shared[SHARED];
    char error[256];
};

namespace {

thread_local Machine* machine;

/// Pushes the registers that a call keeps, leaves the stack's top in `*save`, and goes on with the stack at `top`.
extern "C" __attribute__((naked)) void msl_change(void** /* save */, void* /* top */) {
    __asm__(
        "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
        "retq");
}

/// Ends the launch. What threads had on their stacks is forgotten.
template <class... T>
[[noreturn]] void fail(const char* format, T... values) {
    snprintf(machine->error, sizeof machine->error, format, values...);
    void* forgotten;
    msl_change(&forgotten, machine->host);
    __builtin_unreachable();
}

bool can_run(const Fiber& fiber) {
    return !fiber.ended && (!fiber.meeting || fiber.meeting->generation != fiber.generation);
}

/// Goes on with the next thread that can.
void next() {
    Machine& m = *machine;
    Fiber& from = m.fibers[m.running];
    for (unsigned i = 1; i <= m.count; i++) {
        unsigned to = (m.running + (m.reverse ? m.count - i : i)) % m.count;
        Fiber& fiber = m.fibers[to];
        if (!can_run(fiber)) continue;
        fiber.meeting = nullptr;
        m.running = to;
        if (&fiber != &from) msl_change(&from.top, fiber.top);
        return;
    }
    for (unsigned i = 0; i < m.count; i++) {
        if (m.fibers[i].ended) continue;
        const Meeting& meeting = *m.fibers[i].meeting;
        fail("thread %u waits for ever in %s, line %u: %u of %u threads came", i, meeting.place.call, meeting.place.line,
             meeting.come, meeting.expected);
    }
}

void open(Meeting& meeting) {
    meeting.come = 0;
    meeting.generation++;
}

/// Waits in `meeting` until all threads that it expects have come.
void meet(Meeting& meeting, Place place) {
    const Place& other = meeting.place;
    if (meeting.come == 0) {
        meeting.place = place;
    } else if (other.line != place.line || other.column != place.column) {
        fail("threads part: %s, line %u, and %s, line %u", other.call, other.line, place.call, place.line);
    }
    if (++meeting.come == meeting.expected) return open(meeting);
    Fiber& fiber = machine->fibers[machine->running];
    fiber.meeting = &meeting;
    fiber.generation = meeting.generation;
    next();
}

/// A thread's first and last function.
void run_thread() {
    Machine& m = *machine;
    m.kernel(m.buffers);
    m.fibers[m.running].ended = true;
    if (m.all.come) fail("thread %u ends, and others wait in %s, line %u", m.running, m.all.place.call, m.all.place.line);
    // A simdgroup function goes without the threads that have ended; a barrier of the threadgroup does not.
    Meeting& simd = m.simdgroups[m.running / SIMD].meeting;
    if (--simd.expected && simd.come == simd.expected) open(simd);
    if (--m.left == 0) msl_change(&m.fibers[m.running].top, m.host);
    next();
    __builtin_unreachable();
}

bool prepare(Fiber& fiber) {
    if (!fiber.stack) {
        void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, GUARD, PROT_NONE)) return false;
        fiber.stack = (char*)stack;
    }
    // The six registers that a change pops, where it returns to, and a word that aligns the stack as a call does.
    void** entry = (void**)(fiber.stack + STACK) - 2;
    *entry = (void*)run_thread;
    fiber.top = entry - 6;
    fiber.meeting = nullptr;
    fiber.ended = false;
    return true;
}

void run_threadgroup(Machine& m, unsigned shared) {
    memset(m.shared, 0xff, shared);
    m.left = m.count;
    m.all = {};
    m.all.expected = m.count;
    for (Simdgroup& simdgroup : m.simdgroups) simdgroup.meeting = {};
    for (unsigned i = 0; i < m.count; i++) {
        m.simdgroups[i / SIMD].meeting.expected++;
        if (prepare(m.fibers[i])) continue;
        snprintf(m.error, sizeof m.error, "no memory for the stacks of %u threads", m.count);
        return;
    }
    m.running = m.reverse ? m.count - 1 : 0;
    msl_change(&m.host, m.fibers[m.running].top);
}

}  // namespace
}  // namespace msl

using namespace msl;

extern "C" {

const Grid* msl_grid() { return &machine->grid; }

unsigned msl_index() { return machine->running; }

char* msl_shared(unsigned start) { return machine->shared + start; }

void msl_barrier(Place place) { meet(machine->all, place); }

Lanes* msl_exchange(Place place, const void* value, unsigned long bytes) {
    Simdgroup& simdgroup = machine->simdgroups[machine->running / SIMD];
    Lanes& lanes = simdgroup.lanes[simdgroup.meeting.generation & 1];
    if (simdgroup.meeting.come == 0) {
        lanes.present = 0;
        lanes.has_folded = false;
    }
    unsigned lane = machine->running % SIMD;
    memcpy(lanes.values[lane], value, bytes);
    lanes.present |= 1u << lane;
    meet(simdgroup.meeting, place);
    return &lanes;
}

/// Null when there is no memory for it. It is kept until the process ends.
Machine* msl_machine() {
    void* machine = aligned_alloc(alignof(Machine), sizeof(Machine));
    return (Machine*)(machine ? memset(machine, 0, sizeof(Machine)) : nullptr);
}

/// Runs `kernel` for all threads of the grid. `sizes` are the threadgroups along x, y and z, then the threads of each. The
/// answer is what went wrong, or null, and is the machine's.
const char* msl_run(Machine* m, void (*kernel)(void**), void** buffers, const unsigned* sizes, unsigned shared, bool reverse) {
    m->error[0] = 0;
    m->kernel = kernel;
    m->buffers = buffers;
    m->reverse = reverse;
    Grid& grid = m->grid;
    for (int i = 0; i < 3; i++) grid.threadgroups[i] = sizes[i], grid.threads[i] = sizes[3 + i];
    m->count = grid.threads[0] * grid.threads[1] * grid.threads[2];
    if (m->count == 0 || m->count > THREADS || shared > SHARED) {
        snprintf(m->error, sizeof m->error, "%u threads and %u bytes of threadgroup memory", m->count, shared);
        return m->error;
    }
    machine = m;
    // As Apple's GPUs do, f32 numbers that are too small become 0.
    unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON | 0x40);
    unsigned* at = grid.threadgroup;
    for (at[2] = 0; at[2] < sizes[2] && !m->error[0]; at[2]++)
        for (at[1] = 0; at[1] < sizes[1] && !m->error[0]; at[1]++)
            for (at[0] = 0; at[0] < sizes[0] && !m->error[0]; at[0]++) run_threadgroup(*m, shared);
    _mm_setcsr(control);
    machine = nullptr;
    return m->error[0] ? m->error : nullptr;
}

}  // extern "C"
