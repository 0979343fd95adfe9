// What generated kernels see of Metal: the language's words that C++ has not, the library, and the arguments of a kernel.
#pragma once
#include "simdgroup.h"

namespace msl {

/// A buffer as the pointer or the reference that a kernel declares.
struct Buffer {
    void* start;

    template <class T>
    operator T*() const { return (T*)start; }
    template <class T>
    operator const T&() const { return *(const T*)start; }
};

/// A place in the grid as the integer or the vector that a kernel declares.
struct Position {
    uint3 at;

    operator uint3() const { return at; }
    operator uint2() const { return at.xy; }
    operator uint() const { return at.x; }
};

inline uint3 vector(const unsigned* x) { return uint3{x[0], x[1], x[2]}; }
inline uint3 in_threadgroup() {
    uint index = msl_index(), x = msl_grid()->threads[0], y = msl_grid()->threads[1];
    return uint3{index % x, index / x % y, index / x / y};
}

// The attributes of a kernel's parameters, by their names.
inline Position thread_position_in_threadgroup() { return {in_threadgroup()}; }
inline Position threadgroup_position_in_grid() { return {vector(msl_grid()->threadgroup)}; }
inline Position threads_per_threadgroup() { return {vector(msl_grid()->threads)}; }
inline Position threadgroups_per_grid() { return {vector(msl_grid()->threadgroups)}; }
inline Position thread_position_in_grid() {
    return {vector(msl_grid()->threadgroup) * vector(msl_grid()->threads) + in_threadgroup()};
}
inline uint thread_index_in_threadgroup() { return msl_index(); }
inline uint thread_index_in_simdgroup() { return msl_index() % SIMD; }
inline uint simdgroup_index_in_threadgroup() { return msl_index() / SIMD; }
inline uint threads_per_simdgroup() { return SIMD; }

}  // namespace msl

// Which memory a pointer points to is not checked here.
#define device
#define threadgroup
#define thread
#define constant const
