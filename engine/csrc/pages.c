/* Writing K and V of new rows into pages. */
#include "pages.h"

int pages_valid(const pages_args *a) {
    if (a->layer < 0 || a->layer >= a->num_layers) return 0;
    for (long s = 0; s < a->sequences; s++) {
        long last = a->positions[a->row_starts[s + 1] - 1], first = a->positions[a->row_starts[s]];
        if (first < 0 || last / a->page_tokens >= a->max_pages) return 0;
        for (long i = 0; i <= last / a->page_tokens; i++) {
            long page = a->page_table[s * a->max_pages + i];
            if (page < 0 || page >= a->num_pages) return 0;
        }
    }
    return 1;
}

/* Round to nearest, ties to even, as torch does. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void put(char *base, long index, float value, const int is_bf16) {
    if (is_bf16) ((uint16_t *)base)[index] = to_bf16(value);
    else ((float *)base)[index] = value;
}

/* Place of an element in its group. */
INLINE long placed(long i, const int is_bf16) {
    return is_bf16 ? i / GROUP * GROUP + i % (GROUP / 2) * 2 + i % GROUP / (GROUP / 2) : i;
}

INLINE void write_row(const write_args *a, long sequence, long row, const int is_bf16) {
    const pages_args *at = &a->at;
    long position = at->positions[row], slot = position % at->page_tokens, dim = at->head_dim;
    long page = page_of(at, sequence, position), column = placed(slot, is_bf16);
    for (long h = 0; h < at->kv_heads; h++) {
        char *keys = page_part(at, page, 0, h), *values = page_part(at, page, 1, h);
        const float *k = a->k + row * a->ldk + h * dim, *v = a->v + row * a->ldv + h * dim;
        for (long d = 0; d < dim; d++) put(keys, d * at->page_tokens + column, k[d], is_bf16);
        for (long d = 0; d < dim; d++) put(values, slot * dim + placed(d, is_bf16), v[d], is_bf16);
    }
}

/* 0, or -1 when the page table is wrong (nothing is written then). */
int write_kv(const write_args *a) {
    if (!pages_valid(&a->at)) return -1;
    for (long s = 0; s < a->at.sequences; s++)
        for (long row = a->at.row_starts[s]; row < a->at.row_starts[s + 1]; row++) {
            if (a->at.is_bf16) write_row(a, s, row, 1);
            else write_row(a, s, row, 0);
        }
    return 0;
}
