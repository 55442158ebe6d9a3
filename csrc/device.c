/* device: see device.h. */
#define _GNU_SOURCE /* RTLD_NOLOAD, dladdr */
#include "device.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "torch_abi.h"

enum { DEVICES = 64, UNKNOWN = 0, USABLE = 1, UNUSABLE = 2 };

typedef struct functions {
  void (*tell)(hc_cuda_about *about);
  int (*device_check)(int device);
  int (*device_set)(int device, int *previous);
  int (*copy)(const hc_block *blocks, int64_t count, int64_t element_size, void *stream);
  int (*fill)(const hc_block *blocks, int64_t count, int64_t element_size, const void *value, void *stream);
  int (*add)(const hc_block *blocks, int64_t count, hc_element element, void *stream);
  const char *(*error_text)(int error);
  int32_t (*current_stream)(int32_t device_index, void **stream); /* torch's */
} functions;

/* Written by hc_device_load, at import, and only read after that. */
static functions calls;
static hc_device_library library = {.reason = "haloconv is not imported"};
static char library_path[1024], library_reason[2 * sizeof library_path];

/* By device, once it was asked for: whether the kernels run there. Threads that ask at once find the same. */
static int32_t usable[DEVICES], check_errors[DEVICES];

/* ---- loading ---- */

/* POSIX has dlsym give functions as void *, which C does not convert. */
static bool look_up(void *handle, const char *name, void *function_pointer) {
  void *found = dlsym(handle, name);
  memcpy(function_pointer, &found, sizeof found);
  return found != NULL;
}

static const char *look_up_all(void *handle) {
  const struct {
    const char *name;
    void *function;
  } wanted[] = {
      {"hc_cuda_tell", &calls.tell},
      {"hc_cuda_device_check", &calls.device_check},
      {"hc_cuda_device_set", &calls.device_set},
      {"hc_cuda_blocks_copy", &calls.copy},
      {"hc_cuda_blocks_fill", &calls.fill},
      {"hc_cuda_blocks_add", &calls.add},
      {"hc_cuda_error_text", &calls.error_text},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
    if (!look_up(handle, wanted[i].name, wanted[i].function)) {
      return wanted[i].name;
    }
  }
  return NULL;
}

/* The library beside the binary that this function is in. False, where there is none. */
static bool find_library(void) {
  static const char name[] = "libhaloconv_cuda.so";
  Dl_info self;
  if (dladdr(&library, &self) == 0 || self.dli_fname == NULL) {
    return false;
  }
  const char *slash = strrchr(self.dli_fname, '/');
  const int folder = slash == NULL ? 0 : (int)(slash - self.dli_fname) + 1;
  const int length = snprintf(library_path, sizeof library_path, "%.*s%s", folder, self.dli_fname, name);
  return length > 0 && (size_t)length < sizeof library_path && access(library_path, R_OK) == 0;
}

/* Opens library_path. Sets the reason where it can't be used. */
static void open_library(bool named) {
  void *handle = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    (void)snprintf(library_reason, sizeof library_reason, "%s", dlerror());
    return;
  }
  const char *missing = look_up_all(handle);
  if (missing != NULL) {
    (void)snprintf(library_reason, sizeof library_reason, "%s has no %.40s", library_path, missing);
    goto close;
  }
  calls.tell(&library.about);
  if (library.about.abi != HC_CUDA_ABI) {
    (void)snprintf(library_reason, sizeof library_reason,
                   "%s has the interface %" PRId32 ", expected %d: build it anew", library_path,
                   library.about.abi, (int)HC_CUDA_ABI);
    goto close;
  }
  if (library.about.host != 0 && !named) {
    (void)snprintf(library_reason, sizeof library_reason, "%s is the library for tests", library_path);
    goto close;
  }
  library.path = library_path;
  library.reason = NULL;
  return; /* it stays loaded as long as the process */
close:
  (void)dlclose(handle);
}

hc_code hc_device_load(hc_status *status) {
  const char *named = getenv("HALOCONV_CUDA_LIBRARY");
  void *torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  library.reason = library_reason;
  if (torch_cuda != NULL) {
    (void)look_up(torch_cuda, "aoti_torch_get_current_cuda_stream", &calls.current_stream);
    (void)dlclose(torch_cuda); /* torch keeps it loaded */
  }
  if (named != NULL && strcmp(named, "0") == 0) {
    library.reason = "switched off by HALOCONV_CUDA_LIBRARY=0";
    return status->code;
  }
  if (named != NULL && named[0] != '\0') {
    if (strlen(named) >= sizeof library_path) {
      return hc_fail(status, HC_ERROR_ARGUMENT, "HALOCONV_CUDA_LIBRARY has %zu characters, expected a path",
                     strlen(named));
    }
    memcpy(library_path, named, strlen(named) + 1);
    open_library(true);
    if (library.path == NULL) {
      return hc_fail(status, HC_ERROR_ARGUMENT, "HALOCONV_CUDA_LIBRARY is '%s', which can't be used: %s",
                     named, library_reason);
    }
    return status->code;
  }
  if (torch_cuda == NULL) {
    library.reason = "torch is not a CUDA build";
  } else if (calls.current_stream == NULL) {
    library.reason = "libtorch_cuda.so has no aoti_torch_get_current_cuda_stream";
  } else if (!find_library()) {
    library.reason = "it was not built: libhaloconv_cuda.so is not beside haloconv._C";
  } else {
    open_library(false);
  }
  return status->code;
}

const hc_device_library *hc_device_loaded(void) { return &library; }

/* ---- devices ---- */

static bool check(int32_t device_index) {
  int32_t known = __atomic_load_n(&usable[device_index], __ATOMIC_ACQUIRE);
  if (known == UNKNOWN) {
    const int32_t error = calls.device_check(device_index);
    known = error == 0 ? USABLE : UNUSABLE;
    __atomic_store_n(&check_errors[device_index], error, __ATOMIC_RELAXED);
    __atomic_store_n(&usable[device_index], known, __ATOMIC_RELEASE);
  }
  return known == USABLE;
}

bool hc_device_takes(int32_t device_type, int32_t device_index) {
  if (library.path == NULL) {
    return false;
  }
  if (library.about.host != 0) {
    return device_type == aoti_torch_device_type_cpu();
  }
  return device_type == aoti_torch_device_type_cuda() && device_index >= 0 && device_index < DEVICES &&
         check(device_index);
}

const char *hc_device_reason(int32_t device_index) {
  if (library.path == NULL) {
    return library.reason;
  }
  if (library.about.host != 0) {
    return "the library for tests is loaded";
  }
  if (device_index < 0 || device_index >= DEVICES) {
    return "there is no such device";
  }
  return check(device_index)
             ? NULL
             : calls.error_text(__atomic_load_n(&check_errors[device_index], __ATOMIC_RELAXED));
}

/* ---- work ---- */

hc_code hc_device_stream(int32_t device_index, void **stream, hc_status *status) {
  *stream = NULL;
  if (library.about.host != 0) {
    return status->code;
  }
  if (calls.current_stream == NULL) {
    return hc_fail(status, HC_ERROR_TORCH, "a CUDA tensor needs a CUDA build of torch");
  }
  HC_TRY_TORCH(status, calls.current_stream(device_index, stream));
done:
  return status->code;
}

/* Which kernel, and what only some need. */
typedef struct request {
  enum { COPY, FILL, ADD } kind;
  int64_t element_size;
  const void *value;
  hc_element element;
} request;

static int start(const request *wanted, const hc_block *blocks, int64_t count, void *stream) {
  switch (wanted->kind) {
  case COPY:
    return calls.copy(blocks, count, wanted->element_size, stream);
  case FILL:
    return calls.fill(blocks, count, wanted->element_size, wanted->value, stream);
  default:
    return calls.add(blocks, count, wanted->element, stream);
  }
}

static hc_code launch(int32_t device_index, const hc_block *blocks, int64_t count, const request *wanted,
                      hc_status *status) {
  void *stream = NULL;
  int previous = -1, ignored = 0;
  if (count == 0) {
    return status->code;
  }
  if (library.path == NULL) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "the CUDA kernels are not there: %s", library.reason);
  }
  HC_FAULT_POINT(status);
  HC_TRY(hc_device_stream(device_index, &stream, status));
  int error = calls.device_set(device_index, &previous); /* a kernel runs on the current device */
  if (error == 0) {
    error = start(wanted, blocks, count, stream);
    if (previous != device_index) {
      const int restored = calls.device_set(previous, &ignored);
      error = error == 0 ? restored : error;
    }
  }
  if (error != 0) {
    (void)hc_fail(status, HC_ERROR_CUDA,
                  "CUDA error %d on device %" PRId32 ", at a kernel for %" PRId64 " blocks: %s", error,
                  device_index, count, calls.error_text(error));
  }
done:
  return status->code;
}

hc_code hc_device_blocks_copy(int32_t device_index, const hc_block *blocks, int64_t count,
                              int64_t element_size, hc_status *status) {
  const request wanted = {.kind = COPY, .element_size = element_size};
  return launch(device_index, blocks, count, &wanted, status);
}

hc_code hc_device_blocks_fill(int32_t device_index, const hc_block *blocks, int64_t count,
                              int64_t element_size, const void *value, hc_status *status) {
  const request wanted = {.kind = FILL, .element_size = element_size, .value = value};
  return launch(device_index, blocks, count, &wanted, status);
}

hc_code hc_device_blocks_add(int32_t device_index, const hc_block *blocks, int64_t count, hc_element element,
                             hc_status *status) {
  const request wanted = {.kind = ADD, .element = element};
  return launch(device_index, blocks, count, &wanted, status);
}
