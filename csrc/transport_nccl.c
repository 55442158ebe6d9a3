/* transport_nccl: see transport_nccl.h. */
#include "transport_nccl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- statistics ---- */

enum { MAX_OPS = 32 };

static struct {
  char op[32];
  hc_nccl_count count;
} counts[MAX_OPS]; /* the last one takes what there is no room for */
static pthread_mutex_t counts_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_count(const char *op, int64_t messages, int64_t bytes, double seconds) {
  int i = 0;
  (void)pthread_mutex_lock(&counts_lock);
  while (i < MAX_OPS - 1 && counts[i].op[0] != '\0' && strcmp(counts[i].op, op) != 0) {
    ++i;
  }
  if (counts[i].op[0] == '\0') {
    (void)snprintf(counts[i].op, sizeof counts[i].op, "%s", op);
  }
  counts[i].count.messages += messages;
  counts[i].count.bytes += bytes;
  ++counts[i].count.exchanges;
  counts[i].count.seconds += seconds;
  (void)pthread_mutex_unlock(&counts_lock);
}

void hc_nccl_visit_counts(void (*visit)(const hc_nccl_count *, void *), void *context) {
  (void)pthread_mutex_lock(&counts_lock);
  for (int i = 0; i < MAX_OPS && counts[i].op[0] != '\0'; ++i) {
    counts[i].count.op = counts[i].op;
    visit(&counts[i].count, context);
  }
  (void)pthread_mutex_unlock(&counts_lock);
}

void hc_nccl_reset_counts(void) {
  (void)pthread_mutex_lock(&counts_lock);
  memset(counts, 0, sizeof counts);
  (void)pthread_mutex_unlock(&counts_lock);
}

/* ---- buffers ---- */

typedef struct span {
  void *data;
  size_t bytes;
} span;

static hc_code span_of(AtenTensorHandle buffer, span *out, hc_status *status) {
  int64_t *sizes = NULL; /* of a list of bytes */
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(buffer, &out->data));
  HC_TRY_TORCH(status, aoti_torch_get_sizes(buffer, &sizes));
  out->bytes = (size_t)sizes[0];
done:
  return status->code;
}

/* References to the buffers, so that whoever posts them may free his own. */
static hc_code hold(hc_flight *flight, const hc_messages *messages, hc_status *status) {
  for (int64_t i = 0; i < messages->count; ++i) {
    HC_TRY(hc_tensor_share(messages->items[i].buffer, &flight->held[flight->nheld], status));
    ++flight->nheld;
  }
done:
  return status->code;
}

/* ---- exchange ---- */

static hc_code describe(hc_flight *flight, const hc_comm *comm, const hc_messages *sends,
                        const hc_messages *recvs, const char *op, int64_t *sent, hc_status *status) {
  const hc_messages *both[2] = {recvs, sends};
  int64_t bytes[2] = {0, 0};
  char peers[64] = "";
  size_t used = 0;
  for (int i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < both[i]->count; ++j) {
      span buffer = {NULL, 0};
      HC_TRY(span_of(both[i]->items[j].buffer, &buffer, status));
      bytes[i] += (int64_t)buffer.bytes;
      if ((i == 0 || recvs->count == 0) && used < sizeof peers - 24) {
        used += (size_t)snprintf(peers + used, sizeof peers - used, "%s%" PRId64, used == 0 ? "" : ", ",
                                 both[i]->items[j].peer);
      }
    }
  }
  (void)snprintf(flight->what, sizeof flight->what,
                 "exchange %" PRId64 " (%.32s) of rank %" PRId64 " with ranks [%s], %" PRId64
                 " bytes to send and %" PRId64 " to receive,",
                 flight->number, op, comm->rank, peers, bytes[1], bytes[0]);
  *sent = bytes[1];
done:
  return status->code;
}

/* The group of sends and receives. It is closed also after an error. */
static hc_code launch(const hc_nccl_api *api, hc_comm *comm, const hc_messages *sends,
                      const hc_messages *recvs, const char *what, hc_status *status) {
  span buffer;
  bool open = false;
  HC_TRY_NCCL(api, status, comm->comm, ncclGroupStart());
  open = true;
  for (int64_t i = 0; i < recvs->count; ++i) {
    HC_TRY(span_of(recvs->items[i].buffer, &buffer, status));
    HC_TRY_NCCL(
        api, status, comm->comm,
        ncclRecv(buffer.data, buffer.bytes, ncclUint8, (int)recvs->items[i].peer, comm->comm, comm->stream));
  }
  for (int64_t i = 0; i < sends->count; ++i) {
    HC_TRY(span_of(sends->items[i].buffer, &buffer, status));
    HC_TRY_NCCL(
        api, status, comm->comm,
        ncclSend(buffer.data, buffer.bytes, ncclUint8, (int)sends->items[i].peer, comm->comm, comm->stream));
  }
  open = false;
  HC_TRY_NCCL(api, status, comm->comm, ncclGroupEnd());
  HC_TRY(hc_comm_settle(comm, what, status)); /* what follows on the stream must follow the group */
done:
  if (open) {
    (void)api->ncclGroupEnd();
  }
  return status->code;
}

hc_code hc_nccl_post(hc_comm *comm, const hc_messages *sends, const hc_messages *recvs, const char *op,
                     hc_flight **out, hc_status *status) {
  const hc_nccl_api *api = NULL;
  hc_flight *flight = NULL;
  int before = 0;
  bool switched = false, capturing = false;
  int64_t sent = 0;
  void *current = NULL;
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const double started = hc_clock();
  const size_t nbuffers = (size_t)(sends->count + recvs->count);
  *out = NULL;
  hc_comm_lock_order();
  HC_TRY(hc_nccl_api_get(&api, status));
  HC_TRY(hc_comm_check(comm, comm->serial, comm->exchanges + 1, status));
  if (nbuffers == 0) {
    ++comm->exchanges;
    goto done;
  }
  HC_TRY_CUDA(api, status, cudaGetDevice(&before));
  HC_TRY_CUDA(api, status, cudaSetDevice(comm->device));
  switched = true;
  HC_TRY_TORCH(status, api->aoti_torch_get_current_cuda_stream(comm->device, &current));
  HC_TRY_CUDA(api, status, cudaStreamIsCapturing(current, &capture));
  capturing = capture != cudaStreamCaptureStatusNone;
  if (!capturing) {
    hc_comm_retire(comm);
  }
  HC_TRY(hc_flight_new(comm->device, &flight, status));
  flight->comm = comm;
  flight->serial = comm->serial;
  flight->number = comm->exchanges + 1;
  flight->current = current;
  flight->captured = capturing;
  flight->deadline = started + comm->timeout_s;
  flight->held = calloc(nbuffers, sizeof *flight->held);
  if (flight->held == NULL) {
    (void)hc_fail(status, HC_ERROR_MEMORY, "out of memory for an exchange");
    goto done;
  }
  HC_TRY(describe(flight, comm, sends, recvs, op, &sent, status));
  HC_TRY(hold(flight, sends, status));
  HC_TRY(hold(flight, recvs, status));
  HC_TRY_CUDA(api, status, cudaEventRecord(flight->ready, flight->current));
  HC_TRY_CUDA(api, status, cudaStreamWaitEvent(comm->stream, flight->ready, 0));
  HC_TRY(launch(api, comm, sends, recvs, flight->what, status));
  HC_TRY_CUDA(api, status, cudaEventRecord(flight->done, comm->stream));
  if (!capturing) {
    hc_flight_add(flight);
  }
  ++comm->exchanges;
  *out = flight;
  flight = NULL;
done:
  if (status->code != HC_OK && api != NULL) {
    hc_comm_abort(comm, capturing, status); /* before the buffers can go */
  }
  if (flight != NULL) {
    hc_flight_free(flight);
  }
  if (switched) {
    (void)api->cudaSetDevice(before);
  }
  hc_comm_unlock_order();
  if (status->code == HC_OK && nbuffers > 0) {
    add_count(op, sends->count, sent, hc_clock() - started);
  }
  return status->code;
}

hc_code hc_nccl_wait(hc_flight *flight, hc_status *status) {
  const hc_nccl_api *api = NULL;
  hc_comm *comm = flight->comm;
  hc_status waiting = {HC_OK, ""};
  HC_TRY(hc_nccl_api_get(&api, &waiting));
  HC_TRY_CUDA(api, &waiting, cudaStreamWaitEvent(flight->current, flight->done, 0));
done:
  if (waiting.code != HC_OK) {
    (void)hc_fail(status, waiting.code, "%s", waiting.message);
    hc_comm_lock_order();
    hc_comm_abort(comm, flight->captured, &waiting); /* nothing is in flight any more */
    hc_comm_unlock_order();
  } else {
    hc_comm_look(comm); /* what NCCL knows by now, or a peer has said, need not wait for the next exchange */
    (void)hc_comm_check(comm, flight->serial, flight->number, status);
  }
  for (int64_t i = 0; i < flight->nheld; ++i) {
    hc_tensor_free(&flight->held[i]);
  }
  if (flight->captured) {
    hc_flight_free(flight);
  } else {
    hc_flight_waited(flight);
  }
  return status->code;
}
