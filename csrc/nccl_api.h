/* nccl_api: NCCL, the CUDA runtime and torch's streams as one table of functions.
 *
 * They come from the copies that torch has loaded. A second NCCL in the process would be a second world of
 * communicators, so nothing is ever loaded from here. A build with -DHC_FAULTS takes the whole table from the library
 * that HALOCONV_FAKE_CUDA names instead, and counts tensors on the CPU as its device memory: this is how the transport
 * is tested without a card (tests/fakes/).
 */
#ifndef HC_NCCL_API_H
#define HC_NCCL_API_H

#include "nccl_abi.h"
#include "status.h"

typedef struct hc_nccl_api {
#define HC_FIELD(name) __typeof__(name) *name; /* NOLINT(bugprone-macro-parentheses) */
  HC_NCCL_FUNCTIONS(HC_FIELD)
  HC_CUDART_FUNCTIONS(HC_FIELD)
  HC_TORCH_CUDA_FUNCTIONS(HC_FIELD)
#undef HC_FIELD
} hc_nccl_api;

/* The table; a failure says what is missing. */
hc_code hc_nccl_api_get(const hc_nccl_api **api, hc_status *status);
/* Whether the table is the tests' own: tensors on the CPU are device memory then. */
bool hc_nccl_api_is_fake(void);

/* Turn a result into a status; `call` is its source text. They leave no error behind that torch would find. */
hc_code hc_check_cuda(const hc_nccl_api *api, hc_status *status, cudaError_t error, const char *call);
hc_code hc_check_nccl(const hc_nccl_api *api, hc_status *status, ncclResult_t result, ncclComm_t comm,
                      const char *call);

#define HC_TRY_CUDA(api, status, call) HC_TRY(hc_check_cuda((api), (status), (api)->call, #call))
#define HC_TRY_NCCL(api, status, comm, call) \
  HC_TRY(hc_check_nccl((api), (status), (api)->call, (comm), #call))

#endif
