/* What a linear layer takes; see linear.c. */
#ifndef PDSERVE_LINEAR_H
#define PDSERVE_LINEAR_H

#include "simd.h"

typedef struct {
    const float *x; /* [rows][in], rows ldx floats apart */
    const char *w;  /* packed, out padded to a multiple of 16 */
    const float *bias; /* padded like w, or null */
    float *y; /* [rows][out] */
    long ldx, rows, in, out, is_bf16, threads;
} linear_args;

int linear_forward(const linear_args *a);

#endif
