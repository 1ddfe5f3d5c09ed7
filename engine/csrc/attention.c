/* Causal attention over pages, online softmax.
 *
 * The query heads that share a KV head go together ("queries": a row's heads behind one another), several rows of a sequence in one strip.
 * Keys are taken in blocks of 64 tokens counted from position 0; a query sees its blocks in order, and in its last block only the tokens up
 * to its own position: rows whose block is not full are computed one by one, so that nothing behind a row is ever added to it, garbage
 * and NaN in unused slots included. Where a layer's reach is limited, a query skips the blocks that lie wholly before it, and in its first
 * block the weights of the tokens before it are 0. What a query goes through is thus a function of its position alone.
 */
#include <stdlib.h>

#include "pages.h"
#include "threads.h"

#define BLOCK 64
#define BLOCK_GROUPS (BLOCK / GROUP)
#define STRIP 48 /* queries */

typedef struct { /* of a strip; all but `scores` live while blocks pass */
    float *q;            /* [queries][head_dim], scaled so that weights are powers of 2 */
    float *out;          /* [queries][head_dim], not yet divided by the sum of weights */
    float (*scores)[BLOCK];
    float *max, *shrink; /* [queries]: largest score so far; factor for what was summed before it */
    group *sum;          /* [queries]: weights so far, by token modulo 16 */
    long position, shared; /* of its first row; queries of a row */
} strip;

typedef struct { /* tokens that some queries of a strip look at */
    const char *keys[BLOCK_GROUPS], *values[BLOCK_GROUPS];
    const char *next_keys[BLOCK_GROUPS], *next_values[BLOCK_GROUPS]; /* of the block after it: pages lie far apart in memory */
    long start; /* position of the first of them */
    int tokens, groups;
} block;

/* The first position that the row at `position` sees. */
INLINE long first_seen(const attend_args *a, long position) {
    return a->reach && position >= a->reach ? position - a->reach + 1 : 0;
}

/* Where K and V of the 16 tokens from `token` on lie. */
INLINE void find_group(const attend_args *a, long sequence, long kv_head, long token, const char **keys, const char **values) {
    const pages_args *at = &a->at;
    uint32_t index = (uint32_t)token / (uint32_t)at->page_tokens; /* half as long as in 64 bits, and there are many */
    long bytes = element_bytes(at), slot = token - (long)index * at->page_tokens;
    long page = at->page_table[sequence * at->max_pages + index];
    *keys = page_part(at, page, 0, kv_head) + slot * bytes;
    *values = page_part(at, page, 1, kv_head) + slot * at->head_dim * bytes;
}

/* The tokens from `start` to `end`, at most a block of them; `length` is how many tokens there are in all.
 * After the last ones the next KV head's first are read, and after those of the last head the next sequence's. */
INLINE block find_block(const attend_args *a, long sequence, long kv_head, long start, long end, long length) {
    long tokens = end - start < BLOCK ? end - start : BLOCK, next_start = start + BLOCK, next_sequence = sequence, next_head = kv_head;
    block b = {.start = start, .tokens = (int)tokens, .groups = (int)((tokens + GROUP - 1) / GROUP)};
    if (next_start >= length) {
        if (++next_head == a->at.kv_heads) next_head = 0, next_sequence = sequence + 1 < a->at.sequences ? sequence + 1 : sequence;
        long last = a->at.positions[a->at.row_starts[next_sequence + 1] - 1];
        next_start = first_seen(a, a->at.positions[a->at.row_starts[next_sequence]]) / BLOCK * BLOCK;
        length = last + 1;
    }
    for (int g = 0; g < b.groups; g++) {
        long next = next_start + g * GROUP;
        find_group(a, sequence, kv_head, start + g * GROUP, &b.keys[g], &b.values[g]);
        find_group(a, next_sequence, next_head, next < length ? next : next_start, &b.next_keys[g], &b.next_values[g]);
    }
    return b;
}

INLINE void score_tile(const attend_args *a, strip *s, const block *b, const int rows, const int groups, long query,
                       int first, const int is_bf16) {
    long dim = a->at.head_dim;
    tile t;
    UNROLL for (int j = 0; j < rows * groups; j++) UNROLL for (int i = 0; i < PARTS; i++) t.at[j].part[i] = splat(0.0f);
    long step = a->at.page_tokens * (is_bf16 ? 2 : 4);
    stream keys = {.step = step, .step_ahead = step};
    UNROLL for (int g = 0; g < groups; g++) keys.at[g] = b->keys[first + g], keys.ahead[g] = b->next_keys[first + g];
    accumulate(&t, rows, groups, dim, s->q + query * dim, dim, &keys, is_bf16);
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int g = 0; g < groups; g++) UNROLL for (int i = 0; i < PARTS; i++)
        store(&s->scores[query + m][(first + g) * GROUP + i * LANES], t.at[m * groups + g].part[i]);
}

/* The largest score of a row, and of the blocks before it. */
INLINE float largest(const float *row, int groups, float top) {
    vf lanes = splat(top);
    for (int i = 0; i < groups * GROUP; i += LANES) lanes = max_f(load(row + i), lanes);
    return max_lane(lanes);
}

/* Turn the scores of one query into weights 2^(score - max), and keep the running maximum and sum. */
INLINE void weigh(const attend_args *a, strip *s, const block *b, long query) {
    float *row = s->scores[query];
    long unseen = a->reach ? first_seen(a, s->position + query / s->shared) - b->start : 0;
    for (long i = 0; i < unseen; i++) row[i] = -INFINITY;
    for (int i = b->tokens; i < b->groups * GROUP; i++) row[i] = -INFINITY;
    vf top = splat(largest(row, b->groups, s->max[query])), shrink = exp2_f(splat(s->max[query]) - top);
    group sum = s->sum[query];
    UNROLL for (int i = 0; i < PARTS; i++) sum.part[i] = sum.part[i] * shrink;
    for (int g = 0; g < b->groups; g++) UNROLL for (int i = 0; i < PARTS; i++) {
        float *at = row + g * GROUP + i * LANES;
        vf weight = exp2_f(load(at) - top);
        store(at, weight);
        sum.part[i] += weight;
    }
    s->sum[query] = sum;
    s->max[query] = top[0];
    s->shrink[query] = shrink[0];
}

INLINE void value_tile(const attend_args *a, strip *s, const block *b, const int rows, const int groups, long query,
                       long first, const int is_bf16) {
    long dim = a->at.head_dim, bytes = is_bf16 ? 2 : 4;
    float *out = s->out + query * dim + first * GROUP;
    tile t;
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int j = 0; j < groups * PARTS; j++)
        t.at[m * groups + j / PARTS].part[j % PARTS] = load(out + m * dim + j * LANES) * splat(s->shrink[query + m]);
    for (int n = 0; n < b->groups; n++) {
        stream values = {.step = dim * bytes, .step_ahead = dim * bytes};
        int tokens = b->tokens - n * GROUP < GROUP ? b->tokens - n * GROUP : GROUP;
        UNROLL for (int g = 0; g < groups; g++) {
            values.at[g] = b->values[n] + (first + g) * GROUP * bytes;
            values.ahead[g] = b->next_values[n] + (first + g) * GROUP * bytes;
        }
        accumulate(&t, rows, groups, tokens, s->scores[query] + n * GROUP, BLOCK, &values, is_bf16);
    }
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int j = 0; j < groups * PARTS; j++)
        store(out + m * dim + j * LANES, t.at[m * groups + j / PARTS].part[j % PARTS]);
}

INLINE void attend_block_as(const attend_args *a, strip *s, const block *b, long begin, long end, const int is_bf16) {
    int rows, done = 1;
    for (long query = begin; query < end; query += rows) {
        rows = next_rows(end - query);
        for (int first = 0; first < b->groups; first += done) {
#define TILE(m, g) (score_tile(a, s, b, m, g, query, first, is_bf16), done = g)
            FOR_TILE(TILE, rows, b->groups - first)
#undef TILE
        }
        for (int m = 0; m < rows; m++) weigh(a, s, b, query + m);
        long groups = a->at.head_dim / GROUP;
        for (long first = 0; first < groups; first += done) {
#define TILE(m, g) (value_tile(a, s, b, m, g, query, first, is_bf16), done = g)
            FOR_TILE(TILE, rows, groups - first)
#undef TILE
        }
    }
}

/* One block for the queries begin..end of a strip. */
static void attend_block(const attend_args *a, strip *s, const block *b, long begin, long end) {
    if (a->at.is_bf16) attend_block_as(a, s, b, begin, end, 1);
    else attend_block_as(a, s, b, begin, end, 0);
}

static void begin_strip(const attend_args *a, strip *s, long row, long rows, long kv_head) {
    long dim = a->at.head_dim, shared = a->heads / a->at.kv_heads;
    float scale = (float)(1.4426950408889634 * a->scale); /* log2(e): weights are powers of 2 */
    s->position = a->at.positions[row];
    s->shared = shared;
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < shared * dim; i++)
            s->q[r * shared * dim + i] = a->q[(row + r) * a->ldq + kv_head * shared * dim + i] * scale;
    memset(s->out, 0, rows * shared * dim * sizeof(float));
    memset(s->sum, 0, rows * shared * sizeof(group));
    for (long i = 0; i < rows * shared; i++) s->max[i] = -INFINITY;
}

static void end_strip(const attend_args *a, const strip *s, long row, long rows, long kv_head) {
    long dim = a->at.head_dim, shared = a->heads / a->at.kv_heads;
    for (long query = 0; query < rows * shared; query++) {
        float sum = sum_group(s->sum[query]);
        long head = kv_head * shared + query % shared;
        float *out = a->out + ((row + query / shared) * a->heads + head) * dim;
        for (long d = 0; d < dim; d++) out[d] = s->out[query * dim + d] / sum;
    }
}

static void attend_strip(const attend_args *a, strip *s, long sequence, long row, long rows, long kv_head) {
    long shared = a->heads / a->at.kv_heads, position = a->at.positions[row];
    begin_strip(a, s, row, rows, kv_head);
    for (long start = first_seen(a, position) / BLOCK * BLOCK; start < position + rows; start += BLOCK) {
        long seeing = a->reach ? start + BLOCK - 1 + a->reach - position : rows; /* rows that see some of the block */
        if (seeing > rows) seeing = rows;
        long full = start + BLOCK - 1 - position; /* first row that sees the whole block */
        full = full < 0 ? 0 : full < rows ? full : rows;
        for (long r = start > position ? start - position : 0; r < full; r++) {
            block b = find_block(a, sequence, kv_head, start, position + r + 1, position + r + 1);
            attend_block(a, s, &b, r * shared, (r + 1) * shared);
        }
        if (full >= seeing) continue;
        block b = find_block(a, sequence, kv_head, start, start + BLOCK, position + rows);
        attend_block(a, s, &b, full * shared, seeing * shared);
    }
    end_strip(a, s, row, rows, kv_head);
}

/* Take strips of all sequences and KV heads until none is left; late rows first, because they see the most keys. */
static void attend_strips(const attend_args *a, strip s, long strip_rows, long *next) {
    long item = 0, mine = take(next);
    for (long sequence = 0; sequence < a->at.sequences; sequence++) {
        long begin = a->at.row_starts[sequence], end = a->at.row_starts[sequence + 1];
        for (long kv_head = 0; kv_head < a->at.kv_heads; kv_head++)
            for (long row = begin + (end - begin - 1) / strip_rows * strip_rows; row >= begin; row -= strip_rows, item++) {
                if (item != mine) continue;
                attend_strip(a, &s, sequence, row, end - row < strip_rows ? end - row : strip_rows, kv_head);
                mine = take(next);
            }
    }
}

/* The parts of a strip in its memory. */
static strip lay_out(float *memory, long queries, long vectors) {
    strip s = {.scores = (float (*)[BLOCK])memory, .sum = (group *)(memory + queries * BLOCK)};
    s.q = memory + queries * (BLOCK + GROUP);
    s.out = s.q + vectors;
    s.max = s.out + vectors;
    s.shrink = s.max + queries;
    return s;
}

/* Floating-point operations of a call. */
static double work_of(const attend_args *a) {
    double keys = 0;
    for (long s = 0; s < a->at.sequences; s++) {
        long begin = a->at.row_starts[s], end = a->at.row_starts[s + 1];
        double seen = 0.5 * (a->at.positions[begin] + a->at.positions[end - 1]);
        keys += (end - begin) * (a->reach && seen > a->reach ? a->reach : seen);
    }
    return 4.0 * keys * a->heads * a->at.head_dim;
}

/* 0; -1 when the page table is wrong; -2 without memory. */
int attend(const attend_args *a) {
    if (!pages_valid(&a->at)) return -1;
    long shared = a->heads / a->at.kv_heads, strip_rows = shared < STRIP ? STRIP / shared : 1;
    long queries = shared * strip_rows, vectors = queries * a->at.head_dim;
    long floats = (queries * (BLOCK + GROUP + 2) + vectors * 2 + 15) / 16 * 16, threads = team(a->threads, work_of(a)), next = 0;
    float *memory = aligned_alloc(64, threads * floats * sizeof(float));
    if (!memory) return -2;
    if (threads == 1) attend_strips(a, lay_out(memory, queries, vectors), strip_rows, &next);
    else {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
        for (long thread = 0; thread < threads; thread++)
            attend_strips(a, lay_out(memory + thread * floats, queries, vectors), strip_rows, &next);
    }
    free(memory);
    return 0;
}
