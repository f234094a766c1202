/* What GEMMs in integers of `linear.c` are made of, for those of other files. Called by all threads of a team. */

#ifndef LINEAR_H
#define LINEAR_H

#include "output.h"

/* Rows of one type that follow each other. */
typedef struct {
    const uint8_t *rows;
    int64_t row_bytes, count, type;
} Segment;

/* The largest int16 of x: the upper of its two bytes, rounded, stays below 128. */
enum { LARGEST = 127 * 256 + 127 };

/* Rows of x in int16, with a scale each. See `Few` for the orders and the sums. */
typedef struct {
    int16_t *natural, *paired;
    int8_t *bytes;
    float *scales, *sums;
} Quantized;

/* For so many rows of x: all orders, their scales and sums, rounded up to whole lines of the cache. */
static inline size_t quantized_bytes(int columns, int64_t num_x) {
    return (num_x * (4 * (1 + columns / 32) + 6 * (int64_t)columns) + 63) & -64;
}

/* Rows in `scratch`, which has `quantized_bytes` and is aligned to 64. */
static inline Quantized quantized_in(void *scratch, int columns, int64_t num_x) {
    int16_t *const natural = scratch;
    float *const scales = (float *)(natural + 3 * num_x * columns);
    return (Quantized){natural, natural + num_x * columns, (int8_t *)(natural + 2 * num_x * columns), scales,
                       scales + num_x};
}

static inline Quantized rows_from(Quantized x, int64_t m, int columns) {
    return (Quantized){x.natural + m * columns, x.paired + m * columns, x.bytes + 2 * m * columns, x.scales + m,
                       x.sums + m * (columns / 32)};
}

/* Quantize `columns` numbers from `first` on as row m. */
void quantize_row(Input x, int64_t first, int columns, Quantized to, int64_t m);

/* y (num_x, all rows of the segments). Threads do not wait for each other at the end. */
void few_products(const Segment *segments, int count, int columns, Quantized x, int64_t num_x, Output y);

#endif
