/* halo: see halo.h. */
#include "halo.h"

#include <inttypes.h>
#include <string.h>

/* Bytes of a message's payload: the pieces [first, last) of one peer, each over the whole of the other dimensions. */
static int64_t payload_bytes(const hc_shape *shape, int64_t dim, const hc_piece *pieces, int64_t count) {
  hc_shape part = *shape;
  part.sizes[dim] = 0;
  for (int64_t i = 0; i < count; ++i) {
    part.sizes[dim] += pieces[i].end - pieces[i].begin;
  }
  return hc_shape_numel(&part) * (int64_t)aoti_torch_dtype_element_size(shape->dtype);
}

/* How many of the pieces from `pieces` on belong to the same peer. */
static int64_t run_length(const hc_piece *pieces, int64_t count) {
  int64_t length = 0;
  while (length < count && pieces[length].peer == pieces[0].peer) {
    ++length;
  }
  return length;
}

/* One buffer per peer that the pieces name. None at all for a tensor without elements: both sides see that. */
static hc_code allocate(const hc_shape *shape, int64_t dim, const hc_piece *pieces, int64_t count,
                        bool receives, hc_messages *messages, hc_status *status) {
  HC_TRY(hc_messages_init(messages, count, status));
  for (int64_t i = 0, run = 0; i < count; i += run) {
    run = run_length(pieces + i, count - i);
    const int64_t payload = payload_bytes(shape, dim, pieces + i, run);
    if (payload > 0) {
      hc_message *message = &messages->items[messages->count];
      HC_TRY(hc_transport_buffer(payload, receives, shape, &message->buffer, status));
      message->peer = pieces[i].peer;
      ++messages->count;
    }
  }
done:
  return status->code;
}

/* ---- messages ---- */

/* Goes through the pieces of a list of messages: where each lies on the wire, one after another in its message. The
 * elements of a piece are in the order of the sender's memory format, which the message names, so that packing is
 * copying rows; ranks may differ in it. */
typedef struct walk {
  const hc_shape *shape; /* of the tensor; its size in `dim` does not matter */
  int64_t dim, header;
  const hc_piece *pieces;
  const hc_messages *messages;
  int64_t message, offset_bytes;
  bool channels_last;
} walk;

static walk walk_begin(const hc_shape *shape, int64_t dim, const hc_piece *pieces,
                       const hc_messages *messages) {
  return (walk){.shape = shape,
                .dim = dim,
                .header = hc_transport_header_bytes(shape),
                .pieces = pieces,
                .messages = messages,
                .message = -1};
}

/* Piece i, which must be the first or follow the last one asked for. */
static hc_code walk_to(walk *w, int64_t i, bool is_sent, hc_part *wire, hc_status *status) {
  const hc_piece *piece = &w->pieces[i];
  if (i == 0 || piece->peer != piece[-1].peer) {
    const hc_message *message = &w->messages->items[++w->message];
    w->offset_bytes = w->header;
    if (is_sent) {
      w->channels_last = hc_shape_is_channels_last(w->shape);
      HC_TRY(hc_transport_set_mark(message, w->shape, &w->channels_last, status));
    } else {
      HC_TRY(hc_transport_get_mark(message, w->shape, &w->channels_last, status));
    }
  }
  *wire = (hc_part){w->messages->items[w->message].buffer, w->offset_bytes, *w->shape};
  wire->shape.sizes[w->dim] = piece->end - piece->begin;
  hc_shape_set_strides(&wire->shape, w->channels_last);
  w->offset_bytes += payload_bytes(w->shape, w->dim, piece, 1);
done:
  return status->code;
}

/* Packs pieces of a tensor into the messages. A piece lies at its offset in the extent when `by_offset`, else at its
 * coordinate minus `origin`. */
static hc_code pack(const hc_part *tensor, int64_t dim, const hc_piece *pieces, int64_t count, bool by_offset,
                    int64_t origin, const hc_messages *messages, hc_status *status) {
  hc_moves moves;
  hc_part wire;
  walk w = walk_begin(&tensor->shape, dim, pieces, messages);
  hc_moves_init(false, &moves);
  for (int64_t i = 0; i < count && messages->count > 0; ++i) {
    HC_TRY(walk_to(&w, i, true, &wire, status));
    const int64_t at = by_offset ? pieces[i].offset : pieces[i].begin - origin;
    const hc_part place = hc_part_narrow(tensor, dim, at, pieces[i].end - pieces[i].begin);
    HC_TRY(hc_moves_push(&moves, &wire, &place, status));
  }
  HC_TRY(hc_moves_run(&moves, status));
done:
  return status->code;
}

static hc_code check_length(const hc_shape *shape, const hc_axis *axis, hc_interval expected,
                            const char *what, hc_status *status) {
  if (axis->dim < 0 || axis->dim >= shape->ndim) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "dim is %" PRId64 ", expected one of a tensor of %" PRId64 " dimensions", axis->dim,
                   shape->ndim);
  }
  if (shape->sizes[axis->dim] != hc_length(expected)) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "the local tensor has size %" PRId64 " in dim %" PRId64 ", expected %" PRId64
                   ": the %s of rank %" PRId64 " of %" PRId64 " for a global size of %" PRId64,
                   shape->sizes[axis->dim], axis->dim, hc_length(expected), what, axis->rank, axis->world,
                   axis->size);
  }
  return HC_OK;
}

/* What every rank must have alike for its messages to mean what their receiver takes them for: a hash (FNV-1a, by words)
 * of the op, the tensor's dtype, the axis and what every rank reads. Lengths do not tell: ranks that disagree on the
 * tensor's width, or on a stride, may well send as many bytes as is expected of them. */
static int64_t signature_of(const hc_shape *shape, const hc_axis *axis, const hc_interval *extents,
                            bool backwards, const char *op) {
  const uint64_t prime = 1099511628211u;
  uint64_t hash = 14695981039346656037u;
  for (const char *letter = op; *letter != '\0'; ++letter) {
    hash = (hash ^ (uint64_t)(unsigned char)*letter) * prime;
  }
  const int64_t numbers[] = {shape->dtype, axis->size, axis->world, axis->periodic, backwards};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
    hash = (hash ^ (uint64_t)numbers[i]) * prime;
  }
  for (int64_t i = 0; i < axis->world; ++i) {
    hash = (hash ^ (uint64_t)extents[i].begin) * prime;
    hash = (hash ^ (uint64_t)extents[i].end) * prime;
  }
  return (int64_t)(hash >> 1); /* without a sign, to be read by a person */
}

/* ---- exchange ---- */

hc_code hc_exchange_begin(AtenTensorHandle local, const hc_axis *axis, const hc_interval *extents,
                          const char *op, hc_exchange *exchange, hc_status *status) {
  memset(exchange, 0, sizeof *exchange);
  exchange->axis = *axis;
  HC_TRY(hc_tensor_shape(local, &exchange->shape, status));
  HC_TRY(
      check_length(&exchange->shape, axis, hc_shard(axis->size, axis->world, axis->rank), "shard", status));
  hc_route *route = &exchange->route;
  HC_TRY(hc_route_build(axis->size, axis->world, axis->rank, extents, axis->periodic, route, status));
  if (!route->silent) {
    HC_TRY(
        allocate(&exchange->shape, axis->dim, route->sends, route->nsends, false, &exchange->sends, status));
    HC_TRY(
        allocate(&exchange->shape, axis->dim, route->recvs, route->nrecvs, true, &exchange->recvs, status));
    const hc_part shard = hc_part_of(local, &exchange->shape);
    HC_TRY(pack(&shard, axis->dim, route->sends, route->nsends, false, route->owned.begin, &exchange->sends,
                status));
    HC_TRY(hc_transport_post(axis->group, &exchange->shape, &exchange->sends, &exchange->recvs, op,
                             signature_of(&exchange->shape, axis, extents, false, op), &exchange->request,
                             status));
  }
done:
  return status->code;
}

hc_code hc_exchange_wait(hc_exchange *exchange, hc_status *status) {
  return hc_transport_wait(&exchange->request, status);
}

/* The part of a piece that lies in `part`, in the extent's coordinates. */
static hc_interval clip(const hc_route *route, const hc_piece *piece, hc_interval part) {
  const int64_t begin = route->extent.begin + piece->offset;
  const hc_interval whole = {begin, begin + piece->end - piece->begin};
  return hc_intersect(whole, part);
}

static hc_code copy_kept(const hc_exchange *exchange, AtenTensorHandle local, hc_interval part,
                         const hc_part *target, hc_moves *moves, hc_status *status) {
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  const hc_part shard = hc_part_of(local, &exchange->shape);
  for (int64_t i = 0; i < route->nkeeps; ++i) {
    const hc_piece *keep = &route->keeps[i];
    const hc_interval both = clip(route, keep, part);
    const int64_t length = hc_length(both);
    if (length > 0) {
      const int64_t skipped = both.begin - route->extent.begin - keep->offset;
      const hc_part to = hc_part_narrow(target, dim, both.begin - part.begin, length);
      const hc_part from = hc_part_narrow(&shard, dim, keep->begin + skipped - route->owned.begin, length);
      HC_TRY(hc_moves_push(moves, &to, &from, status));
    }
  }
done:
  return status->code;
}

static hc_code copy_received(const hc_exchange *exchange, hc_interval part, const hc_part *target,
                             hc_moves *moves, hc_status *status) {
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  hc_part wire;
  walk w = walk_begin(&exchange->shape, dim, route->recvs, &exchange->recvs);
  for (int64_t i = 0; i < route->nrecvs && exchange->recvs.count > 0; ++i) {
    HC_TRY(walk_to(&w, i, false, &wire, status));
    const hc_interval both = clip(route, &route->recvs[i], part);
    const int64_t length = hc_length(both);
    if (length > 0) {
      const int64_t skipped = both.begin - route->extent.begin - route->recvs[i].offset;
      const hc_part to = hc_part_narrow(target, dim, both.begin - part.begin, length);
      const hc_part from = hc_part_narrow(&wire, dim, skipped, length);
      HC_TRY(hc_moves_push(moves, &to, &from, status));
    }
  }
done:
  return status->code;
}

hc_code hc_exchange_copy(const hc_exchange *exchange, AtenTensorHandle local, hc_interval part,
                         const hc_part *target, hc_moves *moves, hc_status *status) {
  HC_TRY(copy_kept(exchange, local, part, target, moves, status));
  HC_TRY(copy_received(exchange, part, target, moves, status));
done:
  return status->code;
}

/* Sets the columns that nobody sends: [0, lead) to zero, and what the extent has outside the tensor to `fill`. `whole` is
 * the buffer: these, then the extent. */
static hc_code fill_outside(const hc_exchange *exchange, const hc_part *whole, int64_t lead, double fill,
                            hc_moves *moves, hc_status *status) {
  const int64_t dim = exchange->axis.dim, length = hc_length(exchange->route.extent);
  const hc_interval extent = exchange->route.extent;
  const hc_interval lower = {0, hc_min(length, hc_max(0, -extent.begin))};
  const hc_interval upper = {hc_max(lower.end, hc_min(length, exchange->axis.size - extent.begin)), length};
  const hc_part front = hc_part_narrow(whole, dim, 0, lead);
  HC_TRY(hc_moves_fill(moves, &front, 0.0, status));
  for (int side = 0; side < 2 && !exchange->axis.periodic; ++side) {
    const hc_interval outside = side == 0 ? lower : upper;
    const hc_part part = hc_part_narrow(whole, dim, lead + outside.begin, hc_length(outside));
    HC_TRY(hc_moves_fill(moves, &part, fill, status));
  }
done:
  return status->code;
}

hc_code hc_exchange_finish(hc_exchange *exchange, AtenTensorHandle local, int64_t lead, double fill,
                           AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle buffer = NULL;
  const hc_route *route = &exchange->route;
  const bool own_shard =
      lead == 0 && route->extent.begin == route->owned.begin && route->extent.end == route->owned.end;
  HC_TRY(hc_exchange_wait(exchange, status));
  if (own_shard) {
    return hc_tensor_share(local, out, status);
  }
  hc_shape extended = exchange->shape;
  extended.sizes[exchange->axis.dim] = lead + hc_length(route->extent);
  hc_shape_set_strides(&extended, hc_shape_is_channels_last(&exchange->shape));
  HC_TRY(hc_tensor_empty(&extended, &buffer, status));
  hc_moves moves;
  hc_moves_init(false, &moves);
  const hc_part whole = hc_part_of(buffer, &extended);
  HC_TRY(fill_outside(exchange, &whole, lead, fill, &moves, status));
  const hc_part extent = hc_part_narrow(&whole, exchange->axis.dim, lead, hc_length(route->extent));
  HC_TRY(hc_exchange_copy(exchange, local, route->extent, &extent, &moves, status));
  HC_TRY(hc_moves_run(&moves, status));
  *out = buffer;
  buffer = NULL;
done:
  hc_tensor_free(&buffer);
  return status->code;
}

void hc_exchange_drop(hc_exchange *exchange) {
  hc_status ignored = {HC_OK, ""};
  (void)hc_transport_wait(&exchange->request, &ignored);
  hc_messages_free(&exchange->sends);
  hc_messages_free(&exchange->recvs);
  hc_route_free(&exchange->route);
}

hc_code hc_halo_exchange(AtenTensorHandle local, const hc_axis *axis, const hc_interval *extents,
                         int64_t lead, double fill, const char *op, AtenTensorHandle *out,
                         hc_status *status) {
  hc_exchange exchange;
  memset(&exchange, 0, sizeof exchange);
  HC_TRY(hc_exchange_begin(local, axis, extents, op, &exchange, status));
  HC_TRY(hc_exchange_finish(&exchange, local, lead, fill, out, status));
done:
  hc_exchange_drop(&exchange);
  return status->code;
}

/* ---- reduce ---- */

/* Adds what was received to `shard`, a part with this rank's columns. */
static hc_code add_received(const hc_exchange *exchange, const hc_part *shard, hc_status *status) {
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  hc_part wire;
  walk w = walk_begin(&exchange->shape, dim, route->sends, &exchange->recvs);
  for (int64_t i = 0; i < route->nsends && exchange->recvs.count > 0; ++i) {
    const hc_piece *piece = &route->sends[i];
    HC_TRY(walk_to(&w, i, false, &wire, status));
    const hc_part place =
        hc_part_narrow(shard, dim, piece->begin - route->owned.begin, piece->end - piece->begin);
    HC_TRY(hc_move(true, &place, &wire, status)); /* one by one: two ranks may give to one column */
  }
done:
  return status->code;
}

/* Whether the gradient of the own columns lies in `grad` in one piece, in memory that can be moved together. */
static bool can_compact(const hc_exchange *exchange) {
  const hc_route *route = &exchange->route;
  hc_shape dense = exchange->shape;
  hc_shape_set_strides(&dense, hc_shape_is_channels_last(&exchange->shape));
  return route->nkeeps == 1 && route->keeps[0].begin == route->owned.begin &&
         route->keeps[0].end == route->owned.end && hc_shape_on_cpu(&dense) &&
         memcmp(dense.strides, exchange->shape.strides, (size_t)dense.ndim * sizeof *dense.strides) == 0;
}

/* Moves the own columns to the front of grad's memory, and makes a dense tensor of them. Rows move towards the front,
 * in order, so none is overwritten before it has moved. */
static hc_code compact(const hc_exchange *exchange, AtenTensorHandle grad, const hc_shape *shard,
                       AtenTensorHandle *out, hc_status *status) {
  const int64_t dim = exchange->axis.dim, stride = exchange->shape.strides[dim];
  const int64_t size = (int64_t)aoti_torch_dtype_element_size(shard->dtype);
  const int64_t row = shard->sizes[dim] * stride * size;
  const int64_t extended_row = exchange->shape.sizes[dim] * stride * size;
  const int64_t rows = row > 0 ? hc_shape_numel(shard) * size / row : 0;
  void *data = NULL;
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(grad, &data));
  const char *from = (const char *)data + exchange->route.keeps[0].offset * stride * size;
  for (int64_t i = 0; i < rows; ++i) {
    memmove((char *)data + i * row, from + i * extended_row, (size_t)row);
  }
  HC_TRY_TORCH(status,
               aoti_torch__reinterpret_tensor(grad, shard->ndim, shard->sizes, shard->strides, 0, out));
done:
  return status->code;
}

/* The own columns of `grad` in a tensor of their own, zero where `grad` has none. */
static hc_code keep_own(const hc_exchange *exchange, AtenTensorHandle grad, const hc_shape *shard,
                        AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle sum = NULL;
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  const hc_part extent = hc_part_of(grad, &exchange->shape);
  HC_TRY(hc_tensor_zeros(shard, &sum, status));
  const hc_part whole = hc_part_of(sum, shard);
  for (int64_t i = 0; i < route->nkeeps; ++i) {
    const hc_piece *keep = &route->keeps[i];
    const int64_t length = keep->end - keep->begin;
    const hc_part to = hc_part_narrow(&whole, dim, keep->begin - route->owned.begin, length);
    const hc_part from = hc_part_narrow(&extent, dim, keep->offset, length);
    HC_TRY(hc_move(true, &to, &from, status)); /* periodic: several images of one column */
  }
  *out = sum;
  sum = NULL;
done:
  hc_tensor_free(&sum);
  return status->code;
}

hc_code hc_halo_reduce(AtenTensorHandle grad, bool consume, const hc_axis *axis, const hc_interval *extents,
                       const char *op, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle sum = NULL;
  hc_exchange exchange; /* the same route, travelled backwards: what was received is sent */
  memset(&exchange, 0, sizeof exchange);
  exchange.axis = *axis;
  hc_route *route = &exchange.route;
  HC_TRY(hc_tensor_shape(grad, &exchange.shape, status));
  HC_TRY(check_length(&exchange.shape, axis, extents[axis->rank], "extent", status));
  HC_TRY(hc_route_build(axis->size, axis->world, axis->rank, extents, axis->periodic, route, status));
  const hc_part extent = hc_part_of(grad, &exchange.shape);
  if (!route->silent) {
    HC_TRY(allocate(&exchange.shape, axis->dim, route->recvs, route->nrecvs, false, &exchange.sends, status));
    HC_TRY(allocate(&exchange.shape, axis->dim, route->sends, route->nsends, true, &exchange.recvs, status));
    HC_TRY(pack(&extent, axis->dim, route->recvs, route->nrecvs, true, 0, &exchange.sends, status));
    HC_TRY(hc_transport_post(axis->group, &exchange.shape, &exchange.sends, &exchange.recvs, op,
                             signature_of(&exchange.shape, axis, extents, true, op), &exchange.request,
                             status));
  }
  hc_shape shard = exchange.shape;
  shard.sizes[axis->dim] = hc_length(route->owned);
  hc_shape_set_strides(&shard, hc_shape_is_channels_last(&exchange.shape));
  if (consume && can_compact(&exchange)) {
    HC_TRY(compact(&exchange, grad, &shard, &sum, status));
  } else {
    HC_TRY(keep_own(&exchange, grad, &shard, &sum, status));
  }
  HC_TRY(hc_transport_wait(&exchange.request, status));
  const hc_part whole = hc_part_of(sum, &shard);
  HC_TRY(add_received(&exchange, &whole, status));
  *out = sum;
  sum = NULL;
done:
  hc_tensor_free(&sum);
  hc_exchange_drop(&exchange);
  return status->code;
}
