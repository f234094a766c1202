/* x and y of a linear layer: float32 or bfloat16. */

#ifndef OUTPUT_H
#define OUTPUT_H

#include "blocks.h"

typedef struct {
    const void *numbers;
    int is_float32;
} Input;

static inline __m512 of_bfloat16(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

static inline __m512 input16(Input x, int64_t index) {
    if (x.is_float32) return _mm512_loadu_ps((const float *)x.numbers + index);
    return of_bfloat16(load32((const uint8_t *)x.numbers + 2 * index));
}

typedef struct {
    void *numbers;
    int64_t stride;
    int is_float32;
    const uint16_t *bias;  /* bfloat16, or NULL */
} Output;

/* The first `count` of 16 neighbours of row m, from column n on. */
static inline void put16(Output y, int64_t m, int64_t n, int count, __m512 numbers) {
    const __mmask16 some = count < 16 ? (__mmask16)((1 << count) - 1) : 0xffff;
    if (y.bias) numbers = _mm512_add_ps(numbers, of_bfloat16(_mm256_maskz_loadu_epi16(some, y.bias + n)));
    const int64_t at = m * y.stride + n;
    if (y.is_float32) _mm512_mask_storeu_ps((float *)y.numbers + at, some, numbers);
    else _mm256_mask_storeu_epi16((uint16_t *)y.numbers + at, some, (__m256i)_mm512_cvtneps_pbh(numbers));
}

#endif
