/* nccl_abi: the part of NCCL, of the CUDA runtime and of libtorch_cuda that the NCCL transport uses.
 *
 * None of the three is linked, and none of their headers is needed to build: the functions are taken from the copies
 * that torch has loaded (nccl_api.c), so that one binary serves torch builds with and without CUDA. The declarations
 * here are theirs, repeated; tests/test_nccl_abi.py compiles them behind the real headers (a wrong one is a conflicting
 * declaration, a wrong number a failed assertion) and looks every name up in the real libraries.
 */
#ifndef HC_NCCL_ABI_H
#define HC_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef HC_REAL_CUDA_HEADERS /* the test has included them */

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef enum cudaError { cudaSuccess = 0, cudaErrorNotReady = 600 } cudaError_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum { cudaEventDisableTiming = 2 };

typedef struct ncclComm *ncclComm_t;
enum { NCCL_UNIQUE_ID_BYTES = 128 };
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;
typedef enum {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclUint8 = 1 } ncclDataType_t;
/* As far as NCCL 2.14 had it. Its size and version say so, and NCCL puts its defaults for what came later. */
typedef struct ncclConfig_v21400 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
} ncclConfig_t;

typedef int32_t AOTITorchError;

#endif

/* The first NCCL with non-blocking communicators, and so our floor. */
enum { HC_NCCL_FLOOR = 21400, HC_NCCL_CONFIG_BYTES = 24 };
#define HC_NCCL_MAGIC 0xcafebeefU

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
const char *ncclGetLastError(ncclComm_t comm);
const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode);

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);
AOTITorchError torch_get_cuda_stream_from_pool(bool high_priority, int32_t device, void **stream);

/* X(name) for each of them, by library. */
#define HC_NCCL_FUNCTIONS(X) \
  X(ncclGetVersion)          \
  X(ncclGetUniqueId)         \
  X(ncclCommInitRankConfig)  \
  X(ncclCommFinalize)        \
  X(ncclCommDestroy)         \
  X(ncclCommAbort)           \
  X(ncclCommGetAsyncError)   \
  X(ncclGetLastError)        \
  X(ncclGetErrorString)      \
  X(ncclGroupStart)          \
  X(ncclGroupEnd)            \
  X(ncclSend)                \
  X(ncclRecv)
#define HC_CUDART_FUNCTIONS(X) \
  X(cudaGetDevice)             \
  X(cudaSetDevice)             \
  X(cudaGetLastError)          \
  X(cudaGetErrorString)        \
  X(cudaEventCreateWithFlags)  \
  X(cudaEventDestroy)          \
  X(cudaEventRecord)           \
  X(cudaEventQuery)            \
  X(cudaStreamWaitEvent)       \
  X(cudaStreamSynchronize)     \
  X(cudaStreamIsCapturing)     \
  X(cudaThreadExchangeStreamCaptureMode)
#define HC_TORCH_CUDA_FUNCTIONS(X)      \
  X(aoti_torch_get_current_cuda_stream) \
  X(torch_get_cuda_stream_from_pool)

#endif
