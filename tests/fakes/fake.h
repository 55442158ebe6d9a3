/* fake: a stand-in for NCCL and the CUDA runtime, on the CPU, for the tests of the NCCL transport.
 *
 * Tensors on the CPU play the device's memory. What ATen and the C core do with them runs at once, on the host: that is
 * the *current stream*. Any other stream is a queue, whose work runs as late as possible: when the current stream, or
 * the host, is made to wait for it, or after a twentieth of a second; with an odd HALOCONV_FAKE_SEED also at any moment
 * before that. What two streams do is ordered only by events that are recorded and waited for; the stand-in keeps that order as vector
 * clocks, and does what is not ordered in the worst way:
 *
 * - memory that a receive is going to write holds garbage from the moment it is queued until it has run;
 * - a send that is not ordered after all that the current stream has done sends garbage, such a receive leaves garbage;
 * - memory that queued work refers to and that is freed is an error that ends the process (fake_memory.c);
 * - non-blocking NCCL calls stay "in progress", with nothing on the stream, until they have been asked about.
 *
 * The NCCL part (fake_nccl.c) connects processes through POSIX shared memory and has NCCL's rules: a rendezvous by id, groups,
 * sends that end when they are received, message i of a pair meets receive i; counts and types that differ, calls out of
 * order and a deadlock (after HALOCONV_FAKE_LIMIT seconds) are reported. An abort ends this rank's part alone: the
 * others are not told, as with NCCL over NVLink.
 *
 * fake_arm makes the n-th call from this thread fail, either without effect or after it.
 */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>

#include "../../csrc/nccl_abi.h"

enum { STREAMS = 16, GARBAGE = 0x5a };

typedef struct fake_group fake_group;

typedef struct fake_op {
  enum { OP_RECORD, OP_WAIT, OP_GROUP } kind;
  cudaEvent_t event;
  int64_t version; /* of the event */
  fake_group *group;
  double queued; /* when */
  struct fake_op *next;
} fake_op;

struct CUstream_st {
  int id; /* 0: the current stream */
  fake_op *first, *last;
  int running;
  int64_t clock[STREAMS]; /* what of each stream's work comes before this stream's next */
};

struct CUevent_st {
  int64_t recorded, done; /* versions: how often queued, and run */
  cudaStream_t stream;
  int64_t clock[STREAMS];
};

/* One lock for everything; whoever waits for another process or thread lets go of it. */
void fake_lock(void);
void fake_unlock(void);
void fake_pause(void); /* lets go for a moment */

cudaStream_t fake_current(void);
void fake_queue(cudaStream_t stream, fake_op op);
void fake_run_all(cudaStream_t stream);
/* Whether all that the current stream has done so far comes before what `stream` does next. */
int fake_is_ordered(cudaStream_t stream);

uint32_t fake_random(uint32_t below);
double fake_now(void);

/* 0, or whether the call fails: 1 without effect, 2 after it. */
int fake_fails(const char *call);
/* What the transport must never do: says it and ends the process. */
void fake_violation(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Memory that queued work refers to. */
void fake_watch_memory(const void *begin, size_t bytes);
void fake_forget_memory(const void *begin, size_t bytes);

/* fake_nccl.c */
void fake_run_group(fake_group *group); /* frees it */

#endif
