/* Vectors of 16 floats, which GCC makes of what the CPU has: one register of AVX-512, two of AVX2, four of NEON. */

#ifndef VECTORS_H
#define VECTORS_H

#pragma GCC optimize("fp-contract=fast")

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

/* Vectors that hold `dim` numbers, and how many the v-th of them holds. */
INLINE int vectors_of(int dim) { return (dim + LANES - 1) / LANES; }
INLINE int width(int v, int dim) { return v < vectors_of(dim) - 1 ? LANES : dim - LANES * v; }

INLINE Vector all(float number) { return number - (Vector){}; }

/* `count` numbers from `at` on, in float32 or bfloat16, and zeros. */
INLINE Vector load(const void *numbers, int64_t at, int count, int is_float32) {
    if (is_float32) {
        Vector wide = {};
        memcpy(&wide, (const float *)numbers + at, 4 * count);
        return wide;
    }
    Halves halves = {};
    memcpy(&halves, (const uint16_t *)numbers + at, 2 * count);
#ifdef __AVX512F__  /* GCC 12 makes eight instructions of the line below */
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#else
    return (Vector)(__builtin_convertvector(halves, Words) << 16);
#endif
}

INLINE void store(void *numbers, int64_t at, int count, int is_float32, Vector wide) {
    if (is_float32) {
        memcpy((float *)numbers + at, &wide, 4 * count);
        return;
    }
    const Words words = (Words)wide, nan = (Words)(wide != wide);
    const Words rounded = (words + 0x7fff + (words >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
    memcpy((uint16_t *)numbers + at, &halves, 2 * count);
}

INLINE Vector choose(Ints mask, Vector a, Vector b) { return (Vector)(((Ints)a & mask) | ((Ints)b & ~mask)); }

/* e^x for x <= 0; below -87 it is e^-87. Cephes' polynomial; within 2 units of the last place. */
INLINE Vector exponential(Vector x) {
    x = choose(x < -87.0f, all(-87.0f), x);
    const Vector magic = all(12582912.0f), n = (x * 1.44269504f + magic) - magic;  /* to the nearest integer */
    const Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (Vector)((__builtin_convertvector(n, Ints) + 127) << 23);
}

#endif
