/* transport_c10d: the transport over torch's own process groups, of any backend, through ops registered from Python. */
#ifndef HC_TRANSPORT_C10D_H
#define HC_TRANSPORT_C10D_H

#include "transport.h"

hc_code hc_c10d_post(const char *group, const hc_messages *sends, const hc_messages *recvs, const char *op,
                     int64_t signature, int64_t *out, hc_status *status);
hc_code hc_c10d_wait(int64_t ticket, hc_status *status);
/* Closes the group's communicator too, if there is one. */
void hc_c10d_report(const char *group, const char *message);

/* Collective: whether the ranks of the group use NCCL for tensors on a device, whose communicator is made then. */
hc_code hc_c10d_connect(const char *group, int64_t device, bool *nccl, hc_status *status);

#endif
