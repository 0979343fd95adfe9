// Metal's types and functions of numbers, as chapters 2 and 6 of Apple's specification declare them: overloads, so that a call which
// is ambiguous for Metal is so here.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef _Float16 half;

#define MSL_VECTORS(T) \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
#undef MSL_VECTORS

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

/// The upper half of a float. It becomes a float by itself; the way back, which rounds, must be written.
struct bfloat {
    ushort bits;

    bfloat() = default;
    explicit bfloat(float x) {
        uint word = __builtin_bit_cast(uint, x);
        bool is_nan = (word & 0x7fffffff) > 0x7f800000;
        bits = is_nan ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    template <class T>
    explicit bfloat(T x) : bfloat(float(x)) {}
    operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }
};
inline bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
inline bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
inline bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
inline bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
inline bfloat operator-(bfloat a) { return bfloat(-float(a)); }

namespace metal {

template <class T, class U>
inline T as_type(U x) {
    static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
    return __builtin_bit_cast(T, x);
}

// Halves are computed in float and rounded once.
#define MSL_UNARY(name) \
    inline float name(float x) { return __builtin_##name##f(x); } \
    inline half name(half x) { return half(__builtin_##name##f(float(x))); }
#define MSL_BINARY(name) \
    inline float name(float x, float y) { return __builtin_##name##f(x, y); } \
    inline half name(half x, half y) { return half(__builtin_##name##f(float(x), float(y))); }
#define MSL_FLOATS \
    MSL_UNARY(acos) MSL_UNARY(acosh) MSL_UNARY(asin) MSL_UNARY(asinh) MSL_UNARY(atan) MSL_UNARY(atanh) MSL_UNARY(ceil) \
    MSL_UNARY(cos) MSL_UNARY(cosh) MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(fabs) MSL_UNARY(floor) MSL_UNARY(log) \
    MSL_UNARY(log10) MSL_UNARY(log2) MSL_UNARY(rint) MSL_UNARY(round) MSL_UNARY(sin) MSL_UNARY(sinh) MSL_UNARY(sqrt) \
    MSL_UNARY(tan) MSL_UNARY(tanh) MSL_UNARY(trunc) \
    MSL_BINARY(atan2) MSL_BINARY(copysign) MSL_BINARY(fmax) MSL_BINARY(fmin) MSL_BINARY(fmod) MSL_BINARY(pow) \
    inline float powr(float x, float y) { return __builtin_powf(x, y); } \
    inline half powr(half x, half y) { return half(__builtin_powf(float(x), float(y))); } \
    inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); } \
    inline half rsqrt(half x) { return half(1.0f / __builtin_sqrtf(float(x))); } \
    inline float abs(float x) { return __builtin_fabsf(x); } \
    inline half abs(half x) { return half(__builtin_fabsf(float(x))); }
namespace precise { MSL_FLOATS }
namespace fast { MSL_FLOATS }
MSL_FLOATS
#undef MSL_FLOATS
#undef MSL_BINARY
#undef MSL_UNARY

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }

#define MSL_CLASSES(T) \
    inline bool isnan(T x) { return __builtin_isnan(float(x)); } \
    inline bool isinf(T x) { return __builtin_isinf(float(x)); } \
    inline bool isfinite(T x) { return __builtin_isfinite(float(x)); } \
    inline T min(T a, T b) { return T(__builtin_fminf(float(a), float(b))); } \
    inline T max(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); } \
    inline T clamp(T x, T least, T most) { return min(max(x, least), most); }
MSL_CLASSES(float)
MSL_CLASSES(half)
#undef MSL_CLASSES

#define MSL_INTEGER(T, U, n) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; } \
    inline T clamp(T x, T least, T most) { return min(max(x, least), most); } \
    inline T abs(T x) { return x < T(0) ? T(-x) : x; } \
    inline T popcount(T x) { return T(__builtin_popcountll(U(x))); } \
    inline T clz(T x) { return T(x ? __builtin_clzll(U(x)) - (64 - n) : n); } \
    inline T ctz(T x) { return T(x ? __builtin_ctzll(U(x)) : n); } \
    inline T reverse_bits(T x) { \
        U y = 0; \
        for (int i = 0; i < n; i++) y = U(y << 1) | U(U(x) >> i & 1); \
        return T(y); \
    }
MSL_INTEGER(char, uchar, 8)
MSL_INTEGER(int8_t, uchar, 8)
MSL_INTEGER(uchar, uchar, 8)
MSL_INTEGER(short, ushort, 16)
MSL_INTEGER(ushort, ushort, 16)
MSL_INTEGER(int, uint, 32)
MSL_INTEGER(uint, uint, 32)
MSL_INTEGER(long, ulong, 64)
MSL_INTEGER(ulong, ulong, 64)
#undef MSL_INTEGER

template <class T>
inline T select(T otherwise, T then, bool condition) { return condition ? then : otherwise; }

template <class T, size_t N>
struct array {
    T elements[N];

    T& operator[](size_t i) { return elements[i]; }
    const T& operator[](size_t i) const { return elements[i]; }
    constexpr size_t size() const { return N; }
};

// Threads run one after the other, and change at barriers alone: no operation on memory is ever interrupted.
enum memory_order { memory_order_relaxed, memory_order_seq_cst };

template <class T>
struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

namespace {
template <class T>
struct Same { typedef T Type; };
}

#define MSL_ATOMIC(name, result) \
    template <class T> \
    inline T atomic_##name##_explicit(atomic<T>* at, typename Same<T>::Type x, memory_order) { \
        T old = at->value; \
        at->value = result; \
        return old; \
    }
MSL_ATOMIC(exchange, x)
MSL_ATOMIC(fetch_add, old + x)
MSL_ATOMIC(fetch_sub, old - x)
MSL_ATOMIC(fetch_min, x < old ? x : old)
MSL_ATOMIC(fetch_max, old < x ? x : old)
MSL_ATOMIC(fetch_and, old & x)
MSL_ATOMIC(fetch_or, old | x)
MSL_ATOMIC(fetch_xor, old ^ x)
#undef MSL_ATOMIC

template <class T>
inline T atomic_load_explicit(const atomic<T>* at, memory_order) { return at->value; }

template <class T>
inline void atomic_store_explicit(atomic<T>* at, typename Same<T>::Type x, memory_order) { at->value = x; }

template <class T>
inline bool atomic_compare_exchange_weak_explicit(
    atomic<T>* at, T* expected, typename Same<T>::Type x, memory_order, memory_order) {
    bool same = at->value == *expected;
    if (same) at->value = x;
    else *expected = at->value;
    return same;
}

}  // namespace metal
