/* plan: see plan.h. */
#include "plan.h"

#include <inttypes.h>
#include <stdlib.h>

static int64_t reach(const hc_window *window) { return window->dilation * (window->kernel - 1); }

static hc_code check_range(const char *name, int64_t value, int64_t low, int64_t high, hc_status *status) {
  if (value < low || value > high) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "%s is %" PRId64 ", expected %" PRId64 " to %" PRId64, name,
                   value, low, high);
  }
  return HC_OK;
}

hc_code hc_window_check(const hc_window *window, int64_t size, int64_t world, hc_status *status) {
  HC_TRY(check_range("size", size, 0, HC_LARGEST, status));
  HC_TRY(check_range("world", world, 1, HC_LARGEST_WORLD, status));
  HC_TRY(check_range("kernel", window->kernel, 1, HC_LARGEST, status));
  HC_TRY(check_range("stride", window->stride, 1, HC_LARGEST, status));
  HC_TRY(check_range("dilation", window->dilation, 1, HC_LARGEST, status));
  HC_TRY(check_range("padding (left)", window->pad_lo, -HC_LARGEST, HC_LARGEST, status));
  HC_TRY(check_range("padding (right)", window->pad_hi, -HC_LARGEST, HC_LARGEST, status));
  HC_TRY(check_range("output_padding", window->output_padding, 0, HC_LARGEST, status));
  if (window->output_padding > 0 && !window->transposed) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "output_padding is %" PRId64 ", expected 0 unless transposed",
                   window->output_padding);
  }
  if (window->output_padding > 0 && window->output_padding >= hc_max(window->stride, window->dilation)) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "output_padding is %" PRId64 ", expected less than stride (%" PRId64
                   ") or dilation (%" PRId64 ")",
                   window->output_padding, window->stride, window->dilation);
  }
  if (window->periodic && window->transposed) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "periodic is true, expected false when transposed");
  }
  if (window->periodic && size == 0 && (window->pad_lo > 0 || window->pad_hi > 0)) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "size is 0, expected at least 1 when periodic");
  }
  const int64_t padded = size + window->pad_lo + window->pad_hi;
  if (window->transposed) {
    const int64_t out_size = hc_window_out_size(window, size);
    if (out_size < 0) {
      return hc_fail(status, HC_ERROR_ARGUMENT,
                     "the padding (%" PRId64 " + %" PRId64 ") leaves an output of size %" PRId64,
                     window->pad_lo, window->pad_hi, out_size);
    }
  } else if (padded < reach(window) + 1 && !(padded == 0 && window->kernel == 1)) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "the window (kernel %" PRId64 ", dilation %" PRId64
                   ") is larger than the padded input (%" PRId64 " + %" PRId64 " + %" PRId64 ")",
                   window->kernel, window->dilation, size, window->pad_lo, window->pad_hi);
  }
done:
  return status->code;
}

int64_t hc_window_out_size(const hc_window *window, int64_t size) {
  const int64_t padding = window->pad_lo + window->pad_hi;
  if (window->transposed) {
    return (size - 1) * window->stride - padding + reach(window) + window->output_padding + 1;
  }
  return hc_floor_div(size + padding - reach(window) - 1, window->stride) + 1;
}

hc_interval hc_window_reads(const hc_window *window, hc_interval out) {
  hc_interval in = {0, 0};
  if (hc_length(out) > 0) {
    in.begin = out.begin * window->stride - window->pad_lo;
    in.end = (out.end - 1) * window->stride - window->pad_lo + reach(window) + 1;
  }
  return in;
}

/* Small-side indices whose hull [i*s - p, i*s - p + reach] meets `in`: every integer, no gaps considered. */
static hc_interval hull_touching(const hc_window *window, hc_interval in) {
  const hc_interval hull = {
      hc_ceil_div(in.begin + window->pad_lo - reach(window), window->stride),
      hc_floor_div(in.end - 1 + window->pad_lo, window->stride) + 1,
  };
  return hull;
}

static bool touches(const hc_window *window, int64_t index, hc_interval in) {
  const int64_t start = index * window->stride - window->pad_lo;
  const int64_t first = hc_max(0, hc_ceil_div(in.begin - start, window->dilation));
  return first < window->kernel && start + first * window->dilation < in.end;
}

hc_interval hc_window_touched_by(const hc_window *window, hc_interval in, int64_t small_size) {
  const hc_interval none = {0, 0}, all = {0, small_size};
  if (hc_length(in) == 0) {
    return none;
  }
  hc_interval small = hc_intersect(hull_touching(window, in), all);
  while (small.begin < small.end && !touches(window, small.begin, in)) {
    ++small.begin;
  }
  while (small.begin < small.end && !touches(window, small.end - 1, in)) {
    --small.end;
  }
  return hc_length(small) > 0 ? small : none;
}

hc_fit hc_window_fit(const hc_window *window, hc_interval strip) {
  hc_fit fit = {{0, 0}, 0, 0, 0, 0, 0};
  const hc_interval hull = hull_touching(window, strip);
  if (hc_length(strip) == 0 || hc_length(hull) == 0) {
    return fit;
  }
  /* How far the first window begins before the strip, and the last one ends behind it; negative: short of it. */
  int64_t before = strip.begin - (hull.begin * window->stride - window->pad_lo);
  int64_t behind = (hull.end - 1) * window->stride - window->pad_lo + reach(window) + 1 - strip.end;
  fit.extent = hull;
  fit.crop_lo = hc_max(0, -before);
  fit.crop_hi = hc_max(0, -behind);
  before = hc_max(0, before);
  behind = hc_max(0, behind);
  if (before < behind) { /* one more window in front, which touches nothing of the strip, makes it fit */
    fit.lead = 1;
    before += window->stride;
  }
  fit.padding = before;
  fit.output_padding = before - behind; /* 0 <= output_padding < stride */
  return fit;
}

void hc_window_extents(const hc_window *window, int64_t size, int64_t world, hc_interval *extents) {
  const int64_t out_size = hc_window_out_size(window, size);
  for (int64_t rank = 0; rank < world; ++rank) {
    const hc_interval out = hc_shard(out_size, world, rank);
    extents[rank] =
        window->transposed ? hc_window_touched_by(window, out, size) : hc_window_reads(window, out);
  }
}

/* Calls for each piece of `extent` that `owned` holds, in ascending order of where it lies in the extent. With
 * pieces NULL it only counts. */
static int64_t cut(hc_interval extent, hc_interval owned, int64_t size, bool periodic, int64_t peer,
                   hc_piece *pieces) {
  int64_t count = 0, turn = 0, last_turn = 0;
  if (hc_length(extent) == 0 || hc_length(owned) == 0) {
    return 0;
  }
  if (periodic) {
    turn = hc_floor_div(extent.begin, size);
    last_turn = hc_floor_div(extent.end - 1, size);
  }
  for (; turn <= last_turn; ++turn) {
    const hc_interval image = {owned.begin + turn * size, owned.end + turn * size};
    const hc_interval both = hc_intersect(extent, image);
    if (hc_length(both) == 0) {
      continue;
    }
    if (pieces != NULL) {
      const hc_piece piece = {peer, both.begin - turn * size, both.end - turn * size,
                              both.begin - extent.begin};
      pieces[count] = piece;
    }
    ++count;
  }
  return count;
}

/* Fills `pieces` (or only counts, when NULL) with what `rank` receives (from the others) or sends (to them). */
static int64_t cut_all(int64_t size, int64_t world, int64_t rank, const hc_interval *extents, bool periodic,
                       bool sends, hc_piece *pieces) {
  int64_t count = 0;
  for (int64_t peer = 0; peer < world; ++peer) {
    if (peer != rank) {
      const hc_interval extent = extents[sends ? peer : rank];
      const hc_interval owned = hc_shard(size, world, sends ? rank : peer);
      count += cut(extent, owned, size, periodic, peer, pieces == NULL ? NULL : pieces + count);
    }
  }
  return count;
}

bool hc_extents_are_local(int64_t size, int64_t world, const hc_interval *extents, bool periodic) {
  const hc_interval all = {0, size};
  for (int64_t rank = 0; rank < world && world > 1; ++rank) { /* one rank alone wraps around onto itself */
    const hc_interval owned = hc_shard(size, world, rank);
    const hc_interval inside = periodic ? extents[rank] : hc_intersect(extents[rank], all);
    if (hc_length(inside) > 0 && (inside.begin < owned.begin || inside.end > owned.end)) {
      return false;
    }
  }
  return true;
}

hc_code hc_route_build(int64_t size, int64_t world, int64_t rank, const hc_interval *extents, bool periodic,
                       hc_route *route, hc_status *status) {
  route->owned = hc_shard(size, world, rank);
  route->extent = extents[rank];
  route->silent = hc_extents_are_local(size, world, extents, periodic);
  route->nkeeps = cut(route->extent, route->owned, size, periodic, rank, NULL);
  route->nrecvs = cut_all(size, world, rank, extents, periodic, false, NULL);
  route->nsends = cut_all(size, world, rank, extents, periodic, true, NULL);
  const int64_t total = route->nkeeps + route->nrecvs + route->nsends;
  route->keeps = malloc((size_t)(total + 1) * sizeof *route->keeps); /* never of size 0 */
  if (route->keeps == NULL) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for %" PRId64 " segments", total);
  }
  route->recvs = route->keeps + route->nkeeps;
  route->sends = route->recvs + route->nrecvs;
  (void)cut(route->extent, route->owned, size, periodic, rank, route->keeps);
  (void)cut_all(size, world, rank, extents, periodic, false, route->recvs);
  (void)cut_all(size, world, rank, extents, periodic, true, route->sends);
  return HC_OK;
}

void hc_route_free(hc_route *route) {
  free(route->keeps); /* the one block that holds all three arrays */
  route->keeps = route->recvs = route->sends = NULL;
}
