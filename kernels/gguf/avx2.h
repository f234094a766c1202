/* The AVX-512 instructions that this folder uses, for CPUs without: each vector is a pair of AVX2's. */

#ifndef AVX2_H
#define AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LANES static inline __attribute__((always_inline))

typedef struct { __m256 lo, hi; } Floats;
typedef struct { __m256i lo, hi; } Integers;
#define __m512 Floats
#define __m512i Integers
#define __m512bh Integers
#define __mmask16 uint16_t

/* Of each half: name(a), name(a, b). */
#define UNARY(type, name, half) \
    LANES type avx2_##name(type a) { return (type){_mm256_##half(a.lo), _mm256_##half(a.hi)}; }
#define BINARY(type, name, half) \
    LANES type avx2_##name(type a, type b) { return (type){_mm256_##half(a.lo, b.lo), _mm256_##half(a.hi, b.hi)}; }
BINARY(Floats, add_ps, add_ps)
BINARY(Floats, sub_ps, sub_ps)
BINARY(Floats, mul_ps, mul_ps)
BINARY(Floats, max_ps, max_ps)
BINARY(Integers, add_epi32, add_epi32)
BINARY(Integers, madd_epi16, madd_epi16)
BINARY(Integers, mullo_epi16, mullo_epi16)

LANES Floats avx2_setzero_ps(void) { return (Floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LANES Integers avx2_setzero_si512(void) { return (Integers){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
LANES Floats avx2_set1_ps(float a) { return (Floats){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
LANES Integers avx2_set1_epi16(short a) { return (Integers){_mm256_set1_epi16(a), _mm256_set1_epi16(a)}; }
LANES Integers avx2_set1_epi32(int a) { return (Integers){_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
LANES Floats avx2_loadu_ps(const float *from) { return (Floats){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
LANES Integers avx2_loadu_si512(const void *from) {
    const __m256i *both = from;
    return (Integers){_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
}
LANES Floats avx2_abs_ps(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (Floats){_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
LANES Floats avx2_fmadd_ps(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
LANES float avx2_reduce_add_ps(Floats a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
LANES float avx2_reduce_max_ps(Floats a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
LANES int avx2_reduce_add_epi32(Integers a) {
    const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

/* Conversions. */
LANES Integers avx2_cvtps_epi32(Floats a) { return (Integers){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
LANES Floats avx2_cvtepi32_ps(Integers a) { return (Floats){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
LANES Floats avx2_castsi512_ps(Integers a) { return (Floats){_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
LANES Integers avx2_slli_epi32(Integers a, int count) {
    return (Integers){_mm256_slli_epi32(a.lo, count), _mm256_slli_epi32(a.hi, count)};
}
LANES __m256i avx2_cvtsepi32_epi16(Integers a) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
}
LANES Integers avx2_cvtepi8_epi16(__m256i a) {
    return (Integers){_mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1))};
}
LANES Integers avx2_cvtepu8_epi16(__m256i a) {
    return (Integers){_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1))};
}
LANES Integers avx2_cvtepu16_epi32(__m256i a) {
    return (Integers){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}

/* To bfloat16, to the nearest and of two the even one, in the low halves of 32 bits. NaN is not met. */
LANES __m256i rounded_halves(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
LANES __m256i avx2_cvtneps_pbh(Floats a) {
    const __m256i packed = _mm256_packus_epi32(rounded_halves(a.lo), rounded_halves(a.hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}

/* Products of neighbours in int16, added to the sums. */
LANES Integers avx2_dpwssd_epi32(Integers sums, Integers a, Integers b) {
    return avx2_add_epi32(sums, avx2_madd_epi16(a, b));
}

LANES Integers avx2_inserti64x4(Integers a, __m256i b, int index) {
    return index ? (Integers){a.lo, b} : (Integers){b, a.hi};
}
LANES Floats avx2_zextps256_ps512(__m256 a) { return (Floats){a, _mm256_setzero_ps()}; }

/* Bytes that are all ones where the bit of their number is set. */
LANES __m256i bytes_of_bits(uint32_t bits) {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i one = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), which);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, one), one);
}
LANES __m256i avx2_mask_add_epi8(__m256i other, uint32_t bits, __m256i a, __m256i b) {
    (void)other;  /* is `a` wherever this is called */
    return _mm256_add_epi8(a, _mm256_and_si256(bytes_of_bits(bits), b));
}
LANES __m256i avx2_mask_sub_epi8(__m256i other, uint32_t bits, __m256i a, __m256i b) {
    (void)other;
    return _mm256_sub_epi8(a, _mm256_and_si256(bytes_of_bits(bits), b));
}

/* Some of 16 neighbours: the first ones. */
LANES size_t num_of(uint16_t some) { return (size_t)__builtin_popcount(some); }
LANES __m256i avx2_maskz_loadu_epi16(uint16_t some, const uint16_t *from) {
    uint16_t numbers[16] = {0};
    memcpy(numbers, from, 2 * num_of(some));
    return _mm256_loadu_si256((const __m256i *)numbers);
}
LANES void avx2_mask_storeu_ps(float *to, uint16_t some, Floats a) {
    float numbers[16];
    _mm256_storeu_ps(numbers, a.lo), _mm256_storeu_ps(numbers + 8, a.hi);
    memcpy(to, numbers, 4 * num_of(some));
}
LANES void avx2_mask_storeu_epi16(uint16_t *to, uint16_t some, __m256i a) {
    uint16_t numbers[16];
    _mm256_storeu_si256((__m256i *)numbers, a);
    memcpy(to, numbers, 2 * num_of(some));
}

#define _mm256_mask_add_epi8 avx2_mask_add_epi8
#define _mm256_mask_sub_epi8 avx2_mask_sub_epi8
#define _mm256_maskz_loadu_epi16 avx2_maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 avx2_mask_storeu_epi16
#define _mm512_abs_ps avx2_abs_ps
#define _mm512_add_epi32 avx2_add_epi32
#define _mm512_add_ps avx2_add_ps
#define _mm512_castsi512_ps avx2_castsi512_ps
#define _mm512_cvtepi32_ps avx2_cvtepi32_ps
#define _mm512_cvtepi8_epi16 avx2_cvtepi8_epi16
#define _mm512_cvtepu16_epi32 avx2_cvtepu16_epi32
#define _mm512_cvtepu8_epi16 avx2_cvtepu8_epi16
#define _mm512_cvtneps_pbh avx2_cvtneps_pbh
#define _mm512_cvtps_epi32 avx2_cvtps_epi32
#define _mm512_cvtsepi32_epi16 avx2_cvtsepi32_epi16
#define _mm512_dpwssd_epi32 avx2_dpwssd_epi32
#define _mm512_fmadd_ps avx2_fmadd_ps
#define _mm512_inserti64x4 avx2_inserti64x4
#define _mm512_loadu_ps avx2_loadu_ps
#define _mm512_loadu_si512 avx2_loadu_si512
#define _mm512_madd_epi16 avx2_madd_epi16
#define _mm512_mask_storeu_ps avx2_mask_storeu_ps
#define _mm512_max_ps avx2_max_ps
#define _mm512_mul_ps avx2_mul_ps
#define _mm512_mullo_epi16 avx2_mullo_epi16
#define _mm512_reduce_add_epi32 avx2_reduce_add_epi32
#define _mm512_reduce_add_ps avx2_reduce_add_ps
#define _mm512_reduce_max_ps avx2_reduce_max_ps
#define _mm512_set1_epi16 avx2_set1_epi16
#define _mm512_set1_epi32 avx2_set1_epi32
#define _mm512_set1_ps avx2_set1_ps
#define _mm512_setzero_ps avx2_setzero_ps
#define _mm512_setzero_si512 avx2_setzero_si512
#define _mm512_slli_epi32 avx2_slli_epi32
#define _mm512_sub_ps avx2_sub_ps
#define _mm512_zextps256_ps512 avx2_zextps256_ps512

#endif
