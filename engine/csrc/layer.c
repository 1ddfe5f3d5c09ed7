/* A whole decoder layer in one call: the routines of the other files one after the other, over scratch memory of its own.
 *
 *   hidden += end_norm(out(attend(turned(head_norm(qkv(norm(hidden))))))), K and V into pages before that
 *   hidden += end_norm(down(activation(gate_up(norm(hidden)))))
 *
 * The bits are those of the single calls. The MLP goes over blocks of rows, so that what lies between its products stays in a cache.
 */
#include <stdlib.h>
#include <time.h>

#include "linear.h"
#include "ops.h"
#include "pages.h"

#define MLP_ROWS 96 /* a multiple of MAX_ROWS, so that tiles stay whole */

typedef struct {
    linear_args qkv, out, gate_up, down; /* without x, y, ldx and rows */
    const float *attention_norm, *head_norm, *attention_end_norm, *mlp_norm, *mlp_end_norm; /* null: there is none */
    const float *cos, *sin; /* [window][half] */
    long index, heads, half, window, reach, is_gelu, threads;
    float eps;
    double scale;
} layer_args;

typedef struct {
    const layer_args *layer;
    pages_args at; /* whatever its layer */
    float *hidden; /* [rows][hidden], in place */
    long rows;
    double *spent; /* null, or seconds by part: is added to */
} layer_call;

enum { NORMS, QKV, ROTATION, KV_WRITE, ATTENTION, OUT, GATE_UP, ACTIVATION, DOWN }; /* as PARTS in engine/joined.py */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Note what has passed since `from` as time of this part, and begin anew. */
static void lap(const layer_call *c, double *from, int part) {
    if (!c->spent) return;
    double now = now_s();
    c->spent[part] += now - *from;
    *from = now;
}

static void apply(const linear_args *layer, const float *x, long ldx, float *y, long rows) {
    linear_args a = *layer;
    a.x = x, a.ldx = ldx, a.y = y, a.rows = rows;
    linear_forward(&a);
}

static void norm(const layer_call *c, const float *x, const float *weight, float *y, long rows) {
    long n = c->layer->qkv.in;
    rms_norm_args a = {x, weight, y, n, rows, n, c->layer->eps};
    rms_norm(&a);
}

/* hidden += update, normed where there is a norm. */
static void add(const layer_call *c, float *hidden, float *update, const float *weight, long rows) {
    if (weight) norm(c, update, weight, update, rows);
    for (long i = 0; i < rows * c->layer->qkv.in; i++) hidden[i] += update[i];
}

static int attention_half(const layer_call *c, float *normed, float *qkv, float *mixed) {
    const layer_args *l = c->layer;
    long dim = c->at.head_dim, width = l->qkv.out, keys = l->heads * dim, values = keys + c->at.kv_heads * dim;
    double from = c->spent ? now_s() : 0;
    norm(c, c->hidden, l->attention_norm, normed, c->rows);
    lap(c, &from, NORMS);
    apply(&l->qkv, normed, l->qkv.in, qkv, c->rows);
    lap(c, &from, QKV);
    if (l->head_norm) {
        norm_heads_args norms = {qkv, l->head_norm, width, c->rows, l->heads + c->at.kv_heads, dim, l->eps};
        norm_heads(&norms);
        lap(c, &from, NORMS);
    }
    rotate_args turn = {qkv, l->cos, l->sin, c->at.positions, width, c->rows, l->heads + c->at.kv_heads, dim, l->half, l->window};
    if (rotate(&turn)) return -3;
    lap(c, &from, ROTATION);
    write_args write = {c->at, qkv + keys, qkv + values, width, width};
    if (write_kv(&write)) return -1;
    lap(c, &from, KV_WRITE);
    attend_args look = {c->at, qkv, mixed, l->heads, width, l->threads, l->reach, l->scale};
    int status = attend(&look);
    if (status) return status;
    lap(c, &from, ATTENTION);
    apply(&l->out, mixed, keys, normed, c->rows);
    lap(c, &from, OUT);
    add(c, c->hidden, normed, l->attention_end_norm, c->rows);
    lap(c, &from, NORMS);
    return 0;
}

static void mlp_half(const layer_call *c, long row, long rows, float *normed, float *gate_up, float *between) {
    const layer_args *l = c->layer;
    float *hidden = c->hidden + row * l->qkv.in;
    double from = c->spent ? now_s() : 0;
    norm(c, hidden, l->mlp_norm, normed, rows);
    lap(c, &from, NORMS);
    apply(&l->gate_up, normed, l->qkv.in, gate_up, rows);
    lap(c, &from, GATE_UP);
    gate_mul_args gate = {gate_up, between, l->gate_up.out, rows, l->down.in};
    if (l->is_gelu) gelu_mul(&gate);
    else silu_mul(&gate);
    lap(c, &from, ACTIVATION);
    apply(&l->down, between, l->down.in, normed, rows);
    lap(c, &from, DOWN);
    add(c, hidden, normed, l->mlp_end_norm, rows);
    lap(c, &from, NORMS);
}

static long larger(long a, long b) { return a > b ? a : b; }

/* 0; -1 when the page table is wrong; -2 without memory; -3 when a position is not in the rotary tables. */
int decoder_layer(const layer_call *given) {
    layer_call own = *given, *c = &own;
    const layer_args *l = c->layer;
    c->at.layer = l->index;
    long block = c->rows < MLP_ROWS ? c->rows : MLP_ROWS, normed = c->rows * l->qkv.in;
    long first = larger(c->rows * l->qkv.out, block * l->gate_up.out), second = larger(c->rows * l->out.in, block * l->down.in);
    float *scratch = malloc((normed + first + second) * sizeof(float));
    if (!scratch) return -2;
    int status = attention_half(c, scratch, scratch + normed, scratch + normed + first);
    for (long row = 0; row < c->rows && !status; row += block) {
        long rows = c->rows - row < block ? c->rows - row : block;
        mlp_half(c, row, rows, scratch, scratch + normed, scratch + normed + first);
    }
    free(scratch);
    return status;
}
