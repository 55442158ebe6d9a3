/* transport_nccl: the transport between devices: NCCL, on a stream of its own.
 *
 * An exchange is one NCCL group: a send or a receive for each peer that has something for this rank, and for no other.
 * It runs on a high-priority stream of torch's pool beside the caller's, ordered by two events and never by the host:
 *
 *   caller's stream   pack --> record ready          (compute)        wait for done --> unpack
 *   own stream                    wait for ready --> send, receive --> record done
 *
 * The buffers were allocated on the caller's stream. The transport holds references to them until that stream has been
 * made to wait for `done`: only then may torch's allocator give them to somebody else. That holds for errors too: an
 * exchange that cannot be waited for is aborted first, and its stream is drained.
 *
 * Nothing here asks the device for its state, so that an exchange can be captured in a CUDA graph.
 */
#ifndef HC_TRANSPORT_NCCL_H
#define HC_TRANSPORT_NCCL_H

#include "nccl_comm.h"
#include "transport.h"

/* `flight` is NULL afterwards if there was nothing to send or to receive. */
hc_code hc_nccl_post(hc_comm *comm, const hc_messages *sends, const hc_messages *recvs, const char *op,
                     hc_flight **out, hc_status *status);
/* Makes the caller's stream wait, and gives the exchange up. */
hc_code hc_nccl_wait(hc_flight *flight, hc_status *status);

/* What was sent since the last reset. Calls `visit` for each op. */
typedef struct hc_nccl_count {
  const char *op;
  int64_t messages, bytes, exchanges;
  double seconds; /* of the host */
} hc_nccl_count;
void hc_nccl_visit_counts(void (*visit)(const hc_nccl_count *count, void *context), void *context);
void hc_nccl_reset_counts(void);

#endif
