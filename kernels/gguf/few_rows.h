/* Skinny GEMMs: packed rows of W times 1 to 8 rows of x in int16, for the types that most files consist of.

   x is quantized to int16 with one scale per row, which is finer than bfloat16 except for numbers 128 times smaller
   than the row's largest. W stays in the integers that the file holds: `vpdpwssd` accumulates 32 columns as integers,
   and block scales are applied to the sums. 32 weights take 6 to 10 instructions; dequantized to bfloat16 they take
   14, and with few rows that decides the time.

   Accumulators of a superblock stay below 2^31: |q * scale| <= 32 * 128, |x| < 2^15, and each lane adds 16 terms. */

#ifndef FEW_ROWS_H
#define FEW_ROWS_H

#include "blocks.h"

/* Quantized rows of x. x: (M, columns) in the order of columns. paired: the same with each 64 columns in the order in
   which `paired_dot` reads them, 0-15, 32-47, 16-31, 48-63. bytes: (M, 2 columns), with AVX-512 alone: of each 64 columns
   the upper bytes u, then the lower ones l, both signed, x = 256 u + l; columns 0 and 1, 32 and 33, 2 and 3, and so on.
   All are aligned to 64 bytes, or most loads of vectors would cross cache lines. sums: (M, columns / 32), of x over each block. ahead: bytes from a row of W to the row that
   has its place in the next block. */
typedef struct {
    const int16_t *x, *paired;
    const int8_t *bytes;
    const float *sums;
    int columns;
    int64_t ahead;
} Few;

/* Rows of x, and of W, in one tile. Two rows of W share the loads of x. One or two rows of x are bound by memory, and
   the hardware prefetches W best as one stream. Rows of W come in blocks; the two of a tile are half a block apart.
   With more than MAX_INTEGER_ROWS rows of x, `many_rows.h` is faster. */
enum { MAX_ROWS = 2, BLOCK_ROWS = 16, MAX_INTEGER_ROWS = 12 };
#ifdef __AVX512F__
enum { FEW_AT_ONCE = 8 };
INLINE int rows_at_once(int num_x) { return num_x <= 2 ? 1 : 2; }
#else  /* half as many registers, each half as long */
enum { FEW_AT_ONCE = 4 };
INLINE int rows_at_once(int num_x) { return (void)num_x, 1; }
#endif
INLINE float *place(float *y, int m, int r) { return y + BLOCK_ROWS * m + BLOCK_ROWS / 2 * r; }

/* Prefetch W of the next block into the second-level cache: the hardware follows rows that are half a block apart
   badly, and stops at the end of each block. A prefetch past the end of W is harmless. */
INLINE void prefetch_ahead(const uint8_t *w, const Few *few) { _mm_prefetch((const char *)w + few->ahead, _MM_HINT_T1); }

INLINE __m512i x32(const int16_t *x, int m, int columns, int group) {
    return _mm512_loadu_si512(x + (long)m * columns + 32 * group);
}

INLINE const float *sums_of(const Few *few, int m, int group) {
    return few->sums + (long)m * (few->columns / 32) + group;
}

/* Two float16 numbers, each in half of the lanes. */
INLINE __m512 halves(const uint8_t *a, const uint8_t *b) {
    uint16_t of[2];
    memcpy(of, a, 2), memcpy(of + 1, b, 2);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128((int)(of[0] | (uint32_t)of[1] << 16)));
#ifdef __AVX512F__
    const __m512i lanes = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
    return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(both));
#else
    return (__m512){_mm256_broadcastss_ps(both), _mm256_broadcastss_ps(_mm_movehdup_ps(both))};
#endif
}

/* Two powers of two, each in half of the lanes, see `half_power`. */
INLINE __m512 powers(const uint8_t *a, const uint8_t *b) {
#ifdef __AVX512F__
    return _mm512_insertf32x8(_mm512_set1_ps(half_power(a[0])), _mm256_set1_ps(half_power(b[0])), 1);
#else
    return (__m512){_mm256_set1_ps(half_power(a[0])), _mm256_set1_ps(half_power(b[0]))};
#endif
}

/* Types with a scale per 32 columns. In those of 4 and 5 bits byte i of a block holds columns i and i + 16. Two blocks
   share an accumulator: each half of its lanes belongs to one block and has its scale. */
INLINE void paired_dot(int type, const uint8_t *const rows[MAX_ROWS], const Few *few, const int M, float *y) {
    const int R = rows_at_once(M);
    const int size = type == Q4_0 ? 18 : type == Q4_1 ? 20 : type == Q5_0 ? 22 : type == MXFP4 ? 17 : 34;
    const int start = size - 16;
    __m512 sums[FEW_AT_ONCE][MAX_ROWS];
    float offsets[FEW_AT_ONCE][MAX_ROWS];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sums[m][r] = _mm512_setzero_ps(), offsets[m][r] = 0;
    for (int group = 0; group < few->columns / 32; group += 2) {
        __m512i first[MAX_ROWS], last[MAX_ROWS];
        __m512 scales[MAX_ROWS];
        for (int r = 0; r < R; r++) {
            const uint8_t *a = rows[r] + size * group, *b = a + size;
            const __m256i bytes = _mm256_loadu2_m128i((const __m128i *)(b + start), (const __m128i *)(a + start));
            __m256i low = bits_of(bytes, 0, 4), high = bits_of(bytes, 4, 4);
            prefetch_ahead(a, few);
            if (type == Q8_0) {
                low = _mm256_loadu2_m128i((const __m128i *)(b + 2), (const __m128i *)(a + 2)), high = bytes;
                prefetch_ahead(b, few);
            } else if (type == MXFP4) {
                low = twice_e2m1(low), high = twice_e2m1(high);
            } else if (type == Q4_0) {
                low = _mm256_sub_epi8(low, _mm256_set1_epi8(8));
                high = _mm256_sub_epi8(high, _mm256_set1_epi8(8));
            } else if (type == Q5_0) {  /* a fifth bit that is not set takes 16 away */
                const uint32_t unset_a = ~word(a + 2), unset_b = ~word(b + 2);
                low = _mm256_mask_sub_epi8(low, (unset_a & 0xffff) | unset_b << 16, low, _mm256_set1_epi8(16));
                high = _mm256_mask_sub_epi8(high, unset_a >> 16 | (unset_b & 0xffff0000), high, _mm256_set1_epi8(16));
            }
            first[r] = _mm512_cvtepi8_epi16(low), last[r] = _mm512_cvtepi8_epi16(high);
            scales[r] = type == MXFP4 ? powers(a, b) : halves(a, b);
            if (type == Q4_1)
                for (int m = 0; m < M; m++) {
                    const float *of_x = sums_of(few, m, group);
                    offsets[m][r] += half(a + 2) * of_x[0] + half(b + 2) * of_x[1];
                }
        }
        for (int m = 0; m < M; m++) {
            const __m512i x0 = x32(few->paired, m, few->columns, group), x1 = x32(few->paired, m, few->columns, group + 1);
            for (int r = 0; r < R; r++) {
                const __m512i sum = _mm512_dpwssd_epi32(_mm512_madd_epi16(first[r], x0), last[r], x1);
                sums[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales[r], sums[m][r]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) *place(y, m, r) = _mm512_reduce_add_ps(sums[m][r]) + offsets[m][r];
}

/* 32 weights of a superblock times their scales, in int16. */
INLINE __m512i scaled_values(int type, const uint8_t *block, const uint8_t scales[8], int g) {
    if (type == Q6_K) {
        const int8_t *two = (const int8_t *)block + 192 + 2 * g;
        const __m512i q = _mm512_cvtepi8_epi16(_mm256_sub_epi8(q6_k_values(block, g), _mm256_set1_epi8(32)));
        return _mm512_mullo_epi16(q, _mm512_inserti64x4(_mm512_set1_epi16(two[0]), _mm256_set1_epi16(two[1]), 1));
    }
    const __m256i q = type == Q4_K ? bits_of(load32(block + 16 + 32 * (g / 2)), 4 * (g % 2), 4) : q5_k_values(block, g);
    return _mm512_mullo_epi16(_mm512_cvtepu8_epi16(q), _mm512_set1_epi16(scales[g]));
}

/* K-quants: the 8 groups of a superblock are accumulated as integers, since their scales are multiplied into W. */
INLINE void k_dot(int type, const uint8_t *const rows[MAX_ROWS], const Few *few, const int M, float *y) {
    const int R = rows_at_once(M);
    const int size = type == Q4_K ? 144 : type == Q5_K ? 176 : 210;
    __m512 sums[FEW_AT_ONCE][MAX_ROWS];
    __m256 offsets[FEW_AT_ONCE][MAX_ROWS];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sums[m][r] = _mm512_setzero_ps(), offsets[m][r] = _mm256_setzero_ps();
    for (int group = 0; group < few->columns / 32; group += 8) {
        const uint8_t *blocks[MAX_ROWS];
        uint8_t scales[MAX_ROWS][8], minima[MAX_ROWS][8];
        for (int r = 0; r < R; r++) {
            blocks[r] = rows[r] + size * (group / 8);
            if (type != Q6_K) scales_and_minima(blocks[r] + 4, scales[r], minima[r]);
        }
        __m512i products[FEW_AT_ONCE][MAX_ROWS];
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) products[m][r] = _mm512_setzero_si512();
        #pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            __m512i w[MAX_ROWS];
            for (int r = 0; r < R; r++) {
                if (g % 2 == 0 && 32 * g < size) prefetch_ahead(blocks[r] + 32 * g, few);
                w[r] = scaled_values(type, blocks[r], scales[r], g);
            }
            for (int m = 0; m < M; m++) {
                const __m512i x = x32(few->x, m, few->columns, group + g);
                for (int r = 0; r < R; r++) products[m][r] = _mm512_dpwssd_epi32(products[m][r], w[r], x);
            }
        }
        for (int r = 0; r < R; r++) {
            const __m512 d = _mm512_set1_ps(half(blocks[r] + (type == Q6_K ? 208 : 0)));
            for (int m = 0; m < M; m++) sums[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[m][r]), d, sums[m][r]);
            if (type == Q6_K) continue;
            const __m256i least = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)minima[r]));
            const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(half(blocks[r] + 2)), _mm256_cvtepi32_ps(least));
            for (int m = 0; m < M; m++)
                offsets[m][r] = _mm256_fmadd_ps(scaled, _mm256_loadu_ps(sums_of(few, m, group)), offsets[m][r]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++)
            *place(y, m, r) = _mm512_reduce_add_ps(_mm512_sub_ps(sums[m][r], _mm512_zextps256_ps512(offsets[m][r])));
}

#include "k_bytes.h"

INLINE void dot(int type, const uint8_t *const rows[MAX_ROWS], const Few *few, const int M, float *y) {
    const int is_k = type == Q4_K || type == Q5_K || type == Q6_K;
#ifdef __AVX512F__
    if (is_k && M <= 2) {
        k_bytes_dot(type, rows[0], few, M, y);
        return;
    }
#endif
    if (is_k) k_dot(type, rows, few, M, y);
    else paired_dot(type, rows, few, M, y);
}

/* y: see `place`. One function for each M, so that accumulators stay in registers. */
typedef void (*Dot)(const uint8_t *const rows[MAX_ROWS], const Few *few, float *y);

#define DOT(type, M) \
    static void type##_##M(const uint8_t *const rows[MAX_ROWS], const Few *few, float *y) { dot(type, rows, few, M, y); }
#ifdef __AVX512F__
#define DOTS(type)                                                                                            \
    DOT(type, 1) DOT(type, 2) DOT(type, 3) DOT(type, 4) DOT(type, 5) DOT(type, 6) DOT(type, 7) DOT(type, 8)   \
    static const Dot type##_dots[] = {NULL,     type##_1, type##_2, type##_3, type##_4,                       \
                                      type##_5, type##_6, type##_7, type##_8};
#else
#define DOTS(type)                                      \
    DOT(type, 1) DOT(type, 2) DOT(type, 3) DOT(type, 4) \
    static const Dot type##_dots[] = {NULL, type##_1, type##_2, type##_3, type##_4};
#endif
DOTS(Q4_0) DOTS(Q4_1) DOTS(Q5_0) DOTS(Q8_0) DOTS(MXFP4) DOTS(Q4_K) DOTS(Q5_K) DOTS(Q6_K)

/* NULL for types without one. */
static const Dot *dots_of(int64_t type) {
    switch (type) {
        case Q4_0: return Q4_0_dots;
        case Q4_1: return Q4_1_dots;
        case Q5_0: return Q5_0_dots;
        case Q8_0: return Q8_0_dots;
        case MXFP4: return MXFP4_dots;
        case Q4_K: return Q4_K_dots;
        case Q5_K: return Q5_K_dots;
        case Q6_K: return Q6_K_dots;
        default: return NULL;
    }
}

#endif
