/* What the row-wise routines take; see ops.c. */
#ifndef PDSERVE_OPS_H
#define PDSERVE_OPS_H

#include "simd.h"

typedef struct {
    const float *x, *weight; /* [rows][n], rows ldx floats apart; [n] */
    float *y;                /* [rows][n] */
    long ldx, rows, n;
    float eps;
} rms_norm_args;

typedef struct {
    float *x;            /* [rows][heads][dim], rows ldx floats apart, in place */
    const float *weight; /* [heads][dim] */
    long ldx, rows, heads, dim;
    float eps;
} norm_heads_args;

typedef struct {
    const float *gate_up; /* [rows][2 n], rows ldx floats apart */
    float *y;             /* [rows][n] */
    long ldx, rows, n;
} gate_mul_args;

typedef struct {
    float *x;                 /* [rows][heads][dim], rows ldx floats apart, in place; the first 2 half of dim turn */
    const float *cos, *sin;   /* [window][half] */
    const int32_t *positions; /* [rows] */
    long ldx, rows, heads, dim, half, window;
} rotate_args;

int rms_norm(const rms_norm_args *a);
int norm_heads(const norm_heads_args *a);
int silu_mul(const gate_mul_args *a);
int gelu_mul(const gate_mul_args *a);
int rotate(const rotate_args *a);

#endif
