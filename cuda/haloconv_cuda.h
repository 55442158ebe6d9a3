/* haloconv_cuda: what libhaloconv_cuda.so exports; csrc/device.c looks these names up.
 *
 * Two libraries have these entry points. cuda/blocks.cu is compiled by nvcc and launches kernels. cuda/blocks_host.c is
 * compiled by the C compiler and runs the same bodies over the same launches on the host: it is for tests, and not
 * shipped.
 *
 * Neither knows torch. Pointers are addresses that the stream's device can reach, a stream is a cudaStream_t, and what
 * comes back is a cudaError_t as an int, 0 for success. Nothing waits for the device: the error is that of the launch.
 */
#ifndef HALOCONV_CUDA_H
#define HALOCONV_CUDA_H

#include "../csrc/block.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Goes up with every change of a function or of hc_block: a library of another number is not used. */
enum { HC_CUDA_ABI = 1 };

typedef struct hc_cuda_about {
  int32_t abi;             /* HC_CUDA_ABI */
  int32_t host;            /* 1: the library for tests, which works on host memory */
  int32_t runtime_version; /* of CUDA, as in 13000 for 13.0: what it was built with */
  int32_t driver_version;  /* the newest CUDA that the driver knows; 0: no driver */
  char archs[96];          /* what it was compiled for */
} hc_cuda_about;

void hc_cuda_tell(hc_cuda_about *about);

/* Whether the kernels can run on a device: 0, or why not. Makes it the current one for the while. */
int hc_cuda_device_check(int device);
/* Makes a device the thread's current one, and says which one was. A negative number changes nothing. */
int hc_cuda_device_set(int device, int *previous);

/* Each takes any number of blocks and starts as few kernels as they fit in: one for up to HC_LAUNCH_SPANS. They run on
 * the current device, which must be the stream's. Targets of one call do not overlap, nor do target and source.
 *
 * copy: element_size is 1, 2, 4, 8 or 16. A block without a source is set to zero.
 * fill: like copy, but a block without a source is set to the element at `value`, a host address.
 * add:  target += source; 16-bit elements are added in float. Not for HC_ELEMENT_OTHER.
 */
int hc_cuda_blocks_copy(const hc_block *blocks, int64_t count, int64_t element_size, void *stream);
int hc_cuda_blocks_fill(const hc_block *blocks, int64_t count, int64_t element_size, const void *value,
                        void *stream);
int hc_cuda_blocks_add(const hc_block *blocks, int64_t count, hc_element element, void *stream);

/* A static text for an error that one of the above returned. */
const char *hc_cuda_error_text(int error);

#ifdef __cplusplus
}
#endif

#endif
