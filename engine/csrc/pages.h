/* Where things lie in the KV cache: [num_pages][layers][K, V][kv_heads][page_tokens * head_dim]; see engine/kv_cache.py. */
#ifndef PDSERVE_PAGES_H
#define PDSERVE_PAGES_H

#include "simd.h"

typedef struct {
    char *pages;
    const int32_t *positions;  /* [rows] */
    const int32_t *row_starts; /* [sequences + 1] */
    const int32_t *page_table; /* [sequences][max_pages] */
    long num_pages, num_layers, kv_heads, head_dim, page_tokens, is_bf16;
    long layer, sequences, max_pages;
} pages_args;

INLINE long element_bytes(const pages_args *a) { return a->is_bf16 ? 2 : 4; }

/* K of a page, layer and KV head: [head_dim][page_tokens]; V (which = 1): [page_tokens][head_dim]. */
INLINE char *page_part(const pages_args *a, long page, int which, long kv_head) {
    long part = ((page * a->num_layers + a->layer) * 2 + which) * a->kv_heads + kv_head;
    return a->pages + part * a->page_tokens * a->head_dim * element_bytes(a);
}

/* Page that holds a token of a sequence. */
INLINE long page_of(const pages_args *a, long sequence, long token) {
    return a->page_table[sequence * a->max_pages + token / a->page_tokens];
}

/* Whether every page that the rows of the batch need is one of ours: a wrong id must not write into foreign memory. */
int pages_valid(const pages_args *a);

typedef struct {
    pages_args at;
    const float *k, *v; /* [rows][kv_heads][head_dim], rows ldk and ldv floats apart */
    long ldk, ldv;
} write_args;

typedef struct {
    pages_args at;
    const float *q; /* [rows][heads][head_dim], rows ldq floats apart */
    float *out;     /* [rows][heads][head_dim] */
    long heads, ldq, threads;
    long reach; /* tokens that a row sees, its own included; 0: all */
    double scale; /* of the scores */
} attend_args;

int write_kv(const write_args *a);
int attend(const attend_args *a);

#endif
