/* Decode attention over a paged KV pool: new K and V are stored, then each query attends to its sequence.

   Queries, KV heads and KV splits of long sequences are divided among OpenMP's threads, as many as torch uses. A
   query's numbers are added up in one order, whatever shares its step and however many threads there are. All
   arithmetic is in float32. */

#include <stdlib.h>

#include "vectors.h"

enum { KEYS = 16, MAX_VECTORS = 16, MAX_GROUP = 64 };
enum { PART = 512, LEAST_WORK = 1 << 16 };  /* keys of a KV split; multiplications worth a second thread */
typedef Vector Wide[KEYS][MAX_VECTORS];

/* (blocks, layers, 2, kv_heads, block_size, head_dim); strides in numbers, which are float32 or bfloat16. */
typedef struct {
    void *numbers;
    int64_t block_stride, layer_stride, kv_heads, block_size, head_dim, num_heads, is_float32;
    float scale;
} Pool;

/* tokens: of the step, one for each query; their new K and V go to (blocks, offsets). tables: block ids of all
   sequences, of which a query's begin at `starts`. lengths: keys that each sees. */
typedef struct {
    int64_t num_queries;
    const int64_t *tokens, *blocks, *offsets, *tables, *starts, *lengths;
} Queries;

INLINE float largest(const Vector *of, int64_t count) {
    Vector most = of[0];
    for (int64_t k = 1; k < count; k++) most = choose(of[k] > most, of[k], most);
    float found = most[0];
    for (int lane = 1; lane < LANES; lane++) found = most[lane] > found ? most[lane] : found;
    return found;
}

/* The sums of 16 vectors: lane i is that of vector i. */
INLINE Vector sums_of(Vector of[LANES]) {
#define FOLD(width, first, second)                                                        \
    for (int i = 0; i < width; i++) {                                                     \
        const Vector a = of[i], b = of[i + width];                                        \
        of[i] = __builtin_shuffle(a, b, (Ints)first) + __builtin_shuffle(a, b, (Ints)second); \
    }
    FOLD(8, ((Ints){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
         ((Ints){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
    FOLD(4, ((Ints){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
         ((Ints){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    FOLD(2, ((Ints){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
         ((Ints){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    FOLD(1, ((Ints){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
         ((Ints){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
#undef FOLD
    return of[0];
}

INLINE void *plane(const Pool *pool, int64_t layer, int64_t block, int64_t which, int64_t head) {
    const int64_t heads = block * pool->block_stride + layer * pool->layer_stride;
    const int64_t at = heads + (which * pool->kv_heads + head) * pool->block_size * pool->head_dim;
    return (char *)pool->numbers + at * (pool->is_float32 ? 4 : 2);
}

/* Keys, or values, of up to KEYS tokens that follow each other, in float32; zeros for those that are missing. What has
   their place in `next` is prefetched: blocks are far apart, so that the hardware does not foresee it. */
INLINE void widen(const void *numbers, const void *next, int64_t at, int count, const int is_float32, const int dim,
                  Wide wide) {
    const int bytes = dim * (is_float32 ? 4 : 2);
    for (int k = 0; k < KEYS; k++) {
        for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char *)next + (at + k) * bytes + byte);
        for (int v = 0; v < vectors_of(dim); v++)
            wide[k][v] = k < count ? load(numbers, (at + k) * dim + LANES * v, width(v, dim), is_float32) : (Vector){};
    }
}

/* One query of all heads that share a KV head, and `length` keys whose blocks `table` has. scores: (group, stride), with
   KEYS in each vector. partial: (group, vectors of a head + 1) for the result of a KV split: weighted values, then the
   largest score and the sum of weights. NULL: the keys are the whole sequence. */
typedef struct {
    const Pool *pool;
    int64_t layer, head, length, group, stride;
    const int64_t *table;
    Vector *scores, *partial;
} Work;

/* The block after the one in which `first` lies; after the last, the first one of the plane that is read then. */
INLINE const void *block_after(const Work *work, int64_t which, int64_t first) {
    const int64_t size = work->pool->block_size, is_last = first + size >= work->length;
    const int64_t block = work->table[is_last ? 0 : first / size + 1];
    return plane(work->pool, work->layer, block, which | is_last, work->head);
}

INLINE void score(const Work *work, const void *q, const int is_float32, const int dim) {
    const int vectors = vectors_of(dim);
    const int64_t size = work->pool->block_size;
    Wide wide;
    for (int64_t first = 0; first < work->length; first += size) {
        const void *const keys = plane(work->pool, work->layer, work->table[first / size], 0, work->head);
        const void *const next = block_after(work, 0, first);
        const int64_t count = work->length - first < size ? work->length - first : size;
        for (int64_t at = 0; at < count; at += KEYS) {
            const int some = count - at < KEYS ? (int)(count - at) : KEYS;
            widen(keys, next, at, some, is_float32, dim, wide);
            for (int64_t g = 0; g < work->group; g++) {
                Vector mine[MAX_VECTORS] = {}, products[KEYS];
                for (int v = 0; v < vectors; v++)
                    mine[v] = load(q, g * dim + LANES * v, width(v, dim), is_float32) * work->pool->scale;
                #pragma GCC unroll 16
                for (int k = 0; k < KEYS; k++) {
                    products[k] = mine[0] * wide[k][0];
                    for (int v = 1; v < vectors; v++) products[k] += mine[v] * wide[k][v];
                }
                const Vector sums = sums_of(products);
                memcpy((float *)(work->scores + g * work->stride) + first + at, &sums, sizeof(float) * some);
            }
        }
    }
}

/* Scores become weights, which have yet to be divided by the sum that is returned. most: the largest score. */
INLINE float weights_of(Vector *scores, int64_t length, int64_t stride, float *most) {
    float *const flat = (float *)scores, total = 0;
    for (int64_t k = length; k < stride * KEYS; k++) flat[k] = flat[0];
    *most = largest(scores, stride);
    for (int64_t k = 0; k < stride; k++) scores[k] = exponential(scores[k] - *most);
    for (int64_t k = length; k < stride * KEYS; k++) flat[k] = 0;
    Vector sum = {};
    for (int64_t k = 0; k < stride; k++) sum += scores[k];
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
}

INLINE void weigh(const Work *work, Vector weighted[][MAX_VECTORS], const int is_float32, const int dim) {
    const int vectors = vectors_of(dim);
    const int64_t size = work->pool->block_size;
    Wide wide;
    for (int64_t first = 0; first < work->length; first += size) {
        const void *const values = plane(work->pool, work->layer, work->table[first / size], 1, work->head);
        const void *const next = block_after(work, 1, first);
        const int64_t count = work->length - first < size ? work->length - first : size;
        for (int64_t at = 0; at < count; at += KEYS) {
            const int some = count - at < KEYS ? (int)(count - at) : KEYS;
            widen(values, next, at, some, is_float32, dim, wide);
            for (int64_t g = 0; g < work->group; g++) {
                float weights[KEYS] = {};
                memcpy(weights, (float *)(work->scores + g * work->stride) + first + at, sizeof(float) * some);
                Vector even[MAX_VECTORS], odd[MAX_VECTORS];  /* twice as many sums: each waits for its last addition */
                for (int v = 0; v < vectors; v++) even[v] = weighted[g][v], odd[v] = (Vector){};
                #pragma GCC unroll 8
                for (int k = 0; k < KEYS; k += 2)
                    for (int v = 0; v < vectors; v++) {
                        even[v] += wide[k][v] * weights[k];
                        odd[v] += wide[k + 1][v] * weights[k + 1];
                    }
                for (int v = 0; v < vectors; v++) weighted[g][v] = even[v] + odd[v];
            }
        }
    }
}

INLINE void attend_one(const Work *work, const void *q, void *out, const int is_float32, const int dim) {
    const int vectors = vectors_of(dim);
    Vector weighted[MAX_GROUP][MAX_VECTORS];
    float totals[MAX_GROUP], most[MAX_GROUP];
    score(work, q, is_float32, dim);
    for (int64_t g = 0; g < work->group; g++) {
        totals[g] = weights_of(work->scores + g * work->stride, work->length, work->stride, most + g);
        for (int v = 0; v < vectors; v++) weighted[g][v] = (Vector){};
    }
    weigh(work, weighted, is_float32, dim);
    for (int64_t g = 0; g < work->group; g++) {
        if (work->partial != NULL) {
            Vector *const partial = work->partial + g * (vectors + 1);
            for (int v = 0; v < vectors; v++) partial[v] = weighted[g][v];
            partial[vectors] = (Vector){most[g], totals[g]};
            continue;
        }
        for (int v = 0; v < vectors; v++)
            store(out, g * dim + LANES * v, width(v, dim), is_float32, weighted[g][v] / totals[g]);
    }
}

/* Combine the partials of `count` KV splits in their order, and store the result. partials: (count, group, vectors + 1). */
static void merge(const Pool *pool, const Vector *partials, int64_t count, int64_t group, void *out) {
    const int dim = (int)pool->head_dim, vectors = vectors_of(dim);
    const int64_t stride = group * (vectors + 1);
    for (int64_t g = 0; g < group; g++, partials += vectors + 1) {
        float most = partials[vectors][0], total = 0;
        for (int64_t part = 1; part < count; part++) {
            const float other = partials[part * stride + vectors][0];
            most = other > most ? other : most;
        }
        Vector weighted[MAX_VECTORS] = {};
        for (int64_t part = 0; part < count; part++) {
            const Vector *const of = partials + part * stride;
            const float share = exponential(all(of[vectors][0] - most))[0];
            total += share * of[vectors][1];
            for (int v = 0; v < vectors; v++) weighted[v] += of[v] * share;
        }
        for (int v = 0; v < vectors; v++)
            store(out, g * dim + LANES * v, width(v, dim), (int)pool->is_float32, weighted[v] / total);
    }
}

typedef void (*Attend)(const Work *, const void *q, void *out);

/* One function for each width that is usual, so that a head's numbers stay in registers. */
#define ATTEND(name, is_float32, dim) \
    static void name(const Work *work, const void *q, void *out) { attend_one(work, q, out, is_float32, dim); }
ATTEND(bfloat16_64, 0, 64)
ATTEND(bfloat16_128, 0, 128)
ATTEND(bfloat16_any, 0, (int)work->pool->head_dim)
ATTEND(float32_any, 1, (int)work->pool->head_dim)

static Attend function_for(const Pool *pool) {
    if (pool->is_float32) return float32_any;
    return pool->head_dim == 64 ? bfloat16_64 : pool->head_dim == 128 ? bfloat16_128 : bfloat16_any;
}

int native_supports(const Pool *pool) {
    return pool->head_dim <= LANES * MAX_VECTORS && pool->num_heads / pool->kv_heads <= MAX_GROUP;
}

static void store_kv(const Pool *pool, int64_t layer, const Queries *queries, int64_t i, const void *kv, int64_t stride) {
    const int64_t token = queries->tokens[i], bytes = pool->head_dim * (pool->is_float32 ? 4 : 2);
    const char *const heads = (const char *)kv + token * stride * (pool->is_float32 ? 4 : 2);
    for (int64_t j = 0; j < 2 * pool->kv_heads; j++) {
        char *const to = plane(pool, layer, queries->blocks[token], j / pool->kv_heads, j % pool->kv_heads);
        memcpy(to + queries->offsets[token] * bytes, heads + j * bytes, bytes);
    }
}

/* Store the K and V of the queries' tokens, then attend. q: (tokens, num_heads, head_dim), kv: (tokens, 2, kv_heads,
   head_dim), whose tokens are so many numbers apart; out: (queries, num_heads, head_dim). Returns 0 when there is no
   memory for scores. */
int native_attend(const Pool *pool, int64_t layer, const Queries *queries, const void *q, int64_t q_stride,
                  const void *kv, int64_t kv_stride, void *out) {
    const int64_t size = pool->is_float32 ? 4 : 2, dim = pool->head_dim, group = pool->num_heads / pool->kv_heads;
    const int64_t per_part = pool->block_size < PART ? PART / pool->block_size * pool->block_size : pool->block_size;
    const Attend attend = function_for(pool);
    int64_t longest = 0, work = 0;
    for (int64_t i = 0; i < queries->num_queries; i++) {
        longest = queries->lengths[i] > longest ? queries->lengths[i] : longest;
        work += queries->lengths[i] * pool->num_heads * dim;
    }
    const int64_t num_parts = (longest + per_part - 1) / per_part, of_part = group * (vectors_of((int)dim) + 1);
    const int64_t num_partials = num_parts > 1 ? queries->num_queries * pool->kv_heads * num_parts : 0;
    const int64_t num_scores = group * (((longest < per_part ? longest : per_part) + KEYS - 1) / KEYS);
    Vector *const partials = aligned_alloc(sizeof(Vector), (num_partials * of_part + 1) * sizeof(Vector));
    int is_done = partials != NULL;
    #pragma omp parallel if (work > LEAST_WORK)
    {
        Vector *const scores = aligned_alloc(sizeof(Vector), num_scores * sizeof(Vector));
        if (scores == NULL) {
            #pragma omp atomic write
            is_done = 0;
        }
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < queries->num_queries; i++) store_kv(pool, layer, queries, i, kv, kv_stride);
        #pragma omp for collapse(3) schedule(dynamic) nowait
        for (int64_t i = 0; i < queries->num_queries; i++)
            for (int64_t head = 0; head < pool->kv_heads; head++)
                for (int64_t part = 0; part < num_parts; part++) {
                    const int64_t first = part * per_part, left = queries->lengths[i] - first;
                    if (!is_done || left <= 0) continue;
                    const int64_t length = left < per_part ? left : per_part, is_whole = queries->lengths[i] <= per_part;
                    const Work own = {
                        .pool = pool, .layer = layer, .head = head, .length = length, .group = group,
                        .stride = (length + KEYS - 1) / KEYS, .scores = scores,
                        .table = queries->tables + queries->starts[i] + first / pool->block_size,
                        .partial = is_whole ? NULL : partials + ((i * pool->kv_heads + head) * num_parts + part) * of_part,
                    };
                    attend(&own, (const char *)q + (queries->tokens[i] * q_stride + head * group * dim) * size,
                           (char *)out + (i * pool->num_heads + head * group) * dim * size);
                }
        free(scores);
        if (num_parts > 1) {
            #pragma omp barrier
            #pragma omp for collapse(2) schedule(static) nowait
            for (int64_t i = 0; i < queries->num_queries; i++)
                for (int64_t head = 0; head < pool->kv_heads; head++)
                    if (is_done && queries->lengths[i] > per_part)
                        merge(pool, partials + (i * pool->kv_heads + head) * num_parts * of_part,
                              (queries->lengths[i] + per_part - 1) / per_part, group,
                              (char *)out + (i * pool->num_heads + head * group) * dim * size);
        }
    }
    free(partials);
    return is_done;
}
