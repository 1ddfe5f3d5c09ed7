/* How a call is shared out to threads.
 *
 * A call is cut into items that write different outputs; every thread takes the next item until none is left, so that a thread which loses
 * its core for a while holds up one item and no more. Which thread computes an item changes nothing in it: bits are those of one thread.
 * A loop "for each thread: take items" runs in parallel by OpenMP; compiled without, or with fewer threads than asked for, it is still
 * right, because the first pass then finds more of the items.
 */
#ifndef PDSERVE_THREADS_H
#define PDSERVE_THREADS_H

#ifndef SMALL_WORK /* a test shares out everything */
#define SMALL_WORK 4e6 /* floating-point operations: about 0.1 ms, below which waking a thread takes as long as what it saves */
#endif

/* The next item that nobody has taken. */
static inline long take(long *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* One thread or all of them, nothing between: libgomp ends threads when a team shrinks, and starts new ones when it grows again. */
static inline long team(long threads, double work) { return work > SMALL_WORK ? threads : 1; }

#endif
