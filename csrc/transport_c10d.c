/* transport_c10d: the transport over torch's own process groups.
 *
 * The stable C ABI has no process groups. Three ops registered from Python (python/haloconv/_transport.py) are the
 * bridge, called through the dispatcher: haloconv::_post, _wait and _report. They are a thin layer over
 * torch.distributed.batch_isend_irecv and work with any of its backends.
 */
#include <stdlib.h>

#include "shard.h"
#include "stable.h"
#include "transport.h"

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

int64_t hc_transport_header_bytes(const hc_shape *shape) {
  return hc_shape_on_cpu(shape) ? HC_HEADER_BYTES : 0;
}

hc_code hc_transport_buffer(int64_t payload_bytes, bool receives, const hc_shape *like, AtenTensorHandle *out,
                            hc_status *status) {
  AtenTensorHandle room = NULL;
  const int64_t size = hc_transport_header_bytes(like) + payload_bytes, stride = 1;
  const bool spare = receives && hc_shape_on_cpu(like);
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

/* The buffers as Tensor[] and the peers as int[]. */
static hc_code box(const hc_messages *messages, StableIValue *buffers, StableIValue *peers,
                   hc_status *status) {
  AtenTensorHandle *handles = malloc(((size_t)messages->count + 1) * sizeof *handles);
  int64_t *ranks = malloc(((size_t)messages->count + 1) * sizeof *ranks);
  if (handles == NULL || ranks == NULL) {
    (void)hc_fail(status, HC_ERROR_MEMORY, "out of memory for a list of messages");
    goto done;
  }
  for (int64_t i = 0; i < messages->count; ++i) {
    handles[i] = messages->items[i].buffer;
    ranks[i] = messages->items[i].peer;
  }
  HC_TRY(hc_stable_from_tensors(handles, messages->count, buffers, status));
  HC_TRY(hc_stable_from_ints(ranks, messages->count, peers, status));
done:
  free(handles);
  free(ranks);
  return status->code;
}

hc_code hc_transport_post(const char *group, const hc_messages *sends, const hc_messages *recvs,
                          const char *op, hc_request *request, hc_status *status) {
  /* _post(Tensor[] send, int[] to, Tensor[] recv, int[] source, int[] group, int[] op) -> int */
  StableIValue stack[6] = {0, 0, 0, 0, 0, 0};
  HC_TRY(box(sends, &stack[0], &stack[1], status));
  HC_TRY(box(recvs, &stack[2], &stack[3], status));
  HC_TRY(hc_stable_from_text(group, &stack[4], status));
  HC_TRY(hc_stable_from_text(op, &stack[5], status));
  HC_FAULT_POINT(status);
  const int32_t error = torch_call_dispatcher("haloconv::_post", "", stack, HC_TORCH_ABI_VERSION);
  const int64_t ticket = hc_stable_to_int(stack[0]);
  for (int i = 0; i < 6; ++i) {
    stack[i] = 0; /* taken over by the dispatcher */
  }
  HC_TRY(hc_check_torch(status, error, "haloconv::_post"));
  request->ticket = ticket;
done:
  hc_stable_free_tensor_list(&stack[0]);
  hc_stable_free_list(&stack[1]);
  hc_stable_free_tensor_list(&stack[2]);
  hc_stable_free_list(&stack[3]);
  hc_stable_free_list(&stack[4]);
  hc_stable_free_list(&stack[5]);
  return status->code;
}

hc_code hc_transport_wait(hc_request *request, hc_status *status) {
  if (request->ticket != 0) {
    StableIValue stack[1] = {(StableIValue)request->ticket};
    request->ticket = 0;
    HC_TRY(hc_check_torch(status, torch_call_dispatcher("haloconv::_wait", "", stack, HC_TORCH_ABI_VERSION),
                          "haloconv::_wait"));
  }
done:
  return status->code;
}

void hc_transport_report(const char *group, const char *message) {
  hc_status ignored = {HC_OK, ""};
  StableIValue stack[2] = {0, 0};
  HC_TRY(hc_stable_from_text(group, &stack[0], &ignored));
  HC_TRY(hc_stable_from_text(message, &stack[1], &ignored));
  (void)torch_call_dispatcher("haloconv::_report", "", stack, HC_TORCH_ABI_VERSION);
  stack[0] = stack[1] = 0; /* taken over by the dispatcher */
done:
  hc_stable_free_list(&stack[0]);
  hc_stable_free_list(&stack[1]);
}
