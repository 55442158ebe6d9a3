/* fake_nccl: communicators between processes. See fake.h. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PART_BYTES = 1 << 14, MAX_WORLD = 16 };

/* What one rank passes to another, a part at a time. */
typedef struct box {
  int full;
  int64_t index; /* of the message, among those of the pair */
  int64_t bytes; /* of the whole message */
  int32_t type;
  int64_t offset, length;
  char data[PART_BYTES];
} box;

typedef struct shared {
  int attached, world;
  box boxes[]; /* [sender * world + receiver] */
} shared;

struct ncclComm {
  enum { CONNECTING, READY, FINALIZING, FINALIZED, GONE } state;
  int rank, world;
  char name[64];
  shared *memory;
  size_t memory_bytes;
  int aborted, polls; /* polls: how often it stays in progress yet */
  ncclResult_t error;
  char text[256];
  int64_t sent[MAX_WORLD], received[MAX_WORLD]; /* messages queued, by peer */
  fake_group *pending;                          /* called for, and not on a stream yet */
};

typedef struct transfer {
  int sends;
  void *buffer;
  int64_t bytes, index, at;
  int32_t type;
  int peer, ordered, done;
} transfer;

struct fake_group {
  ncclComm_t comm;
  cudaStream_t stream;
  int count;
  transfer *transfers;
  fake_group *next;
};

static __thread int depth;          /* of ncclGroupStart */
static __thread fake_group *called; /* within the group that is open */
static __thread ncclResult_t group_error;
static int64_t comms_alive;

#define EXPORT __attribute__((visibility("default")))
EXPORT int64_t fake_comms(void);
EXPORT int64_t fake_comms(void) { return comms_alive; }

static double limit_s(void) {
  const char *text = getenv("HALOCONV_FAKE_LIMIT");
  return text == NULL ? 20 : atof(text);
}

static ncclResult_t fail(ncclComm_t comm, ncclResult_t error, const char *text) {
  if (comm != NULL && comm->error == ncclSuccess) {
    comm->error = error;
    (void)snprintf(comm->text, sizeof comm->text, "%s", text);
    (void)fprintf(stderr, "fake NCCL, rank %d of %d: %s\n", comm->rank, comm->world, text);
  }
  return error;
}

/* ---- communicators ---- */

EXPORT ncclResult_t ncclGetVersion(int *version) {
  *version = HC_NCCL_FLOOR;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static int number;
  fake_lock();
  const int fails = fake_fails("ncclGetUniqueId");
  memset(id, 0, sizeof *id);
  (void)snprintf(id->internal, sizeof id->internal, "/haloconv_fake_%d_%d", (int)getpid(), ++number);
  fake_unlock();
  return fails ? ncclSystemError : ncclSuccess;
}

static ncclResult_t attach(ncclComm_t comm) {
  const int file = shm_open(comm->name, O_RDWR | O_CREAT, 0600);
  comm->memory_bytes = sizeof(shared) + (size_t)(comm->world * comm->world) * sizeof(box);
  if (file < 0 || ftruncate(file, (off_t)comm->memory_bytes) != 0) {
    return fail(comm, ncclSystemError, strerror(errno));
  }
  comm->memory = mmap(NULL, comm->memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  (void)close(file);
  if (comm->memory == MAP_FAILED) {
    comm->memory = NULL;
    return fail(comm, ncclSystemError, strerror(errno));
  }
  const int before = __atomic_exchange_n(&comm->memory->world, comm->world, __ATOMIC_ACQ_REL);
  if (before != 0 && before != comm->world) {
    return fail(comm, ncclInvalidArgument, "the ranks give different sizes of the world");
  }
  (void)__atomic_add_fetch(&comm->memory->attached, 1, __ATOMIC_ACQ_REL);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int world, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
  if (config->magic != HC_NCCL_MAGIC || config->size < HC_NCCL_CONFIG_BYTES ||
      config->version < HC_NCCL_FLOOR || config->blocking != 0 || world > MAX_WORLD || rank < 0 ||
      rank >= world || strncmp(id.internal, "/haloconv_fake_", 15) != 0) {
    return ncclInvalidArgument;
  }
  fake_lock();
  const int fails = fake_fails("ncclCommInitRankConfig");
  if (fails != 1) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->world = world;
    comm->polls = (int)fake_random(4);
    (void)snprintf(comm->name, sizeof comm->name, "%.48s", id.internal);
    (void)attach(comm);
    ++comms_alive;
    *out = comm;
  }
  fake_unlock();
  return fails ? ncclSystemError : ncclInProgress;
}

static void detach(ncclComm_t comm) {
  if (comm->memory != NULL) {
    (void)shm_unlink(comm->name); /* the first that leaves: all have come */
    (void)munmap(comm->memory, comm->memory_bytes);
    comm->memory = NULL;
  }
  comm->state = GONE; /* and it stays in memory, so that what still refers to it is noticed */
  --comms_alive;
}

static void check_use(ncclComm_t comm, const char *call) {
  if (comm == NULL || comm->state == GONE) {
    fake_violation("%s on a communicator that is gone", call);
  }
}

static void queue_pending(ncclComm_t comm) {
  while (comm->pending != NULL) {
    fake_group *group = comm->pending;
    comm->pending = group->next;
    fake_queue(group->stream, (fake_op){.kind = OP_GROUP, .group = group});
  }
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  fake_lock();
  check_use(comm, "ncclCommGetAsyncError");
  const int fails = fake_fails("ncclCommGetAsyncError");
  if (comm->error != ncclSuccess) {
    *error = comm->error;
  } else if (comm->polls-- > 0) {
    *error = ncclInProgress;
  } else if (comm->state == CONNECTING &&
             __atomic_load_n(&comm->memory->attached, __ATOMIC_ACQUIRE) < comm->world) {
    *error = ncclInProgress;
  } else {
    if (comm->state == CONNECTING) {
      (void)shm_unlink(comm->name);
      comm->state = READY;
    } else if (comm->state == FINALIZING) {
      comm->state = FINALIZED;
    }
    queue_pending(comm);
    *error = comm->error;
  }
  fake_unlock();
  return fails ? ncclSystemError : ncclSuccess;
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  fake_lock();
  check_use(comm, "ncclCommFinalize");
  const int fails = fake_fails("ncclCommFinalize");
  if (comm->state != READY) {
    fake_violation("ncclCommFinalize on a communicator that is not ready");
  }
  if (fails != 1) {
    comm->state = FINALIZING;
    comm->polls = (int)fake_random(3);
  }
  fake_unlock();
  return fails ? ncclSystemError : ncclInProgress;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  fake_lock();
  check_use(comm, "ncclCommDestroy");
  const int fails = fake_fails("ncclCommDestroy");
  if (comm->state != FINALIZED) {
    fake_violation("ncclCommDestroy before ncclCommFinalize was through");
  }
  if (fails != 1) {
    detach(comm);
  }
  fake_unlock();
  return fails ? ncclSystemError : ncclSuccess;
}

static void free_group(fake_group *group) {
  for (int i = 0; i < group->count; ++i) {
    fake_forget_memory(group->transfers[i].buffer, (size_t)group->transfers[i].bytes);
  }
  free(group->transfers);
  free(group);
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  fake_lock();
  check_use(comm, "ncclCommAbort");
  const int fails = fake_fails("ncclCommAbort");
  comm->aborted = 1; /* also when it says that it failed: NCCL has no other way to give up */
  while (comm->pending != NULL) {
    fake_group *group = comm->pending;
    comm->pending = group->next;
    free_group(group);
  }
  detach(comm);
  fake_unlock();
  return fails ? ncclSystemError : ncclSuccess;
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) { return comm == NULL ? "" : comm->text; }
EXPORT const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : "system error";
}

/* ---- groups ---- */

static ncclResult_t finish_group(void) {
  ncclResult_t result = group_error;
  while (called != NULL) {
    fake_group *group = called;
    called = group->next;
    group->next = NULL;
    if (group_error != ncclSuccess) {
      free_group(group);
      continue;
    }
    fake_group **last = &group->comm->pending;
    while (*last != NULL) {
      last = &(*last)->next;
    }
    *last = group;
    group->comm->polls = (int)fake_random(3);
    if (group->comm->polls == 0) {
      queue_pending(group->comm);
    } else {
      result = ncclInProgress;
    }
  }
  group_error = ncclSuccess;
  return result;
}

EXPORT ncclResult_t ncclGroupStart(void) {
  if (fake_fails("ncclGroupStart") == 1) {
    return ncclSystemError;
  }
  ++depth;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
  ncclResult_t result = ncclSuccess;
  fake_lock();
  const int fails = fake_fails("ncclGroupEnd");
  if (depth == 0) {
    fake_violation("ncclGroupEnd without ncclGroupStart");
  }
  if (fails == 1) {
    group_error = ncclSystemError;
  }
  if (--depth == 0) {
    result = finish_group();
  }
  fake_unlock();
  return fails ? ncclSystemError : result;
}

static ncclResult_t add(int sends, const void *buffer, size_t count, ncclDataType_t type, int peer,
                        ncclComm_t comm, cudaStream_t stream, const char *call) {
  ncclResult_t result = ncclSuccess;
  fake_lock();
  check_use(comm, call);
  const int fails = fake_fails(call);
  if (fails == 1) {
    result = ncclSystemError;
  } else if (comm->state != READY || comm->pending != NULL) {
    fake_violation("%s while the communicator is in progress", call);
  } else if (peer < 0 || peer >= comm->world || type != ncclUint8 || (buffer == NULL && count > 0)) {
    result = fail(comm, ncclInvalidArgument, "a peer, a type or a buffer that is not one");
  } else if (comm->error != ncclSuccess) {
    result = comm->error;
  } else {
    fake_group *group = called;
    while (group != NULL && (group->comm != comm || group->stream != stream)) {
      group = group->next;
    }
    if (group == NULL) {
      group = calloc(1, sizeof *group);
      *group = (fake_group){comm, stream, 0, NULL, called};
      called = group;
    }
    group->transfers = realloc(group->transfers, (size_t)(group->count + 1) * sizeof *group->transfers);
    int64_t *index = sends ? comm->sent : comm->received;
    group->transfers[group->count++] = (transfer){sends,
                                                  (void *)(uintptr_t)buffer,
                                                  (int64_t)count,
                                                  index[peer]++,
                                                  -1,
                                                  type,
                                                  peer,
                                                  fake_is_ordered(stream),
                                                  0};
    fake_watch_memory(buffer, count);
    if (!sends) {
      memset((void *)(uintptr_t)buffer, GARBAGE, count);
    }
  }
  if (result != ncclSuccess || fails) {
    result = result != ncclSuccess ? result : ncclSystemError;
    group_error = result;
  }
  if (depth == 0) { /* a group of its own */
    result = finish_group();
  }
  fake_unlock();
  return result;
}

EXPORT ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return add(1, buffer, count, type, peer, comm, stream, "ncclSend");
}

EXPORT ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return add(0, buffer, count, type, peer, comm, stream, "ncclRecv");
}

/* ---- transfers ---- */

static box *box_of(ncclComm_t comm, int sender, int receiver) {
  return &comm->memory->boxes[sender * comm->world + receiver];
}

static int push(ncclComm_t comm, transfer *t) {
  box *b = box_of(comm, comm->rank, t->peer);
  if (__atomic_load_n(&b->full, __ATOMIC_ACQUIRE)) {
    return 0;
  }
  if (t->at >= t->bytes) { /* taken */
    t->done = 1;
    return 1;
  }
  t->at = t->at < 0 ? 0 : t->at;
  b->index = t->index;
  b->bytes = t->bytes;
  b->type = t->type;
  b->offset = t->at;
  b->length = t->bytes - t->at < PART_BYTES ? t->bytes - t->at : PART_BYTES;
  if (t->ordered) {
    memcpy(b->data, (const char *)t->buffer + t->at, (size_t)b->length);
  } else {
    memset(b->data, GARBAGE, (size_t)b->length);
  }
  t->at += b->length;
  __atomic_store_n(&b->full, 1, __ATOMIC_RELEASE);
  return 1;
}

static int pull(ncclComm_t comm, transfer *t) {
  char text[160];
  box *b = box_of(comm, t->peer, comm->rank);
  if (!__atomic_load_n(&b->full, __ATOMIC_ACQUIRE)) {
    return 0;
  }
  t->at = t->at < 0 ? 0 : t->at;
  if (b->index != t->index || b->bytes != t->bytes || b->type != t->type || b->offset != t->at) {
    (void)snprintf(
        text, sizeof text,
        "rank %d sent message %lld of %lld bytes, type %d; expected message %lld of %lld bytes, type %d",
        t->peer, (long long)b->index, (long long)b->bytes, b->type, (long long)t->index, (long long)t->bytes,
        t->type);
    (void)fail(comm, ncclInvalidUsage, text);
    return 0;
  }
  if (t->ordered) {
    memcpy((char *)t->buffer + t->at, b->data, (size_t)b->length);
  }
  t->at += b->length;
  t->done = t->at >= t->bytes;
  __atomic_store_n(&b->full, 0, __ATOMIC_RELEASE);
  return 1;
}

/* Messages of one pair keep their order. */
static int is_next(const fake_group *group, int i) {
  for (int j = 0; j < i; ++j) {
    const transfer *t = &group->transfers[j];
    if (!t->done && t->sends == group->transfers[i].sends && t->peer == group->transfers[i].peer) {
      return 0;
    }
  }
  return 1;
}

void fake_run_group(fake_group *group) {
  ncclComm_t comm = group->comm;
  int left = group->count;
  double end = fake_now() + limit_s();
  while (left > 0 && !comm->aborted && comm->error == ncclSuccess) {
    int moved = 0;
    left = 0;
    const int first = (int)fake_random((uint32_t)group->count);
    for (int i = 0; i < group->count; ++i) {
      const int k = (first + i) % group->count;
      transfer *t = &group->transfers[k];
      if (!t->done && is_next(group, k)) {
        moved |= t->sends ? push(comm, t) : pull(comm, t);
      }
      left += !t->done;
    }
    if (moved) {
      end = fake_now() + limit_s();
    } else if (left > 0 && fake_now() > end) {
      (void)fail(comm, ncclSystemError, "deadlock: nothing has moved for as long as the limit");
    } else if (left > 0) {
      fake_pause();
    }
  }
  free_group(group);
}
