/* The experts that few tokens chose, in one team of threads: a call for each expert would fork and join it twice, and
   return to Python in between. Numbers are those of `gguf_linear` in integers, one expert after the other. */

#include <stdlib.h>

#include "linear.h"

/* segments: NULL for a layer of an expert that is not here. bias: bfloat16, or NULL. */
typedef struct {
    const Segment *segments;
    int64_t count;
    const uint16_t *bias;
} Layer;

typedef struct {
    Layer gate_up, down;
} Expert;

typedef void (*SiluMul)(const void *gate_up, void *out, int is_float32, int64_t rows, int64_t n, float alpha, float limit);

typedef struct {
    int64_t token;
    float share;
} Pair;

static inline int is_here(const Expert *experts, int64_t num_experts, int64_t e) {
    return e >= 0 && e < num_experts && experts[e].gate_up.segments != NULL;
}

/* Pairs of a token and an expert that is here, by expert. ends[e]: of expert e. Returns the most of an expert. */
static int64_t sort_pairs(const Expert *experts, int64_t num_experts, const int64_t *chosen, const float *shares,
                          int64_t num_tokens, int64_t top_k, Pair *pairs, int64_t *ends) {
    int64_t most = 0;
    memset(ends, 0, num_experts * sizeof *ends);
    for (int64_t i = 0; i < num_tokens * top_k; i++)
        if (is_here(experts, num_experts, chosen[i])) ends[chosen[i]]++;
    for (int64_t e = 0, first = 0; e < num_experts; e++) {
        const int64_t count = ends[e];
        if (count > most) most = count;
        ends[e] = first, first += count;
    }
    for (int64_t i = 0; i < num_tokens * top_k; i++)
        if (is_here(experts, num_experts, chosen[i])) pairs[ends[chosen[i]]++] = (Pair){i / top_k, shares[i]};
    return most;
}

/* 16 columns of a token: what its experts gave, times its shares, in the order of experts. */
static inline __m512 weighted_sum(const Pair *pairs, int64_t num_pairs, const uint16_t *y, int hidden, int64_t token,
                                  int column) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t m = 0; m < num_pairs; m++) {
        if (pairs[m].token != token) continue;
        const __m512 given = input16((Input){y, 0}, m * hidden + column);
        total = _mm512_add_ps(total, _mm512_mul_ps(given, _mm512_set1_ps(pairs[m].share)));
    }
    return total;
}

/* Rows m to end of y = x W^T + bias, by all threads of a team. */
static void layer_products(Layer layer, int columns, Quantized x, int64_t m, int64_t end, uint16_t *y, int64_t stride) {
    const Output output = {y + m * stride, stride, 0, layer.bias};
    if (end > m) few_products(layer.segments, (int)layer.count, columns, rows_from(x, m, columns), end - m, output);
}

/* out (num_tokens, hidden), float32 = sums of share * down(silu_mul(gate_up(x))) over a token's experts. x (num_tokens,
   hidden), bfloat16. chosen, shares (num_tokens, top_k). silu_mul: `native_silu_mul`. Returns 0, and does nothing, when an expert has more than max_rows tokens (0: any number) or there is no memory. */
int gguf_experts(const Expert *experts, int64_t num_experts, int hidden, int inner, const uint16_t *x,
                 int64_t num_tokens, const int64_t *chosen, const float *shares, int64_t top_k, int64_t max_rows,
                 SiluMul silu_mul, float alpha, float limit, float *out) {
    const int64_t most_pairs = num_tokens * top_k;
    const size_t of_x = quantized_bytes(hidden, most_pairs), of_inner = quantized_bytes(inner, most_pairs);
    const size_t of_outputs = 2 * most_pairs * (3 * (int64_t)inner + hidden) + 192;
    char *const scratch = aligned_alloc(64, (of_x + of_inner + of_outputs + 63) & -64);
    Pair *const pairs = malloc(most_pairs * sizeof *pairs);
    int64_t *const ends = malloc(num_experts * sizeof *ends);
    int is_done = scratch && pairs && ends;
    if (is_done) {
        const int64_t most = sort_pairs(experts, num_experts, chosen, shares, num_tokens, top_k, pairs, ends);
        is_done = max_rows == 0 || most <= max_rows;
    }
    if (is_done) {
        const int64_t num_pairs = ends[num_experts - 1];
        const Quantized of_tokens = quantized_in(scratch, hidden, most_pairs);
        const Quantized of_gates = quantized_in(scratch + of_x, inner, most_pairs);
        uint16_t *const both = (uint16_t *)(scratch + of_x + of_inner), *const gated = both + most_pairs * 2 * inner;
        uint16_t *const y = gated + most_pairs * inner;
        #pragma omp parallel
        {
            #pragma omp for schedule(static)
            for (int64_t m = 0; m < num_pairs; m++)
                quantize_row((Input){x, 0}, pairs[m].token * hidden, hidden, of_tokens, m);
            for (int64_t e = 0, m = 0; e < num_experts; m = ends[e++])
                layer_products(experts[e].gate_up, hidden, of_tokens, m, ends[e], both, 2 * inner);
            #pragma omp barrier
            #pragma omp for schedule(static)
            for (int64_t m = 0; m < num_pairs; m++) {
                silu_mul(both + m * 2 * inner, gated + m * inner, 0, 1, inner, alpha, limit);
                quantize_row((Input){gated, 0}, m * inner, inner, of_gates, m);
            }
            for (int64_t e = 0, m = 0; e < num_experts; m = ends[e++])
                layer_products(experts[e].down, inner, of_gates, m, ends[e], y, hidden);
            #pragma omp barrier
            #pragma omp for collapse(2) schedule(static)
            for (int64_t token = 0; token < num_tokens; token++)
                for (int column = 0; column < hidden; column += 16) {
                    const __m512 sum = weighted_sum(pairs, num_pairs, y, hidden, token, column);
                    _mm512_mask_storeu_ps(out + token * hidden + column, 0xffff, sum);
                }
        }
    }
    free(scratch), free(pairs), free(ends);
    return is_done;
}
