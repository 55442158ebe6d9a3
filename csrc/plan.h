/* plan: the propagation rule. Which inputs does a rank need, and who holds them?
 *
 * Everything follows from public numbers (global size, world size, window), so each rank computes every
 * rank's plan, and nothing is negotiated. Integers only: no torch, no communication.
 *
 *   source, chunked      |  rank 0  |  rank 1  |  rank 2  |
 *                                 . '          ' .
 *   what rank 1 reads          [ its extent, unclipped ]        a few columns of 0 and of 2: the halo
 *                                  \            /
 *   result, chunked      |  rank 0  |  rank 1  |  rank 2  |
 *
 * 1. The result is chunked over its own global size, so a rank's output strip is fixed.
 * 2. A window map turns the strip into an *extent* of source indices. It is not clipped: indices outside
 *    [0, size) are padding, or wrap around when the dimension is periodic.
 * 3. A route cuts each extent along the owners' boundaries: pieces to keep, to receive and to send. A piece
 *    may come from any rank, not only from a neighbour, and the extent need not touch the own shard.
 *
 * Two window maps exist; a convolution uses one forward and the other backward, a transposed one the reverse:
 *   reads    outputs [o0, o1) read inputs [o0*s - p, (o1-1)*s - p + d*(k-1) + 1)
 *   touches  which small-side indices i have i*s - p + j*d in [b0, b1) for some 0 <= j < k ?
 */
#ifndef HC_PLAN_H
#define HC_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "shard.h"
#include "status.h"

/* Sizes above HC_LARGEST are refused, which keeps every product of two of them far from overflow. */
#define HC_LARGEST       (INT64_C(1) << 30)
#define HC_LARGEST_WORLD (INT64_C(1) << 20) /* a plan has an entry for each rank */

/* The window of one dimension. For a transposed convolution it describes the convolution whose adjoint it is. */
typedef struct hc_window {
  int64_t kernel, stride, pad_lo, pad_hi, dilation, output_padding;
  bool transposed, periodic;
} hc_window;

/* Refuses what cannot be: sizes below 0, strides below 1, an output size below 0, ... */
hc_code hc_window_check(const hc_window *window, int64_t size, int64_t world, hc_status *status);

/* Global size of the result over a source of `size`; may be negative when the window does not fit. */
int64_t hc_window_out_size(const hc_window *window, int64_t size);

/* Small side -> big side: the extent that the windows `out` read, unclipped. Empty for an empty `out`. */
hc_interval hc_window_reads(const hc_window *window, hc_interval out);

/* Big side -> small side: the smallest interval that holds every small-side index, within [0, small_size),
 * whose window touches `in`. Exact, also where dilation or stride leave gaps. */
hc_interval hc_window_touched_by(const hc_window *window, hc_interval in, int64_t small_size);

/* How to run a local (transposed) convolution between a small-side buffer and a big-side strip.
 *
 * ATen knows symmetric padding only. With `lead` (0 or 1) zero columns before the small-side extent and
 * `crop` columns of the strip set aside, one symmetric `padding` and an `output_padding` line the two up
 * exactly: transposed convolution of the buffer gives the strip, and the backward of a convolution that reads the
 * strip takes the buffer as its output gradient. No copy of the strip is needed for either.
 */
typedef struct hc_fit {
  hc_interval extent;       /* small side, unclipped; empty: nothing touches the strip */
  int64_t lead;             /* zero columns in the buffer before the extent */
  int64_t crop_lo, crop_hi; /* columns of the strip, at its ends, that no window touches */
  int64_t padding, output_padding;
} hc_fit;

/* `strip` is an interval of the big side. */
hc_fit hc_window_fit(const hc_window *window, hc_interval strip);

/* One interval that travels, in the source's global coordinates. */
typedef struct hc_piece {
  int64_t peer;
  int64_t begin, end;
  int64_t offset; /* where it starts in the reader's extent */
} hc_piece;

/* What one rank keeps, receives and sends for one exchange. Pieces are sorted by peer; those of one peer travel
 * as one message, in the order in which they stand here, which is the same on both sides. */
typedef struct hc_route {
  hc_interval owned;
  hc_interval extent; /* what this rank reads */
  int64_t nkeeps, nrecvs, nsends;
  hc_piece *keeps, *recvs, *sends;
  bool silent; /* no rank of the group sends anything: decided alike on every rank */
} hc_route;

/* Whether every rank reads only what it holds, so that nothing is sent. Decided alike on every rank. */
bool hc_extents_are_local(int64_t size, int64_t world, const hc_interval *extents, bool periodic);

/* extents: one per rank of the group, unclipped. The route owns its arrays: hc_route_free. */
hc_code hc_route_build(int64_t size, int64_t world, int64_t rank, const hc_interval *extents, bool periodic,
                       hc_route *route, hc_status *status);
void hc_route_free(hc_route *route);

/* The extents of all ranks for a window op over a source of `size`: `reads`, or `touched_by` when transposed.
 * `extents` has room for `world` intervals. */
void hc_window_extents(const hc_window *window, int64_t size, int64_t world, hc_interval *extents);

#endif
