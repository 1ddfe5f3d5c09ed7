/* Linear layers: y = x w^T + bias in fp32, weights packed as [out / 16][in][16] in bf16 or fp32. */
#include "linear.h"
#include "threads.h"

#define AHEAD 1024 /* bytes of weights, times rows: the hardware's own prefetch stops at every memory page */
#define ITEMS_PER_THREAD 4 /* so that none waits long for another */
#define DEPTH 256 /* inputs that are summed by themselves: long sums in one piece lose digits, ten times as many at 2048 */
#define BLOCK_BYTES (256 * 1024) /* of x: stays in the second-level cache while all weights pass by */

/* Rows `row`.. times panels `first`..; of the `tiles` that read the same panels this is number `number`, and fetches its part of the next. */
INLINE void run_tile(const linear_args *a, const int rows, const int groups, long row, long first, long number, long tiles,
                     const int is_bf16) {
    long row_bytes = GROUP * (is_bf16 ? 2 : 4), panel_bytes = a->in * row_bytes;
    stream w = {.step = row_bytes, .step_ahead = row_bytes / tiles};
    tile sum;
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int g = 0; g < groups; g++) {
        UNROLL for (int i = 0; i < PARTS; i++)
            sum.at[m * groups + g].part[i] = a->bias ? load(a->bias + (first + g) * GROUP + i * LANES) : splat(0.0f);
    }
    for (long begin = 0; begin < a->in; begin += DEPTH) {
        long depth = a->in - begin < DEPTH ? a->in - begin : DEPTH;
        tile t;
        UNROLL for (int g = 0; g < groups; g++) {
            w.at[g] = a->w + (first + g) * panel_bytes + begin * row_bytes;
            w.ahead[g] = tiles == 1 ? w.at[g] + AHEAD * rows
                                    : a->w + (first + groups + g) * panel_bytes + (number * a->in + begin) * w.step_ahead;
        }
        UNROLL for (int j = 0; j < rows * groups; j++) UNROLL for (int i = 0; i < PARTS; i++) t.at[j].part[i] = splat(0.0f);
        accumulate(&t, rows, groups, depth, a->x + row * a->ldx + begin, a->ldx, &w, is_bf16);
        UNROLL for (int j = 0; j < rows * groups; j++) UNROLL for (int i = 0; i < PARTS; i++)
            sum.at[j].part[i] += t.at[j].part[i];
    }
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int g = 0; g < groups; g++) {
        float *y = a->y + (row + m) * a->out + (first + g) * GROUP;
        long left = a->out - (first + g) * GROUP;
        if (left >= GROUP) {
            UNROLL for (int i = 0; i < PARTS; i++) store(y + i * LANES, sum.at[m * groups + g].part[i]);
        } else {
            group rest = sum.at[m * groups + g];
            memcpy(y, &rest, left * sizeof(float));
        }
    }
}

/* The rows begin..end of x times the panels first..last of weights. */
INLINE void run_block(const linear_args *a, long begin, long end, long first, long last, const int is_bf16) {
    long tiles = (end - begin + MAX_ROWS - 1) / MAX_ROWS;
    while (first < last) {
        int rows = next_rows(end - begin), done = 1, number = 0;
        for (long row = begin; row < end; row += rows, number++) {
            rows = next_rows(end - row);
            int wide = end - begin <= 3; /* several panels at once only where one tile takes all rows */
#define TILE(m, g) (run_tile(a, m, g, row, first, number, tiles, is_bf16), done = g)
            FOR_TILE(TILE, rows, wide || LANES == 16 ? last - first : 1)
#undef TILE
        }
        first += done;
    }
}

/* Take items, each a block of rows times a part of the panels, until none is left. */
static void run_items(const linear_args *a, long block_rows, long parts, long *next) {
    long blocks = (a->rows + block_rows - 1) / block_rows, panels = (a->out + GROUP - 1) / GROUP;
    long quads = (panels + 3) / 4; /* as many as the widest tile spans */
    for (long item = take(next); item < blocks * parts; item = take(next)) {
        long begin = item / parts * block_rows, part = item % parts;
        long end = begin + block_rows < a->rows ? begin + block_rows : a->rows;
        long first = quads * part / parts * 4, last = quads * (part + 1) / parts * 4;
        if (last > panels) last = panels;
        if (a->is_bf16) run_block(a, begin, end, first, last, 1);
        else run_block(a, begin, end, first, last, 0);
    }
}

/* Rows of a block: all blocks of nearly equal height, in whole tiles. */
static long blocked(const linear_args *a) {
    long most = BLOCK_BYTES / (a->in * (long)sizeof(float)) / MAX_ROWS * MAX_ROWS;
    if (most < MAX_ROWS) most = MAX_ROWS;
    long blocks = (a->rows + most - 1) / most, rows = blocks ? (a->rows + blocks - 1) / blocks : 1;
    return (rows + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
}

/* 0. */
int linear_forward(const linear_args *a) {
    long block_rows = blocked(a), next = 0;
    long threads = team(a->threads, 2.0 * a->rows * a->in * a->out), blocks = (a->rows + block_rows - 1) / block_rows;
    long parts = threads == 1 ? 1 : (threads * ITEMS_PER_THREAD + blocks - 1) / blocks;
    if (threads == 1) run_items(a, block_rows, 1, &next);
    else {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
        for (long thread = 0; thread < threads; thread++) run_items(a, block_rows, parts, &next);
    }
    return 0;
}
