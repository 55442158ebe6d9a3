/* shard: see shard.h. */
#include "shard.h"

int64_t hc_floor_div(int64_t dividend, int64_t divisor) {
  const int64_t quotient = dividend / divisor;
  return dividend % divisor < 0 ? quotient - 1 : quotient;
}

int64_t hc_ceil_div(int64_t dividend, int64_t divisor) { return -hc_floor_div(-dividend, divisor); }

hc_interval hc_shard(int64_t size, int64_t world, int64_t rank) {
  const int64_t full = hc_ceil_div(size, world);
  const hc_interval shard = {hc_min(rank * full, size), hc_min((rank + 1) * full, size)};
  return shard;
}

int64_t hc_length(hc_interval interval) { return hc_max(0, interval.end - interval.begin); }

hc_interval hc_intersect(hc_interval a, hc_interval b) {
  const hc_interval both = {hc_max(a.begin, b.begin), hc_min(a.end, b.end)};
  return both;
}
