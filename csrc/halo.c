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

/* Packs the pieces of `tensor` into the message buffers, or (add) adds the buffers to the pieces. A piece lies at its
 * offset in the extent plus `origin` when `by_offset`, else at its source coordinate minus `origin`. */
static hc_code move(AtenTensorHandle tensor, const hc_shape *shape, int64_t dim, const hc_piece *pieces,
                    int64_t count, bool by_offset, int64_t origin, const hc_messages *messages, bool add,
                    hc_status *status) {
  AtenTensorHandle wire = NULL, place = NULL;
  const int64_t header = hc_transport_header_bytes(shape);
  int64_t message = -1, offset_bytes = 0;
  if (messages->count == 0) {
    return HC_OK;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || pieces[i].peer != pieces[i - 1].peer) {
      ++message;
      offset_bytes = header;
    }
    hc_shape part = *shape;
    part.sizes[dim] = pieces[i].end - pieces[i].begin;
    const int64_t at = by_offset ? pieces[i].offset + origin : pieces[i].begin - origin;
    AtenTensorHandle buffer = messages->items[message].buffer;
    HC_TRY(hc_tensor_view_bytes(buffer, offset_bytes, &part, &wire, status));
    if (add) {
      HC_TRY(hc_tensor_add_at(tensor, shape, dim, at, part.sizes[dim], wire, status));
    } else {
      HC_TRY(hc_tensor_narrow(tensor, shape, dim, at, part.sizes[dim], &place, status));
      HC_TRY_TORCH(status, aoti_torch_copy_(wire, place, 1));
      hc_tensor_free(&place);
    }
    offset_bytes += payload_bytes(shape, dim, &pieces[i], 1);
    hc_tensor_free(&wire);
  }
done:
  hc_tensor_free(&wire);
  hc_tensor_free(&place);
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
    HC_TRY(move(local, &exchange->shape, axis->dim, route->sends, route->nsends, false, route->owned.begin,
                &exchange->sends, false, status));
    HC_TRY(
        hc_transport_post(axis->group, &exchange->sends, &exchange->recvs, op, &exchange->request, status));
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
                         AtenTensorHandle target, const hc_shape *shape, int64_t at, hc_status *status) {
  AtenTensorHandle kept = NULL;
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  for (int64_t i = 0; i < route->nkeeps; ++i) {
    const hc_piece *keep = &route->keeps[i];
    const hc_interval both = clip(route, keep, part);
    if (hc_length(both) > 0) {
      const int64_t skipped = both.begin - route->extent.begin - keep->offset;
      HC_TRY(hc_tensor_narrow(local, &exchange->shape, dim, keep->begin + skipped - route->owned.begin,
                              hc_length(both), &kept, status));
      HC_TRY(
          hc_tensor_copy_at(target, shape, dim, at + both.begin - part.begin, hc_length(both), kept, status));
      hc_tensor_free(&kept);
    }
  }
done:
  hc_tensor_free(&kept);
  return status->code;
}

static hc_code copy_received(const hc_exchange *exchange, hc_interval part, AtenTensorHandle target,
                             const hc_shape *shape, int64_t at, hc_status *status) {
  AtenTensorHandle wire = NULL, place = NULL;
  const hc_route *route = &exchange->route;
  const int64_t dim = exchange->axis.dim;
  int64_t message = -1, offset_bytes = 0;
  for (int64_t i = 0; i < route->nrecvs && exchange->recvs.count > 0; ++i) {
    const hc_piece *piece = &route->recvs[i];
    if (i == 0 || piece->peer != piece[-1].peer) {
      ++message;
      offset_bytes = hc_transport_header_bytes(&exchange->shape);
    }
    const hc_interval both = clip(route, piece, part);
    if (hc_length(both) > 0) {
      hc_shape sent = exchange->shape;
      sent.sizes[dim] = piece->end - piece->begin;
      hc_shape_set_strides(&sent, false);
      HC_TRY(hc_tensor_view_bytes(exchange->recvs.items[message].buffer, offset_bytes, &sent, &wire, status));
      HC_TRY(hc_tensor_narrow(wire, &sent, dim, both.begin - route->extent.begin - piece->offset,
                              hc_length(both), &place, status));
      HC_TRY(hc_tensor_copy_at(target, shape, dim, at + both.begin - part.begin, hc_length(both), place,
                               status));
      hc_tensor_free(&wire);
      hc_tensor_free(&place);
    }
    offset_bytes += payload_bytes(&exchange->shape, dim, piece, 1);
  }
done:
  hc_tensor_free(&wire);
  hc_tensor_free(&place);
  return status->code;
}

hc_code hc_exchange_copy(const hc_exchange *exchange, AtenTensorHandle local, hc_interval part,
                         AtenTensorHandle target, const hc_shape *shape, int64_t at, hc_status *status) {
  HC_TRY(copy_kept(exchange, local, part, target, shape, at, status));
  HC_TRY(copy_received(exchange, part, target, shape, at, status));
done:
  return status->code;
}

/* Sets the columns that nobody sends: [0, lead) to zero, and what the extent has outside the tensor to `fill`. */
static hc_code fill_outside(const hc_exchange *exchange, AtenTensorHandle buffer, const hc_shape *shape,
                            int64_t lead, double fill, hc_status *status) {
  AtenTensorHandle part = NULL;
  const int64_t dim = exchange->axis.dim, length = hc_length(exchange->route.extent);
  const hc_interval extent = exchange->route.extent;
  const hc_interval lower = {0, hc_min(length, hc_max(0, -extent.begin))};
  const hc_interval upper = {hc_max(lower.end, hc_min(length, exchange->axis.size - extent.begin)), length};
  if (lead > 0) {
    HC_TRY(hc_tensor_narrow(buffer, shape, dim, 0, lead, &part, status));
    HC_TRY_TORCH(status, aoti_torch_zero_(part));
    hc_tensor_free(&part);
  }
  for (int side = 0; side < 2 && !exchange->axis.periodic; ++side) {
    const hc_interval outside = side == 0 ? lower : upper;
    if (hc_length(outside) > 0) {
      HC_TRY(hc_tensor_narrow(buffer, shape, dim, lead + outside.begin, hc_length(outside), &part, status));
      HC_TRY_TORCH(status, aoti_torch_aten_fill__Scalar(part, fill));
      hc_tensor_free(&part);
    }
  }
done:
  hc_tensor_free(&part);
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
  HC_TRY(fill_outside(exchange, buffer, &extended, lead, fill, status));
  HC_TRY(hc_exchange_copy(exchange, local, route->extent, buffer, &extended, lead, status));
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

hc_code hc_halo_reduce(AtenTensorHandle grad, const hc_axis *axis, const hc_interval *extents, const char *op,
                       AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle sum = NULL, kept = NULL;
  hc_exchange exchange; /* the same route, travelled backwards: what was received is sent */
  memset(&exchange, 0, sizeof exchange);
  exchange.axis = *axis;
  hc_route *route = &exchange.route;
  HC_TRY(hc_tensor_shape(grad, &exchange.shape, status));
  HC_TRY(check_length(&exchange.shape, axis, extents[axis->rank], "extent", status));
  HC_TRY(hc_route_build(axis->size, axis->world, axis->rank, extents, axis->periodic, route, status));
  if (!route->silent) {
    HC_TRY(allocate(&exchange.shape, axis->dim, route->recvs, route->nrecvs, false, &exchange.sends, status));
    HC_TRY(allocate(&exchange.shape, axis->dim, route->sends, route->nsends, true, &exchange.recvs, status));
    HC_TRY(move(grad, &exchange.shape, axis->dim, route->recvs, route->nrecvs, true, 0, &exchange.sends,
                false, status));
    HC_TRY(hc_transport_post(axis->group, &exchange.sends, &exchange.recvs, op, &exchange.request, status));
  }
  hc_shape shard = exchange.shape;
  shard.sizes[axis->dim] = hc_length(route->owned);
  hc_shape_set_strides(&shard, hc_shape_is_channels_last(&exchange.shape));
  HC_TRY(hc_tensor_zeros(&shard, &sum, status));
  for (int64_t i = 0; i < route->nkeeps; ++i) {
    const hc_piece *keep = &route->keeps[i];
    const int64_t length = keep->end - keep->begin;
    HC_TRY(hc_tensor_narrow(grad, &exchange.shape, axis->dim, keep->offset, length, &kept, status));
    HC_TRY(hc_tensor_add_at(sum, &shard, axis->dim, keep->begin - route->owned.begin, length, kept, status));
    hc_tensor_free(&kept);
  }
  HC_TRY(hc_transport_wait(&exchange.request, status));
  HC_TRY(move(sum, &shard, axis->dim, route->sends, route->nsends, false, route->owned.begin, &exchange.recvs,
              true, status));
  *out = sum;
  sum = NULL;
done:
  hc_tensor_free(&sum);
  hc_tensor_free(&kept);
  hc_exchange_drop(&exchange);
  return status->code;
}
