// Vectors of the widest registers that the compiler flags of this translation unit allow.
//
// GCC's vector extensions (also Clang's) carry the arithmetic; intrinsics appear only where the extensions generate
// poor code: maxima and transposes.
#pragma once

#include <cstdint>
#include <cstring>

#include "problem.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define VL_INLINE inline __attribute__((always_inline))
#define VL_NOINLINE __attribute__((noinline))
#define VL_LAMBDA __attribute__((always_inline))

namespace vision_longformer {
namespace VL_LEVEL {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int MICRO_ROWS = 8;  // rows of a register tile two vectors wide: 16 of 32 registers, enough to hide latency
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
constexpr int MICRO_ROWS = 6;  // 12 of 16 registers; the rest hold two vectors and a broadcast
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16;
constexpr int MICRO_ROWS = 8;
#else
constexpr int VECTOR_BYTES = 16;
constexpr int MICRO_ROWS = 6;
#endif

template <class T>
struct VectorTypes;
template <>
struct VectorTypes<float> {
    typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
    typedef uint32_t Lane;
    typedef Lane Integers __attribute__((vector_size(VECTOR_BYTES)));
};
template <>
struct VectorTypes<double> {
    typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8)));
    typedef uint64_t Lane;
    typedef Lane Integers __attribute__((vector_size(VECTOR_BYTES)));
};

template <class T>
using Vector = typename VectorTypes<T>::Vector;

template <class T>
constexpr int LANES = VECTOR_BYTES / int(sizeof(T));

template <class T>
VL_INLINE Vector<T> load(const T* source) {
    return *reinterpret_cast<const typename VectorTypes<T>::Unaligned*>(source);
}

template <class T>
VL_INLINE void store(T* target, Vector<T> value) {
    *reinterpret_cast<typename VectorTypes<T>::Unaligned*>(target) = value;
}

template <class T>
VL_INLINE Vector<T> broadcast(T value) {
    return value - Vector<T>{};  // not plus: that is an instruction, because it changes the sign of negative zeros
}

// Keeps a loaded vector in a register. GCC would otherwise fold the load into each multiply-add that uses it.
template <class V>
VL_INLINE void keep_in_register(V& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
}

// The larger of each pair; `value` where either is not a number.
VL_INLINE Vector<float> maximum(Vector<float> bound, Vector<float> value) {
#if defined(__AVX512F__)
    return (Vector<float>)_mm512_max_ps((__m512)bound, (__m512)value);
#elif defined(__AVX__)
    return (Vector<float>)_mm256_max_ps((__m256)bound, (__m256)value);
#else
    return bound > value ? bound : value;
#endif
}

VL_INLINE Vector<double> maximum(Vector<double> bound, Vector<double> value) {
#if defined(__AVX512F__)
    return (Vector<double>)_mm512_max_pd((__m512d)bound, (__m512d)value);
#elif defined(__AVX__)
    return (Vector<double>)_mm256_max_pd((__m256d)bound, (__m256d)value);
#else
    return bound > value ? bound : value;
#endif
}

template <class T>
VL_INLINE T largest_lane(Vector<T> value) {
    T result = value[0];
    for (int lane = 1; lane < LANES<T>; lane++) result = value[lane] > result ? value[lane] : result;
    return result;
}

template <class T>
VL_INLINE bool any_above(Vector<T> value, T limit) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
    return _mm512_cmp_pd_mask((__m512d)value, _mm512_set1_pd(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
    const auto above = value > limit;
    return !_mm256_testz_si256((__m256i)above, (__m256i)above);
#else
    return largest_lane<T>(value) > limit;
#endif
}

template <class T>
VL_INLINE T sum_of_lanes(Vector<T> value) {
    T result = value[0];
    for (int lane = 1; lane < LANES<T>; lane++) result += value[lane];
    return result;
}

// Whether none of `count` numbers, whole vectors of them, is infinite or not a number.
template <class T>
VL_INLINE bool all_finite(const T* values, Index count) {
    Vector<T> zeros{};
    for (Index i = 0; i < count; i += LANES<T>) zeros += load<T>(values + i) * T(0);
    return sum_of_lanes<T>(zeros) == 0;
}

// Polynomials for 2**x on -1/2 .. 1/2, highest power first: relative errors 1.1e-7 and 5e-18.
template <class T>
struct Exponential;
template <>
struct Exponential<float> {
    static constexpr int SHIFT = 23, BIAS = 127;
    static constexpr float ROUNDER = 12582912.0f + BIAS;  // 1.5 * 2**23
    static constexpr float COEFFICIENTS[] = {1.3390863364671234e-3f, 9.6760319183220541e-3f, 5.5503571142190778e-2f,
                                             2.4022107485308338e-1f, 6.9314718802622878e-1f, 1.0000000754548972f};
};
template <>
struct Exponential<double> {
    static constexpr int SHIFT = 52, BIAS = 1023;
    static constexpr double ROUNDER = 6755399441055744.0 + BIAS;  // 1.5 * 2**52
    static constexpr double COEFFICIENTS[] = {
        4.455817908336064493e-10, 7.0741942972885210056e-9, 1.0178057087733941105e-7, 1.3215432535912376166e-6,
        1.5252733841556772589e-5, 1.5403530463724354209e-4, 1.3333558146406470697e-3, 9.6181291075872566681e-3,
        5.5504108664821627039e-2, 2.4022650695910159567e-1, 6.9314718055994530925e-1, 1.0};
};

// 2**x for x up to about 100. Exactly 0 from -127 (float) or -1023 (double) down, including -infinity; NaN stays NaN.
template <class T>
VL_INLINE Vector<T> power_of_two(Vector<T> x) {
    using E = Exponential<T>;
    using Integers = typename VectorTypes<T>::Integers;
    x = maximum(broadcast<T>(-E::BIAS), x);
    // Adding ROUNDER rounds x to a whole number n and leaves n + BIAS, the exponent of 2**n, in the lowest bits.
    // Shifted into place they are 2**n, or 0 for the lowest n.
    const Vector<T> shifted = x + E::ROUNDER;
    const Vector<T> rest = x - (shifted - E::ROUNDER);
    constexpr int terms = sizeof(E::COEFFICIENTS) / sizeof(T);
    Vector<T> result = broadcast<T>(E::COEFFICIENTS[0]);
#pragma GCC unroll 16
    for (int i = 1; i < terms; i++) result = result * rest + E::COEFFICIENTS[i];
    return result * (Vector<T>)((Integers)shifted << E::SHIFT);
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
