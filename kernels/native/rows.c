/* What decode steps do to rows of few numbers, where a call of torch takes longer than the work: norms, rotation, and
   the gate of an MLP. Numbers are float32 or bfloat16, arithmetic is in float32, and results are rounded once. */

#include <math.h>

#include "vectors.h"

enum { LEAST_WORK = 1 << 15 };  /* numbers worth a second thread */

/* residual (rows, n) += pending, if that is given; out = residual / sqrt(mean(residual^2) + eps) * weight. */
void native_add_rms_norm(float *residual, const void *pending, int pending_is_float32, const float *weight, float eps,
                         int64_t rows, int64_t n, void *out, int out_is_float32) {
    #pragma omp parallel for schedule(static) if (rows * n > LEAST_WORK)
    for (int64_t row = 0; row < rows; row++) {
        float *const own = residual + row * n, total = 0;
        Vector squares = {};
        for (int64_t at = 0; at < n; at += LANES) {
            const int count = n - at < LANES ? (int)(n - at) : LANES;
            Vector x = load(own, at, count, 1);
            if (pending != NULL) {
                x += load(pending, row * n + at, count, pending_is_float32);
                store(own, at, count, 1, x);
            }
            squares += x * x;
        }
        for (int lane = 0; lane < LANES; lane++) total += squares[lane];
        const float scale = 1.0f / sqrtf(total / (float)n + eps);
        for (int64_t at = 0; at < n; at += LANES) {
            const int count = n - at < LANES ? (int)(n - at) : LANES;
            store(out, row * n + at, count, out_is_float32, load(own, at, count, 1) * scale * load(weight, at, count, 1));
        }
    }
}

/* In place: x (tokens, heads, dim), with strides in numbers. cos, sin: a row of dim for each token. */
void native_rotate(void *x, int is_float32, int64_t tokens, int64_t heads, int64_t dim, int64_t token_stride,
                   int64_t head_stride, const float *cos, int64_t cos_stride, const float *sin, int64_t sin_stride) {
    const int64_t half = dim / 2;
    #pragma omp parallel for schedule(static) if (tokens * heads * dim > LEAST_WORK)
    for (int64_t token = 0; token < tokens; token++) {
        const float *const c = cos + token * cos_stride, *const s = sin + token * sin_stride;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                const int count = half - i < LANES ? (int)(half - i) : LANES;
                const int64_t at = token * token_stride + head * head_stride + i;
                const Vector a = load(x, at, count, is_float32), b = load(x, at + half, count, is_float32);
                store(x, at, count, is_float32, a * load(c, i, count, 1) + b * load(s, i, count, 1));
                store(x, at + half, count, is_float32,
                      b * load(c, i + half, count, 1) + a * load(s, i + half, count, 1));
            }
    }
}

/* out (rows, n) = gate * sigmoid(alpha gate) * up, of gate_up (rows, 2 n): silu(gate) * up with alpha = 1. limit: if it
   is not 0, of gate, and of up in both directions, and up is one more. */
void native_silu_mul(const void *gate_up, void *out, int is_float32, int64_t rows, int64_t n, float alpha, float limit) {
    #pragma omp parallel for schedule(static) if (rows * n > LEAST_WORK)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < n; at += LANES) {
            const int count = n - at < LANES ? (int)(n - at) : LANES;
            Vector gate = load(gate_up, 2 * row * n + at, count, is_float32);
            Vector up = load(gate_up, (2 * row + 1) * n + at, count, is_float32);
            if (limit > 0) {
                gate = choose(gate > limit, all(limit), gate);
                up = choose(up > limit, all(limit), choose(up < -limit, all(-limit), up)) + 1.0f;
            }
            const Vector small = exponential((Vector)((Words)(gate * alpha) | 0x80000000));  /* e^-|alpha gate| */
            const Vector sigmoid = choose(gate < 0.0f, small, all(1.0f)) / (small + 1.0f);
            store(out, row * n + at, count, is_float32, gate * sigmoid * up);
        }
}
