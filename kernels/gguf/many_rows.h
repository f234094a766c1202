/* GEMMs of many rows of x: W is dequantized, to bfloat16 and 32 rows at a time, with AVX2 to float32 and 16.

   They are laid out as pairs of neighbouring columns, [pair][row], as `vdpbf16ps` takes them: each lane belongs to
   another row of W, so no sum crosses lanes. Those rows stay in the cache while all rows of x pass. */

#ifndef MANY_ROWS_H
#define MANY_ROWS_H

#include "blocks.h"
#include "output.h"

/* A tile: vectors of 16 rows of W, and rows of x. Number: of x, in bfloat16 or as what it stands for. */
#ifdef __AVX512F__
enum { TILE_W = 2, TILE_X = 12 };
typedef uint16_t Number;
typedef __m512i Pair;
#else
enum { TILE_W = 1, TILE_X = 6 };
typedef float Number;
typedef struct { __m512 first, second; } Pair;
#endif

/* Prefetch the next 16 rows, a part with each group: the hardware prefetcher does not follow 16 streams, and a burst
   fills the CPU's miss buffers. A prefetch past the end of W is harmless. */
INLINE void prefetch_next(const uint8_t *rows, int64_t row_bytes, int group, int groups) {
    const uint8_t *const next = rows + 16 * row_bytes;
    for (int64_t at = 16 * row_bytes * group / groups & -64; at < 16 * row_bytes * (group + 1) / groups; at += 64)
        _mm_prefetch((const char *)next + at, _MM_HINT_T1);
}

#ifdef __AVX512F__
/* 32 weights rounded to bfloat16. */
static inline __m512bh bfloat16_of(Group group) {
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(group.q)));
    const __m512 last = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(group.q, 1)));
    return _mm512_cvtne2ps_pbh(
        _mm512_fmadd_ps(last, _mm512_set1_ps(group.scales[1]), _mm512_set1_ps(group.offsets[1])),
        _mm512_fmadd_ps(first, _mm512_set1_ps(group.scales[0]), _mm512_set1_ps(group.offsets[0])));
}

/* Transpose 16 x 16 numbers of 32 bits in place. */
static inline void transpose(__m512i of[16]) {
    __m512i made[16];
    for (int i = 0; i < 16; i += 2) {
        made[i] = _mm512_unpacklo_epi32(of[i], of[i + 1]);
        made[i + 1] = _mm512_unpackhi_epi32(of[i], of[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            of[i + 2 * j] = _mm512_unpacklo_epi64(made[i + j], made[i + j + 2]);
            of[i + 2 * j + 1] = _mm512_unpackhi_epi64(made[i + j], made[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            made[i + j] = _mm512_shuffle_i32x4(of[i + j], of[i + j + 4], 0x88);
            made[i + j + 4] = _mm512_shuffle_i32x4(of[i + j], of[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        of[j] = _mm512_shuffle_i32x4(made[j], made[j + 8], 0x88);
        of[j + 8] = _mm512_shuffle_i32x4(made[j], made[j + 8], 0xdd);
    }
}

/* Dequantize up to 16 rows: out[pair * TILE_W] holds one pair of columns of all rows. Missing rows are zero. */
#define PAIRS(name)                                                                                               \
    static void name##_pairs(const uint8_t *rows, int64_t row_bytes, int count, int groups, Pair *out) {          \
        for (int g = 0; g < groups; g++, out += 16 * TILE_W) {                                                    \
            prefetch_next(rows, row_bytes, g, groups);                                                            \
            __m512i of[16];                                                                                       \
            for (int i = 0; i < 16; i++)                                                                          \
                of[i] = i < count ? (__m512i)bfloat16_of(name(rows + i * row_bytes, g)) : _mm512_setzero_si512(); \
            transpose(of);                                                                                        \
            for (int i = 0; i < 16; i++) out[i * TILE_W] = of[i];                                                 \
        }                                                                                                         \
    }
#else
/* Transpose 16 rows of 32 bytes in place: vector c then holds columns c and c + 16, each of all rows. */
static inline void transpose(__m256i of[16]) {
    for (int stage = 0; stage < 4; stage++) {
        __m256i made[16];
        for (int i = 0; i < 8; i++) {
            made[2 * i] = _mm256_unpacklo_epi8(of[i], of[i + 8]);
            made[2 * i + 1] = _mm256_unpackhi_epi8(of[i], of[i + 8]);
        }
        memcpy(of, made, sizeof made);
    }
}

/* One column of 16 rows. */
INLINE void put_column(float *to, __m128i q, const float *scales, const float *offsets) {
    for (int half = 0; half < 16; half += 8, q = _mm_srli_si128(q, 8)) {
        const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
        _mm256_store_ps(to + half, _mm256_fmadd_ps(numbers, _mm256_load_ps(scales + half), _mm256_load_ps(offsets + half)));
    }
}

/* Dequantize up to 16 rows: out[pair] holds one pair of columns of all rows, in float32. Missing rows are zero. */
#define PAIRS(name)                                                                                             \
    static void name##_pairs(const uint8_t *rows, int64_t row_bytes, int count, int groups, Pair *out) {        \
        float *to = (float *)out;                                                                               \
        for (int g = 0; g < groups; g++, to += 16 * 32) {                                                       \
            prefetch_next(rows, row_bytes, g, groups);                                                          \
            __m256i of[16];                                                                                     \
            float scales[2][16] __attribute__((aligned(32))), offsets[2][16] __attribute__((aligned(32)));      \
            for (int i = 0; i < 16; i++) {                                                                      \
                const Group group = i < count ? name(rows + i * row_bytes, g) : (Group){0};                     \
                of[i] = group.q;                                                                                \
                for (int j = 0; j < 2; j++) scales[j][i] = group.scales[j], offsets[j][i] = group.offsets[j];   \
            }                                                                                                   \
            transpose(of);                                                                                      \
            for (int i = 0; i < 16; i++) {                                                                      \
                put_column(to + 16 * i, _mm256_castsi256_si128(of[i]), scales[0], offsets[0]);                  \
                put_column(to + 16 * (16 + i), _mm256_extracti128_si256(of[i], 1), scales[1], offsets[1]);      \
            }                                                                                                   \
        }                                                                                                       \
    }
#endif
PAIRS(q4_0) PAIRS(q4_1) PAIRS(q5_0) PAIRS(q5_1) PAIRS(q8_0) PAIRS(mxfp4)
PAIRS(q2_k) PAIRS(q3_k) PAIRS(q4_k) PAIRS(q5_k) PAIRS(q6_k)

typedef void (*Pairs)(const uint8_t *rows, int64_t row_bytes, int count, int groups, Pair *out);

static Pairs pairs_of(int64_t type) {
    switch (type) {
        case Q4_0: return q4_0_pairs;
        case Q4_1: return q4_1_pairs;
        case Q5_0: return q5_0_pairs;
        case Q5_1: return q5_1_pairs;
        case Q8_0: return q8_0_pairs;
        case MXFP4: return mxfp4_pairs;
        case Q2_K: return q2_k_pairs;
        case Q3_K: return q3_k_pairs;
        case Q4_K: return q4_k_pairs;
        case Q5_K: return q5_k_pairs;
        case Q6_K: return q6_k_pairs;
        default: return NULL;
    }
}

/* One tile: `count` rows of W in pairs times M rows of x. m, n: where the tile begins in y. */
INLINE void tile(const Pair *w, const Number *x, int columns, const int M, Output y, int64_t m, int64_t n, int count) {
    __m512 sums[TILE_X][TILE_W];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < TILE_W; j++) sums[i][j] = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 2, w += TILE_W) {
#ifdef __AVX512F__
        for (int i = 0; i < M; i++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)word((const uint8_t *)(x + (int64_t)i * columns + k)));
            for (int j = 0; j < TILE_W; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)w[j], pair);
        }
#else  /* one column after the other: 12 sums leave room for no more of W */
        for (int i = 0; i < M; i++)
            sums[i][0] = _mm512_fmadd_ps(w->first, _mm512_set1_ps(x[(int64_t)i * columns + k]), sums[i][0]);
        for (int i = 0; i < M; i++)
            sums[i][0] = _mm512_fmadd_ps(w->second, _mm512_set1_ps(x[(int64_t)i * columns + k + 1]), sums[i][0]);
#endif
    }
    for (int j = 0; j < TILE_W && 16 * j < count; j++)
        for (int i = 0; i < M; i++) put16(y, m + i, n + 16 * j, count - 16 * j, sums[i][j]);
}

/* One function for each M, so that accumulators stay in registers. */
#define TILE(M)                                                                                                         \
    static void tile_##M(const Pair *w, const Number *x, int columns, Output y, int64_t m, int64_t n, int count) {      \
        tile(w, x, columns, M, y, m, n, count);                                                                         \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#ifdef __AVX512F__
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif

typedef void (*Tile)(const Pair *w, const Number *x, int columns, Output y, int64_t m, int64_t n, int count);
static const Tile tiles[] = {
    NULL,   tile_1, tile_2, tile_3,  tile_4,  tile_5, tile_6,
#ifdef __AVX512F__
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

#endif
