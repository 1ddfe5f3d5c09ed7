/* The row-wise routines between the linear layers. All of them treat an element, or a row, by itself. */
#include "simd.h"

typedef struct {
    const float *x, *weight; /* [rows][n], rows ldx floats apart; [n] */
    float *y;                /* [rows][n] */
    long ldx, rows, n;
    float eps;
} rms_norm_args;

/* Sum of squares: 16 running sums, then a tree. */
INLINE float sum_of_squares(const float *x, long n) {
    group sum = {0};
    long whole = n / GROUP * GROUP;
    float rest[GROUP] = {0};
    memcpy(rest, x + whole, (n - whole) * sizeof(float));
    for (long i = 0; i <= whole; i += GROUP) {
        const float *at = i < whole ? x + i : rest;
        UNROLL for (int p = 0; p < PARTS; p++) {
            vf value = load(at + p * LANES);
            sum.part[p] = fused(value, value, sum.part[p]);
        }
    }
    return sum_group(sum);
}

int rms_norm(const rms_norm_args *a) {
    for (long row = 0; row < a->rows; row++) {
        const float *x = a->x + row * a->ldx;
        float scale = 1.0f / sqrtf(sum_of_squares(x, a->n) / (float)a->n + a->eps);
        for (long i = 0; i < a->n; i++) a->y[row * a->n + i] = x[i] * scale * a->weight[i];
    }
    return 0;
}

typedef struct {
    const float *gate_up; /* [rows][2 n], rows ldx floats apart */
    float *y;             /* [rows][n] */
    long ldx, rows, n;
} silu_mul_args;

INLINE vf silu_times(vf gate, vf up) {
    vf power = exp2_f(gate * splat(-1.4426950408889634f));
    return gate / (splat(1.0f) + power) * up;
}

INLINE void silu_tail(const float *gate, const float *up, float *y, long left) {
    float g[LANES] = {0}, u[LANES] = {0};
    memcpy(g, gate, left * sizeof(float));
    memcpy(u, up, left * sizeof(float));
    store(g, silu_times(load(g), load(u)));
    memcpy(y, g, left * sizeof(float));
}

int silu_mul(const silu_mul_args *a) {
    for (long row = 0; row < a->rows; row++) {
        const float *gate = a->gate_up + row * a->ldx, *up = gate + a->n;
        float *y = a->y + row * a->n;
        long i = 0;
        for (; i + LANES <= a->n; i += LANES) store(y + i, silu_times(load(gate + i), load(up + i)));
        if (i < a->n) silu_tail(gate + i, up + i, y + i, a->n - i);
    }
    return 0;
}

typedef struct {
    float *x;                 /* [rows][heads][2 half], rows ldx floats apart, in place */
    const float *cos, *sin;   /* [window][half] */
    const int32_t *positions; /* [rows] */
    long ldx, rows, heads, half, window;
} rotate_args;

/* 0, or -1 when a position is not in the tables (then nothing is changed). */
int rotate(const rotate_args *a) {
    for (long row = 0; row < a->rows; row++)
        if (a->positions[row] < 0 || a->positions[row] >= a->window) return -1;
    for (long row = 0; row < a->rows; row++)
        for (long head = 0; head < a->heads; head++) {
            float *restrict x = a->x + row * a->ldx + head * 2 * a->half;
            const float *cos = a->cos + a->positions[row] * a->half, *sin = a->sin + a->positions[row] * a->half;
            for (long i = 0; i < a->half; i++) {
                float first = x[i], second = x[i + a->half];
                x[i] = first * cos[i] - second * sin[i];
                x[i + a->half] = second * cos[i] + first * sin[i];
            }
        }
    return 0;
}
