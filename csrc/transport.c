/* transport: the front, and what both transports share. See transport.h. */
#include "transport.h"

#include <stdlib.h>

#include "shard.h"
#include "transport_c10d.h"
#include "transport_nccl.h"

hc_code hc_messages_init(hc_messages *messages, int64_t capacity, hc_status *status) {
  messages->count = 0;
  messages->items = calloc((size_t)capacity + 1, sizeof *messages->items); /* never of size 0 */
  if (messages->items == NULL) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for a list of messages");
  }
  return HC_OK;
}

void hc_messages_free(hc_messages *messages) {
  for (int64_t i = 0; i < messages->count; ++i) {
    hc_tensor_free(&messages->items[i].buffer);
  }
  free(messages->items);
  messages->items = NULL;
  messages->count = 0;
}

/* Where the host may read and write a buffer at any time. */
static bool on_host(const hc_shape *shape) { return hc_shape_on_cpu(shape) && !hc_nccl_api_is_fake(); }

int64_t hc_transport_header_bytes(const hc_shape *shape) { return on_host(shape) ? HC_HEADER_BYTES : 0; }

hc_code hc_transport_buffer(int64_t payload_bytes, bool receives, const hc_shape *like, AtenTensorHandle *out,
                            hc_status *status) {
  AtenTensorHandle room = NULL;
  const int64_t size = hc_transport_header_bytes(like) + payload_bytes, stride = 1;
  const bool spare = receives && on_host(like);
  const int64_t capacity = spare ? hc_ceil_div(size, HC_CHUNK_BYTES) * HC_CHUNK_BYTES : size;
  HC_TRY(hc_tensor_bytes(capacity, like, &room, status));
  HC_TRY_TORCH(status, aoti_torch__reinterpret_tensor(room, 1, &size, &stride, 0, out));
done:
  hc_tensor_free(&room);
  return status->code;
}

/* Where the mark is, NULL without a header. */
static hc_code find_mark(const hc_message *message, const hc_shape *like, int64_t **mark, hc_status *status) {
  void *header = NULL;
  *mark = NULL;
  if (hc_transport_header_bytes(like) > 0) {
    HC_TRY_TORCH(status, aoti_torch_get_data_ptr(message->buffer, &header));
    *mark = (int64_t *)header + 2;
  }
done:
  return status->code;
}

hc_code hc_transport_set_mark(const hc_message *message, const hc_shape *like, bool *mark,
                              hc_status *status) {
  int64_t *place = NULL;
  HC_TRY(find_mark(message, like, &place, status));
  if (place == NULL) {
    *mark = false;
  } else {
    *place = *mark;
  }
done:
  return status->code;
}

hc_code hc_transport_get_mark(const hc_message *message, const hc_shape *like, bool *mark,
                              hc_status *status) {
  int64_t *place = NULL;
  HC_TRY(find_mark(message, like, &place, status));
  *mark = place != NULL && *place != 0;
done:
  return status->code;
}

/* Finds the communicator of a group for a device, or makes it; NULL where the ranks agreed on c10d. */
static hc_code find_comm(const char *group, const hc_shape *like, hc_comm **comm, hc_status *status) {
  const int32_t device = like->device_index > 0 ? like->device_index : 0;
  bool nccl = false;
  *comm = NULL;
  if (on_host(like)) {
    return HC_OK;
  }
  *comm = hc_comm_find(group, device);
  if (*comm == NULL) {
    HC_TRY(hc_c10d_connect(group, device, &nccl, status));
    *comm = nccl ? hc_comm_find(group, device) : NULL;
    if (nccl && *comm == NULL) {
      (void)hc_fail(status, HC_ERROR_TORCH, "the communicator of group '%s' was closed as it was made",
                    group);
    }
  }
done:
  return status->code;
}

hc_code hc_transport_post(const char *group, const hc_shape *like, const hc_messages *sends,
                          const hc_messages *recvs, const char *op, int64_t signature, hc_request *request,
                          hc_status *status) {
  hc_comm *comm = NULL;
  HC_TRY(find_comm(group, like, &comm, status));
  if (comm != NULL) {
    HC_TRY(hc_nccl_post(comm, sends, recvs, op, &request->flight, status));
  } else {
    HC_TRY(hc_c10d_post(group, sends, recvs, op, signature, &request->ticket, status));
  }
done:
  return status->code;
}

hc_code hc_transport_wait(hc_request *request, hc_status *status) {
  const hc_request taken = *request;
  *request = (hc_request){0, NULL};
  if (taken.flight != NULL) {
    HC_TRY(hc_nccl_wait(taken.flight, status));
  }
  if (taken.ticket != 0) {
    HC_TRY(hc_c10d_wait(taken.ticket, status));
  }
done:
  return status->code;
}

void hc_transport_report(const char *group, const char *message) { hc_c10d_report(group, message); }
