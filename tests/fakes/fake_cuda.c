/* fake_cuda: streams, events and memory. See fake.h. */
#define _GNU_SOURCE
#include "fake.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { cudaErrorUnknown = 999, RANGES = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct CUstream_st streams[STREAMS];
static int nstreams = 1;
static int64_t events_alive;
static int capturing, eager;
static const double LATE_S = 0.05;
static uint32_t seed;
static __thread enum cudaStreamCaptureMode thread_mode;
static __thread int64_t calls_until_fault, calls;
static __thread int fault_after;

/* ---- memory in use by queued work ---- */

static struct {
  const char *begin, *end;
} ranges[RANGES];
static int nranges;
static int ranges_lock; /* no mutex: free may be called from anywhere */

static void lock_ranges(void) {
  while (__atomic_exchange_n(&ranges_lock, 1, __ATOMIC_ACQUIRE)) {
  }
}
static void unlock_ranges(void) { __atomic_store_n(&ranges_lock, 0, __ATOMIC_RELEASE); }

void fake_watch_memory(const void *begin, size_t bytes) {
  lock_ranges();
  const int slot = nranges++;
  if (slot < RANGES) {
    ranges[slot].begin = begin;
    ranges[slot].end = (const char *)begin + bytes;
  }
  unlock_ranges();
  if (slot >= RANGES) {
    fake_violation("more than %d buffers are in use by queued work", RANGES);
  }
}

void fake_forget_memory(const void *begin, size_t bytes) {
  lock_ranges();
  for (int i = 0; i < nranges; ++i) {
    if (ranges[i].begin == begin && ranges[i].end == (const char *)begin + bytes) {
      ranges[i] = ranges[--nranges];
      break;
    }
  }
  unlock_ranges();
}

static void on_free(const void *block, size_t size) {
  int used = 0;
  if (__atomic_load_n(&nranges, __ATOMIC_ACQUIRE) == 0) {
    return;
  }
  lock_ranges();
  for (int i = 0; i < nranges; ++i) {
    used |= ranges[i].begin < (const char *)block + size && (const char *)block < ranges[i].end;
  }
  unlock_ranges();
  if (used) {
    fake_violation("memory is freed that queued work of another stream refers to");
  }
}

/* A new tensor: the current stream is going to do something. */
static void on_allocation(void) { __atomic_add_fetch(&streams[0].clock[0], 1, __ATOMIC_ACQ_REL); }

/* ---- set-up, faults ---- */

static void *run_now_and_then(void *unused);

static void set_up(void) {
  const char *text = getenv("HALOCONV_FAKE_SEED");
  const int number = text == NULL ? 0 : atoi(text);
  pthread_t thread;
  eager = number % 2;
  seed = (uint32_t)number * 2654435761u;
  streams[0].clock[0] = 1;
  if (pthread_create(&thread, NULL, run_now_and_then, NULL) == 0) {
    (void)pthread_detach(thread);
  }
  void (**free_hook)(const void *, size_t) = dlsym(RTLD_DEFAULT, "fake_memory_on_free");
  void (**allocation_hook)(void) = dlsym(RTLD_DEFAULT, "fake_memory_on_allocation");
  if (free_hook != NULL && allocation_hook != NULL) {
    *free_hook = on_free;
    *allocation_hook = on_allocation;
  }
}

void fake_lock(void) {
  (void)pthread_once(&once, set_up);
  (void)pthread_mutex_lock(&lock);
}
void fake_unlock(void) { (void)pthread_mutex_unlock(&lock); }

void fake_pause(void) {
  const struct timespec pause = {0, 20000};
  fake_unlock();
  (void)nanosleep(&pause, NULL);
  fake_lock();
}

double fake_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

uint32_t fake_random(uint32_t below) {
  seed = seed * 1664525u + 1013904223u;
  return (seed >> 8) % below;
}

void fake_violation(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)fprintf(stderr, "fake CUDA: ");
  (void)vfprintf(stderr, format, arguments);
  (void)fprintf(stderr, "\n");
  va_end(arguments);
  abort();
}

int fake_fails(const char *call) {
  (void)call;
  ++calls;
  return calls_until_fault > 0 && --calls_until_fault == 0 ? 1 + fault_after : 0;
}

#define EXPORT __attribute__((visibility("default")))

/* For tests, through ctypes. */
EXPORT void fake_arm(int64_t n, int after);
EXPORT int64_t fake_calls(void);
EXPORT int64_t fake_events(void);
EXPORT int64_t fake_buffers(void);
EXPORT void fake_begin_capture(void);
EXPORT int fake_end_capture(void);

EXPORT void fake_arm(int64_t n, int after) {
  calls_until_fault = n;
  fault_after = after;
  calls = 0;
}
EXPORT int64_t fake_calls(void) { return calls; }
EXPORT int64_t fake_events(void) { return events_alive; }
EXPORT int64_t fake_buffers(void) { return nranges; }

EXPORT void fake_begin_capture(void) {
  fake_lock();
  capturing = 1;
  fake_unlock();
}

/* Whether all work of other streams was joined to the current one, as CUDA asks for. */
EXPORT int fake_end_capture(void) {
  int joined = 1;
  fake_lock();
  capturing = 0;
  for (int i = 1; i < nstreams; ++i) {
    joined &= streams[0].clock[i] >= streams[i].clock[i];
  }
  fake_unlock();
  return joined;
}

static void forbid_during_capture(const char *call) {
  if (capturing && thread_mode != cudaStreamCaptureModeRelaxed) {
    fake_violation("%s during a capture", call);
  }
}

/* ---- queues ---- */

cudaStream_t fake_current(void) { return &streams[0]; }

int fake_is_ordered(cudaStream_t stream) { return stream->clock[0] >= streams[0].clock[0]; }

static void merge(int64_t *into, const int64_t *clock) {
  for (int i = 0; i < STREAMS; ++i) {
    into[i] = into[i] > clock[i] ? into[i] : clock[i];
  }
}

static void run(cudaStream_t stream, cudaEvent_t until, int64_t version);

static void run_first(cudaStream_t stream) {
  fake_op *op = stream->first;
  if (op->kind == OP_WAIT && op->event->done < op->version) {
    run(op->event->stream, op->event, op->version);
  } else if (op->kind == OP_GROUP) {
    fake_run_group(op->group);
  } else if (op->kind == OP_RECORD) {
    op->event->done = op->version;
  }
  stream->first = op->next;
  if (stream->first == NULL) {
    stream->last = NULL;
  }
  free(op);
}

/* Runs a queue until an event has happened; NULL: to its end. */
static void run(cudaStream_t stream, cudaEvent_t until, int64_t version) {
  while (stream->running) { /* by another thread */
    fake_pause();
  }
  stream->running = 1;
  while (stream->first != NULL && (until == NULL || until->done < version)) {
    run_first(stream);
  }
  stream->running = 0;
}

void fake_run_all(cudaStream_t stream) { run(stream, NULL, 0); }

void fake_queue(cudaStream_t stream, fake_op op) {
  fake_op *copy = malloc(sizeof *copy);
  if (copy == NULL) {
    fake_violation("out of memory");
  }
  *copy = op;
  copy->next = NULL;
  copy->queued = fake_now();
  if (stream->last == NULL) {
    stream->first = copy;
  } else {
    stream->last->next = copy;
  }
  stream->last = copy;
  if (stream->id == 0) {
    fake_run_all(stream); /* the current stream runs at once */
  }
}

/* The device does not wait for ever to be asked; with an odd seed, not at all. */
static void *run_now_and_then(void *unused) {
  (void)unused;
  for (;;) {
    fake_lock();
    const struct timespec pause = {0, 1000 * (long)(1 + fake_random(1000))};
    for (int i = 1; i < nstreams; ++i) {
      const double waits = streams[i].first == NULL ? 0 : fake_now() - streams[i].first->queued;
      if (streams[i].first != NULL && !streams[i].running &&
          (waits > LATE_S || (eager && fake_random(2) == 0))) {
        fake_run_all(&streams[i]);
      }
    }
    fake_unlock();
    (void)nanosleep(&pause, NULL);
  }
  return NULL;
}

/* ---- the CUDA runtime ---- */

/* Runs `body` unless the call is to fail without effect; returns the error. */
#define CALL(name, body)                                        \
  do {                                                          \
    fake_lock();                                                \
    const int fails = fake_fails(name);                         \
    if (fails != 1) {                                           \
      body                                                      \
    }                                                           \
    fake_unlock();                                              \
    return fails ? (cudaError_t)cudaErrorUnknown : cudaSuccess; \
  } while (0)

EXPORT cudaError_t cudaGetDevice(int *device) { CALL("cudaGetDevice", *device = 0;); }
EXPORT cudaError_t cudaSetDevice(int device) { CALL("cudaSetDevice", (void)device;); }
EXPORT cudaError_t cudaGetLastError(void) { return cudaSuccess; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "injected fault";
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  (void)flags;
  CALL("cudaEventCreateWithFlags", *event = calloc(1, sizeof **event); ++events_alive;);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CALL(
      "cudaEventDestroy",
      if (event->done < event->recorded) {
        fake_violation("an event is destroyed before it has happened");
      } --events_alive;
      free(event););
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CALL(
      "cudaEventRecord", if (stream->id != 0) { ++stream->clock[stream->id]; } memcpy(
                             event->clock, stream->clock, sizeof event->clock);
      event->stream = stream; ++event->recorded;
      fake_queue(stream, (fake_op){.kind = OP_RECORD, .event = event, .version = event->recorded}););
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  cudaError_t state = cudaSuccess;
  fake_lock();
  forbid_during_capture("cudaEventQuery");
  if (event->done < event->recorded) {
    state = cudaErrorNotReady;
  }
  fake_unlock();
  return state;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  (void)flags;
  CALL(
      "cudaStreamWaitEvent", merge(stream->clock, event->clock); if (event->recorded > 0) {
        fake_queue(stream, (fake_op){.kind = OP_WAIT, .event = event, .version = event->recorded});
      } if (stream->id == 0) {
        on_allocation(); /* it goes on and does something */
      });
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake_lock();
  forbid_during_capture("cudaStreamSynchronize");
  fake_unlock();
  CALL("cudaStreamSynchronize", fake_run_all(stream););
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  CALL("cudaStreamIsCapturing", *status = (enum cudaStreamCaptureStatus)capturing;);
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  const enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

/* ---- torch's streams ---- */

EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
  (void)device;
  CALL("aoti_torch_get_current_cuda_stream", *stream = &streams[0];);
}

/* As torch: a few of them, handed out in turn. */
EXPORT AOTITorchError torch_get_cuda_stream_from_pool(bool high_priority, int32_t device, void **stream) {
  (void)device;
  static int next;
  if (!high_priority) {
    fake_violation("a stream without priority was asked for");
  }
  CALL("torch_get_cuda_stream_from_pool", nstreams = STREAMS; next = next % 4 + 1; streams[next].id = next;
       *stream = &streams[next];);
}
