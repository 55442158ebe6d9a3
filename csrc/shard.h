/* shard: who owns which interval of a dimension.
 *
 * torch.chunk's rule, which DTensor's Shard placement follows: with full = ceil(size / world), rank r owns
 * [min(r * full, size), min((r + 1) * full, size)). The last shards may be smaller, or empty.
 * Everyone can compute everyone's shard, so sizes are never negotiated. Integers only.
 */
#ifndef HC_SHARD_H
#define HC_SHARD_H

#include <stdbool.h>
#include <stdint.h>

/* Half-open: begin is in it, end is not. Empty when begin >= end. */
typedef struct hc_interval {
  int64_t begin, end;
} hc_interval;

/* size >= 0, world >= 1, 0 <= rank < world. */
hc_interval hc_shard(int64_t size, int64_t world, int64_t rank);

int64_t hc_length(hc_interval interval); /* 0 for an empty one, never negative */
hc_interval hc_intersect(hc_interval a, hc_interval b);
/* Rounds towards minus infinity; divisor > 0. */
int64_t hc_floor_div(int64_t dividend, int64_t divisor);
int64_t hc_ceil_div(int64_t dividend, int64_t divisor);

static inline int64_t hc_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t hc_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
