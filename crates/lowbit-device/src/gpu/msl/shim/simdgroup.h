// Barriers, and functions of simdgroups and their matrices: chapters 6.9 and 6.7 of Apple's specification. Each says where it was
// called, so that threads which meet at different places are found.
#pragma once
#include "numbers.h"
#include "threads.h"

#define MSL_HERE uint line = __builtin_LINE(), uint column = __builtin_COLUMN()
#define MSL_NUMBER(T) static_assert(!__is_same(T, bfloat) && !__is_same(T, double), "Metal has no such overload")

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

inline void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
inline void threadgroup_barrier(mem_flags, MSL_HERE) { msl_barrier({"threadgroup_barrier", line, column}); }
inline void simdgroup_barrier(mem_flags, MSL_HERE) { msl_exchange({"simdgroup_barrier", line, column}, "", 1); }

namespace {

constexpr uint SIMD = msl::SIMD;

/// The lanes' values of one place.
template <class T>
struct Met {
    msl::Lanes* lanes;
    uint me;

    Met(const char* call, uint line, uint column, const T& x)
        : lanes(msl_exchange({call, line, column}, &x, sizeof x)), me(msl_index() % SIMD) {
        static_assert(sizeof(T) <= sizeof lanes->values[0], "a lane's value is too large");
    }
    bool has(uint lane) const { return lanes->present >> lane & 1; }
    const T& at(uint lane) const { return *(const T*)lanes->values[lane]; }
    /// Of a lane that need not be there: then what a lane gave itself.
    T near(uint lane) const { return at(lane < SIMD && has(lane) ? lane : me); }
    /// All lanes' values joined in a tree; `none` stands for lanes that are not there.
    template <class F>
    T fold(T none, F join) const {
        T& result = *(T*)lanes->folded;
        if (!lanes->has_folded) {
            T x[SIMD];
            for (uint i = 0; i < SIMD; i++) x[i] = has(i) ? at(i) : none;
            for (uint n = SIMD / 2; n; n /= 2)
                for (uint i = 0; i < n; i++) x[i] = join(x[i], x[i + n]);
            result = x[0];
            lanes->has_folded = true;
        }
        return result;
    }
    /// The values of the lanes before this one, and its own if `end` is the next lane, joined.
    template <class F>
    T scan(T none, uint end, F join) const {
        T result = none;
        for (uint i = 0; i < end; i++)
            if (has(i)) result = join(result, at(i));
        return result;
    }
};

}  // namespace

#define MSL_FOLD(name, none, join) \
    template <class T> \
    inline T name(T x, MSL_HERE) { \
        MSL_NUMBER(T); \
        return Met<T>(#name, line, column, x).fold(none, [](T a, T b) { return T(join); }); \
    }
MSL_FOLD(simd_sum, T(0), a + b)
MSL_FOLD(simd_product, T(1), a * b)
MSL_FOLD(simd_and, T(-1), a & b)
MSL_FOLD(simd_or, T(0), a | b)
MSL_FOLD(simd_xor, T(0), a ^ b)
// A lane that is not there counts as this one, which is.
MSL_FOLD(simd_max, x, max(a, b))
MSL_FOLD(simd_min, x, min(a, b))
#undef MSL_FOLD

#define MSL_SCAN(name, none, own, join) \
    template <class T> \
    inline T name(T x, MSL_HERE) { \
        MSL_NUMBER(T); \
        Met<T> met(#name, line, column, x); \
        return met.scan(none, met.me + own, [](T a, T b) { return T(join); }); \
    }
MSL_SCAN(simd_prefix_inclusive_sum, T(0), 1, a + b)
MSL_SCAN(simd_prefix_exclusive_sum, T(0), 0, a + b)
MSL_SCAN(simd_prefix_inclusive_product, T(1), 1, a * b)
MSL_SCAN(simd_prefix_exclusive_product, T(1), 0, a * b)
#undef MSL_SCAN

#define MSL_SHUFFLE(name, lane) \
    template <class T> \
    inline T name(T x, ushort n, MSL_HERE) { \
        MSL_NUMBER(T); \
        Met<T> met(#name, line, column, x); \
        return met.near(lane); \
    }
MSL_SHUFFLE(simd_shuffle, n)
MSL_SHUFFLE(simd_broadcast, n)
MSL_SHUFFLE(simd_shuffle_xor, met.me ^ n)
MSL_SHUFFLE(simd_shuffle_up, met.me - n)
MSL_SHUFFLE(simd_shuffle_down, met.me + n)
#undef MSL_SHUFFLE

struct simd_vote {
    ulong bits;
    explicit operator ulong() const { return bits; }
};
inline simd_vote simd_ballot(bool x, MSL_HERE) {
    Met<bool> met("simd_ballot", line, column, x);
    ulong bits = 0;
    for (uint i = 0; i < SIMD; i++) bits |= ulong(met.has(i) && met.at(i)) << i;
    return {bits};
}
inline bool simd_any(bool x, MSL_HERE) { return simd_ballot(x, line, column).bits != 0; }
inline bool simd_all(bool x, MSL_HERE) { return simd_ballot(!x, line, column).bits == 0; }
template <class T>
inline T simd_broadcast_first(T x, MSL_HERE) {
    Met<T> met("simd_broadcast_first", line, column, x);
    return met.at(__builtin_ctz(met.lanes->present));
}
inline bool simd_is_first(MSL_HERE) {
    Met<bool> met("simd_is_first", line, column, true);
    return met.me == uint(__builtin_ctz(met.lanes->present));
}

/// 8 rows and columns over the lanes of a simdgroup, two elements each. Apple does not say which: here, neighbours in a row.
template <class T>
struct simdgroup_matrix {
    T elements[2];

    T* thread_elements() { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T> make_filled_simdgroup_matrix(T x) {
    static_assert(ROWS == 8 && COLUMNS == 8, "Metal has matrices of 8x8 alone");
    return {{x, x}};
}

template <class T>
inline void simdgroup_load(
    simdgroup_matrix<T>& to, const T* from, ulong stride = 8, ulong = 0, bool transpose = false, MSL_HERE) {
    msl_exchange({"simdgroup_load", line, column}, "", 1);
    ulong lane = msl_index() % SIMD, row = lane / 4, first = lane % 4 * 2;
    for (ulong i = 0; i < 2; i++) to.elements[i] = from[transpose ? (first + i) * stride + row : row * stride + first + i];
}

template <class T>
inline void simdgroup_store(const simdgroup_matrix<T>& from, T* to, ulong stride = 8, MSL_HERE) {
    ulong lane = msl_index() % SIMD, row = lane / 4, first = lane % 4 * 2;
    for (ulong i = 0; i < 2; i++) to[row * stride + first + i] = from.elements[i];
    msl_exchange({"simdgroup_store", line, column}, "", 1);
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a, const simdgroup_matrix<B>& b,
                                          const simdgroup_matrix<C>& c, MSL_HERE) {
    struct Operands {
        simdgroup_matrix<A> a;
        simdgroup_matrix<B> b;
    };
    Met<Operands> met("simdgroup_multiply_accumulate", line, column, {a, b});
    uint row = met.me / 4, first = met.me % 4 * 2;
    float sums[2] = {float(c.elements[0]), float(c.elements[1])};
    for (uint k = 0; k < 8; k++)
        for (uint i = 0; i < 2; i++)
            sums[i] += float(met.at(row * 4 + k / 2).a.elements[k % 2]) *
                       float(met.at(k * 4 + (first + i) / 2).b.elements[(first + i) % 2]);
    for (uint i = 0; i < 2; i++) d.elements[i] = D(sums[i]);
}

}  // namespace metal

#undef MSL_HERE
#undef MSL_NUMBER
