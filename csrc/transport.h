/* transport: moves messages between the ranks of one group.
 *
 *   post(sends, recvs) -> request     wait(request)
 *
 * Between the two the caller computes. A message is a byte buffer, and `peer` a rank of the group, never a global
 * one. Every rank of a group posts the same sequence of exchanges, also where it has nothing to send or receive
 * itself (that costs no message): the sequence number is how a message that is out of step, or one that reports
 * an error of its sender, is told from the one that is expected.
 *
 * On the CPU each buffer starts with HC_HEADER_BYTES that belong to the transport: number, length, the sender's mark, and
 * the exchange's signature, a number that the ranks have alike if they mean the same by it. It travels in chunks, each
 * received into room for a whole one: gloo ends the process when a message is larger than the buffer that waits for it,
 * while a header that says so can be answered with an error.
 *
 * A buffer on a device has no header: to read it the host would have to wait. There the transport's own error handling
 * applies.
 *
 * There are two implementations: torch's own process groups, any backend (transport_c10d.c), and NCCL, between CUDA
 * devices (transport_nccl.c). Which of them a group uses for tensors on a device is agreed on by its ranks, in Python, at
 * the first exchange: HALOCONV_TRANSPORT says nccl or c10d, and unset it is NCCL where all ranks can.
 */
#ifndef HC_TRANSPORT_H
#define HC_TRANSPORT_H

#include "status.h"
#include "tensor.h"

enum { HC_HEADER_BYTES = 32, HC_CHUNK_BYTES = 1 << 20 };

typedef struct hc_message {
  int64_t peer;
  AtenTensorHandle buffer; /* uint8; owned by the list that it is in */
} hc_message;

typedef struct hc_messages {
  int64_t count;
  hc_message *items;
} hc_messages;

typedef struct hc_request { /* zeroed: nothing is in flight */
  int64_t ticket;           /* of transport_c10d */
  struct hc_flight *flight; /* of transport_nccl */
} hc_request;

/* Room for `capacity` messages. */
hc_code hc_messages_init(hc_messages *messages, int64_t capacity, hc_status *status);
/* Frees the buffers too. */
void hc_messages_free(hc_messages *messages);

/* Bytes that the transport keeps for itself at the front of a buffer on the device of `shape`. */
int64_t hc_transport_header_bytes(const hc_shape *shape);

/* A buffer for one message, its header included, on the device of `like`. */
hc_code hc_transport_buffer(int64_t payload_bytes, bool receives, const hc_shape *like, AtenTensorHandle *out,
                            hc_status *status);

/* One bit from the sender to the receiver, in the header; where there is none it is false, and setting it says so. To be
 * read after the wait. */
hc_code hc_transport_set_mark(const hc_message *message, const hc_shape *like, bool *mark, hc_status *status);
hc_code hc_transport_get_mark(const hc_message *message, const hc_shape *like, bool *mark, hc_status *status);

/* Starts the exchange, receives before sends. `like` is what is exchanged, also where this rank has no message; `op` names
 * the operation, for the statistics; a message whose signature is another one is an error. The transport keeps its own
 * references to the buffers until it is through with them. */
hc_code hc_transport_post(const char *group, const hc_shape *like, const hc_messages *sends,
                          const hc_messages *recvs, const char *op, int64_t signature, hc_request *request,
                          hc_status *status);
/* Returns when everything has been received, or, on a device, when the caller's stream is made to wait for it. Leaves
 * nothing in flight, also on failure. */
hc_code hc_transport_wait(hc_request *request, hc_status *status);

/* Tells the other ranks of `group` that this one failed, so that none waits for it for ever. Never fails itself. */
void hc_transport_report(const char *group, const char *message);

#endif
