/* Blocks of GGUF files, 32 weights at a time: w = scale * q + offset, with one scale and offset per half of the 32.

   ggml's layouts (ggml-common.h there). Superblocks of K-quants hold 8 such groups under one or two float16 scales. */

#ifndef BLOCKS_H
#define BLOCKS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVX512F__
#include "avx2.h"
#endif

#define INLINE static inline __attribute__((always_inline))

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       MXFP4 = 39 };

typedef struct {
    __m256i q;                       /* 32 int8 in the order of columns */
    float scales[2], offsets[2];     /* of the first and the last 16 */
} Group;

static inline float half(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

static inline uint32_t word(const uint8_t *from) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    return bits;
}

static inline __m256i load32(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* The 4-bit halves of 16 bytes: first the low ones, then the high ones. */
static inline __m256i nibbles(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}

/* `count` bits of each byte, from bit `shift` on. */
static inline __m256i bits_of(__m256i bytes, int shift, int count) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8((1 << count) - 1));
}

static inline Group whole(__m256i q, float scale, float offset) { return (Group){q, {scale, scale}, {offset, offset}}; }

static inline Group q4_0(const uint8_t *row, int group) {
    const uint8_t *block = row + 18 * group;
    const float d = half(block);
    return whole(nibbles(block + 2), d, -8 * d);
}

static inline Group q4_1(const uint8_t *row, int group) {
    const uint8_t *block = row + 20 * group;
    return whole(nibbles(block + 4), half(block), half(block + 2));
}

static inline Group q5_0(const uint8_t *row, int group) {
    const uint8_t *block = row + 22 * group;
    const float d = half(block);
    const __m256i low = nibbles(block + 6);
    return whole(_mm256_mask_add_epi8(low, word(block + 2), low, _mm256_set1_epi8(16)), d, -16 * d);
}

static inline Group q5_1(const uint8_t *row, int group) {
    const uint8_t *block = row + 24 * group;
    const __m256i low = nibbles(block + 8);
    return whole(_mm256_mask_add_epi8(low, word(block + 4), low, _mm256_set1_epi8(16)), half(block), half(block + 2));
}

/* Twice the numbers that 4 bits stand for. */
static inline __m256i twice_e2m1(__m256i nibbles) {
    const __m128i numbers = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), nibbles);
}

/* 2^(e - 128). */
static inline float half_power(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

static inline Group mxfp4(const uint8_t *row, int group) {
    const uint8_t *block = row + 17 * group;
    return whole(twice_e2m1(nibbles(block + 1)), half_power(block[0]), 0);
}

static inline Group q8_0(const uint8_t *row, int group) {
    const uint8_t *block = row + 34 * group;
    return whole(load32(block + 2), half(block), 0);
}

/* 6-bit scales and minima of the 8 groups of a Q4_K or Q5_K superblock, out of 12 bytes. */
static inline void scales_and_minima(const uint8_t *packed, uint8_t scales[8], uint8_t minima[8]) {
    const uint32_t a = word(packed), b = word(packed + 4), c = word(packed + 8);
    const uint32_t low = 0x3f3f3f3f, nibble = 0x0f0f0f0f, top = 0x30303030;
    const uint32_t words[4] = {a & low, (c & nibble) | (a >> 2 & top), b & low, (c >> 4 & nibble) | (b >> 2 & top)};
    memcpy(scales, words, 8);
    memcpy(minima, words + 2, 8);
}

static inline Group q4_k(const uint8_t *row, int group) {
    const uint8_t *block = row + 144 * (group / 8);
    const int g = group % 8;
    uint8_t scales[8], minima[8];
    scales_and_minima(block + 4, scales, minima);
    const __m256i q = bits_of(load32(block + 16 + 32 * (g / 2)), 4 * (g % 2), 4);
    return whole(q, half(block) * scales[g], -half(block + 2) * minima[g]);
}

static inline __m256i q5_k_values(const uint8_t *block, int g) {
    const __m256i low = bits_of(load32(block + 48 + 32 * (g / 2)), 4 * (g % 2), 4);
    return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(load32(block + 16), g, 1), 4));
}

static inline Group q5_k(const uint8_t *row, int group) {
    const uint8_t *block = row + 176 * (group / 8);
    uint8_t scales[8], minima[8];
    scales_and_minima(block + 4, scales, minima);
    const int g = group % 8;
    return whole(q5_k_values(block, g), half(block) * scales[g], -half(block + 2) * minima[g]);
}

/* 0 to 63; 32 stands for zero. Four groups share 64 bytes of low halves and 32 bytes of two high bits. */
static inline __m256i q6_k_values(const uint8_t *block, int g) {
    const int part = g / 4, j = g % 4;
    const __m256i low = bits_of(load32(block + 64 * part + 32 * (j % 2)), 4 * (j / 2), 4);
    return _mm256_or_si256(low, _mm256_slli_epi16(bits_of(load32(block + 128 + 32 * part), 2 * j, 2), 4));
}

static inline Group q6_k(const uint8_t *row, int group) {
    const uint8_t *block = row + 210 * (group / 8);
    const int8_t *scales = (const int8_t *)block + 192 + 2 * (group % 8);
    const float d = half(block + 208), first = d * scales[0], second = d * scales[1];
    return (Group){q6_k_values(block, group % 8), {first, second}, {-32 * first, -32 * second}};
}

static inline Group q2_k(const uint8_t *row, int group) {
    const uint8_t *block = row + 84 * (group / 8), *scales = block + 2 * (group % 8);
    const int part = group % 8 / 4, j = group % 4;
    const float d = half(block + 80), m = half(block + 82);
    const __m256i q = bits_of(load32(block + 16 + 32 * part), 2 * j, 2);
    return (Group){q, {d * (scales[0] & 15), d * (scales[1] & 15)}, {-m * (scales[0] >> 4), -m * (scales[1] >> 4)}};
}

/* 6-bit scale `i` of 16 out of 12 bytes; 32 stands for zero. */
static inline int q3_k_scale(const uint8_t *packed, int i) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
    return (low | (packed[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
}

static inline Group q3_k(const uint8_t *row, int group) {
    const uint8_t *block = row + 110 * (group / 8);
    const int g = group % 8;
    const __m256i low = bits_of(load32(block + 32 + 32 * (g / 4)), 2 * (g % 4), 2);
    const __m256i q = _mm256_or_si256(low, _mm256_slli_epi16(bits_of(load32(block), g, 1), 2));
    const float d = half(block + 108), first = d * q3_k_scale(block + 96, 2 * g), second = d * q3_k_scale(block + 96, 2 * g + 1);
    return (Group){q, {first, second}, {-4 * first, -4 * second}};
}

#endif
