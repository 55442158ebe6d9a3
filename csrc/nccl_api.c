/* nccl_api: see nccl_api.h. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "nccl_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

static struct {
  pthread_once_t once;
  hc_status status;
  bool fake;
  hc_nccl_api api;
} loaded = {.once = PTHREAD_ONCE_INIT};

/* Fails by name where a library has no such function. */
static void *find(void *library, const char *where, const char *name) {
  void *function = dlsym(library, name);
  if (function == NULL) {
    (void)hc_fail(&loaded.status, HC_ERROR_TORCH, "%s has no %s", where, name);
  }
  return function;
}

static void fill(void *nccl, void *cuda, void *torch) {
  hc_nccl_api *api = &loaded.api;
#define HC_FIND_NCCL(name)  *(void **)&api->name = find(nccl, "libnccl.so.2", #name);
#define HC_FIND_CUDA(name)  *(void **)&api->name = find(cuda, "the CUDA runtime of torch", #name);
#define HC_FIND_TORCH(name) *(void **)&api->name = find(torch, "libtorch_cuda.so", #name);
  HC_NCCL_FUNCTIONS(HC_FIND_NCCL)
  HC_CUDART_FUNCTIONS(HC_FIND_CUDA)
  HC_TORCH_CUDA_FUNCTIONS(HC_FIND_TORCH)
}

static void check_version(void) {
  int version = 0;
  if (loaded.status.code == HC_OK &&
      (loaded.api.ncclGetVersion(&version) != ncclSuccess || version < HC_NCCL_FLOOR)) {
    (void)hc_fail(&loaded.status, HC_ERROR_TORCH, "NCCL says it is version %d, expected %d or newer", version,
                  HC_NCCL_FLOOR);
  }
}

static void load(void) {
#ifdef HC_FAULTS
  const char *fake_path = getenv("HALOCONV_FAKE_CUDA");
  if (fake_path != NULL && fake_path[0] != '\0') {
    void *fake = dlopen(fake_path, RTLD_NOW | RTLD_LOCAL);
    if (fake == NULL) {
      (void)hc_fail(&loaded.status, HC_ERROR_ARGUMENT, "HALOCONV_FAKE_CUDA is '%s': %s", fake_path,
                    dlerror());
      return;
    }
    loaded.fake = true;
    fill(fake, fake, fake);
    check_version();
    return;
  }
#endif
  void *torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == NULL) {
    (void)hc_fail(&loaded.status, HC_ERROR_TORCH, "this torch is built without CUDA");
    return;
  }
  void *nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (nccl == NULL) {
    (void)hc_fail(&loaded.status, HC_ERROR_TORCH, "torch has not loaded libnccl.so.2");
  } else {
    fill(nccl, torch, torch); /* a look-up goes on to what libtorch_cuda is linked to: its own CUDA runtime */
    check_version();
    (void)dlclose(nccl); /* torch keeps both loaded */
  }
  (void)dlclose(torch);
}

hc_code hc_nccl_api_get(const hc_nccl_api **api, hc_status *status) {
  (void)pthread_once(&loaded.once, load);
  if (loaded.status.code != HC_OK) {
    return hc_fail(status, loaded.status.code, "%s", loaded.status.message);
  }
  *api = &loaded.api;
  return HC_OK;
}

bool hc_nccl_api_is_fake(void) {
  (void)pthread_once(&loaded.once, load);
  return loaded.fake;
}

hc_code hc_check_cuda(const hc_nccl_api *api, hc_status *status, cudaError_t error, const char *call) {
  if (error == cudaSuccess) {
    return status->code;
  }
  (void)api->cudaGetLastError(); /* else torch would report it for its next kernel */
  return hc_fail(status, HC_ERROR_TORCH, "CUDA: %s [in %.60s]", api->cudaGetErrorString(error), call);
}

hc_code hc_check_nccl(const hc_nccl_api *api, hc_status *status, ncclResult_t result, ncclComm_t comm,
                      const char *call) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return status->code;
  }
  const char *last = api->ncclGetLastError(comm);
  return hc_fail(status, HC_ERROR_TORCH, "NCCL: %s, last error '%s' [in %.60s]",
                 api->ncclGetErrorString(result), last == NULL ? "" : last, call);
}
