/* transport_c10d: the transport over torch's own process groups.
 *
 * The stable C ABI has no process groups. Ops registered from Python (python/haloconv/_transport.py) are the
 * bridge, called through the dispatcher: haloconv::_post, _wait and _report. They are a thin layer over
 * torch.distributed.batch_isend_irecv and work with any of its backends. A fourth, _connect, lets the ranks of a group
 * agree on a transport.
 */
#include "transport_c10d.h"

#include <stdlib.h>

#include "stable.h"

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

hc_code hc_c10d_post(const char *group, const hc_messages *sends, const hc_messages *recvs, const char *op,
                     int64_t signature, int64_t *out, hc_status *status) {
  /* _post(Tensor[] send, int[] to, Tensor[] recv, int[] source, int[] group, int[] op, int signature) -> int */
  StableIValue stack[7] = {0, 0, 0, 0, 0, 0, (StableIValue)signature};
  HC_TRY(box(sends, &stack[0], &stack[1], status));
  HC_TRY(box(recvs, &stack[2], &stack[3], status));
  HC_TRY(hc_stable_from_text(group, &stack[4], status));
  HC_TRY(hc_stable_from_text(op, &stack[5], status));
  HC_FAULT_POINT(status);
  const int32_t error = torch_call_dispatcher("haloconv::_post", "", stack, HC_TORCH_ABI_VERSION);
  const int64_t ticket = hc_stable_to_int(stack[0]);
  for (int i = 0; i < 7; ++i) {
    stack[i] = 0; /* taken over by the dispatcher */
  }
  HC_TRY(hc_check_torch(status, error, "haloconv::_post"));
  *out = ticket;
done:
  hc_stable_free_tensor_list(&stack[0]);
  hc_stable_free_list(&stack[1]);
  hc_stable_free_tensor_list(&stack[2]);
  hc_stable_free_list(&stack[3]);
  hc_stable_free_list(&stack[4]);
  hc_stable_free_list(&stack[5]);
  return status->code;
}

hc_code hc_c10d_wait(int64_t ticket, hc_status *status) {
  StableIValue stack[1] = {(StableIValue)ticket};
  HC_TRY(hc_check_torch(status, torch_call_dispatcher("haloconv::_wait", "", stack, HC_TORCH_ABI_VERSION),
                        "haloconv::_wait"));
done:
  return status->code;
}

static hc_code try_report(const char *group, const char *message, hc_status *status) {
  StableIValue stack[2] = {0, 0};
  HC_TRY(hc_stable_from_text(group, &stack[0], status));
  HC_TRY(hc_stable_from_text(message, &stack[1], status));
  (void)torch_call_dispatcher("haloconv::_report", "", stack, HC_TORCH_ABI_VERSION);
  stack[0] = stack[1] = 0; /* taken over by the dispatcher */
done:
  hc_stable_free_list(&stack[0]);
  hc_stable_free_list(&stack[1]);
  return status->code;
}

void hc_c10d_report(const char *group, const char *message) {
  /* Without its report this rank would stay in an epoch that the others have left: one failure more is survived. */
  hc_status first = {HC_OK, ""}, second = {HC_OK, ""};
  if (try_report(group, message, &first) != HC_OK) {
    (void)try_report(group, message, &second);
  }
}

hc_code hc_c10d_connect(const char *group, int64_t device, bool *nccl, hc_status *status) {
  /* _connect(int[] group, int device) -> int */
  StableIValue stack[2] = {0, (StableIValue)device};
  HC_TRY(hc_stable_from_text(group, &stack[0], status));
  HC_FAULT_POINT(status);
  const int32_t error = torch_call_dispatcher("haloconv::_connect", "", stack, HC_TORCH_ABI_VERSION);
  const int64_t answer = hc_stable_to_int(stack[0]);
  stack[0] = 0; /* taken over by the dispatcher */
  HC_TRY(hc_check_torch(status, error, "haloconv::_connect"));
  *nccl = answer != 0;
done:
  hc_stable_free_list(&stack[0]);
  return status->code;
}
