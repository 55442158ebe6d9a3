/* blocks: the kernels over blocks of memory, and their launches. See haloconv_cuda.h, block_launch.h, block_body.h.
 *
 * Linked to a CUDA runtime of its own, statically, as NCCL and cuBLAS are. All that crosses to the runtime that torch has
 * loaded are handles of the driver (contexts, streams, events), which all runtimes of a process share; a stream that is
 * being captured is captured through any of them. So it makes no difference which minor version torch's runtime has: a
 * libcudart.so.13 older than this nvcc might lack what the code that nvcc generates calls. What counts is the driver,
 * which is asked (hc_cuda_device_check).
 */
#include <cuda_runtime_api.h>

#include "block_launch.h"
#include "haloconv_cuda.h"

#ifndef HC_CUDA_ARCHS
#define HC_CUDA_ARCHS ""
#endif
#define HC_EXPORT extern "C" __attribute__((visibility("default")))

enum { DEVICES = 64 };

/* A row of the grid a span. The parameters are read where they are: constant memory. */
#define HC_KERNEL(name, element)                                                                        \
  static __global__ void __launch_bounds__(HC_THREADS) name(const __grid_constant__ hc_launch launch) { \
    hc_span_run(&launch.spans[blockIdx.y], launch.fill, element, blockIdx.x * HC_THREADS + threadIdx.x, \
                gridDim.x * HC_THREADS);                                                                \
  }

HC_KERNEL(copy_blocks, HC_ELEMENT_OTHER)
HC_KERNEL(add_float64, HC_ELEMENT_FLOAT64)
HC_KERNEL(add_float32, HC_ELEMENT_FLOAT32)
HC_KERNEL(add_float16, HC_ELEMENT_FLOAT16)
HC_KERNEL(add_bfloat16, HC_ELEMENT_BFLOAT16)

typedef void (*kernel)(hc_launch);

/* Of the current device. Asked once for each: concurrent threads write the same number. */
static cudaError_t count_multiprocessors(int *count) {
  static int counts[DEVICES];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  const bool kept = device >= 0 && device < DEVICES;
  *count = kept ? __atomic_load_n(&counts[device], __ATOMIC_RELAXED) : 0;
  if (*count == 0) {
    error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && kept) {
      __atomic_store_n(&counts[device], *count, __ATOMIC_RELAXED);
    }
  }
  return error;
}

static int launch_all(const hc_block *blocks, int64_t count, int64_t element_size, const void *value,
                      hc_element element, kernel run, void *stream) {
  hc_launches launches;
  hc_launch launch;
  int multiprocessors = 0;
  int error = hc_launches_begin(blocks, count, element_size, value, element != HC_ELEMENT_OTHER, &launches);
  if (error == 0 && count > 0) {
    error = count_multiprocessors(&multiprocessors);
  }
  while (error == 0 && hc_launches_next(&launches, &launch)) {
    const dim3 grid(hc_launch_columns(&launch, multiprocessors), launch.count);
    void *arguments[] = {&launch};
    error = cudaLaunchKernel((const void *)run, grid, dim3(HC_THREADS), arguments, 0, (cudaStream_t)stream);
  }
  if (error != 0) {
    (void)cudaGetLastError(); /* it is returned; nobody is to find it again */
  }
  return error;
}

HC_EXPORT int hc_cuda_blocks_copy(const hc_block *blocks, int64_t count, int64_t element_size, void *stream) {
  return launch_all(blocks, count, element_size, NULL, HC_ELEMENT_OTHER, copy_blocks, stream);
}

HC_EXPORT int hc_cuda_blocks_fill(const hc_block *blocks, int64_t count, int64_t element_size,
                                  const void *value, void *stream) {
  return value == NULL
             ? (int)cudaErrorInvalidValue
             : launch_all(blocks, count, element_size, value, HC_ELEMENT_OTHER, copy_blocks, stream);
}

HC_EXPORT int hc_cuda_blocks_add(const hc_block *blocks, int64_t count, hc_element element, void *stream) {
  static const kernel kernels[] = {NULL, add_float64, add_float32, add_float16, add_bfloat16};
  const int64_t element_size = hc_element_size(element);
  return element_size == 0 ? (int)cudaErrorInvalidValue
                           : launch_all(blocks, count, element_size, NULL, element, kernels[element], stream);
}

HC_EXPORT int hc_cuda_device_set(int device, int *previous) {
  cudaError_t error = cudaGetDevice(previous);
  if (error == cudaSuccess && device >= 0 && device != *previous) {
    error = cudaSetDevice(device);
  }
  return error;
}

/* Fails where there is no code for the device, or the driver is too old for it. All kernels are loaded by this, so that
 * none is for the first time while a graph is being captured. */
HC_EXPORT int hc_cuda_device_check(int device) {
  static const kernel kernels[] = {copy_blocks, add_float64, add_float32, add_float16, add_bfloat16};
  cudaFuncAttributes attributes;
  int previous = -1, ignored = 0;
  int error = hc_cuda_device_set(device, &previous);
  for (size_t i = 0; error == 0 && i < sizeof kernels / sizeof *kernels; ++i) {
    error = cudaFuncGetAttributes(&attributes, (const void *)kernels[i]);
  }
  if (previous >= 0) {
    (void)hc_cuda_device_set(previous, &ignored);
  }
  if (error != 0) {
    (void)cudaGetLastError();
  }
  return error;
}

HC_EXPORT void hc_cuda_tell(hc_cuda_about *about) {
  memset(about, 0, sizeof *about);
  about->abi = HC_CUDA_ABI;
  about->runtime_version = CUDART_VERSION;
  if (cudaDriverGetVersion(&about->driver_version) != cudaSuccess) {
    about->driver_version = 0;
    (void)cudaGetLastError();
  }
  strncpy(about->archs, HC_CUDA_ARCHS, sizeof about->archs - 1);
}

HC_EXPORT const char *hc_cuda_error_text(int error) { return cudaGetErrorString((cudaError_t)error); }
