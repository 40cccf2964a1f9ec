// The data types tensors are stored in, converted on load to the type of the arithmetic and back on store.
#pragma once

#include "simd.h"

namespace vision_longformer {
namespace VL_LEVEL {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Arithmetic runs in float32 for the 16-bit types.
template <class S>
struct ArithmeticOf {
    using Type = float;
};
template <>
struct ArithmeticOf<double> {
    using Type = double;
};
template <class S>
using Arithmetic = typename ArithmeticOf<S>::Type;

// One element. The bit patterns are those of IEEE 754; to 16 bits rounding is to nearest, ties to even.
VL_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
VL_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

VL_INLINE float decode(float value) { return value; }
VL_INLINE double decode(double value) { return value; }
VL_INLINE float decode(BFloat16 value) { return as_float(uint32_t(value.bits) << 16); }
VL_INLINE float decode(Float16 value) {
    const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13, sign = uint32_t(value.bits & 0x8000) << 16;
    const float finite = as_float(magnitude) * 0x1p112f;  // moves the exponent, and makes subnormals right
    const uint32_t special = magnitude | 0x7f800000u;
    return as_float((magnitude >= 0x7c00u << 13 ? special : as_bits(finite)) | sign);
}

VL_INLINE void encode(float value, float& target) { target = value; }
VL_INLINE void encode(double value, double& target) { target = value; }
VL_INLINE void encode(float value, BFloat16& target) {
    const uint32_t bits = as_bits(value), even = (bits >> 16) & 1u;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    target.bits = uint16_t(nan ? 0x7fc0u : (bits + 0x7fffu + even) >> 16);
}
VL_INLINE void encode(float value, Float16& target) {
    const uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t even = (magnitude >> 13) & 1u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + even) >> 13;
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);  // the sum's unit is 2**-24
    const uint32_t finite = magnitude < 113u << 23 ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    target.bits = uint16_t((magnitude >= 143u << 23 ? special : finite) | sign);
}

template <class S>
VL_INLINE Vector<Arithmetic<S>> load_as_arithmetic(const S* source) {
    using T = Arithmetic<S>;
    if constexpr (sizeof(S) == sizeof(T)) {
        return load<T>(source);
    } else {
        Vector<T> result{};
        for (int lane = 0; lane < LANES<T>; lane++) result[lane] = decode(source[lane]);
        return result;
    }
}

// target[0 .. padded) = change(source[0 .. size)), then zeros. `padded` is a multiple of the vector length.
template <class S, class Change>
VL_INLINE void load_row(const S* source, Index size, Index padded, Arithmetic<S>* target, Change change) {
    using T = Arithmetic<S>;
    constexpr int step = LANES<T>;
    Index i = 0;
    for (; i + 4 * step <= size; i += 4 * step)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            store<T>(target + i + j * step, change(load_as_arithmetic<S>(source + i + j * step)));
    for (; i + step <= size; i += step) store<T>(target + i, change(load_as_arithmetic<S>(source + i)));
    for (Index rest = i; rest < padded; rest += step) store<T>(target + rest, Vector<T>{});
    for (; i < size; i++) target[i] = change(broadcast<T>(decode(source[i])))[0];
}

template <class S>
VL_INLINE void load_row(const S* source, Index size, Index padded, Arithmetic<S>* target) {
    load_row<S>(source, size, padded, target, [](Vector<Arithmetic<S>> value) VL_LAMBDA { return value; });
}

// target[0 .. size) = factor * source[0 .. size).
template <class S>
VL_INLINE void store_row(const Arithmetic<S>* source, Index size, Arithmetic<S> factor, S* target) {
    using T = Arithmetic<S>;
    Index i = 0;
    if constexpr (sizeof(S) == sizeof(T))
        for (; i + LANES<T> <= size; i += LANES<T>) store<T>(target + i, load<T>(source + i) * factor);
    for (; i < size; i++) encode(source[i] * factor, target[i]);
}

// The sum of left[i] * right[i]; `right` is padded with zeros to whole vectors.
template <class S>
VL_INLINE Arithmetic<S> dot_row(const S* left, Index size, const Arithmetic<S>* right) {
    using T = Arithmetic<S>;
    Vector<T> products{};
    Index i = 0;
    for (; i + LANES<T> <= size; i += LANES<T>) products += load_as_arithmetic<S>(left + i) * load<T>(right + i);
    T sum = sum_of_lanes<T>(products);
    for (; i < size; i++) sum += decode(left[i]) * right[i];
    return sum;
}

// target[0 .. size) += factor * source[0 .. size).
template <class T>
VL_INLINE void add_row(const T* source, Index size, T factor, T* target) {
    Index i = 0;
    for (; i + LANES<T> <= size; i += LANES<T>)
        store<T>(target + i, load<T>(target + i) + load<T>(source + i) * factor);
    for (; i < size; i++) target[i] += source[i] * factor;
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
