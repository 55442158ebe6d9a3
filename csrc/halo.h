/* halo: one exchange along one dimension: a route, a transport, and the tensors at both ends.
 *
 *   exchange: shard -> extent.  Each rank gets the interval it reads, assembled in one buffer: own columns, received
 *             columns, and `fill` where the extent leaves the tensor (or wraps around, when periodic).
 *   reduce:   extent -> shard.  The adjoint: each rank's contribution to columns that others own goes home and is
 *             added there. <exchange(x), y> = <x, reduce(y)>.
 *
 * An exchange is begun and finished separately, so that a caller can compute in between. To finish is to assemble the
 * whole extent, which costs a copy of the shard; a caller that needs only parts of the extent, the strips at the
 * shard's edges, waits and copies them. Whatever was begun must be dropped.
 */
#ifndef HC_HALO_H
#define HC_HALO_H

#include "moves.h"
#include "plan.h"
#include "transport.h"

/* One dimension of a tensor as it lies on a group. world 1: nothing is sent, `group` may be NULL. */
typedef struct hc_axis {
  int64_t dim;
  int64_t size; /* global */
  int64_t world, rank;
  bool periodic;
  const char *group;
} hc_axis;

typedef struct hc_exchange {
  hc_axis axis;
  hc_route route;
  hc_messages sends, recvs;
  hc_request request;
  hc_shape shape; /* of the tensor that was given */
} hc_exchange;

/* `local` must be the rank's shard of axis->size. extents: one per rank. */
hc_code hc_exchange_begin(AtenTensorHandle local, const hc_axis *axis, const hc_interval *extents,
                          const char *op, hc_exchange *exchange, hc_status *status);
/* The buffer: `lead` zero columns, then the extent. When that is just the own shard, the shard itself. */
hc_code hc_exchange_finish(hc_exchange *exchange, AtenTensorHandle local, int64_t lead, double fill,
                           AtenTensorHandle *out, hc_status *status);
/* The other way to finish: returns when everything has been received, and gives out nothing. */
hc_code hc_exchange_wait(hc_exchange *exchange, hc_status *status);
/* After hc_exchange_wait: adds the moves that write what the extent has in `part` into `target`, whether kept from
 * `local` or received. `part` counts as the extent does, and may be more than the extent; columns of it that nobody
 * holds are left as they are in `target`, which has the length of `part` in axis.dim. */
hc_code hc_exchange_copy(const hc_exchange *exchange, AtenTensorHandle local, hc_interval part,
                         const hc_part *target, hc_moves *moves, hc_status *status);
/* Frees what an exchange holds; for a finished, failed or zeroed one. Waits for what is still in flight. */
void hc_exchange_drop(hc_exchange *exchange);

/* begin and finish in one. */
hc_code hc_halo_exchange(AtenTensorHandle local, const hc_axis *axis, const hc_interval *extents,
                         int64_t lead, double fill, const char *op, AtenTensorHandle *out, hc_status *status);
/* `grad` covers extents[axis->rank]. consume: its memory may be overwritten, and `out` may be in it; two buffers of the
 * activation's size would otherwise be alive at once. */
hc_code hc_halo_reduce(AtenTensorHandle grad, bool consume, const hc_axis *axis, const hc_interval *extents,
                       const char *op, AtenTensorHandle *out, hc_status *status);

#endif
