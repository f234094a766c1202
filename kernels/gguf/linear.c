/* y = x W^T + b over weights as a GGUF file holds them, on CPUs with AVX-512, its VNNI and bfloat16 instructions, or
   with AVX2 (`avx2.h`).

   Threads are OpenMP's, as many as torch uses: the process has one libgomp, which torch brings. Both GEMMs are batch
   invariant: the terms of a row of y are added in one order, and the compiler contracts none (-ffp-contract=off). */

#include <stdlib.h>

#include "blocks.h"
#include "few_rows.h"
#include "linear.h"
#include "many_rows.h"

#ifdef __AVX512F__
/* Pairs of bytes of a and b in turn. */
static inline __m512i in_turns(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

/* 64 columns of x as bytes, see `Few`. */
static inline void put_bytes(const int16_t *x, int8_t *to) {
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32), half = _mm512_set1_epi16(128);
    const __m512i upper_a = _mm512_srai_epi16(_mm512_add_epi16(a, half), 8);
    const __m512i upper_b = _mm512_srai_epi16(_mm512_add_epi16(b, half), 8);
    _mm512_storeu_si512(to, in_turns(_mm512_cvtepi16_epi8(upper_a), _mm512_cvtepi16_epi8(upper_b)));
    _mm512_storeu_si512(to + 64, in_turns(_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b)));
}
#endif

void quantize_row(Input x, int64_t first, int columns, Quantized to, int64_t m) {
    int16_t *const natural = to.natural + m * columns, *const paired = to.paired + m * columns;
    __m512 largest = _mm512_setzero_ps();
    for (int k = 0; k < columns; k += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(input16(x, first + k)));
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 per_unit = _mm512_set1_ps(most > 0 ? LARGEST / most : 0);
    for (int k = 0; k < columns; k += 32) {
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(input16(x, first + k), per_unit));
        const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(input16(x, first + k + 16), per_unit));
        const __m256i halves[2] = {_mm512_cvtsepi32_epi16(a), _mm512_cvtsepi32_epi16(b)};
        to.sums[(m * columns + k) / 32] = (float)_mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
        for (int i = 0; i < 2; i++) {
            _mm256_storeu_si256((__m256i *)(natural + k + 16 * i), halves[i]);
            _mm256_storeu_si256((__m256i *)(paired + k / 64 * 64 + k % 64 / 2 + 32 * i), halves[i]);
        }
    }
#ifdef __AVX512F__
    for (int k = 0; k < columns; k += 64) put_bytes(natural + k, to.bytes + 2 * (m * columns + k));
#endif
    to.scales[m] = most / LARGEST;
}

/* BLOCK_ROWS rows of W at a time, so that y is written by vectors. */
void few_products(const Segment *segments, int count, int columns, Quantized x, int64_t num_x, Output y) {
    int64_t first = 0;
    for (int s = 0; s < count; first += segments[s++].count) {
        const Segment segment = segments[s];
        const Dot *const dots = dots_of(segment.type);
        #pragma omp for schedule(static) nowait
        for (int64_t n = 0; n < segment.count; n += BLOCK_ROWS) {
            const uint8_t *const block = segment.rows + n * segment.row_bytes;
            const int num_w = segment.count - n < BLOCK_ROWS ? (int)(segment.count - n) : BLOCK_ROWS;
            for (int64_t m = 0; m < num_x; m += FEW_AT_ONCE) {
                const int num_m = num_x - m < FEW_AT_ONCE ? (int)(num_x - m) : FEW_AT_ONCE;
                const Quantized from = rows_from(x, m, columns);
                const Few few = {from.natural, from.paired, from.bytes, from.sums, columns, BLOCK_ROWS * segment.row_bytes};
                float products[FEW_AT_ONCE][BLOCK_ROWS];
                for (int j = 0; j < BLOCK_ROWS / rows_at_once(num_m) && j < num_w; j++) {
                    const int other = j + BLOCK_ROWS / 2 < num_w ? j + BLOCK_ROWS / 2 : j;
                    const uint8_t *const rows[] = {block + j * segment.row_bytes, block + other * segment.row_bytes};
                    dots[num_m](rows, &few, &products[0][j]);
                }
                for (int i = 0; i < num_m; i++) {
                    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(products[i]), _mm512_set1_ps(from.scales[i]));
                    put16(y, m + i, first + n, num_w, scaled);
                }
            }
        }
    }
}

/* scratch: of `quantized_bytes`. */
static void few_rows(const Segment *segments, int count, int columns, Input x, int64_t num_x, Output y, void *scratch) {
    const Quantized quantized = quantized_in(scratch, columns, num_x);
    #pragma omp parallel
    {
        #pragma omp for schedule(static)
        for (int64_t m = 0; m < num_x; m++) quantize_row(x, m * columns, columns, quantized, m);
        few_products(segments, count, columns, quantized, num_x, y);
    }
}

/* 16 numbers of x as tiles take them. */
static inline void put_numbers(Number *to, __m512 x) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
    const __m512 rounded = of_bfloat16(_mm512_cvtneps_pbh(x));
    _mm256_storeu_ps(to, rounded.lo), _mm256_storeu_ps(to + 8, rounded.hi);
#endif
}

/* scratch: of `quantized_bytes`. */
static void many_rows(const Segment *segments, int count, int columns, Input x, int64_t num_x, Output y, void *scratch) {
    const int64_t numbers = num_x * columns;
    const int is_ready = !x.is_float32 && sizeof(Number) == 2;
    const Number *const taken = is_ready ? x.numbers : scratch;
    #pragma omp parallel
    {
        if (!is_ready) {
            #pragma omp for schedule(static)
            for (int64_t k = 0; k < numbers; k += 16) put_numbers((Number *)scratch + k, input16(x, k));
        }
        Pair *const w = aligned_alloc(64, sizeof(Pair) * TILE_W * columns / 2);
        int64_t first = 0;
        for (int s = 0; s < count; first += segments[s++].count) {
            const Segment segment = segments[s];
            const Pairs pairs = pairs_of(segment.type);
            #pragma omp for schedule(static) nowait
            for (int64_t n = 0; n < segment.count; n += 16 * TILE_W) {
                const int num_w = segment.count - n < 16 * TILE_W ? (int)(segment.count - n) : 16 * TILE_W;
                for (int j = 0; j < TILE_W; j++) {
                    const uint8_t *const rows = segment.rows + (n + 16 * j) * segment.row_bytes;
                    pairs(rows, segment.row_bytes, num_w - 16 * j, columns / 32, w + j);
                }
                for (int64_t m = 0; m < num_x; m += TILE_X) {
                    const int num_m = num_x - m < TILE_X ? (int)(num_x - m) : TILE_X;
                    tiles[num_m](w, taken + m * columns, columns, y, m, first + n, num_w);
                }
            }
        }
        free(w);
    }
}

/* Whether `gguf_linear` can compute in integers for weights of that type. */
int gguf_has_integers(int64_t type, int columns) { return dots_of(type) != NULL && columns % 64 == 0; }

int gguf_max_integer_rows(void) { return MAX_INTEGER_ROWS; }

/* y (num_x, all rows of the segments) = x (num_x, columns) W^T + bias. in_integers: W as the file holds it
   and x quantized to int16; else x in bfloat16, and W dequantized to it, with AVX2 to float32. Returns 0 when there is
   no memory for x. */
int gguf_linear(const Segment *segments, int count, int columns, const void *x, int x_is_float32, int64_t num_x,
                void *y, int64_t y_stride, int y_is_float32, const uint16_t *bias, int in_integers) {
    const Input input = {x, x_is_float32};
    const Output output = {y, y_stride, y_is_float32, bias};
    void *const scratch = aligned_alloc(64, quantized_bytes(columns, num_x));
    if (scratch == NULL) return 0;
    (in_integers ? few_rows : many_rows)(segments, count, columns, input, num_x, output, scratch);
    free(scratch);
    return 1;
}

#ifndef __AVX512F__
static inline uint16_t bfloat16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif

/* Dequantize rows to bfloat16: out (count, columns). */
void gguf_dequantize(const Segment *segment, int columns, uint16_t *out) {
    const Pairs pairs = pairs_of(segment->type);
    #pragma omp parallel
    {
        Pair *const w = aligned_alloc(64, sizeof(Pair) * TILE_W * columns / 2);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < segment->count; n += 16) {
            const int count = segment->count - n < 16 ? (int)(segment->count - n) : 16;
            pairs(segment->rows + n * segment->row_bytes, segment->row_bytes, count, columns / 32, w);
            for (int64_t j = 0; j < count; j++)
                for (int64_t k = 0; k < columns / 2; k++) {
                    uint16_t *const to = out + (n + j) * columns + 2 * k;
#ifdef __AVX512F__
                    memcpy(to, (const uint32_t *)(w + k * TILE_W) + j, 4);
#else
                    const float *const first = (const float *)(w + k);
                    to[0] = bfloat16(first[j]), to[1] = bfloat16(first[16 + j]);
#endif
                }
        }
        free(w);
    }
}
