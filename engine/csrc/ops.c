/* The row-wise routines between the linear layers. All of them treat an element, or a row, by itself. */
#include "ops.h"

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

INLINE void norm_row(const float *x, const float *weight, float *y, long n, float eps) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

int rms_norm(const rms_norm_args *a) {
    for (long row = 0; row < a->rows; row++)
        norm_row(a->x + row * a->ldx, a->weight, a->y + row * a->n, a->n, a->eps);
    return 0;
}

int norm_heads(const norm_heads_args *a) {
    for (long row = 0; row < a->rows; row++)
        for (long head = 0; head < a->heads; head++) {
            float *x = a->x + row * a->ldx + head * a->dim;
            norm_row(x, a->weight + head * a->dim, x, a->dim, a->eps);
        }
    return 0;
}

/* silu(x) = x / (1 + e^-x), and gelu with its tanh form is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf gated(vf gate, vf up, const int is_gelu) {
    vf exponent = gate * splat(-1.4426950408889634f);
    if (is_gelu) exponent = gate * (splat(-2.302208198f) - splat(0.1029432397f) * gate * gate);
    return gate / (splat(1.0f) + exp2_f(exponent)) * up;
}

INLINE void gated_tail(const float *gate, const float *up, float *y, long left, const int is_gelu) {
    float g[LANES] = {0}, u[LANES] = {0};
    memcpy(g, gate, left * sizeof(float));
    memcpy(u, up, left * sizeof(float));
    store(g, gated(load(g), load(u), is_gelu));
    memcpy(y, g, left * sizeof(float));
}

INLINE void gate_mul(const gate_mul_args *a, const int is_gelu) {
    for (long row = 0; row < a->rows; row++) {
        const float *gate = a->gate_up + row * a->ldx, *up = gate + a->n;
        float *y = a->y + row * a->n;
        long i = 0;
        for (; i + LANES <= a->n; i += LANES) store(y + i, gated(load(gate + i), load(up + i), is_gelu));
        if (i < a->n) gated_tail(gate + i, up + i, y + i, a->n - i, is_gelu);
    }
}

int silu_mul(const gate_mul_args *a) {
    gate_mul(a, 0);
    return 0;
}

int gelu_mul(const gate_mul_args *a) {
    gate_mul(a, 1);
    return 0;
}

/* 0, or -1 when a position is not in the tables (then nothing is changed). */
int rotate(const rotate_args *a) {
    for (long row = 0; row < a->rows; row++)
        if (a->positions[row] < 0 || a->positions[row] >= a->window) return -1;
    for (long row = 0; row < a->rows; row++)
        for (long head = 0; head < a->heads; head++) {
            float *restrict x = a->x + row * a->ldx + head * a->dim;
            const float *cos = a->cos + a->positions[row] * a->half, *sin = a->sin + a->positions[row] * a->half;
            for (long i = 0; i < a->half; i++) {
                float first = x[i], second = x[i + a->half];
                x[i] = first * cos[i] - second * sin[i];
                x[i + a->half] = second * cos[i] + first * sin[i];
            }
        }
    return 0;
}
