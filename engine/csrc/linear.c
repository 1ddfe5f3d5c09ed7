/* Linear layers: y = x w^T + bias in fp32, weights packed as [out / 16][in][16] in bf16 or fp32. */
#include "simd.h"

typedef struct {
    const float *x; /* [rows][in], rows ldx floats apart */
    const char *w;  /* packed, out padded to a multiple of 16 */
    const float *bias; /* padded like w, or null */
    float *y; /* [rows][out] */
    long ldx, rows, in, out, is_bf16;
} linear_args;

#define AHEAD 1024 /* bytes of weights: the hardware's own prefetch stops at every memory page */
#define BLOCK_BYTES (192 * 1024) /* of x: stays in the second-level cache while all weights pass by */

INLINE void run_tile(const linear_args *a, const int rows, const int groups, long row, long first, const int is_bf16) {
    long row_bytes = GROUP * (is_bf16 ? 2 : 4), panel_bytes = a->in * row_bytes;
    const char *w[4], *ahead[4];
    tile t;
    UNROLL for (int g = 0; g < groups; g++) {
        w[g] = a->w + (first + g) * panel_bytes;
        ahead[g] = w[g] + AHEAD;
    }
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int g = 0; g < groups; g++) {
        UNROLL for (int i = 0; i < PARTS; i++)
            t.at[m * groups + g].part[i] = a->bias ? load(a->bias + (first + g) * GROUP + i * LANES) : splat(0.0f);
    }
    accumulate(&t, rows, groups, a->in, a->x + row * a->ldx, a->ldx, w, ahead, row_bytes, is_bf16);
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int g = 0; g < groups; g++) {
        float *y = a->y + (row + m) * a->out + (first + g) * GROUP;
        long left = a->out - (first + g) * GROUP;
        if (left >= GROUP) {
            UNROLL for (int i = 0; i < PARTS; i++) store(y + i * LANES, t.at[m * groups + g].part[i]);
        } else {
            group rest = t.at[m * groups + g];
            memcpy(y, &rest, left * sizeof(float));
        }
    }
}

INLINE void run_block(const linear_args *a, long begin, long end, const int is_bf16) {
    long panels = (a->out + GROUP - 1) / GROUP;
    for (long first = 0; first < panels;) {
        int rows = next_rows(end - begin), done = 1;
        for (long row = begin; row < end; row += rows) {
            rows = next_rows(end - row);
            int wide = end - begin <= 3; /* several panels at once only where one tile takes all rows */
#define TILE(m, g) (run_tile(a, m, g, row, first, is_bf16), done = g)
            FOR_TILE(TILE, rows, wide || LANES == 16 ? panels - first : 1)
#undef TILE
        }
        first += done;
    }
}

/* 0. */
int linear_forward(const linear_args *a) {
    long block = BLOCK_BYTES / (a->in * (long)sizeof(float)) / MAX_ROWS * MAX_ROWS;
    if (block < MAX_ROWS) block = MAX_ROWS;
    for (long begin = 0; begin < a->rows; begin += block) {
        long end = begin + block < a->rows ? begin + block : a->rows;
        if (a->is_bf16) run_block(a, begin, end, 1);
        else run_block(a, begin, end, 0);
    }
    return 0;
}
