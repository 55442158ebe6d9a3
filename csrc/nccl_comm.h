/* nccl_comm: the NCCL communicator of each process group that haloconv exchanges on: made, watched, given up, destroyed.
 *
 * A communicator is made by all ranks of the group together, from an id that the Python side passes among them
 * (haloconv::_connect), since NCCL's own lazy set-up would wait for ranks that have nothing to send. It is non-blocking:
 * no call into NCCL stops the host for longer than it takes to look at a flag, so that a stuck peer can be noticed.
 *
 * Errors. An exchange on a device is waited for by the device, not by the host, so the host of a rank whose peer has
 * failed would not know. Two things tell it: each rank that fails gives up its communicator and leaves word in the
 * group's store; and a thread (python/haloconv/_transport.py) that calls hc_comm_watch now and then, while something is
 * in flight, and looks for such word. The watch also sees NCCL's own errors and exchanges that take longer than the
 * group's timeout. Any of these *breaks* the communicator: it is aborted, which ends its kernels, and the next post
 * or wait on it fails with the reason. The word of a peer says how many exchanges it had posted: up to there all is well. What the device has computed from halos that never came is of no use then; nothing
 * of haloconv on that group succeeds before the failure was raised. The op that raises closes the communicator, and the
 * ranks make a new one when they next meet.
 *
 * Locks: `order` is held by whoever calls NCCL, so that all launches of the process have one order; `table` guards
 * names, reasons and the lists of exchanges, and is never held for long. order is taken before table.
 */
#ifndef HC_NCCL_COMM_H
#define HC_NCCL_COMM_H

#include <pthread.h>

#include "nccl_api.h"
#include "tensor.h"

enum { HC_GROUP_NAME_SIZE = 128, HC_WHAT_SIZE = 192 };

/* One exchange, from its post until the device is through with it. */
typedef struct hc_flight {
  struct hc_comm *comm;
  int64_t serial; /* of comm, at the post */
  int64_t number; /* of the exchange, from 1 */
  int32_t device;
  cudaStream_t current;   /* the caller's stream */
  cudaEvent_t ready;      /* the caller's stream has filled the buffers */
  cudaEvent_t done;       /* they have travelled */
  AtenTensorHandle *held; /* references to the buffers, until the wait */
  int64_t nheld;
  bool captured, waited;
  double deadline;
  char what[HC_WHAT_SIZE];
  struct hc_flight *next;
} hc_flight;

typedef struct hc_comm {
  char group[HC_GROUP_NAME_SIZE]; /* "": the entry is free */
  int32_t device;
  int64_t number;     /* in the order of making */
  int64_t serial;     /* grows when the entry is closed */
  int64_t generation; /* Python's epoch of the group */
  int64_t rank, world;
  int64_t exchanges; /* posted, and not given up; also those without a message of this rank */
  double timeout_s;
  ncclComm_t comm; /* NULL: given up */
  cudaStream_t stream;
  bool broken; /* nothing goes on */
  bool warned; /* a peer has failed: what comes after exchange `last_good` does not go on */
  int64_t last_good;
  char reason[HC_MESSAGE_SIZE];
  hc_flight *oldest, *newest; /* in flight */
  struct hc_comm *next;
} hc_comm;

/* The two locks: around calls of NCCL and what belongs between them in one order. */
void hc_comm_lock_order(void);
void hc_comm_unlock_order(void);

/* Collective over the group. `id` is the same on all ranks: what hc_comm_new_id gave to one of them. */
hc_code hc_comm_new_id(ncclUniqueId *id, hc_status *status);
hc_code hc_comm_connect(const char *group, int64_t generation, int32_t device, int64_t rank, int64_t world,
                        const ncclUniqueId *id, double timeout_s, hc_status *status);
/* NULL where there is none. */
hc_comm *hc_comm_find(const char *group, int32_t device);

/* Fails with the reason, if exchange `number` cannot go on, or the communicator is no longer the one of `serial`. */
hc_code hc_comm_check(hc_comm *comm, int64_t serial, int64_t number, hc_status *status);
/* After a call that may return ncclInProgress: until it is through, failed, or timed out. `order` is held. */
hc_code hc_comm_settle(hc_comm *comm, const char *what, hc_status *status);
/* Gives up the communicator, because of what `status` says, and returns when its stream does nothing more with any
 * buffer. Exchanges that were posted before may finish first, for the peers need them. `order` is held. */
void hc_comm_abort(hc_comm *comm, bool capturing, const hc_status *status);

/* A peer failed after it had posted `last_good` exchanges: the later ones break, with the reason. From any thread. */
void hc_comm_warn(const char *group, int64_t generation, int64_t last_good, const char *reason);
/* What the watch does, for one communicator and now. */
void hc_comm_look(hc_comm *comm);
/* Looks after all communicators, from a thread that may wait for nothing. The names of the groups that have something
 * in flight, with commas. */
void hc_comm_watch(char *busy, size_t room);
/* Aborts and forgets the communicator of a group that failed: the ranks connect anew. Returns how many exchanges it had
 * posted, for hc_comm_warn on the other ranks. */
int64_t hc_comm_close_failed(const char *group);
/* The end of a group, or, NULL, of all, in order: newest first. What is in flight is let finish, for a while. */
void hc_comm_destroy(const char *group);

/* A record with its two events, of the pool; and back. */
hc_code hc_flight_new(int32_t device, hc_flight **out, hc_status *status);
void hc_flight_free(hc_flight *flight);
/* Into the list of comm's exchanges; whoever waits sets `waited` through hc_flight_waited, and gives the record up. */
void hc_flight_add(hc_flight *flight);
void hc_flight_waited(hc_flight *flight);
/* Returns the records that neither the device nor a caller needs any more to the pool. */
void hc_comm_retire(hc_comm *comm);

double hc_clock(void);

#endif
