/* Products of a packed row of weights with 1 to 8 rows of x in 16-bit integers, for types that most files are of.

   x is rounded to 15 bits and a sign under one scale per row, finer than bfloat16 but for numbers 128 times smaller
   than the row's largest. Weights are taken as the integers that the file holds: `vpdpwssd` adds up integer products
   of 32 columns, and block scales are applied to sums. So 32 weights take 6 to 10 instructions, where their numbers in
   bfloat16 take 14: with few rows this decides the time.

   A superblock's sums stay below 2^31: |q * scale| <= 32 * 128, |x| < 2^15, and each lane adds up 16 products. */

#ifndef FEW_ROWS_H
#define FEW_ROWS_H

#include "blocks.h"

enum { MAX_FEW = 8 };  /* rows of x that are multiplied at a time */

/* x: rows of `columns` int16, in the order of columns; paired: of each 64 the two first quarters of each 32, then the
   two last ones, see `paired_dot`. sums: of x over each 32 columns. */
typedef struct {
    const int16_t *x, *paired;
    const float *sums;
    int columns;
} Few;

INLINE __m512i x32(const int16_t *x, int m, int columns, int group) {
    return _mm512_loadu_si512(x + (long)m * columns + 32 * group);
}

INLINE float added(__m512 sums) { return _mm512_reduce_add_ps(sums); }

/* Types of 4 and 5 bits, in which bytes hold a column of the first and one of the second half of 32: two blocks at a
   time, so that one sum holds both, and each half of its lanes has the scale of one block. */
INLINE void paired_dot(int type, const uint8_t *row, const Few *few, const int M, float *y) {
    const int size = type == Q4_0 ? 18 : type == Q4_1 ? 20 : 22, start = size - 16;
    __m512 sums[MAX_FEW];
    float offsets[MAX_FEW];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps(), offsets[m] = 0;
    for (int group = 0; group < few->columns / 32; group += 2) {
        const uint8_t *a = row + size * group, *b = a + size;
        const __m256i bytes = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(a + start))), _mm_loadu_si128((const __m128i *)(b + start)), 1);
        __m256i low = bits_of(bytes, 0, 4), high = bits_of(bytes, 4, 4);
        if (type == Q4_0) {
            low = _mm256_sub_epi8(low, _mm256_set1_epi8(8));
            high = _mm256_sub_epi8(high, _mm256_set1_epi8(8));
        } else if (type == Q5_0) {  /* a fifth bit that is not set takes 16 away */
            const uint32_t unset_a = ~word(a + 2), unset_b = ~word(b + 2);
            low = _mm256_mask_sub_epi8(low, (unset_a & 0xffff) | unset_b << 16, low, _mm256_set1_epi8(16));
            high = _mm256_mask_sub_epi8(high, unset_a >> 16 | (unset_b & 0xffff0000), high, _mm256_set1_epi8(16));
        }
        const __m512i w0 = _mm512_cvtepi8_epi16(low), w1 = _mm512_cvtepi8_epi16(high);
        const __m512 scale = _mm512_insertf32x8(_mm512_set1_ps(half(a)), _mm256_set1_ps(half(b)), 1);
        for (int m = 0; m < M; m++) {
            __m512i sum = _mm512_madd_epi16(w0, x32(few->paired, m, few->columns, group));
            sum = _mm512_dpwssd_epi32(sum, w1, x32(few->paired, m, few->columns, group + 1));
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, sums[m]);
            if (type == Q4_1) {
                const float *of_x = few->sums + (long)m * (few->columns / 32) + group;
                offsets[m] += half(a + 2) * of_x[0] + half(b + 2) * of_x[1];
            }
        }
    }
    for (int m = 0; m < M; m++) y[16 * m] = added(sums[m]) + offsets[m];
}

INLINE void q8_0_dot(const uint8_t *row, const Few *few, const int M, float *y) {
    __m512 sums[MAX_FEW];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps();
    for (int group = 0; group < few->columns / 32; group++) {
        const uint8_t *block = row + 34 * group;
        const __m512i w = _mm512_cvtepi8_epi16(load32(block + 2));
        const __m512 scale = _mm512_set1_ps(half(block));
        for (int m = 0; m < M; m++) {
            const __m512i sum = _mm512_madd_epi16(w, x32(few->x, m, few->columns, group));
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, sums[m]);
        }
    }
    for (int m = 0; m < M; m++) y[16 * m] = added(sums[m]);
}

INLINE void q45_k_dot(int type, const uint8_t *row, const Few *few, const int M, float *y) {
    const int size = type == Q4_K ? 144 : 176;
    __m512 sums[MAX_FEW];
    __m256 offsets[MAX_FEW];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps(), offsets[m] = _mm256_setzero_ps();
    for (int group = 0; group < few->columns / 32; group += 8) {
        const uint8_t *block = row + size * (group / 8);
        uint8_t scales[8], minima[8];
        scales_and_minima(block + 4, scales, minima);
        __m512i products[MAX_FEW];
        for (int m = 0; m < M; m++) products[m] = _mm512_setzero_si512();
        #pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m256i q = type == Q4_K ? bits_of(load32(block + 16 + 32 * (g / 2)), 4 * (g % 2), 4) : q5_k_values(block, g);
            const __m512i w = _mm512_mullo_epi16(_mm512_cvtepu8_epi16(q), _mm512_set1_epi16(scales[g]));
            for (int m = 0; m < M; m++)
                products[m] = _mm512_dpwssd_epi32(products[m], w, x32(few->x, m, few->columns, group + g));
        }
        const __m512 d = _mm512_set1_ps(half(block));
        const __m256 least = _mm256_mul_ps(
            _mm256_set1_ps(half(block + 2)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)minima))));
        for (int m = 0; m < M; m++) {
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[m]), d, sums[m]);
            offsets[m] = _mm256_fmadd_ps(least, _mm256_loadu_ps(few->sums + (long)m * (few->columns / 32) + group), offsets[m]);
        }
    }
    for (int m = 0; m < M; m++) y[16 * m] = added(_mm512_sub_ps(sums[m], _mm512_zextps256_ps512(offsets[m])));
}

INLINE void q6_k_dot(const uint8_t *row, const Few *few, const int M, float *y) {
    __m512 sums[MAX_FEW];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps();
    for (int group = 0; group < few->columns / 32; group += 8) {
        const uint8_t *block = row + 210 * (group / 8);
        const int8_t *scales = (const int8_t *)block + 192;
        __m512i products[MAX_FEW];
        for (int m = 0; m < M; m++) products[m] = _mm512_setzero_si512();
        #pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m512i q = _mm512_cvtepi8_epi16(_mm256_sub_epi8(q6_k_values(block, g), _mm256_set1_epi8(32)));
            const __m512i scale = _mm512_inserti64x4(_mm512_set1_epi16(scales[2 * g]), _mm256_set1_epi16(scales[2 * g + 1]), 1);
            const __m512i w = _mm512_mullo_epi16(q, scale);
            for (int m = 0; m < M; m++)
                products[m] = _mm512_dpwssd_epi32(products[m], w, x32(few->x, m, few->columns, group + g));
        }
        const __m512 d = _mm512_set1_ps(half(block + 208));
        for (int m = 0; m < M; m++) sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[m]), d, sums[m]);
    }
    for (int m = 0; m < M; m++) y[16 * m] = added(sums[m]);
}

INLINE void q4_0_dot(const uint8_t *row, const Few *few, const int M, float *y) { paired_dot(Q4_0, row, few, M, y); }
INLINE void q4_1_dot(const uint8_t *row, const Few *few, const int M, float *y) { paired_dot(Q4_1, row, few, M, y); }
INLINE void q5_0_dot(const uint8_t *row, const Few *few, const int M, float *y) { paired_dot(Q5_0, row, few, M, y); }
INLINE void q4_k_dot(const uint8_t *row, const Few *few, const int M, float *y) { q45_k_dot(Q4_K, row, few, M, y); }
INLINE void q5_k_dot(const uint8_t *row, const Few *few, const int M, float *y) { q45_k_dot(Q5_K, row, few, M, y); }

/* y: a number for each row of x, 16 apart. One function for each number of them, so that sums stay in registers. */
typedef void (*Dot)(const uint8_t *row, const Few *few, float *y);

#define DOT(name, M) \
    static void name##_##M(const uint8_t *row, const Few *few, float *y) { name(row, few, M, y); }
#define DOTS(name)                                                                                            \
    DOT(name, 1) DOT(name, 2) DOT(name, 3) DOT(name, 4) DOT(name, 5) DOT(name, 6) DOT(name, 7) DOT(name, 8)   \
    static const Dot name##s[] = {NULL,     name##_1, name##_2, name##_3, name##_4,                           \
                                  name##_5, name##_6, name##_7, name##_8};
DOTS(q4_0_dot) DOTS(q4_1_dot) DOTS(q5_0_dot) DOTS(q8_0_dot) DOTS(q4_k_dot) DOTS(q5_k_dot) DOTS(q6_k_dot)

/* NULL for types without one. */
static const Dot *dots_of(int64_t type) {
    switch (type) {
        case Q4_0: return q4_0_dots;
        case Q4_1: return q4_1_dots;
        case Q5_0: return q5_0_dots;
        case Q8_0: return q8_0_dots;
        case Q4_K: return q4_k_dots;
        case Q5_K: return q5_k_dots;
        case Q6_K: return q6_k_dots;
        default: return NULL;
    }
}

#endif
