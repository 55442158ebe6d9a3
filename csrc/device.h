/* device: the kernels of libhaloconv_cuda.so, where they are there.
 *
 * The library lies beside _C, is loaded at import where torch is a CUDA build, and is never needed: without it, or on a
 * device that it has no code for, callers use torch's own operators. hc_device_takes says which it is, once for each
 * tensor; why not is for `python -m haloconv info`.
 *
 * HALOCONV_CUDA_LIBRARY is the path of another library, which then must load; 0 switches the kernels off. A library
 * built for the host (cuda/blocks_host.c) takes CPU tensors, which is how tests run everything over the kernels.
 *
 * Work goes to the current stream of torch, on which the memory of a tensor is safe to use and to free: nothing here
 * waits.
 */
#ifndef HC_DEVICE_H
#define HC_DEVICE_H

#include "block.h"
#include "status.h"

#include "../cuda/haloconv_cuda.h"

/* What info shows. The texts live as long as the process. */
typedef struct hc_device_library {
  const char *path;    /* NULL: none is loaded */
  const char *reason;  /* why not, in words; NULL where one is loaded */
  hc_cuda_about about; /* of the loaded one */
} hc_device_library;

/* Called once, before anything else of this file. Fails only for a library that the environment names. */
hc_code hc_device_load(hc_status *status);
const hc_device_library *hc_device_loaded(void);

/* Whether the functions below can be called for tensors on that device. */
bool hc_device_takes(int32_t device_type, int32_t device_index);
/* Why the loaded library doesn't run on a CUDA device, or NULL. */
const char *hc_device_reason(int32_t device_index);

/* torch's current stream of a device, a cudaStream_t. NULL for the library for tests, unless torch has one. */
hc_code hc_device_stream(int32_t device_index, void **stream, hc_status *status);

/* See cuda/haloconv_cuda.h: one kernel for up to 16 blocks. Nothing is done for 0 blocks. */
hc_code hc_device_blocks_copy(int32_t device_index, const hc_block *blocks, int64_t count,
                              int64_t element_size, hc_status *status);
hc_code hc_device_blocks_fill(int32_t device_index, const hc_block *blocks, int64_t count,
                              int64_t element_size, const void *value, hc_status *status);
hc_code hc_device_blocks_add(int32_t device_index, const hc_block *blocks, int64_t count, hc_element element,
                             hc_status *status);

#endif
