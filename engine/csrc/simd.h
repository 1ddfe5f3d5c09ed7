/* Vectors for every CPU from one source, and the one inner loop that linear layers and attention share.
 *
 * Path-invariance by construction: an element of a result is summed in one fixed order by one lane, whatever the number of rows that are
 * computed beside it. Multiply-adds are fused explicitly (the compiler is told not to contract), so that every code path rounds alike, and
 * all sums that cross lanes are over groups of 16 in one order: bits do not even depend on the width of the CPU's vectors.
 */
#ifndef PDSERVE_SIMD_H
#define PDSERVE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LANES /* a test compiles other widths than the CPU's own and compares bits */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")
#define GROUP 16              /* neighbouring columns or tokens that are packed together */
#define PARTS (GROUP / LANES) /* vectors per group */
#define MAX_ROWS 6            /* rows of one register tile */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    vf part[PARTS];
} group;

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf splat(float x) { return x - (vf){}; }
/* Each lane of a mask is all ones or all zeros. */
INLINE vf select_f(vi mask, vf yes, vf no) {
#if LANES == 8 && defined(__AVX__)
    return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
#endif
}

/* a > b ? a : b */
INLINE vf max_f(vf a, vf b) {
#if LANES == 8 && defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_f(a > b, a, b);
#endif
}

/* The largest lane. */
INLINE float max_lane(vf x) {
    float v[LANES];
    memcpy(v, &x, sizeof v);
    UNROLL for (int step = LANES / 2; step > 0; step /= 2) {
        UNROLL for (int i = 0; i < step; i++) v[i] = v[i] > v[i + step] ? v[i] : v[i + step];
    }
    return v[0];
}

/* a * b + c, rounded once. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LANES == 4 && defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif LANES == 4 && defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* A packed group of 16 weights, keys or values as fp32. bf16 words hold element i in the low half and element i + 8 in the high half. */
INLINE group load_group(const char *p, int is_bf16) {
    group out;
    if (!is_bf16) {
        UNROLL for (int i = 0; i < PARTS; i++) out.part[i] = load((const float *)p + i * LANES);
        return out;
    }
    const uint32_t *words = (const uint32_t *)p;
#if LANES == 16
    typedef uint32_t half __attribute__((vector_size(32), aligned(4)));
    half low = *(const half *)words;
    vu both = __builtin_shufflevector(low, low, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vu shift = {16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};
    out.part[0] = (vf)((both << shift) & 0xffff0000u);
#else
    UNROLL for (int i = 0; i < PARTS / 2; i++) {
        vu both = *(const vu_any *)(words + i * LANES);
        out.part[i] = (vf)(both << 16);
        out.part[i + PARTS / 2] = (vf)(both & 0xffff0000u);
    }
#endif
    return out;
}

/* What the compiler has read through a pointer it must read again: a second load is free, a sum that finds no register is not. */
#define FORGET(pointer) __asm__ volatile("" : "+r"(pointer))

/* The register tile: rows x groups, where rows * groups is a constant for the compiler. */
typedef struct {
    group at[MAX_ROWS * 4];
} tile;

/* Weights, keys or values of a tile: for each group where they lie and what will be read after them, and bytes from one to the next. */
typedef struct {
    const char *at[4], *ahead[4];
    long step, step_ahead;
} stream;

/* tile[m][g] += x[m][k] * w[g][k], k in order; ldx in floats. */
INLINE void accumulate(tile *t, const int rows, const int groups, long depth, const float *x, long ldx, const stream *w,
                       const int is_bf16) {
    for (long k = 0; k < depth; k++) {
        UNROLL for (int g = 0; g < groups; g++) {
            __builtin_prefetch(w->ahead[g] + k * w->step_ahead);
            group weight = load_group(w->at[g] + k * w->step, is_bf16);
            const float *column = x + k;
            FORGET(column);
            UNROLL for (int m = 0; m < rows; m++) {
                vf value = splat(column[m * ldx]);
                group *sum = &t->at[m * groups + g];
                UNROLL for (int i = 0; i < PARTS; i++) sum->part[i] = fused(value, weight.part[i], sum->part[i]);
            }
        }
    }
}

/* How many groups a tile of so many rows spans: enough independent sums to hide latency, few enough for the registers. */
#if LANES == 8
#define GROUPS_FOR(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#elif LANES == 16
#define GROUPS_FOR(rows) 4
#else
#define GROUPS_FOR(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#endif

/* Call a macro with (rows, groups) as constants: the widest tile where enough groups are left, else one group. */
#define TILE_CASE(DO, rows, left) \
    case rows: \
        if ((left) >= GROUPS_FOR(rows)) { DO(rows, GROUPS_FOR(rows)); } else { DO(rows, 1); } \
        break;
#define FOR_TILE(DO, num_rows, left) \
    switch (num_rows) { \
        TILE_CASE(DO, 1, left) TILE_CASE(DO, 2, left) TILE_CASE(DO, 3, left) \
        TILE_CASE(DO, 4, left) TILE_CASE(DO, 5, left) TILE_CASE(DO, 6, left) }

/* Rows of the next tile when `left` remain: tiles of nearly equal height, 8 = 4 + 4 rather than 6 + 2. */
INLINE int next_rows(long left) {
    long tiles = (left + MAX_ROWS - 1) / MAX_ROWS;
    return (int)((left + tiles - 1) / tiles);
}

/* 2^x by a polynomial of degree 6 on [-1/2, 1/2] (relative error below 2e-7); 0 below -126, infinite near 128, exactly 1 at 0. */
INLINE vf exp2_f(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    vi tiny = x < -126.0f;
    x = select_f(x > 128.0f, splat(128.0f), select_f(tiny, splat(-126.0f), x));
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = splat(1.535335370e-4f);
    p = fused(p, f, splat(1.339887495e-3f));
    p = fused(p, f, splat(9.618437395e-3f));
    p = fused(p, f, splat(5.550332470e-2f));
    p = fused(p, f, splat(2.402264791e-1f));
    p = fused(p, f, splat(6.931472029e-1f));
    p = fused(p, f, splat(1.0f));
    vi power = (((vi)shifted - (vi)magic) + 127) << 23;
    return select_f(tiny, splat(0.0f), p * (vf)power);
}

/* The sum of 16 lanes, as a tree. */
INLINE float sum_group(group x) {
    float v[GROUP];
    memcpy(v, &x, sizeof v);
    for (int step = GROUP / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

#endif
