/* blocks_host: the entry points of haloconv_cuda.h on host memory, for tests. Not shipped.
 *
 * The launches are those of blocks.cu, and each thread of each is run, one after the other, in an order of its own for
 * every launch: nothing that a kernel does may depend on it. Addresses are used as the device would: under
 * AddressSanitizer and UndefinedBehaviorSanitizer a unit that is out of bounds or not aligned ends the process.
 *
 * HALOCONV_CUDA_LIBRARY names this library where haloconv itself is to run over it. A stand-in for CUDA's streams can
 * have the launches queued in a stream, instead of run at once (hc_host_queue).
 */
#include <stdlib.h>

#include "block_launch.h"
#include "haloconv_cuda.h"

#ifndef __FLT16_MAX__
#error "the C compiler has no _Float16: gcc 12 or clang 15 have it"
#endif

#define HC_EXPORT __attribute__((visibility("default")))

typedef void (*hc_host_run)(void *work);
/* Runs `run(work)` later, after what is in the stream already. 0, or a cudaError_t; then `work` is the caller's. */
typedef int (*hc_host_queue_fn)(void *stream, hc_host_run run, void *work);

/* For tests. multiprocessors: of the device that is played; 0 leaves it. */
void hc_host_geometry(int multiprocessors, uint64_t seed);
void hc_host_queue(hc_host_queue_fn queue);
int64_t hc_host_launch_count(void);
/* The spans that blocks become, in their order: their number, or minus the error. Writes `capacity` of them at most. */
int64_t hc_host_spans(const hc_block *blocks, int64_t count, int64_t element_size, bool adds,
                      int64_t capacity, hc_span *spans);
uint32_t hc_host_divide(uint32_t number, uint32_t divisor);

static int host_multiprocessors = 1;
static uint64_t host_seed = 1;
static int64_t launch_count;
static hc_host_queue_fn host_queue;

HC_EXPORT void hc_host_geometry(int multiprocessors, uint64_t seed) {
  if (multiprocessors > 0) {
    host_multiprocessors = multiprocessors;
  }
  __atomic_store_n(&host_seed, seed, __ATOMIC_RELAXED);
}

HC_EXPORT void hc_host_queue(hc_host_queue_fn queue) { host_queue = queue; }

HC_EXPORT int64_t hc_host_launch_count(void) { return __atomic_load_n(&launch_count, __ATOMIC_RELAXED); }

HC_EXPORT uint32_t hc_host_divide(uint32_t number, uint32_t divisor) {
  return hc_divide(number, hc_divider_make(divisor));
}

HC_EXPORT int64_t hc_host_spans(const hc_block *blocks, int64_t count, int64_t element_size, bool adds,
                                int64_t capacity, hc_span *spans) {
  hc_launches launches;
  hc_launch launch;
  int64_t total = 0;
  const int error = hc_launches_begin(blocks, count, element_size, NULL, adds, &launches);
  if (error != 0) {
    return -error;
  }
  while (hc_launches_next(&launches, &launch)) {
    for (uint32_t i = 0; i < launch.count; ++i, ++total) {
      if (total < capacity) {
        spans[total] = launch.spans[i];
      }
    }
  }
  return total;
}

/* ---- a launch ---- */

typedef struct work {
  hc_launch launch;
  hc_element element;
  uint32_t columns;
  uint64_t seed;
} work;

static uint64_t next_random(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

static uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  while (b != 0) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* Every thread once: i * factor + start, modulo their number, which the factor shares no divisor with. */
static void run_work(const work *todo) {
  const uint64_t row = (uint64_t)todo->columns * HC_THREADS, total = row * todo->launch.count;
  uint64_t state = todo->seed, factor = 1;
  do {
    factor = next_random(&state) % total + 1;
  } while (greatest_common_divisor(factor, total) != 1);
  uint64_t thread = next_random(&state) % total;
  for (uint64_t i = 0; i < total; ++i) {
    hc_span_run(&todo->launch.spans[thread / row], todo->launch.fill, todo->element, (uint32_t)(thread % row),
                (uint32_t)row);
    thread = (thread + factor) % total;
  }
}

static void run_queued(void *argument) {
  run_work(argument);
  free(argument);
}

static int launch_all(const hc_block *blocks, int64_t count, int64_t element_size, const void *value,
                      hc_element element, void *stream) {
  hc_launches launches;
  work todo;
  int error = hc_launches_begin(blocks, count, element_size, value, element != HC_ELEMENT_OTHER, &launches);
  while (error == 0 && hc_launches_next(&launches, &todo.launch)) {
    todo.element = element;
    todo.columns = hc_launch_columns(&todo.launch, host_multiprocessors);
    todo.seed = __atomic_add_fetch(&host_seed, 1, __ATOMIC_RELAXED);
    (void)__atomic_add_fetch(&launch_count, 1, __ATOMIC_RELAXED);
    if (host_queue == NULL) {
      run_work(&todo);
    } else {
      work *copy = malloc(sizeof *copy);
      if (copy == NULL) {
        return 2; /* cudaErrorMemoryAllocation */
      }
      *copy = todo;
      error = host_queue(stream, run_queued, copy);
      if (error != 0) {
        free(copy);
      }
    }
  }
  return error;
}

/* ---- haloconv_cuda.h ---- */

HC_EXPORT int hc_cuda_blocks_copy(const hc_block *blocks, int64_t count, int64_t element_size, void *stream) {
  return launch_all(blocks, count, element_size, NULL, HC_ELEMENT_OTHER, stream);
}

HC_EXPORT int hc_cuda_blocks_fill(const hc_block *blocks, int64_t count, int64_t element_size,
                                  const void *value, void *stream) {
  return value == NULL ? HC_CUDA_INVALID_VALUE
                       : launch_all(blocks, count, element_size, value, HC_ELEMENT_OTHER, stream);
}

HC_EXPORT int hc_cuda_blocks_add(const hc_block *blocks, int64_t count, hc_element element, void *stream) {
  const int64_t element_size = hc_element_size(element);
  return element_size == 0 ? HC_CUDA_INVALID_VALUE
                           : launch_all(blocks, count, element_size, NULL, element, stream);
}

HC_EXPORT int hc_cuda_device_set(int device, int *previous) {
  (void)device;
  *previous = -1;
  return 0;
}

HC_EXPORT int hc_cuda_device_check(int device) {
  (void)device;
  return 0;
}

HC_EXPORT void hc_cuda_tell(hc_cuda_about *about) {
  memset(about, 0, sizeof *about);
  about->abi = HC_CUDA_ABI;
  about->host = 1;
  memcpy(about->archs, "host", sizeof "host");
}

HC_EXPORT const char *hc_cuda_error_text(int error) {
  switch (error) {
  case 0:
    return "no error";
  case HC_CUDA_INVALID_VALUE:
    return "invalid argument";
  case HC_CUDA_MISALIGNED:
    return "misaligned address";
  default:
    return "an error of the stream that launches are queued in";
  }
}
